"""Distance between drawn samples and their distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def chi_square(drawn: Tensor | Sequence[Any], weights: Tensor | Mapping[Any, float]) -> float:
    """Return the chi-square statistic of drawn samples; assert that no sample has a weight of zero."""
    counts = Counter(drawn.tolist() if isinstance(drawn, Tensor) else drawn)
    pairs = enumerate(weights.tolist()) if isinstance(weights, Tensor) else weights.items()
    expected = {thing: weight for thing, weight in pairs if weight}
    assert set(counts) <= set(expected), "drew what cannot be drawn"
    scale = counts.total() / sum(expected.values())
    return sum((counts[thing] - weight * scale) ** 2 / (weight * scale) for thing, weight in expected.items())
