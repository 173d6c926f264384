"""Options that are fields of a policy, a model's source, or an example input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
import yaml

from daskinfer.breaker import BreakerPolicy
from daskinfer.cache import TierPolicy
from daskinfer.caching import CachePolicy
from daskinfer.cli.duration import Duration
from daskinfer.policy import BatchPolicy
from daskinfer.retry import RetryPolicy

F = TypeVar("F", bound=Callable[..., Any])
P = TypeVar("P", BatchPolicy, BreakerPolicy, CachePolicy, RetryPolicy)


def source_of(text: str) -> dict[str, str]:
    """Tell a factory from a file, as keywords of :func:`daskinfer.deploy`.

    Examples
    --------
    >>> source_of("pkg.mod:build")
    {'factory': 'pkg.mod:build'}
    """
    if Path(text).is_file():
        return {"path": text}
    module, colon, function = text.partition(":")
    if colon and function.isidentifier() and module.replace(".", "_").isidentifier():
        return {"factory": text}
    raise click.UsageError(
        f"{text!r} is no file, and no factory such as package.module:function"
    )


def pairs(option: str, given: Iterable[str]) -> dict[str, Any]:
    """Read ``KEY=VALUE`` pairs; values are YAML.

    Examples
    --------
    >>> pairs("--batch", ["max-batch-size=16", "max-wait=5ms"])
    {'max_batch_size': 16, 'max_wait': '5ms'}
    """
    found = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=option)
        try:
            found[key.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise click.BadParameter(
                f"the value of {pair!r} cannot be read: {error}", param_hint=option
            ) from None
    return found


def policy_of(kind: type[P], option: str, given: Mapping[str, Any]) -> P | None:
    """Make a policy of its fields; None where none is given.

    Examples
    --------
    >>> policy_of(RetryPolicy, "--retry", {"max_attempts": 2}).max_attempts
    2
    """
    if not given:
        return None
    known = [field.name for field in fields(kind)]
    for key in given:
        if key not in known:
            raise click.BadParameter(
                f"there is no {key!r}; there is {', '.join(known)}", param_hint=option
            )
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def cache_of(is_cached: bool, given: Mapping[str, Any]) -> CachePolicy | None:
    """Make a cache policy, whose tiers are sizes such as ``host=64MiB``, or ``null``.

    Examples
    --------
    >>> cache_of(False, {"host": "1 MiB", "disk": None}).tiers()
    {'host': TierPolicy(nbytes=1048576, ttl=None), 'disk': None}
    """
    if not given:
        return CachePolicy() if is_cached else None
    try:
        read = {
            key: _tier(value) if isinstance(value, (str, int)) else value
            for key, value in given.items()
            if key != "affinity"
        }
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--cache-tier") from None
    affinity = {"affinity": given["affinity"]} if "affinity" in given else {}
    return policy_of(CachePolicy, "--cache-tier", {**read, **affinity})


def _tier(size: Any) -> TierPolicy:
    return TierPolicy(size)


def load_example(path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read an example input: an array, or a model's keyword arguments by name.

    Parameters
    ----------
    path
        A ``.npy`` file, or a ``.npz`` one for several arrays.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise click.UsageError(f"{path!r} holds no array: {error}") from None
    if isinstance(loaded, np.ndarray):
        return (loaded,), {}
    with loaded:
        return (), dict(loaded.items())


def model_options(command: F) -> F:
    """Give a command the options that deploy and update share."""
    example = click.Path(exists=True, dir_okay=False)
    for option in (
        click.option(
            "--wait-timeout",
            type=Duration(),
            help="How long to wait until it is ready, such as 5m.",
        ),
        click.option(
            "--no-wait", is_flag=True, help="Do not wait until workers have loaded it."
        ),
        click.option(
            "--warmup",
            type=example,
            help="An example input in a .npy file, which each worker runs at every "
            "batch size before it takes requests.",
        ),
        click.option(
            "--batch",
            multiple=True,
            metavar="KEY=VALUE",
            help="How requests are batched: a field of BatchPolicy, as in "
            "max-batch-size=64, allowed-batch-sizes=[1,4,16] or batch-dim=null. "
            "Can be repeated.",
        ),
        click.option(
            "--factory-argument",
            multiple=True,
            metavar="KEY=VALUE",
            help="A keyword argument of the factory. Can be repeated.",
        ),
        click.option(
            "--trusted",
            is_flag=True,
            help="The file may be a pickled module, which can run any code of its "
            "maker's.",
        ),
    ):
        command = option(command)
    return command


def model_arguments(
    source: str,
    factory_argument: tuple[str, ...],
    trusted: bool,
    batch: tuple[str, ...],
    warmup: str | None,
    no_wait: bool,
    wait_timeout: float | None,
) -> dict[str, Any]:
    """Those options as keywords of :func:`daskinfer.deploy` and ``update``."""
    arguments: dict[str, Any] = {
        **source_of(source),
        "trusted": trusted,
        "batching": policy_of(BatchPolicy, "--batch", pairs("--batch", batch)),
        "wait": not no_wait,
        "wait_timeout": wait_timeout,
    }
    if factory_argument:
        arguments["factory_kwargs"] = pairs("--factory-argument", factory_argument)
    if warmup is not None:
        positional, keywords = load_example(warmup)
        if keywords:
            raise click.UsageError("--warmup takes one array, in a .npy file")
        arguments["warmup"] = positional
    return arguments
