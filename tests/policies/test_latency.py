from __future__ import annotations

import pytest

from daskinfer.timing.curve import Curve
from daskinfer.timing.latency import LatencyModel


def seeded(**timings: float) -> LatencyModel:
    model = LatencyModel(64)
    model.seed("a", "npu", [(int(k[1:]), v) for k, v in timings.items()])
    return model


def test_curve_between_below_and_beyond_its_points() -> None:
    curve = Curve([2, 4, 8], [1.0, 2.0, 2.0])
    assert [curve.at(rows) for rows in (1, 2, 3, 4, 6, 8)] == [1, 1, 1.5, 2, 2, 2]
    # Flat at the end, yet more rows are not free.
    assert curve.at(16) == pytest.approx(2 + 8 * 0.25 * 2 / 8)


def test_curve_inverted() -> None:
    curve = Curve([1, 5], [1.0, 2.0])
    assert [curve.rows_within(t) for t in (0.5, 1.0, 1.5, 2.0, 9.0)] == [0, 1, 3, 5, 5]


def test_before_anything_is_measured() -> None:
    model = LatencyModel(64)
    assert model.sizes("npu") == []
    assert model.top("npu") == 0
    assert model.ceiling("npu") == 64
    assert model.seconds("a", "npu", 1) == LatencyModel.UNKNOWN_SECONDS
    assert model.table("npu") == []


def test_the_very_first_call_is_no_measurement_but_a_guess() -> None:
    model = LatencyModel(64)
    model.observe("a", "npu", 1, 2.0)
    assert model.sizes("npu") == []
    assert model.seconds("a", "npu", 1) == 2.0
    model.observe("a", "npu", 1, 0.010)
    assert model.sizes("npu") == [1]
    assert model.seconds("a", "npu", 1) == pytest.approx(0.010)


def test_the_first_call_of_a_size_is_dropped_if_it_is_slow() -> None:
    model = seeded(n1=0.010, n4=0.016)
    model.observe("a", "npu", 8, 2.0)
    assert model.sizes("npu") == [1, 4]
    model.observe("a", "npu", 8, 0.024)
    assert model.sizes("npu") == [1, 4, 8]
    model.observe("b", "npu", 8, 2.0)
    assert model.seconds("b", "npu", 8) == pytest.approx(0.024)


def test_time_never_falls_as_the_size_grows() -> None:
    model = seeded(n1=0.010, n8=0.030, n16=0.020, n32=0.040)
    times = [model.seconds("a", "npu", rows) for rows in range(1, 65)]
    assert times == sorted(times)
    assert model.seconds("a", "npu", 12) == pytest.approx(0.025)


def test_drift_is_followed_by_the_device_that_drifts() -> None:
    model = seeded(n1=0.010, n8=0.024)
    model.seed("b", "npu", [(1, 0.010), (8, 0.024)])
    for _ in range(12):
        model.observe("a", "npu", 8, 0.036)
        model.observe("b", "npu", 8, 0.024)
    assert model.seconds("a", "npu", 8) == pytest.approx(0.036, rel=0.1)
    assert model.seconds("b", "npu", 8) == pytest.approx(0.024, rel=0.1)
    # Sizes that were not run since are believed to have drifted alike.
    assert model.seconds("a", "npu", 1) == pytest.approx(0.015, rel=0.15)


def test_one_outlier_moves_little_and_two_in_a_row_much() -> None:
    model = seeded(n8=0.024)
    model.observe("a", "npu", 8, 0.024)
    model.observe("a", "npu", 8, 0.240)
    assert model.seconds("a", "npu", 8) < 0.06
    model.observe("a", "npu", 8, 0.240)
    assert model.seconds("a", "npu", 8) > 0.12


