"""Huawei Ascend devices, through the torch_npu plug-in."""

from __future__ import annotations

import os
import re
from typing import ClassVar

from daskinfer.device.accelerator import AcceleratorDevice
from daskinfer.device.base import BackendReport, text_of
from daskinfer.device.loading import load_torch, npu_failure, npu_is_installed
from daskinfer.wording import counted

# 507xxx are failures of the device or its driver, 107020 a task that never ended;
# the context answers nothing useful after them.  Source: CANN's acl_base error codes.
_FATAL_CODE = re.compile(r"error code is (507\d{3}|107020)\b")
_MEMORY_CODE = re.compile(r"error code is 207001\b")
_SET_ENV = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


class NpuDevice(AcceleratorDevice):
    """One Ascend NPU.

    Parameters
    ----------
    index : int
        Index among the devices that ``ASCEND_RT_VISIBLE_DEVICES`` leaves visible.
    """

    kind: ClassVar[str] = "npu"
    visibility_variable: ClassVar[str] = "ASCEND_RT_VISIBLE_DEVICES"

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        # Some chips compile each operator at its first use by default, which takes
        # minutes for a first inference; the precompiled operators do as well.
        self._vendor.set_compile_mode(jit_compile=False)

    @staticmethod
    def report() -> BackendReport:
        """Count the devices without opening one."""
        if not npu_is_installed():
            reason = "torch_npu is not installed: pip install 'daskinfer[npu]'"
            return BackendReport("npu", 0, reason)
        torch = load_torch()
        failure = npu_failure()
        if failure is not None:
            return BackendReport("npu", 0, _explain_import(failure))
        try:
            count = int(torch.npu.device_count())
        except RuntimeError as error:
            reason = f"the Ascend driver answered: {_first_line(error)}"
            return BackendReport("npu", 0, reason)
        return BackendReport("npu", count, _explain_count(count))

    def utilization(self) -> float | None:
        """Busy share of the AI cores in 0..1; None where the driver does not tell."""
        try:
            return float(self._vendor.utilization(self.torch_device)) / 100
        except RuntimeError:
            return None

    def is_out_of_memory(self, exc: BaseException) -> bool:
        """Recognize torch's error class, the allocator's text and ACL's own code."""
        return super().is_out_of_memory(exc) or (
            isinstance(exc, RuntimeError) and bool(_MEMORY_CODE.search(text_of(exc)))
        )

    def is_fatal(self, exc: BaseException) -> bool:
        """Recognize ACL's codes for a device that needs a new process."""
        return isinstance(exc, RuntimeError) and bool(_FATAL_CODE.search(text_of(exc)))


def _explain_import(failure: Exception) -> str:
    if "cannot open shared object file" in str(failure):
        return (
            f"torch_npu is installed but CANN was not found: {_first_line(failure)}; "
            f"run `{_SET_ENV}` before starting the worker"
        )
    return (
        f"torch_npu is installed but could not be imported: "
        f"{type(failure).__name__}: {_first_line(failure)}"
    )


def _explain_count(count: int) -> str:
    visible = os.environ.get(NpuDevice.visibility_variable)
    if count:
        return f"torch_npu sees {counted(count, 'device')}"
    if visible is None:
        return (
            "torch_npu works but sees no device: is the driver running, and is "
            "/dev/davinci* mapped into this container?"
        )
    return (
        f"no device is visible: ASCEND_RT_VISIBLE_DEVICES={visible!r} must list "
        "existing ids in ascending order"
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
