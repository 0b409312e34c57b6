"""Read the curves of runs from their ``metrics.csv``, and group runs with equal settings and different seeds."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.plain_yaml import raw_value, read_config
from torchrl_lightning._core.run_metadata import ENDED_EARLY, SCORE, read_rows
from torchrl_lightning._core.run_names import ENDS, base_name, changed_settings, in_order, run_folder
from torchrl_lightning._core.untrusted import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_SEED = re.compile(r"[-_ ]?seed[-_=]?\d+$", re.IGNORECASE)
_SERIAL = re.compile(r"(version_)?\d[\d_\-:.T]*$")  # version_3, 2026-11-20_10-30-00, the job numbers of a sweep
_ENVIRONMENT = ("env", "data.env", "data.env.id")  # settings that select the environment
_LOGGER_FOLDERS = {"csv", "csv_logs", "lightning_logs", "logs", "metrics"}


@dataclass(frozen=True)
class Curve:
    """One metric of one run, including the rows of an earlier run that this run continues."""

    label: str
    path: Path
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    seed: Any = None  # None if unknown or irrelevant
    run: Run | None = None  # None without Hydra's record
    unit: str = "environment frames"  # unit of Lightning's `step`
    score: float | None = None  # from the evaluation after training, possibly of the best checkpoint
    ended: float | None = None  # frames after which a search ended the run for a bad score


@dataclass(frozen=True)
class Run:
    """A run, as read from Hydra's record: its name, changed settings, seed and the run that it continues.

    ``logarithmic`` contains the settings that a search sampled on a logarithmic scale.
    """

    folder: Path
    name: str
    settings: dict[str, str]
    seed: Any
    origin: Run | None
    config: Any = None
    choices: Mapping[str, str | None] = field(default_factory=dict)
    logarithmic: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """The parts of the label as one text; runs with the same label differ in the seed."""
        return " ".join(self.label_parts)

    @property
    def label_parts(self) -> tuple[str, ...]:
        """The name, with the environment if it was changed, and each other changed setting."""
        other_settings = {key: text for key, text in self.settings.items() if key not in _ENVIRONMENT}
        environment = [self.settings[key].partition("=")[2] for key in _ENVIRONMENT if key in self.settings]
        return (" ".join((*environment, *["by"] * bool(environment), self.name)), *other_settings.values())

    def config_value(self, key: str) -> str | None:
        """Return the option of a config group or the value of a setting in this run; None if it was not recorded."""
        if key in self.choices:
            return self.choices[key]
        value = raw_value(self.config, key)
        return None if value is None else printable(value)


@dataclass
class _Log:
    """A CSV log.

    Attributes:
        header: The names of all columns.
        columns: The finite cells of some columns, by x. If several rows have the same x, the last row counts.
        first_x: The lowest x of all rows.
        has_epoch: True if a row contains both the metric and the epoch.
    """

    header: set[str]
    columns: dict[str, dict[float, float]]
    first_x: float = math.inf
    has_epoch: bool = False

    def last(self, column: str) -> float | None:
        """Return the last number of a column; None for an empty column."""
        cells = self.columns[column]
        return cells[max(cells)] if cells else None


def read_source(source: Path, metric: str, x: str, label: str | None = None) -> list[Curve]:
    """Read the curves of a file, or of every ``metrics.csv`` below a folder; by default, labels list the settings."""
    if not source.exists():
        raise FileNotFoundError(f"no such file or folder: {source}")
    paths = sorted(source.rglob("metrics.csv")) if source.is_dir() else [source]
    if not paths:
        raise FileNotFoundError(f"no metrics.csv below {source}; was the run started with logger=csv?")
    curves: list[Curve] = []
    columns: set[str] = set()
    for path in paths:
        run = _read_run(path)
        log = _read_log(path, run, metric, x)
        columns |= log.header
        if points := log.columns[metric]:
            xs, ys = (np.fromiter(values, np.float64, len(points)) for values in (points, points.values()))
            order = np.argsort(xs)
            xs, ys = xs[order], ys[order]
            name = label or (default_label(path) if run is None else run.label)
            seed = None if run is None or label else run.seed
            # Lightning adds an epoch to a row only if the step of the row counts updates.
            unit = "updates" if "updates_per_second" in log.header or log.has_epoch else Curve.unit
            score = log.last(SCORE) if metric == "eval/return" else None
            curves.append(Curve(name, path, xs, ys, seed, run, unit, score, log.last(ENDED_EARLY)))
    if not curves:
        missing = [name for name in (metric, x) if name not in columns]
        if missing:
            raise KeyError(f"no column {' and '.join(missing)} in {source}; there are: {', '.join(sorted(columns))}")
        raise ValueError(f"{source} has no value of {metric} yet.")
    runs = len(paths) + len(_runs_without_log(source, paths))
    if len(curves) < runs:
        _log.warning("%d of %d runs below %s have no %s and are skipped", runs - len(curves), runs, source, metric)
    return curves


def _runs_without_log(source: Path, logs: Sequence[Path]) -> list[Path]:
    """Return the folders of training runs below a folder that have no log, for example because the run failed."""
    logged = {folder.resolve() for folder in map(run_folder, logs) if folder is not None}
    records = source.rglob(".hydra/hydra.yaml") if source.is_dir() else ()
    return [
        record.parents[1] for record in records if record.parents[1].resolve() not in logged and _is_training(record)
    ]


def _is_training(record: Path) -> bool:
    """Return True if Hydra's record belongs to a training run, or is damaged, as a failed run may leave it."""
    try:
        return raw_value(read_config(record), "hydra.job.name") == "train"
    except (OSError, ValueError):
        return True


