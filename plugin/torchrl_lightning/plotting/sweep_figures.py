"""Draw a sweep: scores over each setting, trials as lines over all settings, and the importance of each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_lightning._core.run_metadata import SCORE
from torchrl_lightning._core.run_names import ENDS
from torchrl_lightning._core.untrusted import printable
from torchrl_lightning.plotting.figures import saved_panels
from torchrl_lightning.plotting.trials import Trial, number, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MARKERS = "osD^v"
_SHUFFLES = 1000


@dataclass(frozen=True)
class _Scale:
    """The positions of trials on the axis of a setting: numbers, or indices of categories if there are ``names``."""

    places: list[float]
    names: list[str] | None = None
    is_logarithmic: bool = False

    def heights(self) -> NDArray[np.float64]:
        """Return the positions scaled to the range from 0 to 1."""
        places = np.log(self.places) if self.is_logarithmic else np.array(self.places, dtype=float)
        return (places - places.min()) / (np.ptp(places) or 1.0)


def _scale(values: Sequence[str]) -> _Scale:
    numbers = [place for place in map(number, values) if place is not None]
    if len(set(numbers)) < 2 or len(numbers) < len(values):
        names = sorted({*values})
        return _Scale([float(names.index(value)) for value in values], [printable(shown(name)) for name in names])
    return _Scale(numbers, None, _is_logarithmic(sorted(set(numbers))))


def draw_trials(trials: Sequence[Trial], output: str | Path, metric: str = SCORE, title: str | None = None) -> Path:
    """Draw the score over each varied setting, with its standard deviation over seeds, and highlight the best trial.

    A numeric axis is logarithmic if the values span three decades, or span one decade and are more even on a
    logarithmic scale. All other settings are categories, including settings with an unrecorded default. Each run limit
    has its own marker. The marker of a trial that was ended early is hollow.
    """
    keys = list(trials[0].settings)
    # The run limit of each trial, as far as the trials differ in it.
    budgets = [", ".join(f"{end}={trial.settings[end]}" for end in ENDS if end in trial.settings) for trial in trials]
    markers = {budget: _MARKERS[i % len(_MARKERS)] for i, budget in enumerate(sorted({*budgets}))}
    looks = {"best": {"color": "C1", "marker": "o"}}
    if any(trial.ended for trial in trials):
        looks["ended early"] = {"color": "C0", "marker": "o", "mfc": "none"}
    looks |= {budget: {"color": "C0", "marker": marker} for budget, marker in markers.items() if budget}
    with saved_panels(Path(output), len(keys), (4.2, 3.1), title) as (figure, grid):
        for key, axes in zip(keys, grid, strict=True):
            _draw_setting(axes, [trial.settings[key] for trial in trials], trials, [markers[each] for each in budgets])
            axes.set(xlabel=printable(key), ylabel=printable(metric))
        _explain(figure, looks, ls="")
    return Path(output)


def _explain(figure: Figure, looks: Mapping[str, Mapping[str, Any]], **shared: Any) -> None:
    """Add a legend below the panels, and increase the height of the figure by it."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=printable(label), **{**shared, **look}) for label, look in looks.items()]
    figure.set_figheight(figure.get_figheight() + 0.2 * len(handles))
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize="small")


def _draw_setting(axes: Any, values: Sequence[str], trials: Sequence[Trial], markers: Sequence[str]) -> None:
    from matplotlib.ticker import LogFormatter

    scale = _scale(values)
    if scale.names is not None:
        axes.set_xticks(range(len(scale.names)), scale.names, rotation=0 if len(scale.names) < 4 else 30)
        axes.margins(x=0.2)
    elif scale.is_logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())  # the defaults need formulas
    else:
        axes.ticklabel_format(axis="x", scilimits=(-2, 5))  # long labels such as 0.00045 would overlap
    for i, (place, trial) in reversed([*enumerate(zip(scale.places, trials, strict=True))]):
        spread = trial.spread if len(trial.scores) > 1 else None
        color = "C1" if i == 0 else "C0"
        look = {"capsize": 3, "alpha": 0.8, "color": color, "mfc": "none" if trial.ended else color}
        axes.errorbar(place, trial.score, spread, fmt=markers[i], **look)


