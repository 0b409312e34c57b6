"""``torchrl-lightning-plot``: draws the learning curves of one or many runs, mean and spread over seeds."""

from __future__ import annotations

import argparse
import csv
import logging
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["main", "plot_runs"]

Band: TypeAlias = Literal["range", "std", "none"]

_log = logging.getLogger(__name__)

_SEED = re.compile(r"[-_ ]?seed[-_=]?\d+$", re.IGNORECASE)
_SERIAL = re.compile(r"(version_)?\d[\d_\-:.T]*$")  # version_3, 2026-11-20_10-30-00, the job numbers of a sweep
_LOGGER_FOLDERS = {"csv", "csv_logs", "lightning_logs", "logs", "metrics"}


@dataclass(frozen=True)
class Curve:
    """One metric of one run."""

    label: str
    path: Path
    x: NDArray[np.float64]
    y: NDArray[np.float64]


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

    Runs of one label are interpolated to their common points; where some have ended, the rest goes on.

    Args:
        sources: CSV files, or folders that are searched for ``metrics.csv`` to any depth.
        output: the picture; its suffix says which format.
        metric: column to draw.
        x: column to draw it over; Lightning's ``step`` holds environment frames here.
        labels: one for each source; by default the folder above ``seed_...``, so that seeds share a line.
        smooth: length of the centred moving average, in points of a run.
        band: spread around the mean: ``"range"`` from the lowest to the highest run, ``"std"``, or ``"none"``.
        panels: a panel of its own for each label, where returns have different scales.
        title: above the picture.

    Returns:
        The path of the picture.

    Raises:
        FileNotFoundError: a source does not exist or holds no ``metrics.csv``.
        KeyError: no run of a source has the columns; the message names those there are.
        ValueError: another argument is out of range or a file is no table of numbers.
    """
    if smooth < 1:
        raise ValueError(f"smooth={smooth} must be at least 1 point.")
    if band not in ("range", "std", "none"):
        raise ValueError(f"band={band!r} must be 'range', 'std' or 'none'.")
    if not sources:
        raise ValueError("no run given; name a run's folder or a metrics.csv.")
    if labels is not None and len(labels) != len(sources):
        raise ValueError(f"{len(labels)} labels for {len(sources)} sources; give one for each, or none.")
    groups: dict[str, list[Curve]] = {}
    for i, source in enumerate(sources):
        for curve in read_source(Path(source), metric, x, None if labels is None else labels[i]):
            groups.setdefault(curve.label, []).append(_smoothed(curve, smooth))
    return _draw(groups, Path(output), metric, x, band, panels, title)


def read_source(source: Path, metric: str, x: str, label: str | None = None) -> list[Curve]:
    """Read the curves of a file, or of every ``metrics.csv`` below a folder."""
    if not source.exists():
        raise FileNotFoundError(f"no such file or folder: {source}")
    paths = sorted(source.rglob("metrics.csv")) if source.is_dir() else [source]
    if not paths:
        raise FileNotFoundError(f"no metrics.csv below {source}; was the run started with logger=csv?")
    curves: list[Curve] = []
    columns: set[str] = set()
    for path in paths:
        points, header = _read_points(path, metric, x)
        columns |= header
        if points:
            xs, ys = np.array(sorted(points.items())).T
            curves.append(Curve(label or default_label(path), path, xs, ys))
    if not curves:
        missing = [name for name in (metric, x) if name not in columns]
        if missing:
            raise KeyError(f"no column {' and '.join(missing)} in {source}; there are: {', '.join(sorted(columns))}")
        raise ValueError(f"{source} has no value of {metric} yet.")
    if len(curves) < len(paths):
        _log.warning(
            "%d of %d runs below %s have no %s and are left out", len(paths) - len(curves), len(paths), source, metric
        )
    return curves


def default_label(path: Path) -> str:
    """Name the experiment that a metrics file is from: what its seeds have in common.

    >>> default_label(Path("logs/train/ppo_cartpole/seed_3/2026-11-20_10-30-00/csv/metrics.csv"))
    'ppo_cartpole'
    >>> default_label(Path("results/a2c_seed=1/version_0/metrics.csv"))
    'a2c'
    >>> default_label(Path("results/vtrace.csv"))
    'vtrace'
    """
    parts = [*path.absolute().parent.parts[1:]]
    if path.stem != "metrics":
        parts.append(path.stem)
    for part in reversed(parts):
        name = _SEED.sub("", part)
        if name and not _SERIAL.match(name) and name not in _LOGGER_FOLDERS:
            return name
    return parts[-1] if parts else path.stem


def _read_points(path: Path, metric: str, x: str) -> tuple[dict[float, float], set[str]]:
    """Read the rows where both columns are filled; the last row of an x counts. Lightning leaves most cells empty."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        header = set(rows.fieldnames or ())
        if metric not in header or x not in header:
            return {}, header
        points: dict[float, float] = {}
        for number, row in enumerate(rows, start=2):
            if not row[x] or not row[metric]:
                continue
            try:
                at, value = float(row[x]), float(row[metric])
            except ValueError:
                raise ValueError(
                    f"{path}, line {number}: {x}={row[x]!r}, {metric}={row[metric]!r}; both must be numbers."
                ) from None
            if math.isfinite(at) and math.isfinite(value):
                points[at] = value
    return points, header


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(groups) if panels else 1
    columns = min(math.ceil(math.sqrt(count)), 3)
    rows = -(-count // columns)
    size = (4.2 * columns, 3.1 * rows) if panels else (7.5, 4.6)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    for i, (label, curves) in enumerate(groups.items()):
        axes = grid[i if panels else 0]
        runs = f" ({len(curves)} runs)" if len(curves) > 1 else ""
        _draw_group(axes, label + runs, curves, band, f"C{i % 10}")
        if panels:
            axes.set_title(label + runs)
    for axes in grid[:count]:
        axes.set(xlabel="environment frames" if x == "step" else x, ylabel=metric)
        if x == "step":
            axes.xaxis.set_major_formatter(_thousands)
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


def _thousands(x: float, position: int | None = None) -> str:
    """Write a tick of frames shortly: 200k, 1.5M."""
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= unit:
            return f"{x / unit:g}{suffix}"
    return f"{x:g}"


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
    parser.add_argument("--label", action="append", help="name of a line; once for each RUN, equal names share a line")
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="moving average over N points")
    parser.add_argument("--band", choices=("range", "std", "none"), default="range", help="spread over runs")
    parser.add_argument("--panels", action="store_true", help="a panel of its own for each line")
    parser.add_argument("--title")
    given = parser.parse_args(argv)
    try:
        path = plot_runs(
            given.sources,
            given.output,
            metric=given.metric,
            x=given.x,
            labels=given.label,
            smooth=given.smooth,
            band=given.band,
            panels=given.panels,
            title=given.title,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyError as error:
        parser.error(error.args[0])  # a KeyError prints its message in quotes
    print(f"learning curve: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
