"""Compare the runs of a sweep: a table, best first, and a picture of their score over each setting that varies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_lightning.cli.curves import Curve, Run, read_source, runs_by_label
from torchrl_lightning.cli.names import ENDS, run_folder
from torchrl_lightning.cli.panels import panel_grid, save_figure
from torchrl_lightning.learn.records import SCORE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MARKERS = "osD^v"
UNSET = "-"  # a setting that other runs change has a default that was not recorded


@dataclass(frozen=True)
class Trial:
    """The runs of one choice of settings, which differ in their seed alone, and their scores."""

    settings: dict[str, str]
    folders: list[Path]
    scores: NDArray[np.float64]

    @property
    def score(self) -> float:
        """The mean over the seeds."""
        return float(self.scores.mean())

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds."""
        return float(self.scores.std())

    @property
    def best_folder(self) -> Path:
        """The folder of the seed with the highest score."""
        return self.folders[int(self.scores.argmax())]


def read_trials(sources: Sequence[str | Path], metric: str = SCORE) -> list[Trial]:
    """Read the runs below some folders, highest mean score first; settings that are the same in all are left out.

    The score of a run is the last value of a metric; runs without one are left out with a warning.

    Args:
        sources: Folders that are searched for ``metrics.csv`` to any depth, as those of sweeps.
        metric: Column of the score.

    Returns:
        One trial for each setting that was run, with all its seeds; of runs with one seed the latest.

    Raises:
        FileNotFoundError: A source does not exist or holds no ``metrics.csv``.
        KeyError: No run of a source has the metric; the message names the columns there are.
        ValueError: The runs differ in no setting.
    """
    read = [curve for source in sources for curve in read_source(Path(source), metric, "step")]
    # A resumed run has the label of the one that it continues; its score is that of its own, later end.
    read = [replace(curve, label=" ".join((curve.label, *_ends(curve)))) for curve in read]
    groups = runs_by_label(read)
    found = [_settings(curves[0]) for curves in groups.values()]
    if len(found) < 2:
        runs = sum(map(len, groups.values()))
        below = ", ".join(map(str, sources))
        raise ValueError(f"{runs} run(s) below {below} differ in no setting but the seed; nothing to compare.")
    # The experiment comes first and groups before fields.
    keys = sorted(
        {key for settings in found for key in settings}, key=lambda key: (key != "experiment", "." in key, key)
    )
    varied = [key for key in keys if len({settings.get(key) for settings in found}) > 1]
    trials = [
        Trial(
            {key: settings.get(key) or _default(curves[0], key) for key in varied},
            [run_folder(curve.path) or curve.path.parent for curve in curves],
            np.array([curve.y[-1] for curve in curves]),
        )
        for settings, curves in zip(found, groups.values(), strict=True)
    ]
    return sorted(trials, key=lambda trial: -trial.score)


def table(trials: Sequence[Trial], metric: str = SCORE) -> str:
    """Write trials as lines of columns: settings, score, and the number of runs where one has several.

    Example:
        >>> seeds, one = np.array([9.0, 7.0]), np.array([1.0])
        >>> print(table([Trial({"model.gamma": "0.99"}, [], seeds), Trial({"model.gamma": "-"}, [], one)]))
        model.gamma  final/return  runs
        0.99           8.0 +- 1.0     2
        -                     1.0     1
    """
    several = any(len(trial.scores) > 1 for trial in trials)
    keys = list(trials[0].settings)
    rows = [[*keys, metric, *["runs"] * several]]
    for trial in trials:
        spread = f" +- {_rounded(trial.spread)}" if len(trial.scores) > 1 else ""
        values = map(_shown, trial.settings.values())
        rows.append([*values, _rounded(trial.score) + spread, *[str(len(trial.scores))] * several])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * len(keys) + ">>"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)).rstrip()
        for row in rows
    )


