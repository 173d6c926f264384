"""Models off a simulated NPU, in the host's memory, and back."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from distributed.utils_test import captured_logger, gen_cluster
from torch import nn

import daskinfer
from daskinfer import ModelTooLarge, protocol
from daskinfer.artifact import Artifact
from daskinfer.device import open_device
from daskinfer.worker.models import ResidentModel
from tests.cluster.helpers import PATIENCE, Local, Probe, until
from tests.cluster.scheduling_helpers import deploy, engine
from tests.cluster.test_making_room import room_of
from tests.cluster.weights_helpers import Hand, artifacts_asked_for

ONE_WORKER = [("127.0.0.1", 1)]
FATAL = "aclrtSynchronizeStream failed, error code is 507015"
NO_MEMORY = "NPU out of memory. Tried to allocate 1.00 MiB"
#: Of one :func:`layer`.
NBYTES = 4 * 256 * 256
X = torch.ones(2, 256)


def layer(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(256, 256, bias=False)


def allocated() -> int:
    return open_device("npu:0").allocated()


# One model


class Odd(nn.Module):
    """All kinds of parameters and buffers, some of them the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.brief = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("counts", torch.arange(5, dtype=torch.int64))
        self.register_buffer("spread", torch.randn(6, 4)[:, ::2])
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("number", torch.tensor(1.5))
        odd = torch.tensor([0x7FC12345, -0x80000000], dtype=torch.int64)
        self.register_buffer("special", odd.to(torch.int32).view(torch.float32))
        self.register_buffer("away", torch.ones(2), persistent=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x))) * self.number


def contents(net: nn.Module) -> dict[str, tuple[Any, ...]]:
    """All of a module, to the bit."""
    named = [
        *net.named_parameters(remove_duplicate=False),
        *net.named_buffers(remove_duplicate=False),
    ]
    return {
        name: (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.requires_grad,
            tensor.stride(),
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist(),
        )
        for name, tensor in named
    }


def is_tied(net: Odd) -> bool:
    return net.first.weight.data_ptr() == net.second.weight.data_ptr()


def devices(net: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in (*net.parameters(), *net.buffers())}


def on_npu(net: Any) -> ResidentModel:
    policy = {
        "max_batch_size": 8,
        "min_batch_size": 1,
        "max_wait": None,
        "target_latency": None,
        "batch_dim": 0,
        "allowed_batch_sizes": None,
    }
    artifact = net if isinstance(net, Artifact) else Artifact.from_object(net)
    return ResidentModel.load("m", "1", artifact, open_device("npu:0"), {}, policy)


def test_a_model_that_was_parked_is_bit_by_bit_what_it_was():
    net = Odd().eval()
    model = on_npu(net)
    x = torch.randn(4, 8)
    before, answer = contents(model.function), model(x)
    bits = {name: found[-1] for name, found in contents(net).items()}
    assert {name: found[-1] for name, found in before.items()} == bits
    for _ in range(2):
        model.park()
        assert devices(model.function) == {"cpu"}
        assert contents(model.function) == before
        model.resume()
        assert devices(model.function) == {"npu"}
        assert contents(model.function) == before
        assert is_tied(model.function)
        assert torch.equal(model(x), answer)


def test_its_memory_on_the_device_is_free_as_long_as_it_is_parked(simulator):
    before = allocated()
    model = on_npu(layer())
    assert model.nbytes == NBYTES
    assert allocated() - before >= NBYTES
    model.park()
    assert allocated() == before
    assert simulator.counters(0)["reserved"] == before
    model.resume()
    assert allocated() - before >= NBYTES


