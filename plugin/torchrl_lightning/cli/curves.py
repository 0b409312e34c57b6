"""Read the curves of runs from their ``metrics.csv``, and group seeds of one setting."""

from __future__ import annotations

import csv
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_lightning.cli.names import ENDS, base_name, changed_settings, in_order, recorded_command, run_folder
from torchrl_lightning.records import ENDED_EARLY, SCORE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_SEED = re.compile(r"[-_ ]?seed[-_=]?\d+$", re.IGNORECASE)
_SERIAL = re.compile(r"(version_)?\d[\d_\-:.T]*$")  # version_3, 2026-11-20_10-30-00, the job numbers of a sweep
_ENVIRONMENT = ("env", "data.env", "data.env.id")  # what a run is of, whatever experiment it began with
_LOGGER_FOLDERS = {"csv", "csv_logs", "lightning_logs", "logs", "metrics"}


@dataclass(frozen=True)
class Curve:
    """One metric of one run, from its first row on, or from that of the run that it continues."""

    label: str
    path: Path
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    seed: Any = None  # None where it is unknown or does not matter
    run: Run | None = None  # None where Hydra recorded none
    unit: str = "environment frames"  # of Lightning's `step`
    score: float | None = None  # of the evaluation after training, which may be that of the best checkpoint
    ended: float | None = None  # after how many frames a search ended it for doing badly


@dataclass(frozen=True)
class Run:
    """A run as Hydra recorded it: its name, its changed settings, its seed and the run that it continues."""

    folder: Path
    name: str
    settings: dict[str, str]
    seed: Any
    origin: Run | None
    config: Any = None
    choices: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and changed settings, another environment first; runs of one label differ in their seed alone."""
        others = {key: text for key, text in self.settings.items() if key not in _ENVIRONMENT}
        moved = [self.settings[key].partition("=")[2] for key in _ENVIRONMENT if key in self.settings]
        return " ".join((*moved, *["by"] * bool(moved), self.name, *others.values()))

    def composed(self, key: str) -> str | None:
        """Return a choice of a group, or the value of a setting, as the run had it; None where it was not recorded."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        if key in self.choices:
            return self.choices[key]
        try:
            value = OmegaConf.select(self.config, key)
        except OmegaConfBaseException:
            return None
        return None if value is None else str(value)


def read_source(source: Path, metric: str, x: str, label: str | None = None) -> list[Curve]:
    """Read the curves of a file, or of every ``metrics.csv`` below a folder; their settings name them by default."""
    if not source.exists():
        raise FileNotFoundError(f"no such file or folder: {source}")
    paths = sorted(source.rglob("metrics.csv")) if source.is_dir() else [source]
    if not paths:
        raise FileNotFoundError(f"no metrics.csv below {source}; was the run started with logger=csv?")
    curves: list[Curve] = []
    columns: set[str] = set()
    for path in paths:
        run = _run_of(path)
        points, header = _continued_points(path, run, metric, x)
        columns |= header
        if points:
            xs, ys = np.array(sorted(points.items())).T
            name = label or (default_label(path) if run is None else run.label)
            seed = None if run is None or label else run.seed
            # Lightning adds the epoch to what it counts by updates itself.
            by_updates = "updates_per_second" in header or _is_filled(path, metric, "epoch")
            score = _last(path, SCORE, x) if metric == "eval/return" and SCORE in header else None
            ended = _last(path, ENDED_EARLY, x) if ENDED_EARLY in header else None
            curves.append(Curve(name, path, xs, ys, seed, run, "updates" if by_updates else Curve.unit, score, ended))
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


def one_of_each_seed(curves: Iterable[Curve]) -> list[Curve]:
    """Keep one run of each label and seed: the latest, of those that were not ended early if there are any."""
    chosen: dict[object, Curve] = {}
    for curve in sorted(curves, key=lambda curve: (curve.ended is None, curve.path.stat().st_mtime)):
        same = (curve.label, curve.path.resolve() if curve.seed is None else curve.seed)
        if same in chosen and chosen[same].path.resolve() != curve.path.resolve():
            _log.warning("%s is left out: %s has its settings and its seed", chosen[same].path, curve.path)
        chosen[same] = curve
    return sorted(chosen.values(), key=lambda curve: curve.path)


