"""``torchrl-lightning-plot``: draw the learning curves of one or many runs, mean and spread over seeds."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from torchrl_lightning.cli.curves import Curve, latest_of_each_seed, read_source

if TYPE_CHECKING:
    from numpy.typing import NDArray

Band: TypeAlias = Literal["range", "std", "none"]


def plot_runs(
    sources: Sequence[str | Path],
    output: str | Path,
    *,
    metric: str = "eval/return",
    x: str = "step",
    labels: Sequence[str] | None = None,
    smooth: int = 1,
    band: Band = "range",
    panels: bool = False,
    title: str | None = None,
) -> Path:
    """Draw a metric over environment frames, one line for each label, with its spread over the runs of that label.

    Runs that differ in their seed alone share a label; of several with one seed the latest is drawn. A resumed run
    continues the curve of the run whose checkpoint it began with. Runs of one label are interpolated to their common
    points; where some have ended, the rest goes on.

    Args:
        sources: CSV files, or folders that are searched for ``metrics.csv`` to any depth.
        output: The picture; its suffix says which format.
        metric: Column to draw.
        x: Column to draw it over; Lightning's ``step`` holds environment frames here.
        labels: One for each source; by default the experiment and the overrides of a run without its seed, as Hydra
            recorded them, or else the folder above ``seed_...``.
        smooth: Length of the centred moving average, in points of a run.
        band: Spread around the mean: ``"range"`` from the lowest to the highest run, ``"std"``, or ``"none"``.
        panels: A panel of its own for each label, where returns have different scales.
        title: Above the picture.

    Returns:
        The path of the picture.

    Raises:
        FileNotFoundError: A source does not exist or holds no ``metrics.csv``.
        KeyError: No run of a source has the columns; the message names those there are.
        ValueError: Another argument is out of range or a file is no table of numbers.
    """
    if smooth < 1:
        raise ValueError(f"smooth={smooth} must be at least 1 point.")
    if band not in ("range", "std", "none"):
        raise ValueError(f"band={band!r} must be 'range', 'std' or 'none'.")
    if not sources:
        raise ValueError("no run given; name a run's folder or a metrics.csv.")
    if labels is not None and len(labels) != len(sources):
        raise ValueError(f"{len(labels)} labels for {len(sources)} sources; give one for each, or none.")
    curves: list[Curve] = []
    for i, source in enumerate(sources):
        curves += read_source(Path(source), metric, x, None if labels is None else labels[i])
    groups: dict[str, list[Curve]] = {}
    for curve in latest_of_each_seed(curves):
        groups.setdefault(curve.label, []).append(_smoothed(curve, smooth))
    return _draw(groups, Path(output), metric, x, band, panels, title)


def _smoothed(curve: Curve, length: int) -> Curve:
    length = min(length, len(curve.y))
    if length == 1:
        return curve
    window = np.ones(length)
    weight = np.convolve(np.ones_like(curve.y), window, "same")
    return Curve(curve.label, curve.path, curve.x, np.convolve(curve.y, window, "same") / weight)


def _together(curves: Iterable[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Interpolate runs to all their points: x ``[P]`` and values ``[runs, P]``, NaN where a run does not reach."""
    curves = list(curves)
    grid = np.unique(np.concatenate([curve.x for curve in curves]))
    return grid, np.stack([np.interp(grid, c.x, c.y, left=np.nan, right=np.nan) for c in curves])


def _draw(
    groups: dict[str, list[Curve]], output: Path, metric: str, x: str, band: Band, panels: bool, title: str | None
) -> Path:
    # A figure of its own, without pyplot: no display is looked for and no global state is left behind.
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    count = len(groups) if panels else 1
    columns = min(math.ceil(math.sqrt(count)), 3)
    rows = -(-count // columns)
    size = (4.2 * columns, 3.1 * rows) if panels else (7.5, 4.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    for i, (label, curves) in enumerate(groups.items()):
        axes = grid[i if panels else 0]
        runs = f" ({len(curves)} runs)" if len(curves) > 1 else ""
        name = textwrap.fill(label + runs, 60)
        _draw_group(axes, name, curves, band, f"C{i % 10}")
        if panels:
            axes.set_title(name)
    for axes in grid[:count]:
        axes.set(xlabel="environment frames" if x == "step" else x, ylabel=metric)
        if x == "step":
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k, 1.5M
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if not panels:
            axes.legend(frameon=False)
    if title is not None:
        figure.suptitle(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    return output


def _draw_group(axes: Any, label: str, curves: list[Curve], band: Band, color: str) -> None:
    grid, values = _together(curves)
    mean = np.nanmean(values, axis=0)
    axes.plot(grid, mean, color=color, label=label, linewidth=1.8, marker="o" if len(grid) == 1 else None)
    if len(curves) == 1 or band == "none":
        return
    if band == "range":
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    else:
        spread = np.nanstd(values, axis=0)
        low, high = mean - spread, mean + spread
    axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="torchrl-lightning-plot",
        description="Draw learning curves from metrics.csv files: mean and spread over the seeds of an experiment.",
    )
    parser.add_argument("sources", nargs="+", metavar="RUN", help="a run's folder, searched to any depth, or a file")
    parser.add_argument("--output", "-o", default="curve.png", help="the picture to write (default: %(default)s)")
    parser.add_argument("--metric", default="eval/return", help="column to draw (default: %(default)s)")
    parser.add_argument("--x", default="step", help="column to draw it over (default: %(default)s, environment frames)")
    parser.add_argument(
        "--label",
        action="append",
        dest="labels",
        metavar="LABEL",
        help="name of a line; once for each RUN, equal names share a line",
    )
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="moving average over N points")
    parser.add_argument("--band", choices=("range", "std", "none"), default="range", help="spread over runs")
    parser.add_argument("--panels", action="store_true", help="a panel of its own for each line")
    parser.add_argument("--title")
    try:
        path = plot_runs(**vars(parser.parse_args(argv)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyError as error:
        parser.error(error.args[0])  # a KeyError prints its message in quotes
    print(f"learning curve: {path}")
    return 0
