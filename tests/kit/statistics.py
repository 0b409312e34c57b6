"""How far what was drawn is from what should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def chi_square(drawn: Tensor | Sequence[Any], weights: Tensor | Mapping[Any, float]) -> float:
    """Compare how often things were drawn with their weights; what has none must not have been drawn."""
    counts = Counter(drawn.tolist() if isinstance(drawn, Tensor) else drawn)
    pairs = enumerate(weights.tolist()) if isinstance(weights, Tensor) else weights.items()
    expected = {thing: weight for thing, weight in pairs if weight}
    assert set(counts) <= set(expected), "drew what cannot be drawn"
    scale = counts.total() / sum(expected.values())
    return sum((counts[thing] - weight * scale) ** 2 / (weight * scale) for thing, weight in expected.items())
