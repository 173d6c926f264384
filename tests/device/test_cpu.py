from __future__ import annotations

import pytest
import torch

from daskinfer.device import CpuDevice, CudaDevice, NpuDevice, open_device


@pytest.fixture
def cpu() -> CpuDevice:
    return CpuDevice()


def test_auto_takes_the_cpu_where_there_is_nothing_else(bare_host):
    device = open_device()
    assert device.kind == "cpu"
    assert device.torch_device == torch.device("cpu")


def test_the_class_tells_how_many_threads_compute(cpu):
    assert cpu.device_class == f"cpu/{torch.get_num_threads()}-threads"
    assert cpu.name in repr(cpu)


def test_tensors_stay_where_they_are(cpu):
    x = torch.ones(3, requires_grad=True)
    with cpu.active():
        on_device = cpu.put(x)
        y = cpu.to_host(on_device * 2)
    cpu.synchronize()
    assert on_device is x
    assert not y.requires_grad
    assert y.tolist() == [2, 2, 2]


def test_memory_is_what_the_process_may_use(cpu):
    free, total = cpu.memory()
    assert 0 < free < total
    assert 0 < cpu.allocated() < total


def test_utilization_is_a_share(cpu):
    assert 0 <= cpu.utilization() <= 1


def test_emptying_the_cache_loses_no_tensor(cpu):
    x = torch.arange(3)
    cpu.empty_cache()
    assert x.tolist() == [0, 1, 2]


def test_out_of_memory_is_recognized_when_it_really_happens(cpu):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert cpu.is_out_of_memory(caught.value)
    assert cpu.is_out_of_memory(MemoryError())
    assert not cpu.is_out_of_memory(RuntimeError("shape mismatch"))
    assert not cpu.is_out_of_memory(ValueError("can't allocate memory"))


def test_an_error_whose_own_code_fails_is_no_error_of_the_device(cpu, accelerator):
    class Speechless(RuntimeError):
        def __str__(self):
            raise LookupError("no words")

    for device in (cpu, accelerator):
        assert not device.is_out_of_memory(Speechless())
        assert not device.is_fatal(Speechless())


def test_nothing_is_fatal(cpu):
    assert not cpu.is_fatal(RuntimeError("error code is 507018"))


# The classification of errors needs no device.
@pytest.fixture(params=[NpuDevice, CudaDevice])
def accelerator(request):
    return object.__new__(request.param)


def test_out_of_memory_of_any_version_is_recognized(accelerator):
    assert accelerator.is_out_of_memory(torch.OutOfMemoryError("any text"))
    assert accelerator.is_out_of_memory(RuntimeError("NPU out of memory. Tried to"))
    assert accelerator.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not accelerator.is_out_of_memory(RuntimeError("shape mismatch"))
    assert not accelerator.is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("code", [507000, 507015, 507018, 507035, 507899, 107020])
def test_ascend_codes_that_need_a_new_process(code):
    npu = object.__new__(NpuDevice)
    error = RuntimeError(
        f"NPU function error: aclrtSync, error code is {code}\n[ERROR]"
    )
    assert npu.is_fatal(error)
    assert not npu.is_out_of_memory(error)


@pytest.mark.parametrize("code", [107001, 107002, 207001, 5070150])
def test_ascend_codes_that_do_not(code):
    npu = object.__new__(NpuDevice)
    assert not npu.is_fatal(RuntimeError(f"error code is {code}"))


def test_ascend_memory_code_is_out_of_memory():
    npu = object.__new__(NpuDevice)
    assert npu.is_out_of_memory(RuntimeError("aclrtMalloc, error code is 207001"))


@pytest.mark.parametrize(
    ("text", "fatal"),
    [
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: unspecified launch failure", True),
        ("CUDA error: out of memory", False),
        ("CUDA error: invalid argument", False),
    ],
)
def test_cuda_errors_that_need_a_new_process(text, fatal):
    cuda = object.__new__(CudaDevice)
    assert cuda.is_fatal(RuntimeError(text)) is fatal
    assert not cuda.is_fatal(ValueError(text))


def test_cuda_error_codes_decide_whatever_the_text_says():
    error = RuntimeError("something in another language")
    error.error_code = 719
    assert object.__new__(CudaDevice).is_fatal(error)
