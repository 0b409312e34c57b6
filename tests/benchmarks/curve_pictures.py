"""Learning curves of the guide, drawn from the logs of ``results.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks.run_logs import Evaluation, RunLog, log_path, read_logs
from torchrl_lightning.plotting.style import STAR, add_legend, axis_label, line_style, saved_panels

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Line:
    """A run with all its seeds, and its label in the legend of the picture."""

    name: str
    label: str = ""

    def paths(self) -> list[Path]:
        """Return the files of all seeds."""
        return sorted(log_path(self.name, 0).parent.glob("seed_*.csv"))

    def logs(self) -> list[RunLog]:
        """Return the logs of all seeds; raise ResultsError if the settings of the run have changed since."""
        return read_logs(self.name)


@dataclass(frozen=True)
class Panel:
    """One task: its lines, and the column of the logs."""

    title: str
    lines: tuple[Line, ...]
    column: Literal["score", "success"] = "score"
    label: str = axis_label("eval/return")
    is_logarithmic: bool = False


def _each(*names: str) -> tuple[Panel, ...]:
    return tuple(Panel(name, (Line(name),)) for name in names)


def _demonstrations(title: str, name: str, *others: Line) -> Panel:
    return Panel(title, (Line(name, "PPO with demonstrations"), *others), label=axis_label("eval/success"))


def _hindsight(title: str, name: str, *others: Line) -> Panel:
    return Panel(title, (Line(name, "with hindsight"), *others), "success", axis_label("eval/success"))


def _models(title: str, **names: str) -> Panel:
    return Panel(title, tuple(Line(name, label.upper()) for label, name in names.items()), is_logarithmic=True)


WITHOUT = "PPO without demonstrations"
CURVES: dict[str, tuple[Panel, ...]] = {
    "ppo_cartpole.png": _each("ppo_cartpole"),
    "learning_curves.png": _each(
        *("a2c_cartpole", "ppo_acrobot", "ppo_lunarlander"),
        *("ppo_hopper", "ppo_halfcheetah", "ppo_minigrid_doorkey"),
    ),
    "replay_curves.png": _each(
        *("dqn_cartpole", "dqn_lunarlander", "dqn_mountaincar"),
        *("sac_pendulum", "sac_invertedpendulum", "sac_hopper"),
    ),
    "demonstrations.png": (
        _demonstrations(
            *("KeyCorridorS3R2", "ppod_minigrid_keycorridor"), Line("ppod_minigrid_keycorridor_without", WITHOUT)
        ),
        _demonstrations(
            *("UnlockPickup", "ppod_minigrid_unlockpickup"), Line("ppod_minigrid_unlockpickup_without", WITHOUT)
        ),
        _demonstrations("MultiRoom-N4-S5", "ppod_minigrid_multiroom"),
        _demonstrations("LockedRoom", "ppod_minigrid_lockedroom"),
        _demonstrations("ObstructedMaze", "ppod_minigrid_obstructedmaze"),
        _demonstrations("KeyCorridorS3R3", "ppod_minigrid_keycorridor_s3r3"),
    ),
    "episodic.png": (
        _hindsight(
            *("FetchReach, DDPG", "ddpg_her_fetchreach"), Line("ddpg_her_fetchreach_without", "without hindsight")
        ),
        _hindsight("FetchPush, SAC", "sac_her_fetchpush"),
        _hindsight("FetchPickAndPlace, SAC", "sac_her_fetchpickandplace"),
    ),
    "model_based.png": (
        _models("Pendulum", pets="pets_pendulum", sac="sac_pendulum"),
        _models("InvertedPendulum", mbpo="mbpo_invertedpendulum", sac="sac_invertedpendulum"),
        _models("Hopper", mbpo="mbpo_hopper", sac="sac_hopper"),
    ),
}


@dataclass(frozen=True)
class Curves:
    """A picture of several panels."""

    panels: tuple[Panel, ...]

    def source(self) -> bytes:
        """Return the settings of the panels and their logs."""
        logs = [path.read_bytes() for panel in self.panels for line in panel.lines for path in line.paths()]
        return repr(self.panels).encode() + b"".join(logs)

    def draw(self, output: Path) -> None:
        """Draw the mean of the seeds, their range, and the evaluations after training."""
        from matplotlib.ticker import EngFormatter, NullFormatter

        labels = list(dict.fromkeys(line.label for panel in self.panels for line in panel.lines))
        styles = {label: line_style(number) for number, label in enumerate(labels)}
        size = (5.4, 3.4) if len(self.panels) == 1 else (3.6, 2.6)
        with saved_panels(output, len(self.panels), size, columns=2) as (figure, grid):
            for axes, panel in zip(grid, self.panels, strict=True):
                counts = {_draw_line(axes, line.logs(), panel.column, styles[line.label]) for line in panel.lines}
                axes.set_title(f"{panel.title} ({_seeds(counts)})", fontsize="medium")
                axes.set(xlabel=axis_label("step"), ylabel=panel.label)
                if panel.is_logarithmic:
                    axes.set_xscale("log")
                    axes.xaxis.set_minor_formatter(NullFormatter())
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            color, name = ("0.35", "") if len(labels) > 1 else (styles[labels[0]]["color"], labels[0])
            entries: dict[str, dict[str, Any]] = {label: styles[label] for label in labels if label != name}
            entries[f"line: {name and name + ', '}mean of the seeds"] = {"color": color}
            entries["band: lowest to highest seed"] = {"band": color}
            entries["star: mean of the seeds after training"] = {"color": color, **STAR}
            add_legend(figure, entries)


def _seeds(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    number = str(high) if low == high else f"{low} to {high}"
    return f"{number} seed{'s' * (high > 1)}"


def _draw_line(axes: Any, logs: Sequence[RunLog], column: str, style: dict[str, Any]) -> int:
    """Draw the logs of a run, and return their number."""
    frames, values = _interpolate([log.curve for log in logs], column)
    axes.plot(frames, np.nanmean(values, 0), linewidth=1.8, **style)
    if len(logs) > 1:
        low, high = np.nanmin(values, 0), np.nanmax(values, 0)
        axes.fill_between(frames, low, high, color=style["color"], alpha=0.2, linewidth=0)
    ends = [Evaluation(log.frames, *log.last, log.success) for log in logs]
    score = np.mean([getattr(end, column) for end in ends])
    axes.plot(max(end.frames for end in ends), score, "*", color=style["color"], ms=10, clip_on=False, zorder=3)
    return len(logs)


def _interpolate(runs: Sequence[Sequence[Evaluation]], column: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the frames ``[P]`` of all runs, and values ``[runs, P]``.

    Values are NaN before the first row of a run. After its last row they stay constant, because the seeds of a run end
    within a few frames.
    """
    grid = np.unique([row.frames for rows in runs for row in rows])
    points = [([row.frames for row in rows], [getattr(row, column) for row in rows]) for rows in runs]
    return grid, np.stack([np.interp(grid, *point, left=np.nan) for point in points])
