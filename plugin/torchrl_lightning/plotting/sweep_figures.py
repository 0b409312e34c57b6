"""Draw a sweep: a plot of scores against each setting, a line for each trial, and the importance of each setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_lightning._core.run_metadata import SCORE
from torchrl_lightning._core.run_names import ENDS
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.plotting.style import SEQUENTIAL, add_legend, axis_label, saved_panels
from torchrl_lightning.plotting.trials import Trial, parse_number, shortened

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MARKERS = "osD^v"
_SHUFFLES = 1000


@dataclass(frozen=True)
class _Scale:
    """The positions of trials on the axis of a setting: numbers, or indices of categories if there are ``names``."""

    positions: list[float]
    names: list[str] | None = None
    is_logarithmic: bool = False

    def heights(self) -> NDArray[np.float64]:
        """Return the positions scaled to the range from 0 to 1."""
        positions = np.log(self.positions) if self.is_logarithmic else np.array(self.positions, dtype=float)
        return (positions - positions.min()) / (np.ptp(positions) or 1.0)


def _scale(trials: Sequence[Trial], key: str) -> _Scale:
    values = [trial.settings[key] for trial in trials]
    numbers = [value_as_number for value_as_number in map(parse_number, values) if value_as_number is not None]
    if len(set(numbers)) < 2 or len(numbers) < len(values):
        names = sorted({*values})
        return _Scale([float(names.index(value)) for value in values], [printable(shortened(name)) for name in names])
    is_recorded = min(numbers) > 0 and any(key in trial.logarithmic for trial in trials)
    return _Scale(numbers, None, is_recorded or _is_logarithmic(sorted(set(numbers))))


def _title(title: str | None, trials: Sequence[Trial]) -> str | None:
    """Return a given title, or the name of the experiment if all trials have the same."""
    if title is None and len({trial.experiment for trial in trials}) == 1:
        return printable(trials[0].experiment) or None
    return title


def draw_trials(trials: Sequence[Trial], output: str | Path, metric: str = SCORE, title: str | None = None) -> Path:
    """Plot the scores against each varied setting, with standard deviations over seeds, and highlight the best trial.

    A numeric axis is logarithmic if a search sampled the setting on a logarithmic scale, if the values span three
    decades, or if they span one decade and are more evenly spaced on a logarithmic scale. The values of a setting are
    categories if any of them is not a number, for example an unrecorded default. Each run limit has its own marker. The
    marker of a trial that was ended early is hollow.
    """
    keys = list(trials[0].settings)
    # The run limits of each trial, without limits that are equal in all trials.
    run_limits = [
        ", ".join(f"{end}={trial.settings[end]}" for end in ENDS if end in trial.settings) for trial in trials
    ]
    markers = {run_limit: _MARKERS[i % len(_MARKERS)] for i, run_limit in enumerate(sorted({*run_limits}))}
    styles: dict[str, dict[str, Any]] = {"best trial": {"color": "C1", "marker": "o"}}
    if any(trial.ended for trial in trials):
        styles["ended early"] = {"color": "C0", "marker": "o", "mfc": "none"}
    styles |= {run_limit: {"color": "C0", "marker": marker} for run_limit, marker in markers.items() if run_limit}
    with saved_panels(Path(output), len(keys), (4.2, 3.1), _title(title, trials)) as (figure, grid):
        for key, axes in zip(keys, grid, strict=True):
            _draw_setting(
                axes,
                key,
                trials,
                [markers[run_limit] for run_limit in run_limits],
            )
            axes.set(xlabel=printable(key), ylabel=axis_label(metric))
        add_legend(figure, styles, ls="")
    return Path(output)


def _draw_setting(axes: Any, key: str, trials: Sequence[Trial], markers: Sequence[str]) -> None:
    from matplotlib.ticker import LogFormatter

    scale = _scale(trials, key)
    if scale.names is not None:
        axes.set_xticks(range(len(scale.names)), scale.names, rotation=0 if len(scale.names) < 4 else 30)
        axes.margins(x=0.2)
    elif scale.is_logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())  # labels without formulas
    else:
        axes.ticklabel_format(axis="x", scilimits=(-2, 5))  # long labels such as 0.00045 would overlap
    for i, (position, trial) in reversed([*enumerate(zip(scale.positions, trials, strict=True))]):
        spread = trial.spread if len(trial.scores) > 1 else None
        color = "C1" if i == 0 else "C0"
        style = {"capsize": 3, "alpha": 0.8, "color": color, "mfc": "none" if trial.ended else color}
        axes.errorbar(position, trial.score, spread, fmt=markers[i], **style)


def draw_parallel(trials: Sequence[Trial], output: str | Path, metric: str = SCORE, title: str | None = None) -> Path:
    """Draw each trial as a line through its settings to its score; trials that were ended early are dashed.

    Each axis extends from its smallest to its largest value, and is logarithmic as in :func:`draw_trials`.
    """
    from matplotlib import colormaps

    keys, color = list(trials[0].settings), colormaps[SEQUENTIAL]
    scales = [
        *(_scale(trials, key) for key in keys),
        _Scale([trial.score for trial in trials]),
    ]
    heights = np.stack([scale.heights() for scale in scales])
    with saved_panels(Path(output), 1, (1.8 * len(scales) + 1.5, 4.2), _title(title, trials)) as (figure, (axes,)):
        for i, trial in reversed([*enumerate(trials)]):
            style: dict[str, Any] = {"color": color(heights[-1, i]), "ls": "--" if trial.ended else "-"}
            axes.plot(range(len(scales)), heights[:, i], lw=2.5 if i == 0 else 1.2, alpha=0.8, **style)
        for x, (scale, column) in enumerate(zip(scales, heights, strict=True)):
            axes.axvline(x, color="0.6", lw=0.8)
            labelled_trials = range(len(trials)) if scale.names else (column.argmin(), column.argmax())
            for height, i in {float(column[i]): i for i in labelled_trials}.items():
                text = scale.names[int(scale.positions[i])] if scale.names else shortened(f"{scale.positions[i]:.4g}")
                axes.annotate(text, (x, height), (4, 3), textcoords="offset points", fontsize="small")
        axes.set_xticks(range(len(scales)), [*map(printable, keys), axis_label(metric)], rotation=15)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        styles: dict[str, dict[str, Any]] = {
            "best trial": {"color": color(1.0), "lw": 2.5},
            "worst trial": {"color": color(0.0)},
        }
        if any(trial.ended for trial in trials):
            styles["ended early"] = {"color": "0.5", "ls": "--"}
        add_legend(figure, styles)
    return Path(output)


def draw_importances(
    trials: Sequence[Trial], output: str | Path, metric: str = SCORE, title: str | None = None
) -> Path:
    """Draw the importance of each setting from :func:`importances`, and its chance level.

    The importance is a correlation, not a cause. It does not detect settings that matter only in combination. If
    a search selected settings by earlier scores, the trials are not independent.
    """
    ranked = sorted(importances(trials).items(), key=lambda item: item[1][0])
    names, values = [printable(name) for name, _ in ranked], np.array([value for _, value in ranked])
    label = axis_label(metric)
    with saved_panels(Path(output), 1, (6.5, 0.5 * len(ranked) + 1.6), _title(title, trials)) as (figure, (axes,)):
        axes.barh(names, values[:, 0], color="C0", alpha=0.8)
        axes.plot(values[:, 1], names, "|", color="C1", ms=16, mew=2)
        axes.set(
            xlim=(0, 1.02),
            xlabel=f"Rank correlation with the {label[:1].lower()}{label[1:]} of {len(trials)} trials\n"
            "(correlation ratio for categories)",
        )
        chance: dict[str, Any] = {"color": "C1", "marker": "|", "ms": 12, "mew": 2, "ls": ""}
        add_legend(figure, {"95 % quantile for shuffled scores": chance})
    return Path(output)


def importances(trials: Sequence[Trial]) -> dict[str, tuple[float, float]]:
    """Return the rank correlation of the scores with each setting, from 0 to 1, and its chance level.

    For numbers, this is the absolute value of Spearman's rank correlation. For categories, it is the correlation ratio
    of the ranks::

        eta = sqrt(sum_c n_c (mean_c - mean)^2 / sum_i (rank_i - mean)^2)

    The chance level is the 95 % quantile over a thousand shuffles of the scores.

    Examples:
        >>> trials = [Trial({"a": str(i), "b": "xy"[i % 2]}, [], np.array([float(i)])) for i in range(9)]
        >>> {name: round(value, 2) for name, (value, _) in importances(trials).items()}
        {'a': 1.0, 'b': 0.0}
    """
    ranks = _ranks(np.array([trial.score for trial in trials]))
    generator = np.random.default_rng(0)
    rows = np.stack([ranks, *(generator.permutation(ranks) for _ in range(_SHUFFLES))])
    result = {}
    for key in trials[0].settings:
        scale = _scale(trials, key)
        values = _correlations(np.array(scale.positions), rows, scale.names is not None)
        result[key] = float(values[0]), float(np.quantile(values[1:], 0.95))
    return result


def _correlations(
    positions: NDArray[np.float64], rows: NDArray[np.float64], are_categories: bool
) -> NDArray[np.float64]:
    """Return the correlation of each row of ranks ``[R, n]`` with the positions ``[n]``."""
    rows = rows - rows.mean(1, keepdims=True)
    total = (rows**2).sum(1)
    if are_categories:
        members = positions == np.unique(positions)[:, None]  # [categories, n]
        explained = ((rows @ members.T) ** 2 / members.sum(1)).sum(1)
    else:
        ranks = _ranks(positions)
        ranks = ranks - ranks.mean()
        explained = (rows @ ranks) ** 2 / (ranks**2).sum()
    # Constant scores have a correlation of zero.
    return np.sqrt(np.divide(explained, total, out=np.zeros_like(total), where=total > 0))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks of values; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _is_logarithmic(numbers: list[float]) -> bool:
    """Return True if ascending numbers span three decades, or one decade with a more even logarithmic spacing."""
    if numbers[0] <= 0 or numbers[-1] < 10 * numbers[0]:
        return False
    if numbers[-1] >= 1000 * numbers[0]:
        return True
    widest, widest_log = (
        max(np.diff(values)) / (values[-1] - values[0]) for values in (np.array(numbers), np.log(numbers))
    )
    return len(numbers) == 2 or bool(widest_log < widest)
