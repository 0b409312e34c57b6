"""Save a figure of several panels. This module imports nothing heavy before drawing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def saved_panels(
    output: Path, count: int, size: tuple[float, float], title: str | None = None
) -> Iterator[tuple[Figure, list[Any]]]:
    """Create a figure of equal panels, at most three per row, and save it after the block.

    ``size`` is the size of a panel in inches. Only the title may contain formulas. Other texts are drawn literally,
    because they may be names from files.
    """
    import matplotlib

    # A figure without pyplot needs no display and leaves no global state.
    from matplotlib.figure import Figure

    style: Any = {"text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False}
    style["svg.hashsalt"] = "panels"  # equal curves produce equal files
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # names may use any script
        columns = count if count < 4 else min(math.ceil(math.sqrt(count)), 3)
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
