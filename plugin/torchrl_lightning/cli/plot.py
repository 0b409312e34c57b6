"""``torchrl-lightning-plot``: plot learning curves with mean and spread over seeds, or compare the runs of a sweep."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from torchrl_lightning._core.run_metadata import SCORE
from torchrl_lightning._core.untrusted import MESSAGE_LIMIT, printable
from torchrl_lightning.cli.command import flushed_output
from torchrl_lightning.cli.working_directory import leave_out_working_directory
from torchrl_lightning.plotting.curves import Curve, read_source, runs_by_label
from torchrl_lightning.plotting.style import STAR, add_legend, axis_label, line_style, saved_panels
from torchrl_lightning.plotting.sweep_figures import draw_importances, draw_parallel, draw_trials
from torchrl_lightning.plotting.trials import read_trials, table

if TYPE_CHECKING:
    from numpy.typing import NDArray

Band: TypeAlias = Literal["range", "std", "iqm", "none"]
BANDS = get_args(Band)
_NUM_BOOTSTRAP_SAMPLES = 2000  # bootstrap samples


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
    """Plot a metric over environment frames, with one mean curve for each label and the spread over the label's runs.

    Runs that differ only in their seed have the same label. If several runs of a label have the same seed, only the
    latest run is plotted. Runs that a search ended for a bad score are ignored if another run has the same seed. A
    resumed run continues the curve of its checkpoint's run. The runs of a label are interpolated to the union of their
    points. After the end of a run, the mean covers the remaining runs.

    For ``eval/return``, a star at the end of the curve marks the mean score of the evaluation after training. This
    evaluation uses the best checkpoint if the run keeps a best checkpoint.

    Args:
        sources: CSV files, or folders to search recursively for ``metrics.csv``.
        output: The output file; its suffix selects the format.
        metric: Column to plot.
        x: Column of the x axis. Lightning's ``step`` counts environment frames if the run has a
            :class:`~torchrl_lightning.RolloutMetricsLogger`; otherwise it counts updates.
        labels: A label for each source. By default, labels contain the experiment and overrides in Hydra's record,
            without the seed. If the record is missing, the folder above ``seed_...`` is the label.
        smooth: Length of the centred moving average, in points of a run.
        band: Spread around the mean: ``"range"`` from the lowest to the highest run, ``"std"``, or ``"none"``.
            ``"iqm"`` replaces the mean by the mean of the middle half of the runs, with a bootstrapped 95 % interval.
        panels: Plot each label in a separate panel, for returns with different scales.
        title: The title above the figure.

    Returns:
        The path of the output file.

    Raises:
        FileNotFoundError: A source does not exist or does not contain ``metrics.csv``.
        KeyError: All runs of a source lack a column. The message lists the existing columns.
        ValueError: Another argument is out of range, or a file is not a table of numbers.
    """
    if smooth < 1:
        raise ValueError(f"smooth must be at least 1 point, got {smooth}.")
    if band not in BANDS:
        raise ValueError(f"band must be one of {', '.join(map(repr, BANDS))}, got {band!r}.")
    if not sources:
        raise ValueError("no run given; name a run's folder or a metrics.csv.")
    if labels is not None and len(labels) != len(sources):
        raise ValueError(f"labels must have one entry for each of the {len(sources)} sources, got {len(labels)}.")
    curves: list[Curve] = []
    for i, source in enumerate(sources):
        curves += read_source(Path(source), metric, x, None if labels is None else labels[i])
    groups = {label: [_smooth(run, smooth) for run in runs] for label, runs in runs_by_label(curves).items()}
    _draw(groups, Path(output), metric, x, band, panels, title)
    return Path(output)


def _smooth(curve: Curve, length: int) -> Curve:
    length = min(length, len(curve.y))
    if length == 1:
        return curve
    window = np.ones(length)
    weight = np.convolve(np.ones_like(curve.y), window, "same")
    return replace(curve, y=np.convolve(curve.y, window, "same") / weight)


def _interpolate(curves: Iterable[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Interpolate runs to the union of their points.

    Return x ``[P]`` and values ``[runs, P]``, which are NaN outside the range of a run.
    """
    curves = list(curves)
    grid = np.unique(np.concatenate([curve.x for curve in curves]))
    return grid, np.stack([np.interp(grid, c.x, c.y, left=np.nan, right=np.nan) for c in curves])