class Shared(nn.Module):
    """One tensor as a buffer of two parts."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.ones(100, device="npu")
        self.left, self.right = nn.Module(), nn.Module()
        self.left.register_buffer("table", table)
        self.right.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.left.table.sum()


def test_what_is_the_same_stays_the_same():
    model = on_npu(Artifact.from_factory(f"{__name__}:Shared"))
    assert model.nbytes == 400
    for move in (model.park, model.resume):
        move()
        net = model.function
        assert net.left.table.data_ptr() == net.right.table.data_ptr()
        assert model.nbytes == 400


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_cannot_be_moved_whole_is_not():
    assert on_npu(layer()).can_park
    assert not on_npu(abs).can_park
    assert not on_npu(torch.jit.trace(layer(), X)).can_park
    program = torch.export.export(layer(), (X,))
    assert not on_npu(program).can_park


# A worker that is told


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_is_parked_and_comes_back(c: Any, s: Any, a: Any) -> None:
    before = allocated()
    model = await deploy(c, layer(), warmup=X)
    expected = await model.submit(X)
    hand, asked = Hand(s, a), artifacts_asked_for(s)
    for _ in range(3):
        heard = await hand.unloaded("m")
        assert heard == [("parked", "m", True), ("unloaded", "m")]
        assert allocated() == before
        answer = await hand.loaded("m")
        assert (answer["source"], answer["nbytes"]) == (protocol.HOST, NBYTES)
        assert not answer["timings"] and answer["device"] == "npu:0"
        assert answer["digest"] == engine(s).registry.version("m", "1").digest
        assert torch.equal(await model.submit(X), expected)
    assert not asked
    stats = hand.loader.parking.stats()
    assert (stats["hits"], stats["entries"], stats["evictions"]) == (3, 0, 0)


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_not_wanted_again_is_not_parked(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, layer())
    hand = Hand(s, a)
    assert await hand.unloaded("m", keep=False) == [("unloaded", "m")]
    assert (await hand.loaded("m"))["source"] == protocol.DISK
    await hand.unloaded("m")
    function = parked(hand, "m")
    # Without a word of its leaving: that is known.
    assert await hand.unloaded("m", keep=False) == [("unloaded", "m")]
    assert function() is None and not len(hand.loader.parking)
    assert (await hand.loaded("m"))["source"] == protocol.DISK
    assert (await model.submit(X)).shape == X.shape


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_undeploying_frees_what_is_parked_first(c: Any, s: Any, a: Any) -> None:
    model = await deploy(c, layer())
    handlers = dict(s.stream_handlers)
    hand = Hand(s, a)
    await hand.unloaded("m")
    s.stream_handlers.update(handlers)
    function = parked(hand, "m")
    assert function() is not None
    await model.undeploy()
    assert function() is None and not len(hand.loader.parking)


def parked(hand: Hand, name: str) -> weakref.ref[Any]:
    return weakref.ref(hand.loader.parking._models[name, "1"].function)


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.weights.host": 2 * NBYTES}
)
async def test_the_host_has_room_for_two(c: Any, s: Any, a: Any) -> None:
    models = {name: await deploy(c, layer(ord(name)), name=name) for name in "abcd"}
    expected = {name: await model.submit(X) for name, model in models.items()}
    hand = Hand(s, a)
    for name in "ab":
        await hand.unloaded(name)
    assert await hand.unloaded("c") == [
        ("parked", "a", False),
        ("parked", "c", True),
        ("unloaded", "c"),
    ]
    # One that comes leaves its place to one that goes.
    leaving = hand.unload("d")
    back = hand.load("b", after=[leaving])
    assert (await hand.answer(back))["source"] == protocol.HOST
    assert hand.heard[-3:] == [
        ("parked", "d", True),
        ("unloaded", "d"),
        ("loaded", "b"),
    ]
    for name, source in (("a", "disk"), ("c", "host"), ("d", "host")):
        assert (await hand.loaded(name))["source"] == source
    for name, model in models.items():
        assert torch.equal(await model.submit(X), expected[name])


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.weights.host": NBYTES - 1}
)
async def test_what_the_host_has_no_room_for_is_dropped(c: Any, s: Any, a: Any) -> None:
    await deploy(c, layer())
    hand, before = Hand(s, a), allocated()
    assert await hand.unloaded("m") == [("unloaded", "m")]
    assert before - allocated() >= NBYTES
    assert (await hand.loaded("m"))["source"] == protocol.DISK


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.weights.host": 2 * NBYTES}
)
async def test_models_on_the_cpu_come_first(c: Any, s: Any, a: Any) -> None:
    for name in "ab":
        await deploy(c, layer(), name=name)
    await deploy(c, layer(), name="cpu", device="cpu")
    hand = Hand(s, a)
    await hand.unloaded("cpu")
    for name in "ab":
        await hand.unloaded(name)
    await hand.loaded("cpu")
    await until(lambda: ("parked", "a", False) in hand.heard)
    assert hand.loader.parking.names() == {"b"}


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_memory_goes_back_before_dask_spills(c: Any, s: Any, a: Any) -> None:
    for name in "ab":
        await deploy(c, layer(), name=name)
    hand = Hand(s, a)
    for name in "ab":
        await hand.unloaded(name)
    manager = a.memory_manager
    memory = a.monitor.get_process_memory()
    # As if the process had a little more than it may.
    share = 0.9 * manager.memory_spill_fraction
    manager.memory_limit = int((memory - NBYTES // 2) / share)
    a.monitor.get_process_memory = lambda: memory
    await until(lambda: ("parked", "a", False) in hand.heard)
    a.monitor.get_process_memory = lambda: 0
    assert hand.loader.parking.names() == {"b"}


class Held(Local, nn.Module):
    """Waits in its passes until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.entered = threading.Event()
        self.gate = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        return x * self.weight


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_moves_when_no_pass_runs(c: Any, s: Any, a: Any) -> None:
    held = Held()
    for name in "mn":
        await deploy(c, layer(), name=name)
    other = await deploy(c, held, name="held")
    hand = Hand(s, a)
    await hand.unloaded("n")
    running = other.submit(X)
    await until(held.entered.is_set)
    leaving = hand.unload("m")
    load = hand.load("n", after=[leaving])
    # While the other model runs, models may come, but none may go.
    again = hand.load("m")
    await until(lambda: len(hand.loader._unloader._moves) == 1)
    assert not any(map(hand.has_answered, (leaving, load, again)))
    held.gate.set()
    assert (await hand.answer(load))["source"] == protocol.HOST
    # It was to be loaded while it left.
    assert (await hand.answer(again))["source"] == protocol.HOST
    assert hand.has_answered(leaving)
    assert torch.equal(await running, X)


