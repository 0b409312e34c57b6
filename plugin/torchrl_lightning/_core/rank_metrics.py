"""Logged numbers of one rank, and their combination to the numbers of all ranks.

A plain number of a part's ``metrics()`` becomes the mean of the ranks that have it. A count is a :class:`Sum`, and a
mean over samples is a :class:`Mean`, because ranks have different numbers of samples. Each number is a float with the
value of its own rank, so that one process logs it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lightning._core.moments import Moments
from torchrl_lightning._core.ranks import all_gather
from torchrl_lightning._core.state import mapping, state_error

RETURN, LENGTH, SUCCESS = "episode_return", "episode_length", "success"


class Sum(float):
    """A number that is added over the ranks, such as a count.

    Examples:
        >>> reduce_metrics([{"train/episodes": Sum(3)}, {"train/episodes": Sum(1)}])
        {'train/episodes': 4.0}
    """


class Mean(float):
    """A mean of samples, which is weighted over the ranks by their numbers of samples.

    Args:
        value: The mean of this rank.
        weight: The number of samples.

    Examples:
        >>> reduce_metrics([{"train/return": Mean(2.0, 3)}, {"train/return": Mean(10.0, 1)}])
        {'train/return': 4.0}
    """

    weight: float

    def __new__(cls, value: float, weight: float = 1.0) -> Self:
        self = super().__new__(cls, value)
        self.weight = weight
        return self


class ExplainedVariance(float):
    r"""The explained variance \(1 - \mathrm{Var}(y - \hat y) / \mathrm{Var}(y)\); NaN if \(y\) is constant.

    The ranks combine the moments, because the variance of all samples is not the mean of the ranks' variances.

    Args:
        moments: The moments of \(y - \hat y\) and \(y\), ``[2]``.
    """

    moments: Moments

    def __new__(cls, moments: Moments) -> Self:
        unexplained, variance = moments.variance.tolist()
        self = super().__new__(cls, 1.0 - unexplained / variance if variance > 1e-12 else float("nan"))
        self.moments = moments
        return self

    @classmethod
    def of(cls, prediction: Tensor, target: Tensor) -> Self:
        """Return the explained variance of predictions and targets ``[B]``."""
        return cls(Moments.from_samples(torch.stack((target - prediction, target), -1)))

    def __reduce__(self) -> tuple[type[Self], tuple[Moments]]:
        return type(self), (self.moments,)


def reduce_metrics(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all ranks from the metrics of each rank, as plain floats.

    Ranks may have different metrics, for example if no episode has ended on one of them.

    Examples:
        >>> reduce_metrics([{"frames": 8}, {"frames": 8, "time/collect": 0.5}])
        {'frames': 8.0, 'time/collect': 0.5}
    """
    if len(ranks) == 1:
        return {name: float(value) for name, value in ranks[0].items()}
    reduced = {}
    for name in dict.fromkeys(name for metrics in ranks for name in metrics):
        value = _combine([metrics[name] for metrics in ranks if name in metrics])
        if value is not None:
            reduced[name] = value
    return reduced


def _combine(values: list[Any]) -> float | None:
    """Return the common value of the ranks that have a metric; None if it is undefined over all samples."""
    if isinstance(values[0], Sum):
        return sum(map(float, values))
    if isinstance(values[0], ExplainedVariance):
        moments = values[0].moments
        for value in values[1:]:
            moments = moments.merged(value.moments)
        explained = ExplainedVariance(moments)
        return None if explained != explained else float(explained)
    numbers = [float(value) for value in values]
    if all(number == numbers[0] for number in numbers):
        return numbers[0]  # a mean of equal numbers could be rounded
    weights = [value.weight if isinstance(value, Mean) else 1.0 for value in values]
    return sum(number * weight for number, weight in zip(numbers, weights, strict=True)) / sum(weights)


def plain_metrics(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics as plain data for checkpoints: a number, ``["sum", number]`` or ``["mean", number, weight]``.

    Examples:
        >>> plain_metrics({"time/collect": 0.5, "train/return": Mean(2.0, 3), "train/episodes": Sum(3)})
        {'time/collect': 0.5, 'train/return': ['mean', 2.0, 3.0], 'train/episodes': ['sum', 3.0]}
    """
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Sum):
        return ["sum", float(value)]
    return ["mean", float(value), float(value.weight)] if isinstance(value, Mean) else value


def read_metrics(value: Any, name: str) -> dict[str, Any]:
    """Validate the result of :func:`plain_metrics`, and convert it back."""
    return {key: _read(item, f"{key!r} of {name}") for key, item in mapping(value, name).items()}


def _read(value: Any, name: str) -> Any:
    match value:
        case ["sum", float(number)]:
            return Sum(number)
        case ["mean", float(number), float(weight)] if weight > 0:
            return Mean(number, weight)
        case list() | tuple():
            raise state_error(value, name, "a number, or a sum or mean of a rank")
        case _:
            return value


def gather_episodes(batches: Iterable[TensorDictBase]) -> TensorDict:
    """Return returns (float64), lengths (float64) and successes (bool) of the finished episodes of all ranks, ``[E]``.

    All ranks must call this together, also without episodes. The episodes are ordered by rank, so that all ranks
    compute the same statistics. ``success`` exists if a batch of any rank has it, and is False in the other batches.
    """
    columns = [column for rank in all_gather([_episode_columns(batch) for batch in batches]) for column in rank]
    values = {
        name: torch.cat([torch.zeros(0).double(), *(part[name] for part in columns)]) for name in (RETURN, LENGTH)
    }
    if any(SUCCESS in part for part in columns):
        missing = [torch.zeros(len(part[RETURN]), dtype=torch.bool) for part in columns]
        values[SUCCESS] = torch.cat([part.get(SUCCESS, none) for part, none in zip(columns, missing, strict=True)])
    return TensorDict(values, [len(values[RETURN])])


def _episode_columns(batch: TensorDictBase) -> dict[str, Tensor]:
    """Return the columns ``[E]`` of finished episodes that statistics need, on the CPU."""
    columns = {name: batch.get(name).detach().cpu().flatten().double() for name in (RETURN, LENGTH)}
    return {**columns, SUCCESS: batch.get(SUCCESS).cpu().flatten().bool()} if SUCCESS in batch else columns
