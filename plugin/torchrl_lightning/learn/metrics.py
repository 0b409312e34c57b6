"""Metrics over an epoch, cheaper than Lightning's log call (1 us instead of 0.3 ms a key)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MetricSums:
    """Running means of scalar tensors, and the variance that a value prediction explains.

    Example:
        >>> sums = MetricSums()
        >>> sums.add({"loss": torch.tensor(1.0)})
        >>> sums.add({"loss": torch.tensor(3.0)})
        >>> sums.flush()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor | float]] = {}
        self._predictions: list[tuple[Tensor, Tensor]] = []

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Add one observation of each metric."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def add_prediction(self, prediction: Tensor, target: Tensor) -> None:
        """Add values and their targets, of any equal shape; both are kept as they are until ``flush``."""
        self._predictions.append((prediction.detach(), target.detach()))

    def explained_variance(self) -> float | None:
        r"""Return \(1 - \mathrm{Var}(y - \hat y) / \mathrm{Var}(y)\) of all predictions; None without variance."""
        if not self._predictions:
            return None
        value, target = (
            torch.cat([x.reshape(-1) for x in part]).double() for part in zip(*self._predictions, strict=True)
        )
        unexplained, variance = torch.stack(((target - value).var(correction=0), target.var(correction=0))).tolist()
        return 1.0 - unexplained / variance if variance > 1e-12 else None

    def flush(self) -> dict[str, float]:
        """Return the means and reset."""
        means = {name: _mean(values) for name, values in self._values.items()}
        explained = self.explained_variance()
        if explained is not None:
            means["explained_variance"] = explained
        self._values, self._predictions = {}, []
        return means


def _mean(values: list[Tensor | float]) -> float:
    tensors = [value for value in values if isinstance(value, Tensor)]
    total = float(torch.stack(tensors).double().sum()) if tensors else 0.0
    return (total + sum(value for value in values if not isinstance(value, Tensor))) / len(values)