def draw_parallel(trials: Sequence[Trial], output: str | Path, metric: str = SCORE, title: str | None = None) -> Path:
    """Draw each trial as a line through its settings to its score; trials that were ended early are dashed.

    Each axis extends from its smallest to its largest value, and is logarithmic as in :func:`draw_trials`.
    """
    from matplotlib import colormaps

    keys, color = list(trials[0].settings), colormaps["viridis"]
    scales = [*(_scale([trial.settings[key] for trial in trials]) for key in keys), _Scale([t.score for t in trials])]
    heights = np.stack([scale.heights() for scale in scales])
    with saved_panels(Path(output), 1, (1.8 * len(scales) + 1.5, 4.2), title) as (figure, (axes,)):
        for i, trial in reversed([*enumerate(trials)]):
            look: dict[str, Any] = {"color": color(heights[-1, i]), "ls": "--" if trial.ended else "-"}
            axes.plot(range(len(scales)), heights[:, i], lw=2.5 if i == 0 else 1.2, alpha=0.8, **look)
        for place, (scale, column) in enumerate(zip(scales, heights, strict=True)):
            axes.axvline(place, color="0.6", lw=0.8)
            shown_at = range(len(trials)) if scale.names else (column.argmin(), column.argmax())
            for height, i in {float(column[i]): i for i in shown_at}.items():
                text = scale.names[int(scale.places[i])] if scale.names else shown(f"{scale.places[i]:.4g}")
                axes.annotate(text, (place, height), (4, 3), textcoords="offset points", fontsize="small")
        axes.set_xticks(range(len(scales)), [printable(name) for name in (*keys, metric)], rotation=15)
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        ended = {"ended early": {"ls": "--"}} if any(trial.ended for trial in trials) else {}
        _explain(figure, {"best": {"lw": 2.5}, **ended}, color=color(1.0))
    return Path(output)


def draw_importances(
    trials: Sequence[Trial], output: str | Path, metric: str = SCORE, title: str | None = None
) -> Path:
    """Draw the importance of each setting from :func:`importances`, and the importance for shuffled scores.

    The importance is a correlation, not a cause. It does not detect settings that matter only in combination. Settings
    that a search selected by earlier scores are not independent.
    """
    found = sorted(importances(trials).items(), key=lambda item: item[1][0])
    names, values = [printable(name) for name, _ in found], np.array([value for _, value in found])
    with saved_panels(Path(output), 1, (6.5, 0.5 * len(found) + 1.6), title) as (_, (axes,)):
        axes.barh(names, values[:, 0], color="C0", alpha=0.8)
        axes.plot(values[:, 1], names, "|", color="C3", ms=16, mew=2, label="of shuffled scores, 95 % stay below")
        axes.set(
            xlim=(0, 1.02),
            xlabel=f"rank correlation with {printable(metric)}, of categories correlation ratio; n={len(trials)}",
        )
        axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return Path(output)


def importances(trials: Sequence[Trial]) -> dict[str, tuple[float, float]]:
    """Return the rank correlation of the scores with each setting, from 0 to 1, and its chance level.

    Numbers use the absolute value of Spearman's rank correlation, categories the correlation ratio of the ranks::

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
    found = {}
    for key in trials[0].settings:
        scale = _scale([trial.settings[key] for trial in trials])
        values = _closeness(np.array(scale.places), rows, scale.names is not None)
        found[key] = float(values[0]), float(np.quantile(values[1:], 0.95))
    return found


def _closeness(places: NDArray[np.float64], rows: NDArray[np.float64], are_categories: bool) -> NDArray[np.float64]:
    """Return the correlation of each row of ranks ``[R, n]`` with the positions ``[n]``."""
    rows = rows - rows.mean(1, keepdims=True)
    total = (rows**2).sum(1)
    if are_categories:
        members = places == np.unique(places)[:, None]  # [categories, n]
        explained = ((rows @ members.T) ** 2 / members.sum(1)).sum(1)
    else:
        ranks = _ranks(places)
        ranks = ranks - ranks.mean()
        explained = (rows @ ranks) ** 2 / (ranks**2).sum()
    # Constant scores have a correlation of zero.
    return np.sqrt(np.divide(explained, total, out=np.zeros_like(total), where=total > 0))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks of values; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


def _is_logarithmic(numbers: list[float]) -> bool:
    """Return True if ascending numbers span three decades, or span one decade and have more even logarithms."""
    if numbers[0] <= 0 or numbers[-1] < 10 * numbers[0]:
        return False
    if numbers[-1] >= 1000 * numbers[0]:
        return True
    widest, widest_log = (max(np.diff(each)) / (each[-1] - each[0]) for each in (np.array(numbers), np.log(numbers)))
    return len(numbers) == 2 or bool(widest_log < widest)