def one_of_each_seed(curves: Iterable[Curve]) -> list[Curve]:
    """Keep the latest run of each label and seed, but prefer complete runs to runs that a search ended early."""
    chosen: dict[object, Curve] = {}
    for curve in sorted(curves, key=lambda curve: (curve.ended is None, curve.path.stat().st_mtime)):
        key = (curve.label, curve.path.resolve() if curve.seed is None else curve.seed)
        if key in chosen and chosen[key].path.resolve() != curve.path.resolve():
            _log.warning("%s is skipped: %s has the same settings and seed", chosen[key].path, curve.path)
        chosen[key] = curve
    return sorted(chosen.values(), key=lambda curve: curve.path)


def runs_by_label(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    """Group the runs of :func:`one_of_each_seed` by label."""
    groups: dict[str, list[Curve]] = {}
    for curve in one_of_each_seed(curves):
        groups.setdefault(curve.label, []).append(curve)
    return groups


def default_label(path: Path) -> str:
    """Return the experiment name of a run without Hydra's config: the part of the file's path that all seeds share."""
    parts = [*path.absolute().parent.parts[1:]]
    if path.stem != "metrics":
        parts.append(path.stem)
    for part in reversed(parts):
        name = _SEED.sub("", part)
        if name and not _SERIAL.match(name) and name not in _LOGGER_FOLDERS:
            return name
    return parts[-1] if parts else path.stem


def _read_run(path: Path, continued_by: frozenset[Path] = frozenset()) -> Run | None:
    """Read Hydra's record of the run that wrote a file; return None without a record, or if runs form a cycle."""
    folder = run_folder(path)
    if folder is None or folder in continued_by or not (folder / ".hydra" / "hydra.yaml").is_file():
        return None
    config = read_config(folder / ".hydra" / "config.yaml")
    choices, overrides, cwd, logarithmic = _read_hydra_record(folder / ".hydra" / "hydra.yaml")
    settings = changed_settings(overrides, choices)
    seed, checkpoint = raw_value(config, "seed"), raw_value(config, "ckpt_path")
    origin = None
    if isinstance(checkpoint, str):
        origin = _read_run(Path(cwd) / checkpoint, continued_by | {folder})
    if origin is not None:
        # Without a seed in the command, a run records the checkpoint's seed. Older versions did not record that seed.
        seed = seed if any(override.startswith("seed=") for override in overrides) else origin.seed
        limits = {key: value for key, value in origin.settings.items() if key in ENDS}
        settings = in_order({key: value for key, value in settings.items() if key not in ENDS} | limits)
    if not isinstance(seed, int | float | str | None):
        seed = str(seed)
    name = base_name(choices) or default_label(path)
    return Run(folder, name, settings, seed, origin, config, choices, logarithmic)


def _read_hydra_record(path: Path) -> tuple[dict[str, str | None], list[str], str, frozenset[str]]:
    """Return the selected groups, the overrides, the working directory and the logarithmic settings in Hydra's record.

    Raises:
        ValueError: The file is not a record of Hydra.
    """
    hydra = read_config(path)
    choices, overrides, cwd = (
        raw_value(hydra, f"hydra.{key}") for key in ("runtime.choices", "overrides.task", "runtime.cwd")
    )
    if not isinstance(choices, dict) or not isinstance(overrides, list) or not isinstance(cwd, str):
        raise UserError(f"{printable(path)} must be Hydra's record of a run, with choices, overrides and cwd.")
    printable_choices = {
        printable(group): None if option is None else printable(option) for group, option in choices.items()
    }
    logarithmic = raw_value(hydra, "hydra.callbacks.search.logarithmic")
    names = frozenset(map(str, logarithmic)) if isinstance(logarithmic, list) else frozenset()
    return printable_choices, [printable(override) for override in overrides], cwd, names


def _read_log(path: Path, run: Run | None, metric: str, x: str) -> _Log:
    """Read a CSV log, and add the earlier points of the run that this run continues.

    Raises:
        OSError: The path is not a regular file.
        ValueError: The file is not a CSV file, or a cell is not a number.
    """
    rows = read_rows(path)
    header = next(rows, (1, []))[1]
    log = _Log(set(header), {name: {} for name in (metric, SCORE, ENDED_EARLY)})
    column_index = {name: number for number, name in enumerate(header)}
    column_indices = [column_index.get(name, -1) for name in (x, *log.columns, "epoch")]
    for line, row in rows:
        x_text, metric_text, *others, epoch = (row[index] if 0 <= index < len(row) else "" for index in column_indices)
        log.has_epoch |= bool(metric_text and epoch)
        try:
            x_value, *values = (float(cell or "nan") for cell in (x_text, metric_text, *others))
        except ValueError:
            raise UserError(
                f"{printable(path)}, line {line}: {x} and {metric} must be numbers, got {x_text[:100]!r} and "
                f"{metric_text[:100]!r}."
            ) from None
        log.first_x = min(log.first_x, x_value)
        if math.isfinite(x_value):
            for column, value in zip(log.columns.values(), values, strict=True):
                if math.isfinite(value):
                    column[x_value] = value
    if run is not None and run.origin is not None:
        earlier_path = run.origin.folder / path.resolve().relative_to(run.folder)
        if earlier_path.is_file():
            earlier = _read_log(earlier_path, run.origin, metric, x)
            points = {x_value: value for x_value, value in earlier.columns[metric].items() if x_value < log.first_x}
            log.columns[metric] = points | log.columns[metric]
            log.header |= earlier.header
    return log
