"""A picture of panels in a file. Imports nothing heavy before it draws."""

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
    """Make a figure of some panels of one size in inches, at most three side by side, and save it after the block.

    Texts may be names from files, so that they are drawn as they are written; only the title may hold formulas.
    """
    import matplotlib

    # A figure of its own, without pyplot: no display is looked for and no global state is left behind.
    from matplotlib.figure import Figure

    style: Any = {"text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False}
    style["svg.hashsalt"] = "panels"  # equal curves make equal files
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a name in any script
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