def test_warm_up_tells_a_slow_device_from_its_class() -> None:
    model = seeded(n1=0.010, n8=0.024)
    model.seed("slow", "npu", [(1, 0.030), (8, 0.072)])
    assert model.scale("a") == 1
    assert model.scale("slow") == pytest.approx(3, rel=0.02)
    assert model.seconds("a", "npu", 8) == pytest.approx(0.024, rel=0.03)
    model.forget("slow")
    assert model.scale("slow") == 1
    assert model.sizes("npu") == [1, 8]


def test_classes_have_tables_of_their_own() -> None:
    model = seeded(n1=0.010, n8=0.024)
    # Until it is measured, another class is the best guess.
    assert model.seconds("c", "cpu", 8) == pytest.approx(0.024)
    model.seed("c", "cpu", [(1, 0.5), (8, 2.0)])
    assert model.seconds("c", "cpu", 8) == pytest.approx(2.0)
    assert model.seconds("a", "npu", 8) == pytest.approx(0.024)


def test_padding_to_allowed_sizes() -> None:
    model = LatencyModel(16, (1, 4, 16))
    model.seed("a", "npu", [(1, 0.010), (4, 0.012), (16, 0.020)])
    assert [model.padded(rows) for rows in (1, 2, 4, 5, 16)] == [1, 4, 4, 16, 16]
    assert model.seconds("a", "npu", 5) == pytest.approx(0.020)
    model.observe("a", "npu", 3, 0.012)
    assert model.sizes("npu") == [1, 4, 16]
    assert model.table("npu")[1][::2] == (4, 2)


def test_more_rows_than_fit_are_several_passes() -> None:
    model = seeded(n1=0.010, n64=0.073)
    alone, full = model.seconds("a", "npu", 16), model.seconds("a", "npu", 64)
    assert model.seconds("a", "npu", 128) == pytest.approx(2 * full)
    assert model.seconds("a", "npu", 144) == pytest.approx(2 * full + alone)


def test_out_of_memory_halves_the_ceiling_once_for_what_is_in_flight() -> None:
    model = seeded(n1=0.010, n64=0.073)
    model.out_of_memory("npu", 64, 0.0)
    assert model.ceiling("npu") == 32
    assert model.sizes("npu") == [1]
    for _ in range(5):
        model.out_of_memory("npu", 64, 0.0)
        model.out_of_memory("npu", 40, 0.0)
    assert model.ceiling("npu") == 32
    assert model.ceiling("cpu") == 64
    model.out_of_memory("npu", 1, 0.0)
    assert model.ceiling("npu") == 1
    model.out_of_memory("npu", 1, 0.0)
    assert model.ceiling("npu") == 1


def test_out_of_memory_with_allowed_sizes_keeps_to_them() -> None:
    model = LatencyModel(16, (2, 4, 16))
    model.out_of_memory("npu", 9, 0.0)
    assert model.ceiling("npu") == 4
    for _ in range(3):
        model.out_of_memory("npu", 1, 0.0)
    assert model.ceiling("npu") == 2


def test_the_size_offered_does_not_creep_down() -> None:
    model = seeded(n1=0.010, n64=0.073)
    for _ in range(200):
        model.observe("a", "npu", 50, 0.059)
    model.observe("a", "npu", 63, 0.072)
    for _ in range(200):
        model.observe("a", "npu", 50, 0.059)
    assert model.sizes("npu")[-2:] == [63, 64]


def test_the_version_tells_when_predictions_changed() -> None:
    model = seeded(n1=0.010, n64=0.073)
    model.seconds("a", "npu", 8)
    before = model.version
    for _ in range(20):
        model.observe("a", "npu", 64, 0.073)
    assert model.version == before
    for _ in range(20):
        model.observe("a", "npu", 64, 0.2)
    assert model.version > before


def test_a_clock_too_coarse_for_the_model() -> None:
    model = LatencyModel(64)
    for _ in range(5):
        model.observe("a", "npu", 1, 0.0)
    assert 0 < model.seconds("a", "npu", 1) < 1e-5
    assert "LatencyModel" in repr(model)
