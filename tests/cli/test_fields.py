"""Options that become policies, sources and inputs."""

from __future__ import annotations

import click
import numpy as np
import pytest

from daskinfer import BatchPolicy, BreakerPolicy, CachePolicy, RetryPolicy, TierPolicy
from daskinfer.cli.command import one_line
from daskinfer.cli.fields import cache_of, load_example, pairs, policy_of, source_of
from daskinfer.cli.measuring import Example, random_example


def test_a_file_and_a_factory(tmp_path):
    file = tmp_path / "model.pt2"
    file.touch()
    assert source_of(str(file)) == {"path": str(file)}
    assert source_of("a.b:make") == {"factory": "a.b:make"}
    for wrong in ("", "a.b", "a.b:", ":make", "a/b:make", str(tmp_path)):
        with pytest.raises(click.UsageError, match="is no file, and no factory"):
            source_of(wrong)


def test_pairs_are_yaml():
    given = ["a-b=[1, 2]", "c=5ms", "d=null", "e=", "f=x=y"]
    expected = {"a_b": [1, 2], "c": "5ms", "d": None, "e": None, "f": "x=y"}
    assert pairs("--batch", given) == expected
    for wrong in ("a", "=1", "a=[1"):
        with pytest.raises(click.BadParameter):
            pairs("--batch", [wrong])


def test_policies():
    batch = policy_of(BatchPolicy, "--batch", {"allowed_batch_sizes": [4, 1]})
    assert batch == BatchPolicy(allowed_batch_sizes=(1, 4))
    assert policy_of(RetryPolicy, "--retry", {}) is None
    breaker = policy_of(BreakerPolicy, "--breaker", {"cooldown": "10s"})
    assert breaker == BreakerPolicy(cooldown=10)
    with pytest.raises(click.BadParameter, match="failures must be at least 1"):
        policy_of(BreakerPolicy, "--breaker", {"failures": 0})
    with pytest.raises(click.BadParameter, match="there is max_attempts, backoff"):
        policy_of(RetryPolicy, "--retry", {"attempts": 1})


def test_caches():
    assert cache_of(False, {}) is None
    assert cache_of(True, {}) == CachePolicy()
    given = {"host": "1 KiB", "packed": None, "affinity": False}
    expected = CachePolicy(host=TierPolicy(1024), packed=None, affinity=False)
    assert cache_of(False, given) == expected
    for wrong in ({"host": "much"}, {"device": "1 KiB"}, {"affinity": 3}):
        with pytest.raises(click.BadParameter):
            cache_of(True, wrong)


def test_examples(tmp_path):
    array = np.arange(6).reshape(2, 3)
    np.save(tmp_path / "one.npy", array)
    [loaded], keywords = load_example(str(tmp_path / "one.npy"))
    assert np.array_equal(loaded, array) and keywords == {}
    np.savez(tmp_path / "two.npz", ids=array, mask=array > 1)
    positional, keywords = load_example(str(tmp_path / "two.npz"))
    assert positional == () and list(keywords) == ["ids", "mask"]
    (tmp_path / "none.npy").write_text("no array")
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    for wrong in ("none", "pickled"):
        with pytest.raises(click.UsageError, match="holds no array"):
            load_example(str(tmp_path / f"{wrong}.npy"))


def test_rows_are_repeated():
    array = np.arange(6).reshape(3, 2)
    (by_columns,), kwargs = Example((array,), {"mask": array}, 1).rows(5)
    assert by_columns.shape == (3, 5) and kwargs["mask"].shape == (3, 5)
    with pytest.raises(ValueError, match="the example has no rows"):
        Example((np.float32(1),), {}, 0).rows(1)
    with pytest.raises(ValueError, match="the example has no rows"):
        Example((np.zeros((0, 3)),), {}, 0).rows(1)
    sample = Example((array,), {}, None)
    assert sample.rows(1)[0][0] is array
    with pytest.raises(ValueError, match="is one sample"):
        sample.rows(2)


def test_made_up_inputs():
    floats = random_example((2,), "float16", 0)
    assert floats.dtype == np.float16 and 0 < floats.min() <= floats.max() < 1
    assert random_example((2,), "int64", None).tolist() == [0, 0]
    assert random_example((2, 3), "float32", 1).shape == (2, 1, 3)


def test_long_messages_are_cut():
    assert len(one_line(ValueError("x" * 10_000))) < 2_000
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