class Calls(nn.Module):
    """Calls a deployment from within a pass, when it is told to."""

    def __init__(self, other: Any, held: Held) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.other = other
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held(x)
        return x * self.weight.cpu().item() + self.other(x.cpu()).to(x.device)


@pytest.mark.parametrize("first", ["call", "unload"])
def test_what_is_to_move_gives_way_to_a_pass_that_waits_for_a_model(first: str) -> None:
    # Dask has one thread in a process for what is to be done when futures end.
    @gen_cluster(client=True, nthreads=ONE_WORKER, clean_kwargs={"threads": False})
    async def test(c: Any, s: Any, a: Any) -> None:
        held = Held()
        wanted = await deploy(c, layer(), name="wanted")
        await deploy(c, layer(), name="other")
        outer = await deploy(c, Calls(wanted, held), name="outer")
        expected = await wanted.submit(X)
        hand = Hand(s, a)
        await hand.unloaded("wanted")
        # It stays in the queue: this worker would answer that it has none.
        engine(s).dispatcher.lines["wanted", "1"].devices.clear()
        running = outer.submit(X)
        await until(held.entered.is_set)
        moves = hand.loader._unloader._moves
        if first == "call":
            held.gate.set()
            await until(lambda: bool(hand.loader._awaited))
            leaving = hand.unload("other")
        else:
            leaving = hand.unload("other")
            await until(lambda: len(moves) == 1)
            held.gate.set()
        await hand.answer(leaving)
        assert ("parked", "other", True) not in hand.heard
        load = hand.load("wanted", after=[leaving])
        assert (await hand.answer(load))["source"] == protocol.HOST
        assert torch.equal(await running, X + expected)
        # Later ones are parked again.
        await hand.loaded("other")
        assert ("parked", "other", True) in await hand.unloaded("other")

    test()


# What goes wrong


