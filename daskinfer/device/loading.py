"""Import torch without falling over an Ascend plug-in that cannot be loaded.

torch imports every installed back-end plug-in while it is itself imported, so that
``torch_npu`` without the CANN libraries makes ``import torch`` fail, and a second
attempt in the same process cannot succeed either.  `load_torch` keeps torch from
importing the plug-in, imports it afterwards, and remembers what went wrong.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from types import ModuleType

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

_lock = threading.Lock()
_torch: ModuleType | None = None
_npu_failure: Exception | None = None


def load_torch() -> ModuleType:
    """Import torch, and ``torch_npu`` where it is installed.

    A plug-in that cannot be imported is no error here: `npu_failure` tells why, and
    torch works without it.  In that case the environment variable
    ``TORCH_DEVICE_BACKEND_AUTOLOAD`` stays ``"0"``, so that processes started from
    this one can import torch as well.  The first call decides; safe to call from
    several threads.

    Returns
    -------
    module
        The ``torch`` module.

    Raises
    ------
    ImportError
        If torch is not installed or broken.

    Examples
    --------
    >>> load_torch().tensor([1, 2]).sum().item()
    3
    """
    global _torch, _npu_failure
    with _lock:
        if _torch is None:
            if npu_is_installed():
                _torch, _npu_failure = _import_with_npu()
            else:
                _torch = importlib.import_module("torch")
        return _torch


def npu_is_installed() -> bool:
    """Whether a ``torch_npu`` package can be found; imports nothing.

    Examples
    --------
    >>> isinstance(npu_is_installed(), bool)
    True
    """
    return importlib.util.find_spec("torch_npu") is not None


def npu_failure() -> Exception | None:
    """What `load_torch` met when it imported ``torch_npu``; None if nothing."""
    return _npu_failure


def _import_with_npu() -> tuple[ModuleType, Exception | None]:
    before = os.environ.get(AUTOLOAD)
    os.environ[AUTOLOAD] = "0"
    torch = importlib.import_module("torch")
    try:
        importlib.import_module("torch_npu")
    except Exception as failure:
        return torch, failure
    if before is None:
        del os.environ[AUTOLOAD]
    else:
        os.environ[AUTOLOAD] = before
    return torch, None