def runs_by_label(curves: Iterable[Curve]) -> dict[str, list[Curve]]:
    """Return one run of each seed, as :func:`one_of_each_seed`, below the label that the seeds share."""
    groups: dict[str, list[Curve]] = {}
    for curve in one_of_each_seed(curves):
        groups.setdefault(curve.label, []).append(curve)
    return groups


def default_label(path: Path) -> str:
    """Name the experiment of a metrics file that has no Hydra config: the part of its path that its seeds share."""
    parts = [*path.absolute().parent.parts[1:]]
    if path.stem != "metrics":
        parts.append(path.stem)
    for part in reversed(parts):
        name = _SEED.sub("", part)
        if name and not _SERIAL.match(name) and name not in _LOGGER_FOLDERS:
            return name
    return parts[-1] if parts else path.stem


def _run_of(path: Path, continued_by: frozenset[Path] = frozenset()) -> Run | None:
    """Read Hydra's record of the run of a file; return ``None`` if there is none or the run continues itself."""
    from omegaconf import OmegaConf

    folder = run_folder(path)
    if folder is None or folder in continued_by or not (folder / ".hydra" / "hydra.yaml").is_file():
        return None
    config = OmegaConf.load(folder / ".hydra" / "config.yaml")
    hydra = OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra
    choices, overrides = recorded_command(hydra)
    settings = changed_settings(overrides, choices)
    seed, checkpoint = OmegaConf.select(config, "seed"), OmegaConf.select(config, "ckpt_path")
    origin = None
    if checkpoint is not None:
        origin = _run_of(Path(hydra.runtime.cwd) / checkpoint, continued_by | {folder})
    if origin is not None:
        # A run records its own seed, given or the checkpoint's; those of before recorded what was given alone.
        seed = seed if any(override.startswith("seed=") for override in overrides) else origin.seed
        ends = {key: value for key, value in origin.settings.items() if key in ENDS}
        settings = in_order({key: value for key, value in settings.items() if key not in ENDS} | ends)
    return Run(folder, base_name(choices) or default_label(path), settings, seed, origin, config, choices)


def _continued_points(path: Path, run: Run | None, metric: str, x: str) -> tuple[dict[float, float], set[str]]:
    """Read the points of a file behind those of the run that it continues, up to where it began."""
    points, header, began = _read_points(path, metric, x)
    if run is not None and run.origin is not None:
        before = run.origin.folder / path.resolve().relative_to(run.folder)
        if before.is_file():
            earlier, columns = _continued_points(before, run.origin, metric, x)
            points = {at: value for at, value in earlier.items() if at < began} | points
            header |= columns
    return points, header


def _is_filled(path: Path, metric: str, column: str) -> bool:
    """Return whether a row that holds a metric holds another column, too."""
    with path.open(newline="") as file:
        return any(row.get(metric) and row.get(column) for row in csv.DictReader(file))


def _last(path: Path, metric: str, x: str) -> float | None:
    """Return the last value of a column; None where it is empty."""
    points = _read_points(path, metric, x)[0]
    return points[max(points)] if points else None


def _read_points(path: Path, metric: str, x: str) -> tuple[dict[float, float], set[str], float]:
    """Read the rows where both columns are filled, the header, and the first x of any row.

    The last row of an x counts. Lightning leaves most cells empty.
    """
    points: dict[float, float] = {}
    began = math.inf
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        for number, row in enumerate(rows, start=2):
            if not row.get(x) or not (row.get(metric) or math.isinf(began)):
                continue
            try:
                at, value = float(row[x]), float(row.get(metric) or math.nan)
            except ValueError:
                raise ValueError(
                    f"{path}, line {number}: {x}={row[x]!r}, {metric}={row.get(metric)!r}; both must be numbers."
                ) from None
            began = min(began, at)
            if math.isfinite(at) and math.isfinite(value):
                points[at] = value
        return points, set(rows.fieldnames or ()), began
