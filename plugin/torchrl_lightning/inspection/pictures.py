"""Pictures as SVG, which a page holds without any other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT, FOOT = 240, 80, 14
POINTS = 120  # of a line, at most
COLOURS = ("#3366aa", "#cc6633", "#339966", "#aa3377", "#888833", "#6644bb", "#228899", "#777777")


def bars(heights: Sequence[float], low: float, high: float, title: str, second: Sequence[float] = ()) -> str:
    """Draw bars over equal parts of a range, and those of a second series before them."""
    most = max([*heights, *second, 1e-12])
    drawn = "".join(
        f'<rect x="{number * WIDTH / len(series):.1f}" y="{HEIGHT * (1 - height / most):.1f}" '
        f'width="{WIDTH / len(series) * part:.1f}" height="{HEIGHT * height / most:.1f}" fill="{colour}"/>'
        for series, colour, part in ((heights, COLOURS[0], 0.9), (second, COLOURS[1], 0.4))
        for number, height in enumerate(series)
        if height > 0
    )
    return _framed(drawn, title, f"{low:.4g}", f"{high:.4g}")


def histogram(values: NDArray[Any], title: str, parts: int = 32) -> str:
    """Draw how many of some numbers lie in each part of their range; nothing where none is finite."""
    values = np.asarray(values.real, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return ""
    low, high = float(values.min()), float(values.max())
    # Above, float64 does not hold every whole number.
    if max(-low, high) < 1 << 52 and (values % 1 == 0).all():  # as many whole numbers in each part
        width = -(-int(high - low + 1) // parts)
        return bars(np.bincount((values - low).astype(np.int64) // width).tolist(), low, high, title)
    counts, _ = np.histogram(_scaled(values, low, high), parts)
    return bars(counts.tolist(), low, high, title)


def _scaled(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Return values between 0 and 1; halves do not overflow where the range does."""
    span = high / 2 - low / 2
    return (values / 2 - low / 2) / span if span > 0 else np.zeros_like(values)


def lines(columns: NDArray[Any], title: str) -> str:
    """Draw columns ``[n, k]`` over their rows; of many, the least and the largest of each part."""
    shown = np.asarray(columns.real, np.float64)
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    shown = np.nan_to_num(shown, nan=low, posinf=high, neginf=low)
    if len(shown) > POINTS:
        begins = np.linspace(0, len(shown), POINTS // 2, endpoint=False).astype(np.int64)
        extremes = [extreme.reduceat(shown, begins, axis=0) for extreme in (np.minimum, np.maximum)]
        shown = np.stack(extremes, 1).reshape(-1, shown.shape[1])
    across = np.full(len(shown), WIDTH / 2) if len(shown) == 1 else np.linspace(0, WIDTH, len(shown))
    # Differences that small are rounding.
    flat = not high / 2 - low / 2 > 5e-13
    up = HEIGHT * (1 - (np.zeros_like(shown) if flat else _scaled(shown, low, high)))
    drawn = "".join(
        f'<polyline fill="none" stroke="{COLOURS[number % len(COLOURS)]}" '
        f'points="{" ".join(f"{x:.0f},{y:.1f}" for x, y in zip(across, column, strict=True))}"/>'
        for number, column in enumerate(up.T)
    )
    return _framed(drawn, f"{title}: {low:.4g} to {high:.4g}", "0", str(len(columns) - 1))


def _framed(drawn: str, title: str, low: str, high: str) -> str:
    foot = HEIGHT + FOOT - 3
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT + FOOT}" role="img">'
        f'<title>{escape(title)}</title>{drawn}<path d="M0 {HEIGHT}H{WIDTH}" stroke="#999"/>'
        f'<text x="0" y="{foot}">{low}</text><text x="{WIDTH}" y="{foot}" text-anchor="end">{high}</text>'
        "</svg></figure>"
    )
