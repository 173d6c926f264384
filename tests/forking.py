"""Processes that begin with what takes seconds to import."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

#: What tests run in such processes. All of it: there is one server of them for as long
#: as tests run, and whoever asks first has it start.
PRELOADED = ["tests.artifact.store_writer", "tests.cache.writer"]


def fork_server() -> ForkServerContext:
    """Where processes come from that have imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
