"""Metrics of several ranks are combined into the metrics of all samples."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from torchrl_lightning._core import rank_metrics
from torchrl_lightning._core.rank_metrics import (
    ExplainedVariance,
    Mean,
    Sum,
    gather_episodes,
    plain_metrics,
    read_metrics,
    reduce_metrics,
)

NUMBERS = st.floats(-1e6, 1e6, width=32)
RANKS = st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=4)
PAIRS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), min_size=2, max_size=4)


def logged(samples: list[float]) -> dict[str, float]:
    if not samples:
        return {}
    return {"mean": Mean(float(np.mean(samples)), len(samples)), "count": Sum(len(samples))}


@given(RANKS)
@settings(max_examples=100, deadline=None)
def test_means_and_counts_equal_those_of_all_samples(ranks: list[list[float]]) -> None:
    reduced = reduce_metrics([pickle.loads(pickle.dumps(logged(samples))) for samples in ranks])
    together = [sample for samples in ranks for sample in samples]
    if not together:
        assert reduced == {}
        return
    assert reduced["count"] == len(together)
    scale = max(map(abs, together))
    assert reduced["mean"] == pytest.approx(float(np.mean(together)), rel=1e-12, abs=1e-12 * scale)
    assert all(type(value) is float for value in reduced.values())


@given(PAIRS)
@settings(max_examples=100, deadline=None)
def test_explained_variance_equals_that_of_all_samples(ranks: list[list[tuple[float, float]]]) -> None:
    columns = [torch.tensor(pairs, dtype=torch.float64).unbind(1) for pairs in ranks]
    values = [pickle.loads(pickle.dumps(ExplainedVariance.of(*column))) for column in columns]
    reduced = reduce_metrics([{"explained": value} for value in values])
    prediction, target = (torch.cat(parts) for parts in zip(*columns, strict=True))
    variance = float(target.var(correction=0))
    if variance < 1e-6:
        assert reduced == {} or variance > 1e-13
        return
    expected = 1 - float((target - prediction).var(correction=0)) / variance
    assert reduced["explained"] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_explained_variance_is_defined_if_the_targets_of_each_rank_are_constant() -> None:
    values = [ExplainedVariance.of(torch.tensor([y, y]), torch.tensor([y, y])) for y in (1.0, 3.0)]
    assert all(map(math.isnan, values))
    assert reduce_metrics([{"explained": value} for value in values]) == {"explained": 1.0}
    assert reduce_metrics([{"explained": values[0]}, {"explained": values[0]}]) == {}


def test_explained_variance_is_exact_at_a_large_offset() -> None:
    target = torch.arange(8, dtype=torch.float64) + 1e9
    parts = [ExplainedVariance.of(half - 0.5 * (half - 1e9), half) for half in target.split(4)]
    assert reduce_metrics([{"explained": part} for part in parts])["explained"] == pytest.approx(0.75, abs=1e-9)


@pytest.mark.parametrize("number", [0.1, 3e-4, -7.0, math.inf])
@pytest.mark.parametrize("make", [float, lambda number: Mean(number, 7)])
def test_equal_numbers_are_not_rounded(number: float, make: Any) -> None:
    assert reduce_metrics([{"a": make(number)} for _ in range(3)]) == {"a": number}


def test_ranks_may_have_different_metrics() -> None:
    ranks = [{"frames": 8, "a": 1.0}, {"frames": 8, "a": 3.0, "late": torch.tensor(2.5)}, {}]
    assert reduce_metrics(ranks) == {"frames": 8.0, "a": 2.0, "late": 2.5}


def test_one_rank_keeps_its_numbers() -> None:
    metrics = {"a": np.float32(0.1), "b": Sum(3), "c": Mean(0.1, 3), "d": math.nan}
    reduced = reduce_metrics([metrics])
    assert list(reduced) == list(metrics)
    assert [type(value) for value in reduced.values()] == [float] * 4
    assert (reduced["a"], reduced["b"], reduced["c"]) == (float(np.float32(0.1)), 3.0, 0.1)
    assert math.isnan(reduced["d"])


def test_plain_metrics_can_be_read_again() -> None:
    metrics = {"a": 0.5, "b": Sum(3), "c": Mean(2.0, 4)}
    plain = plain_metrics(metrics)
    assert {type(item) for value in plain.values() for item in (value if isinstance(value, list) else [value])} == {
        str,
        float,
    }
    read = read_metrics(plain, "metrics")
    assert [type(value) for value in read.values()] == [float, Sum, Mean]
    assert read == metrics
    assert read["c"].weight == 4


@pytest.mark.parametrize(
    "value", [["sum"], ["sum", "3"], ["mean", 2.0], ["mean", 2.0, 0.0], ["mean", 2.0, math.nan], ["max", 1.0], []]
)
def test_unknown_plain_metrics_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="'a' of metrics"):
        read_metrics({"a": value}, "metrics")


def episodes(returns: list[float], success: list[bool] | None = None) -> TensorDict:
    columns = {"episode_return": torch.tensor(returns), "episode_length": torch.ones(len(returns), dtype=torch.int64)}
    return TensorDict({**columns, **({} if success is None else {"success": torch.tensor(success)})}, [len(returns)])


def test_episodes_of_all_ranks_are_ordered_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []

    def all_gather(value: Any) -> list[Any]:
        gathered.append(value)
        return list(gathered)

    monkeypatch.setattr(rank_metrics, "all_gather", all_gather)
    assert len(gather_episodes([])) == 0
    first = gather_episodes([episodes([1.0]), episodes([2.0, 3.0], [True, False])])
    assert first["episode_return"].tolist() == [1.0, 2.0, 3.0]
    assert first["episode_return"].dtype == torch.float64
    assert first["success"].tolist() == [False, True, False]
    second = gather_episodes([episodes([4.0]).reshape(1, 1)])
    assert second["episode_return"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert second["success"].tolist() == [False, True, False, False]
    assert second["episode_length"].tolist() == [1.0] * 4
