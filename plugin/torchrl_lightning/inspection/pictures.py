"""Plot inline SVG figures; the style sheet of the page sets their colors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning._core.palette import DARK_PALETTE, PALETTE

WIDTH, HEIGHT = 240, 80
POINTS = 120  # maximum number of points per line
COLOURS, DARK_COLOURS = (*PALETTE, "#777777"), (*DARK_PALETTE, "#AAAAAA")


def bars(
    heights: Sequence[float],
    low: float,
    high: float,
    title: str,
    second: Sequence[float] = (),
    *,
    x: str = "value",
    y: str = "steps",
) -> str:
    """Plot a bar for each of several equal parts of a range, with names for both axes.

    A second series has narrower bars in front.
    """
    largest = max([*heights, *second, 1e-12])
    paths = []
    for series, width in [(heights, 0.9), (second, 0.4)][: 1 + bool(second)]:
        across = np.add.outer(np.arange(len(series)), (0, 0, width, width)) * (WIDTH / len(series))
        paths.append((across.ravel(), np.outer(series, (0, 1, 1, 0)).ravel() * (HEIGHT / largest)))
    highest = max([*heights, *second], default=0.0)
    return _figure(paths, title, _Axis(x, low, high), _Axis(y, 0, highest), is_filled=True)


def histogram(values: NDArray[Any], title: str, bins: int = 32, *, x: str = "value", y: str = "steps") -> str:
    """Plot a histogram of the finite values; return an empty string without finite values."""
    values = np.asarray(values.real, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return ""
    low, high = float(values.min()), float(values.max())
    # The limit keeps the range below 2**53, because float64 cannot represent every larger integer.
    if max(-low, high) < 1 << 52 and (values % 1 == 0).all():  # equally many integers per bin
        width = -(-int(high - low + 1) // bins)
        counts = np.bincount((values - low).astype(np.int64) // width)
    else:
        counts, _ = np.histogram(_scaled(values, low, high), bins)
    return bars(counts.tolist(), low, high, title, x=x, y=y)


def lines(columns: NDArray[Any], title: str) -> str:
    """Plot each column of ``[n, k]`` as a line; of many rows, plot the minimum and maximum of equal parts."""
    values = np.asarray(columns.real, np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    if len(values) > POINTS:
        begins = np.linspace(0, len(values), POINTS // 2, endpoint=False).astype(np.int64)
        extremes = [extreme.reduceat(values, begins, axis=0) for extreme in (np.minimum, np.maximum)]
        values = np.stack(extremes, 1).reshape(-1, values.shape[1])
    values = values.repeat(2, 0) if len(values) == 1 else values
    # Smaller differences are rounding errors.
    heights = _scaled(values, low, high) if high / 2 - low / 2 > 5e-13 else np.zeros_like(values)
    across, up = np.linspace(0, WIDTH, len(values)), 1 + heights * (HEIGHT - 2)
    paths = [(across, column) for column in up.T]
    return _figure(paths, title, _Axis("step", 0, len(columns) - 1), _Axis("value", low, high))


def _scaled(values: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """Scale values to 0 to 1; the halved bounds prevent an overflow of the range."""
    span = high / 2 - low / 2
    return (values / 2 - low / 2) / span if span > 0 else np.zeros_like(values)


@dataclass(frozen=True)
class _Axis:
    """The name of an axis and the numbers at its ends."""

    name: str
    low: float
    high: float

    def labels(self) -> str:
        """Return the lower end, the name and the upper end as HTML; equal ends are written once."""
        ends = [_label(self.low), self.name, _label(self.high) if self.high > self.low else ""]
        return "".join(f"<span>{escape(text)}</span>" for text in ends)


def _label(number: float) -> str:
    is_whole = number % 1 == 0 or abs(number) >= 1000
    return f"{number:,.0f}" if abs(number) < 1e6 and is_whole else f"{number:.3g}"


def _figure(paths: Sequence[tuple[Any, Any]], title: str, x: _Axis, y: _Axis, *, is_filled: bool = False) -> str:
    """Return paths in SVG coordinates as a figure with a caption and labels of both axes.

    The caption numbers several lines in their colours. This calls matplotlib's renderer directly: a matplotlib figure
    would take three times as long, and the user's style would change the output.
    """
    from matplotlib.backends.backend_svg import RendererSVG
    from matplotlib.colors import to_rgb
    from matplotlib.path import Path
    from matplotlib.transforms import IdentityTransform

    with io.StringIO() as file:
        renderer = RendererSVG(WIDTH, HEIGHT, file, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        graphics_context = renderer.new_gc()
        graphics_context.set_linewidth(0 if is_filled else 1)
        for number, points in enumerate(paths):
            colour = COLOURS[number % len(COLOURS)]
            graphics_context.set_foreground(colour)
            path = Path(np.column_stack(points).round(1))
            renderer.draw_path(graphics_context, path, IdentityTransform(), to_rgb(colour) if is_filled else None)
        renderer.finalize()
        svg = file.getvalue()
    svg = svg[svg.index("<path") : svg.rindex("</svg>")]
    for number, colour in enumerate(COLOURS):
        svg = svg.replace(colour.lower(), f"var(--colour-{number})")
    columns = range(len(paths)) if len(paths) > 1 and not is_filled else ()
    key = "".join(f' <span style="color: var(--colour-{number % len(COLOURS)})">{number}</span>' for number in columns)
    return (
        f'<figure><figcaption>{escape(title)}{key}</figcaption><div class="y">{y.labels()}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img"><title>{escape(title)}</title>'
        f'{svg}</svg><div class="x">{x.labels()}</div></figure>'
    )
