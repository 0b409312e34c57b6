"""The style of all pictures: colours, labels in words, legends outside the axes, and files of several panels.

This module imports nothing heavy before drawing.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lightning._core.palette import PALETTE
from torchrl_lightning._core.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEQUENTIAL = "cividis"
"""Colour map for ordered values, with the same appearance for colour-blind readers (Nunez et al., 2018)."""
LINE_STYLES = ("-", "--", ":", "-.")
STAR: dict[str, Any] = {"linestyle": "", "marker": "*", "markersize": 10}
"""The marker of an evaluation after training."""

_WORDS = {
    "step": "Environment frames",
    "epoch": "Epoch",
    "frames": "Environment frames",
    "updates": "Updates",
    "eval/return": "Mean return",
    "eval/return_std": "Standard deviation of the return",
    "eval/length": "Mean episode length",
    "eval/success": "Success rate",
    "final/return": "Final mean return",
    "train/return": "Mean return of training episodes",
    "train/length": "Mean length of training episodes",
    "train/episodes": "Training episodes",
    "demos/success": "Success rate of training episodes",
}


def axis_label(column: str) -> str:
    """Return the label of a logged column in words; other columns and settings keep their names.

    Examples:
        >>> axis_label("eval/return"), axis_label("train/loss_critic")
        ('Mean return', 'train/loss_critic')
    """
    return _WORDS.get(column, printable(column))


def line_style(number: int) -> dict[str, Any]:
    """Return colour and line style of the curve with this number; the first 28 curves all look different."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": LINE_STYLES[number // len(PALETTE) % len(LINE_STYLES)],
    }


@contextmanager
def saved_panels(
    output: Path, count: int, size: tuple[float, float], title: str | None = None, columns: int = 3
) -> Iterator[tuple[Figure, list[Any]]]:
    """Create a figure of equal panels and save it after the block.

    ``size`` is the size of a panel in inches, and ``columns`` the maximum number of panels per row. Only the title may
    contain formulas. Other texts are drawn literally, because they may be names from files.
    """
    import matplotlib

    # A figure without pyplot needs no display and leaves no global state.
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    style: Any = {
        "text.parse_math": False,
        "text.usetex": False,
        "axes.formatter.use_mathtext": False,
        "axes.prop_cycle": cycler(color=PALETTE),
        "figure.facecolor": "white",  # also readable on a dark page
        "svg.hashsalt": "panels",  # equal curves produce equal files
    }
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # names may use any script
        columns = min(count if count < 4 else math.ceil(math.sqrt(count)), columns)
        rows = -(-count // columns)
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in grid[count:]:
            axes.set_visible(False)
        for axes in grid[:count]:
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        yield figure, list(grid[:count])
        if title is not None:
            figure.suptitle(title, parse_math=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130, metadata={"Date": None} if output.suffix == ".svg" else None)


def add_legend(figure: Figure, entries: Mapping[str, Mapping[str, Any]], **shared: Any) -> None:
    """Add a legend below the panels, and increase the height of the figure by the height of the legend.

    Long texts are broken into lines.

    Args:
        figure: the figure of :func:`saved_panels`.
        entries: for each text, the properties of its line; the key ``"band"`` draws an area in this colour instead.
        **shared: properties of all lines.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for text, properties in entries.items():
        label = textwrap.fill(printable(text), 100)
        if "band" in properties:
            handles.append(Patch(facecolor=properties["band"], alpha=0.2, label=label))
        else:
            handles.append(Line2D([], [], label=label, **{**shared, **properties}))
    if handles:
        lines = sum(handle.get_label().count("\n") + 1 for handle in handles)
        figure.set_figheight(figure.get_figheight() + 0.2 * lines)
        figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize="small")
