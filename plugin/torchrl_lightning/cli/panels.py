"""A figure of panels. Imports nothing heavy before it draws."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lightning.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plain_text(text: str) -> str:
    r"""Return a text that matplotlib draws as it is written: without formulas and control characters.

    Examples:
        >>> print(plain_text("$x$"))
        \$x\$
    """
    return printable(text).replace("$", r"\$")


def panel_grid(count: int, size: tuple[float, float]) -> tuple[Figure, list[Any]]:
    """Make a figure of some panels of one size in inches, at most three side by side, and return it with its axes."""
    # A figure of its own, without pyplot: no display is looked for and no global state is left behind.
    from matplotlib.figure import Figure

    columns = count if count < 4 else min(math.ceil(math.sqrt(count)), 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    for axes in grid[:count]:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid[:count])


def save_figure(figure: Figure, output: Path, title: str | None) -> Path:
    """Write a figure below its title to a file, whose folder is made, and return the file's path."""
    if title is not None:
        figure.suptitle(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    return output
