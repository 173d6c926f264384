"""NVIDIA devices, through torch's CUDA build."""

from __future__ import annotations

import os
import re
import warnings
from typing import ClassVar

from daskinfer.device.accelerator import AcceleratorDevice
from daskinfer.device.base import BackendReport, text_of
from daskinfer.device.loading import load_torch
from daskinfer.logs import Log
from daskinfer.wording import counted

logger = Log("device")

# The errors after which CUDA answers every later call with the same error.
# Source: the cudaError_t list of the CUDA runtime API, where the entry says that the
# process must be terminated and relaunched.
_STICKY_CODES = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719})
_STICKY_TEXT = re.compile(
    r"device-side assert|illegal memory access|illegal instruction|misaligned address"
    r"|unspecified launch failure|hardware stack error|invalid program counter"
    r"|uncorrectable ECC|launch timed out|context is destroyed",
    re.IGNORECASE,
)


class CudaDevice(AcceleratorDevice):
    """One device that torch's CUDA build sees.

    Parameters
    ----------
    index : int
        Index among the devices that ``CUDA_VISIBLE_DEVICES`` leaves visible.
    """

    kind: ClassVar[str] = "cuda"
    visibility_variable: ClassVar[str] = "CUDA_VISIBLE_DEVICES"

    @staticmethod
    def report() -> BackendReport:
        """Count the devices without opening one."""
        torch = load_torch()
        if torch.version.cuda is None and torch.version.hip is None:
            reason = f"torch {torch.__version__} is built without CUDA"
            return BackendReport("cuda", 0, reason)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count:
            reason = f"torch {torch.__version__} sees {counted(count, 'CUDA device')}"
            return BackendReport("cuda", count, reason)
        visible = os.environ.get(CudaDevice.visibility_variable)
        if caught:
            reason = str(caught[0].message).splitlines()[0]
        elif visible is not None:
            reason = f"no device is visible: CUDA_VISIBLE_DEVICES={visible!r}"
        else:
            reason = "no NVIDIA device or driver was found"
        return BackendReport("cuda", 0, reason)

    def _class_name(self) -> str:
        return super()._class_name().removeprefix("NVIDIA-")

    def utilization(self) -> float | None:
        """Busy share in 0..1; None without NVIDIA's management library."""
        try:
            return float(self._vendor.utilization(self.torch_device)) / 100
        except Exception as error:  # The library's own errors have no closer base.
            logger.debug("No utilization of %s: %s", self.torch_device, error)
            return None

    def is_fatal(self, exc: BaseException) -> bool:
        """Recognize the errors that CUDA repeats for ever after."""
        if not isinstance(exc, RuntimeError):
            return False
        code = getattr(exc, "error_code", None)
        return code in _STICKY_CODES or bool(_STICKY_TEXT.search(text_of(exc)))
