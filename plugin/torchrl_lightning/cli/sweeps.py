"""Compare the runs of a sweep: its trials, best first, and their table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchrl_lightning.cli.curves import Curve, Run, read_source, runs_by_label
from torchrl_lightning.cli.names import ENDS, run_folder
from torchrl_lightning.records import SCORE

if TYPE_CHECKING:
    from numpy.typing import NDArray

SETTINGS_LIMIT = 100  # each is a panel
UNSET = "-"  # a setting that other runs change has a default that was not recorded


@dataclass(frozen=True)
class Trial:
    """The runs of one choice of settings, which differ in their seed alone, and their scores.

    ``ended`` has, of each run that a search ended for doing badly, after how many frames.
    """

    settings: dict[str, str]
    folders: list[Path]
    scores: NDArray[np.float64]
    ended: list[float] = field(default_factory=list)

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
        One trial for each setting that was run, with all its seeds; of runs with one seed the latest, of those that
        were not ended early if there are any.

    Raises:
        FileNotFoundError: A source does not exist or holds no ``metrics.csv``.
        KeyError: No run of a source has the metric; the message names the columns there are.
        ValueError: The runs differ in no setting.
    """
    read = [curve for source in sources for curve in read_source(Path(source), metric, "step")]
    # Not by their label: that of a resumed run is the one of the run that it continues.
    settings_of = {repr(settings): settings for settings in map(_settings, read)}
    groups = runs_by_label(replace(curve, label=repr(_settings(curve))) for curve in read)
    found = [settings_of[label] for label in groups]
    if len(found) < 2:
        runs = sum(map(len, groups.values()))
        below = ", ".join(map(str, sources))
        raise ValueError(f"{runs} run(s) below {below} differ in no setting but the seed; nothing to compare.")
    # The experiment comes first and groups before fields.
    keys = sorted(
        {key for settings in found for key in settings}, key=lambda key: (key != "experiment", "." in key, key)
    )
    varied = [key for key in keys if len({settings.get(key) for settings in found}) > 1]
    if len(varied) > SETTINGS_LIMIT:
        below = ", ".join(map(str, sources))
        raise ValueError(
            f"the runs below {below} must differ in at most {SETTINGS_LIMIT} settings, got {len(varied)}. "
            "Name fewer runs."
        )
    trials = [
        Trial(
            {key: settings.get(key) or _default(curves[0], key) for key in varied},
            [run_folder(curve.path) or curve.path.parent for curve in curves],
            np.array([curve.y[-1] for curve in curves]),
            [curve.ended for curve in curves if curve.ended is not None],
        )
        for settings, curves in zip(found, groups.values(), strict=True)
    ]
    return sorted(trials, key=lambda trial: -trial.score)


def table(trials: Sequence[Trial], metric: str = SCORE) -> str:
    """Write trials as lines of columns: settings, score, the number of runs where one has several, which ended early.

    Examples:
        >>> seeds, one = np.array([9.0, 7.0]), np.array([1.0])
        >>> print(table([Trial({"model.gamma": "0.99"}, [], seeds), Trial({"model.gamma": "-"}, [], one)]))
        model.gamma  final/return  runs
        0.99           8.0 +- 1.0     2
        -                     1.0     1
    """
    several = any(len(trial.scores) > 1 for trial in trials)
    ended = any(trial.ended for trial in trials)
    keys = list(trials[0].settings)
    rows = [[*keys, metric, *["runs"] * several, *["ended early"] * ended]]
    for trial in trials:
        spread = f" +- {_rounded(trial.spread)}" if len(trial.scores) > 1 else ""
        values = map(shown, trial.settings.values())
        runs, end = [str(len(trial.scores))] * several, [_end_of(trial)] * ended
        rows.append([*values, _rounded(trial.score) + spread, *runs, *end])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * len(keys) + ">>>"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)).rstrip()
        for row in rows
    )


def _default(curve: Curve, key: str) -> str:
    """Return what a run had of a setting that it was not told: what Hydra composed, a choice of a group or a value."""
    if curve.run is None:
        return UNSET
    value = curve.run.composed(key)
    return UNSET if value is None else value


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


def number(text: str) -> float | None:
    """Read a setting as a finite number; None where it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def shown(text: str) -> str:
    """Shorten numbers as samplers draw them, 0.0006380556092044456."""
    value = number(text)
    return text if value is None or len(text) < 8 else f"{value:.8g}" if value.is_integer() else f"{value:.4g}"


def _end_of(trial: Trial) -> str:
    """Say after how many frames the run of a trial was ended, or how many of its runs were."""
    if not trial.ended:
        return "-"
    return f"{trial.ended[0]:.0f}" if len(trial.scores) == 1 else f"{len(trial.ended)} of {len(trial.scores)}"


def _rounded(score: float) -> str:
    """Write a score as the last line of a run does, with more digits where it is small."""
    return f"{score:.1f}" if abs(score) >= 10 or score.is_integer() else f"{score:.3g}"
