"""What daskinfer runs on each worker.

``runtime``
    the plugin: messages in, messages out
``models``
    what is loaded, and how it gets loaded and warmed
``execution``
    a batch through a model: joined, padded, run, divided
``resources``
    taking turns with the user's own tasks on the device
``results``
    results into the worker's memory
"""

from __future__ import annotations

from daskinfer.worker.runtime import InferenceRuntime

__all__ = ["InferenceRuntime"]