@contextmanager
def no_copies(
    monkeypatch: pytest.MonkeyPatch, to: str, error: str = NO_MEMORY
) -> Iterator[None]:
    """As if there were no memory on the host, or on the device."""
    move = torch.Tensor.to

    def fail(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.numel() == 256 * 256 and str(args[0]).startswith(to):
            raise RuntimeError(error)
        return move(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", fail)
        yield


def two_layers(seed: int = 0) -> nn.Module:
    """The first of which is small enough to be moved in any case."""
    return nn.Sequential(nn.Linear(256, 1), nn.Linear(1, 256), layer(seed))


def test_a_move_that_fails_drops_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    @gen_cluster(client=True, nthreads=ONE_WORKER)
    async def test(c: Any, s: Any, a: Any) -> None:
        before = allocated()
        models = [await deploy(c, two_layers(), name=name) for name in "ab"]
        expected = await models[0].submit(X)
        hand = Hand(s, a)
        name = "distributed.inference.unloading"
        with no_copies(monkeypatch, "cpu"), captured_logger(name, logging.INFO) as log:
            for name in "ab":
                assert await hand.unloaded(name) == [("unloaded", name)]
        assert log.getvalue().count("\n") == 1
        assert f"{a.address} could not move 'a' '1' into the host" in log.getvalue()
        assert "out of memory" in log.getvalue()
        assert allocated() == before
        assert (await hand.loaded("a"))["source"] == protocol.DISK
        assert torch.equal(await models[0].submit(X), expected)
        assert await hand.unloaded("a") == [("parked", "a", True), ("unloaded", "a")]

    test()


def test_a_device_without_memory_for_what_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @gen_cluster(client=True, nthreads=ONE_WORKER)
    async def test(c: Any, s: Any, a: Any) -> None:
        before = allocated()
        model = await deploy(c, two_layers())
        expected = await model.submit(X)
        hand = Hand(s, a)
        await hand.unloaded("m")
        with no_copies(monkeypatch, "npu"):
            answer = await hand.answer(hand.load("m"))
            await until(lambda: hand.heard[-1][0] == "parked")
        assert NO_MEMORY in answer["failure"]["exception_text"]
        assert (answer["nbytes"], answer["source"], answer["broken"]) == (0, "", "")
        del answer
        hand._answers.clear()
        gc.collect()
        assert allocated() == before
        # It is not on the host any more either.
        assert hand.heard[-2:] == [("loaded", "m"), ("parked", "m", False)]
        assert (await hand.loaded("m"))["source"] == protocol.DISK
        assert torch.equal(await model.submit(X), expected)

    test()


def test_a_device_that_breaks_while_a_model_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @gen_cluster(client=True, nthreads=ONE_WORKER)
    async def test(c: Any, s: Any, a: Any) -> None:
        for name in "ab":
            await deploy(c, layer(), name=name)
        hand = Hand(s, a)
        with no_copies(monkeypatch, "cpu", FATAL):
            assert await hand.unloaded("a") == [("unloaded", "a")]
        assert str(a.plugins["daskinfer-runtime"].device.broken) == FATAL
        # Nothing is tried on it any more.
        assert await hand.unloaded("b") == [("unloaded", "b")]

    test()


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_load_that_is_called_off(c: Any, s: Any, a: Any) -> None:
    held = Held()
    other = await deploy(c, held, name="held")
    await deploy(c, layer())
    before = allocated()
    hand = Hand(s, a)
    await hand.unloaded("m")
    running = other.submit(X)
    await until(held.entered.is_set)
    leaving = hand.unload("held")
    load = hand.load("m", after=[leaving])
    # What is not there yet is not parked.
    assert await hand.unloaded("m") == [("parked", "m", False), ("unloaded", "m")]
    held.gate.set()
    await running
    await hand.answer(leaving)
    assert not hand.has_answered(load)
    assert allocated() <= before - NBYTES
    assert (await hand.loaded("m"))["source"] == protocol.DISK


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_what_is_parked_goes_with_the_worker(c: Any, s: Any, a: Any) -> None:
    await deploy(c, layer())
    hand = Hand(s, a)
    await hand.unloaded("m")
    function = parked(hand, "m")
    await a.close()
    gc.collect()
    assert function() is None


# What fits


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_model_that_never_fits_is_refused(c: Any, s: Any, a: Any) -> None:
    import torch_npu

    before = allocated()
    torch_npu.simulator.set_limit(0, NBYTES)
    asked = r"'m' '1' takes 25\d\.\d\d kiB, and models may take 204\.80 kiB of npu:0 "
    asked += f"of {a.address}: raise daskinfer.weights.device, or deploy it to workers"
    with pytest.raises(ModelTooLarge, match=asked):
        await deploy(c, layer())
    # The memory of the host is another matter.
    model = await deploy(c, layer(), device="cpu")
    assert (await model.submit(X)).shape == X.shape
    torch_npu.simulator.set_limit(0, 18 * NBYTES)
    # Known only when it is there.
    with pytest.raises(ModelTooLarge, match=r"'n' '1' takes 4\.00 MiB, .* 3\.60 MiB"):
        await daskinfer.deploy(c, factory=f"{__name__}:large", name="n")
    gc.collect()
    assert allocated() == before


def large() -> nn.Module:
    return nn.Linear(1024, 1024, bias=False)


@gen_cluster(client=True, nthreads=ONE_WORKER, worker_kwargs={"resources": {"NPU": 1}})
async def test_a_worker_tells_the_room_on_what_it_has_declared(
    c: Any, s: Any, a: Any
) -> None:
    await deploy(c, layer())
    assert (await room_of(s, a))["npu"] == int(0.8 * (1 << 30))


@gen_cluster(client=True, nthreads=ONE_WORKER)
async def test_a_worker_opens_no_device_to_tell_its_room(
    c: Any, s: Any, a: Any
) -> None:
    await deploy(c, layer())
    assert set(await room_of(s, a)) == {"cpu"}


@gen_cluster(
    client=True, nthreads=ONE_WORKER, config={"daskinfer.weights.device": "24 MiB"}
)
async def test_room_in_bytes_is_known_in_any_case(c: Any, s: Any, a: Any) -> None:
    await deploy(c, layer())
    assert (await room_of(s, a))["npu"] == 24 << 20


@gen_cluster(client=True, nthreads=ONE_WORKER, worker_kwargs={"resources": {"NPU": 1}})
async def test_users_tasks_that_hold_the_npu_are_not_disturbed(
    c: Any, s: Any, a: Any
) -> None:
    await deploy(c, layer())
    hand = Hand(s, a)
    probe = Probe(is_open=False)
    task = c.submit(probe, 1, resources={"NPU": 1})
    await probe.entered()
    leaving = hand.unload("m")
    await until(lambda: a.plugins["daskinfer-runtime"].device.account.is_waited_for)
    assert not hand.has_answered(leaving)
    probe.open()
    assert await task == 2
    await hand.answer(leaving)
    assert hand.heard == [("parked", "m", True), ("unloaded", "m")]
