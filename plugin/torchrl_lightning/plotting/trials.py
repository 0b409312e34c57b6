"""Compare the runs of a sweep: read its trials, best first, and format them as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from torchrl_lightning._core.run_metadata import SCORE
from torchrl_lightning._core.run_names import ENDS, run_folder
from torchrl_lightning.plotting.curves import Curve, Run, read_source, runs_by_label

if TYPE_CHECKING:
    from numpy.typing import NDArray

SETTINGS_LIMIT = 100  # a figure has a panel for each setting
UNSET = "-"  # stored for a setting without a recorded value


@dataclass(frozen=True)
class Trial:
    """Runs with equal settings and different seeds, and their scores.

    ``ended`` contains the number of frames of each run that a search ended for a bad score, ``logarithmic`` the
    settings that a search sampled on a logarithmic scale, and ``experiment`` the name of the runs.
    """

    settings: dict[str, str]
    folders: list[Path]
    scores: NDArray[np.float64]
    ended: list[float] = field(default_factory=list)
    logarithmic: frozenset[str] = frozenset()
    experiment: str = ""

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
    """Read the runs below some folders as trials, sorted by descending mean score.

    Trials do not contain the settings that are equal in all runs. The score of a run is the last value of a metric.
    Runs without this metric are left out with a warning.

    Args:
        sources: Folders to search recursively for ``metrics.csv``, such as folders of sweeps.
        metric: The column of the score.

    Returns:
        One trial for each combination of settings, with all its seeds. If several runs have the same seed, the latest
        run counts. Complete runs have priority over runs that a search ended early.

    Raises:
        FileNotFoundError: A source does not exist or does not contain ``metrics.csv``.
        KeyError: No run of a source has the metric; the message lists the existing columns.
        ValueError: The runs do not differ in any setting, or differ in too many.
    """
    curves = [curve for source in sources for curve in read_source(Path(source), metric, "step")]
    # Do not group by label: a resumed run has the label of the run that it continues.
    settings_of = {repr(settings): settings for settings in map(_settings, curves)}
    groups = runs_by_label(replace(curve, label=repr(_settings(curve))) for curve in curves)
    all_settings = [settings_of[label] for label in groups]
    if len(all_settings) < 2:
        runs = sum(map(len, groups.values()))
        below = ", ".join(map(str, sources))
        raise ValueError(f"{runs} run(s) below {below} differ only in their seeds; name runs with different settings.")
    # Put the experiment first, then groups, then fields.
    keys = sorted(
        {key for settings in all_settings for key in settings}, key=lambda key: (key != "experiment", "." in key, key)
    )
    varied = [key for key in keys if len({settings.get(key) for settings in all_settings}) > 1]
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
            frozenset().union(*(curve.run.logarithmic for curve in curves if curve.run is not None)),
            settings["experiment"],
        )
        for settings, curves in zip(all_settings, groups.values(), strict=True)
    ]
    return sorted(trials, key=lambda trial: -trial.score)


def table(trials: Sequence[Trial], metric: str = SCORE) -> str:
    """Format the settings and scores of trials as a table; add columns for several runs and early ends if needed.

    Examples:
        >>> seeds, one = np.array([9.0, 7.0]), np.array([1.0])
        >>> print(table([Trial({"model.gamma": "0.99"}, [], seeds), Trial({"model.gamma": "-"}, [], one)]))
        model.gamma  final/return  runs
        0.99           8.0 +- 1.0     2
        -                     1.0     1
    """
    has_several_seeds = any(len(trial.scores) > 1 for trial in trials)
    has_ended_early = any(trial.ended for trial in trials)
    keys = list(trials[0].settings)
    rows = [[*keys, metric, *["runs"] * has_several_seeds, *["ended early"] * has_ended_early]]
    for trial in trials:
        spread = f" +- {_format_score(trial.spread)}" if len(trial.scores) > 1 else ""
        values = map(shortened, trial.settings.values())
        run_cells, ended_cell = [str(len(trial.scores))] * has_several_seeds, [_format_end(trial)] * has_ended_early
        rows.append([*values, _format_score(trial.score) + spread, *run_cells, *ended_cell])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<" * len(keys) + ">>>"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)).rstrip()
        for row in rows
    )


def _default(curve: Curve, key: str) -> str:
    """Return the composed option or value of a setting that the run's overrides do not set."""
    if curve.run is None:
        return UNSET
    value = curve.run.config_value(key)
    return UNSET if value is None else value


def _run_limits(run: Run) -> dict[str, str]:
    """Return the run limits from the composed config, or from the overrides if the config was not recorded."""
    overrides = {key: override.partition("=")[2] for key, override in run.settings.items() if key in ENDS}
    return overrides | {key: value for key in sorted(ENDS) if (value := run.config_value(key)) is not None}


def _settings(curve: Curve) -> dict[str, str]:
    """Map each setting in a run's overrides to its value; an override ``~key`` maps to ``none``."""
    if curve.run is None:
        return {"experiment": curve.label}
    values = {key: override.partition("=")[2] or "none" for key, override in curve.run.settings.items()}
    return {"experiment": curve.run.name} | values | _run_limits(curve.run)


def parse_number(text: str) -> float | None:
    """Return a setting as a finite number, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def shortened(text: str) -> str:
    """Shorten long numbers from samplers, such as 0.0006380556092044456."""
    value = parse_number(text)
    return text if value is None or len(text) < 8 else f"{value:.8g}" if value.is_integer() else f"{value:.4g}"


def _format_end(trial: Trial) -> str:
    """Format the frames until the early end of a single run; for several runs, the number of runs ended early."""
    if not trial.ended:
        return "-"
    return f"{trial.ended[0]:.0f}" if len(trial.scores) == 1 else f"{len(trial.ended)} of {len(trial.scores)}"


def _format_score(score: float) -> str:
    """Format a score as in the last line that a run prints, with more digits for small values."""
    return f"{score:.1f}" if abs(score) >= 10 or score.is_integer() else f"{score:.3g}"