def draw_trials(trials: Sequence[Trial], output: str | Path, metric: str = SCORE, title: str | None = None) -> Path:
    """Draw the score over each setting that varies, with its deviation over the seeds; the best trial stands out.

    Numbers lie on an axis, which is logarithmic where that spreads them more evenly; all else lies in categories, and
    so does a setting whose default was not recorded. Trials of one budget have one marker, beside those of others.
    """
    keys = list(trials[0].settings)
    figure, grid = panel_grid(len(keys), (4.2, 3.1))
    for key, axes in zip(keys, grid, strict=True):
        _draw_setting(axes, key, trials)
        axes.set(xlabel=key, ylabel=metric)
    return save_figure(figure, Path(output), title)


def _draw_setting(axes: Any, key: str, trials: Sequence[Trial]) -> None:
    values = [trial.settings[key] for trial in trials]
    places = [_number(value) for value in values]
    numbers = sorted({place for place in places if place is not None})
    if len(numbers) < 2 or None in places:
        names = sorted({*values})
        places = [names.index(value) for value in values]
        axes.set_xticks(range(len(names)), names, rotation=0 if len(names) < 4 else 30)
        axes.margins(x=0.2)
    elif _is_logarithmic(numbers):
        axes.set_xscale("log")
    else:
        axes.ticklabel_format(axis="x", scilimits=(-2, 5))  # 0.00045 leaves no room between the ticks
    budgets = [", ".join(f"{end}={trial.settings[end]}" for end in ENDS if end in trial.settings) for trial in trials]
    for i, (place, trial) in reversed([*enumerate(zip(places, trials, strict=True))]):
        spread = trial.spread if len(trial.scores) > 1 else None
        marker = _MARKERS[sorted({*budgets}).index(budgets[i]) % len(_MARKERS)]
        color = "C1" if i == 0 else "C0"
        label = budgets[i] if budgets.index(budgets[i]) == i else None
        axes.errorbar(place, trial.score, spread, fmt=marker, capsize=3, alpha=0.8, color=color, label=label)
    if any(budgets) and key not in ENDS:
        axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))  # above the marks


def _is_logarithmic(numbers: list[float]) -> bool:
    """Return whether ascending numbers span a decade and lie more evenly by their logarithms."""
    if numbers[0] <= 0 or numbers[-1] < 10 * numbers[0]:
        return False
    widest, widest_log = (max(np.diff(each)) / (each[-1] - each[0]) for each in (np.array(numbers), np.log(numbers)))
    return len(numbers) == 2 or bool(widest_log < widest)


def _default(curve: Curve, key: str) -> str:
    """Return what a run had of a setting that it was not told: what Hydra composed, a choice of a group or a value."""
    if curve.run is None:
        return UNSET
    value = curve.run.composed(key)
    return UNSET if value is None else value


def _ends(curve: Curve) -> list[str]:
    return [] if curve.run is None else [f"{end}={value}" for end, value in _own_ends(curve.run).items()]


def _own_ends(run: Run) -> dict[str, str]:
    """Return what ended a run, of all that may, as it was composed; as it was told where that was not recorded."""
    told = {key: override.partition("=")[2] for key, override in run.settings.items() if key in ENDS}
    return told | {key: value for key in sorted(ENDS) if (value := run.composed(key)) is not None}


def _settings(curve: Curve) -> dict[str, str]:
    """Map what a run was told to the values; ``~key`` has none."""
    if curve.run is None:
        return {"experiment": curve.label}
    values = {key: override.partition("=")[2] or "none" for key, override in curve.run.settings.items()}
    return {"experiment": curve.run.name} | values | _own_ends(curve.run)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _shown(text: str) -> str:
    """Shorten numbers as samplers draw them, 0.0006380556092044456."""
    number = _number(text)
    return text if number is None or len(text) < 8 else f"{number:.8g}" if number.is_integer() else f"{number:.4g}"


def _rounded(score: float) -> str:
    """Write a score as the last line of a run does, with more digits where it is small."""
    return f"{score:.1f}" if abs(score) >= 10 or score.is_integer() else f"{score:.3g}"