def interquartile_mean(values: NDArray[Any]) -> NDArray[np.float64]:
    r"""Return the mean of the middle half of the last axis ``[*B, n]``, without \(n / 4\) values at each end.

    If \(n / 4\) is not an integer, the outermost remaining values have a smaller weight (Agarwal et al., 2021).

    Examples:
        >>> float(interquartile_mean(np.array([0.0, 1.0, 2.0, 9.0])))
        1.5
    """
    count = values.shape[-1]
    rank = np.arange(1, count + 1)
    weights = np.clip(np.minimum(rank, rank[::-1]) - count / 4, 0, 1)
    middle: NDArray[np.float64] = np.sort(values, -1) @ weights / weights.sum()
    return middle


def bootstrap_interval(values: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return interquartile means over seeds and their 95 % intervals from a bootstrap with a fixed random seed.

    Args:
        values: Scores ``[n, P]`` with a row for each seed. Missing scores are NaN.

    Returns:
        Three arrays ``[P]``: mean, lower end and upper end of the interval.
    """
    seeds, points = values.shape
    intervals = np.full((3, points), np.nan)
    sample_indices = {
        n: np.random.default_rng(0).integers(n, size=(_NUM_BOOTSTRAP_SAMPLES, n)) for n in range(1, seeds + 1)
    }
    for point, column in enumerate(values.T):
        scores = column[~np.isnan(column)]
        if len(scores):
            low, high = np.quantile(interquartile_mean(scores[sample_indices[len(scores)]]), (0.025, 0.975))
            intervals[:, point] = interquartile_mean(scores), low, high
    return intervals[0], intervals[1], intervals[2]


def _draw(
    groups: dict[str, list[Curve]], output: Path, metric: str, x: str, band: Band, panels: bool, title: str | None
) -> None:
    from matplotlib.ticker import EngFormatter

    units = " or ".join(sorted({curve.unit for curves in groups.values() for curve in curves}))
    labels = [label + _run_count(curves) for label, curves in groups.items()]
    shared, rests = _split_labels(groups)
    count, size = (len(groups), (4.2, 3.1)) if panels else (1, (7.5, 4.6))
    with saved_panels(output, count, size, title) as (figure, grid):
        entries: dict[str, dict[str, Any]] = {}
        for i, (curves, label, rest) in enumerate(zip(groups.values(), labels, rests, strict=True)):
            axes, style = grid[i if panels else 0], line_style(0 if panels else i)
            _draw_group(axes, printable(label), curves, band, style)
            if panels:
                axes.set_title(textwrap.fill(printable(rest), 34), fontsize="medium")
            elif rest:
                entries[rest] = style
        for axes in grid:
            axes.set(xlabel=units.capitalize() if x == "step" else axis_label(x), ylabel=axis_label(metric))
            if x == "step":
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # for example 200k and 1.5M
        if title is None and shared:
            figure.suptitle(textwrap.fill(printable(shared), 70))
        add_legend(figure, entries | _explanations(groups, band, panels))


def _run_count(curves: Sequence[Curve]) -> str:
    return f" ({len(curves)} runs)" if len(curves) > 1 else ""


def _split_labels(groups: Mapping[str, Sequence[Curve]]) -> tuple[str, list[str]]:
    """Return the settings that all groups share, for the title, and the rest of each label with its number of runs.

    Only labels from Hydra's records with the same experiment have shared settings. A label without a rest becomes
    "default settings". The label of a single group is the title.
    """
    counts = [_run_count(curves) for curves in groups.values()]
    labels = [label + count for label, count in zip(groups, counts, strict=True)]
    if len(labels) == 1:
        return labels[0], [""]
    parts = [() if curves[0].run is None else curves[0].run.label_parts for curves in groups.values()]
    if [" ".join(part) for part in parts] != list(groups) or len({part[0] for part in parts}) > 1:
        return "", labels
    shared = [text for text in parts[0] if all(text in part for part in parts)]
    rests = [" ".join(text for text in part if text not in shared) or "default settings" for part in parts]
    return " ".join(shared), [rest + count for rest, count in zip(rests, counts, strict=True)]


_LINE_AND_BAND: dict[Band, tuple[str, str]] = {
    "range": ("mean of the runs", "lowest to highest run"),
    "std": ("mean of the runs", "one standard deviation of the runs"),
    "iqm": ("mean of the middle half of the runs", "its 95 % interval"),
    "none": ("mean of the runs", ""),
}


def _explanations(groups: Mapping[str, Sequence[Curve]], band: Band, panels: bool) -> dict[str, dict[str, Any]]:
    """Return the entries of the legend that explain the line, the band and the star."""
    color = line_style(0)["color"] if panels or len(groups) == 1 else "0.4"
    line, area = _LINE_AND_BAND[band]
    entries: dict[str, dict[str, Any]] = {}
    if any(len(curves) > 1 for curves in groups.values()):
        entries[f"line: {line}"] = {"color": color}
        if area:
            entries[f"band: {area}"] = {"band": color}
    if any(curve.score is not None for curves in groups.values() for curve in curves):
        entries["star: evaluation after training"] = {"color": color, **STAR}
    return entries


def _draw_group(axes: Any, label: str, curves: list[Curve], band: Band, style: Mapping[str, Any]) -> None:
    grid, values = _interpolate(curves)
    color = style["color"]
    if band == "iqm":
        mean, low, high = bootstrap_interval(values)
    else:
        mean = np.nanmean(values, axis=0)
    axes.plot(grid, mean, label=label, linewidth=1.8, marker="o" if len(grid) == 1 else None, **style)
    scores = [curve.score for curve in curves if curve.score is not None]
    if scores:  # the same scores as in the table of the runs
        score = interquartile_mean(np.array(scores)) if band == "iqm" else np.mean(scores)
        axes.plot(grid[-1], score, color=color, marker="*", markersize=11, clip_on=False, zorder=3)
    if len(curves) == 1 or band == "none":
        return
    if band == "range":
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    elif band == "std":
        spread = np.nanstd(values, axis=0)
        low, high = mean - spread, mean + spread
    axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)


def main(argv: Sequence[str] | None = None) -> int:
    """Plot curves or compare runs, and return the exit status."""
    leave_out_working_directory()
    parser = argparse.ArgumentParser(
        prog="torchrl-lightning-plot",
        description="Draw learning curves from metrics.csv files: mean and spread over the seeds of an experiment. "
        "With --table, compare the runs of a sweep instead.",
    )
    parser.add_argument("sources", nargs="+", metavar="RUN", help="a folder, searched recursively, or a metrics.csv")
    parser.add_argument("--output", "-o", help="the picture to write (default: curve.png; with --table sweep.png)")
    parser.add_argument(
        "--metric",
        help=f"column to draw (default: eval/return; with --table {SCORE}, "
        "the mean return of the evaluation after training)",
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="print the settings that differ between runs and the score (the last value of the metric, averaged over "
        "seeds), highest first; and draw the score over each setting, all trials as lines over the settings "
        "(_parallel), and the importance of each setting (_importances)",
    )
    parser.add_argument("--title")
    curves = parser.add_argument_group("learning curves, without --table")
    curves.add_argument(
        "--x",
        default="step",
        help="column of the x axis (default: %(default)s, in frames if they are counted)",
    )
    curves.add_argument(
        "--label",
        action="append",
        dest="labels",
        metavar="LABEL",
        help="name of a line; once for each RUN, equal names share a line",
    )
    curves.add_argument("--smooth", type=int, default=1, metavar="N", help="moving average over N points")
    curves.add_argument(
        "--band",
        choices=BANDS,
        default="range",
        help="spread over runs; iqm is the mean of the middle half with its 95 %% interval (default: %(default)s)",
    )
    curves.add_argument("--panels", action="store_true", help="draw each line in its own panel")
    options = vars(parser.parse_args(argv))
    arguments = {name: value for name, value in options.items() if value is not None}
    try:
        with flushed_output():
            if arguments.pop("table"):
                names = {"x": "--x", "labels": "--label", "smooth": "--smooth", "band": "--band", "panels": "--panels"}
                others = [flag for name, flag in names.items() if options[name] != parser.get_default(name)]
                if others:
                    raise ValueError(f"--table takes --metric, --output and --title, not {', '.join(others)}.")
                _compare(**{name: value for name, value in arguments.items() if name not in names})
            else:
                print(f"learning curve: {plot_runs(**{'output': 'curve.png', **arguments})}")
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {printable(' '.join(str(error).split()), MESSAGE_LIMIT)}\n")
    except KeyError as error:  # str() of a KeyError adds quotes
        parser.exit(2, f"{parser.prog}: error: {printable(error.args[0], MESSAGE_LIMIT)}\n")
    return 0


def _compare(sources: Sequence[str], output: str = "sweep.png", metric: str = SCORE, title: str | None = None) -> None:
    trials = read_trials(sources, metric)
    print(table(trials, metric))
    print(f"best run: {printable(trials[0].best_folder)}")
    picture = Path(output)
    print(f"scores over settings: {draw_trials(trials, picture, metric, title)}")
    lines, importances = (picture.with_stem(f"{picture.stem}_{name}") for name in ("parallel", "importances"))
    print(f"trials over all settings: {draw_parallel(trials, lines, metric, title)}")
    print(f"importances of settings: {draw_importances(trials, importances, metric, title)}")


if __name__ == "__main__":
    raise SystemExit(main())
