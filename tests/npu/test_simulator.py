"""The simulated device itself: what it must share with a real one to be of use."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 5),
    ).eval()


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    ("build", "shape"),
    [(convolutional, (4, 3, 16, 16)), (attention, (2, 5, 16))],
    ids=["convolutional", "attention"],
)
def test_a_network_computes_what_it_computes_on_the_cpu(build, shape, index):
    x = torch.randn(shape)
    with torch.inference_mode():
        expected = build()(x)
        found = build().to(f"npu:{index}")(x.to(f"npu:{index}"))
    assert found.device == torch.device("npu", index)
    torch.testing.assert_close(found.cpu(), expected)


def test_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and npu:1"):
        torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1")
    with pytest.raises(RuntimeError, match="found at least two devices"):
        nn.Conv2d(1, 1, 1).to("npu:0")(torch.ones(1, 1, 2, 2))


def test_device_tensors_are_no_arrays():
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor"):
        torch.ones(2, device="npu").numpy()


def test_memory_is_counted_and_limited(simulator):
    simulator.set_limit(0, 8 << 20)
    kept = torch.ones(1 << 20, device="npu:0")
    assert torch.npu.memory_allocated(0) == 4 << 20
    assert torch.npu.memory_allocated(1) == 0
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 MiB"):
        torch.zeros((1 << 20) + 1, dtype=torch.float32, device="npu:0")
    assert simulator.counters(0)["out_of_memory"] == 1
    del kept
    free, total = torch.npu.mem_get_info(0)
    assert (free, total) == (4 << 20, 8 << 20)  # freed, but kept for reuse
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info(0) == (8 << 20, 8 << 20)


def test_memory_of_other_processes_counts(simulator):
    torch.npu.empty_cache()
    simulator.set_used_by_others(1, 1 << 29)
    assert torch.npu.mem_get_info(1)[0] == 1 << 29
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 29, dtype=torch.uint8, device="npu:1").resize_(1 << 30)


def test_transfers_and_operators_are_counted(simulator):
    x = torch.ones(8, device="cpu").to("npu:1")
    torch.relu(x).cpu()
    counted = simulator.counters(1)
    assert (counted["to_device"], counted["to_device_bytes"]) == (1, 32)
    assert (counted["to_host"], counted["to_host_bytes"]) == (1, 32)
    assert counted["operators"] == 1
    assert simulator.op_calls() == {"aten::relu": 1}
    assert simulator.counters(0)["operators"] == 0


def test_a_fault_strikes_as_often_as_ordered(simulator):
    x = torch.ones(2, device="npu")
    simulator.fail_next("aten::relu", "error code is 507018", times=2)
    torch.sigmoid(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="error code is 507018"):
            torch.relu(x)
    assert torch.relu(x).tolist() == [1, 1]


def test_an_operator_takes_at_least_its_time(simulator):
    x = torch.ones(1, device="npu")
    simulator.set_op_seconds(0.2)
    started = time.monotonic()
    torch.relu(x)
    assert time.monotonic() - started >= 0.2


def test_the_current_device_belongs_to_a_thread():
    torch.npu.set_device(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.npu.current_device()))
    thread.start()
    thread.join()
    assert (seen, torch.npu.current_device()) == ([0], 1)
    with torch.npu.device(0):
        assert torch.ones(1, device="npu").device == torch.device("npu:0")
    assert torch.ones(1, device="npu").device == torch.device("npu:1")


def test_pinned_memory():
    pinned = torch.ones(4).pin_memory()
    assert pinned.is_pinned()
    assert not torch.ones(4).is_pinned()
    assert pinned.to("npu", non_blocking=True).cpu().tolist() == [1, 1, 1, 1]


def test_streams_and_events():
    first, last = (torch.npu.Event(enable_timing=True) for _ in range(2))
    stream = torch.npu.Stream()
    before = torch.npu.current_stream()
    with torch.npu.stream(stream):
        first.record()
        torch.ones(3, device="npu").sum()
        last.record()
        assert torch.npu.current_stream() == stream
    last.synchronize()
    assert torch.npu.current_stream() == before
    assert first.elapsed_time(last) >= 0


def test_autocast():
    x = torch.ones(2, 2, device="npu")
    with torch.autocast("npu", dtype=torch.float16):
        assert (x @ x).dtype == torch.float16


def test_saved_and_scripted_models_are_mapped(tmp_path):
    net = convolutional()
    buffer = io.BytesIO()
    torch.save(net.to("npu:0").state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, map_location="npu:1", weights_only=True)
    assert {value.device for value in state.values()} == {torch.device("npu:1")}

    x = torch.randn(1, 3, 16, 16)
    exported = torch.export.export(net.cpu(), (x,))
    from torch.export.passes import move_to_device_pass

    moved = move_to_device_pass(exported, "npu:1").module()
    torch.testing.assert_close(moved(x.to("npu:1")).cpu(), net(x))


def test_tensors_pickle():
    x = pickle.loads(pickle.dumps(torch.arange(3, device="npu:1")))
    assert (x.device, x.tolist()) == (torch.device("npu:1"), [0, 1, 2])


@pytest.mark.parametrize(
    ("visible", "count", "ids"),
    [("1", 1, [1]), ("0,1", 2, [0, 1]), ("1,0", 0, []), ("", 0, []), ("5", 0, [])],
)
def test_visible_devices_are_limited_as_on_the_real_one(visible, count, ids):
    code = "import torch_npu as t; print(t.npu.device_count(), t.visible_ids)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ASCEND_RT_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{count} {ids}\n", done.stderr


def test_a_forked_child_may_not_use_the_device():
    torch.npu.init()
    child = os.fork()
    if child == 0:
        try:
            torch.npu.init()
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
