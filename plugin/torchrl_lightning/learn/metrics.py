"""Sums of metrics over an epoch: Lightning's own log call costs 0.3 ms a key, an addition 2 us."""

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
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._moments: Tensor | None = None
        self._samples = 0

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Add one observation of each metric."""
        for name, value in metrics.items():
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            known = self._sums.get(name)
            self._sums[name] = value if known is None else known + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def add_prediction(self, prediction: Tensor, target: Tensor) -> None:
        """Add values and their targets, of any equal shape."""
        target = target.detach().reshape(-1).double()
        error = target - prediction.detach().reshape(-1)
        moments = torch.stack([target.sum(), target.dot(target), error.sum(), error.dot(error)])
        self._moments = moments if self._moments is None else self._moments + moments
        self._samples += target.numel()

    def explained_variance(self) -> float | None:
        r"""Return \(1 - \mathrm{Var}(y - \hat y) / \mathrm{Var}(y)\) of all predictions; None without variance."""
        if self._moments is None:
            return None
        y, yy, e, ee = (self._moments / self._samples).tolist()
        variance = yy - y * y
        return 1.0 - (ee - e * e) / variance if variance > 1e-12 else None

    def flush(self) -> dict[str, float]:
        """Return the means and start anew."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        explained = self.explained_variance()
        if explained is not None:
            means["explained_variance"] = explained
        self.__init__()  # type: ignore[misc]
        return means
