"""Runs that change settings of an experiment: of its replay, or without action mask, hindsight or demonstrations.

``examples/results/variants.yaml`` lists their arguments. ``results.py`` records the runs and writes their tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import run_logs
from benchmarks.run_logs import PROJECT, VARIANTS, ResultsError, RunLog, arguments_of
from benchmarks.tables import frames, markdown, middle_half, spread


def read_entry(key: str, root: Path = PROJECT) -> dict[str, Any]:
    """Return an entry of ``variants.yaml``."""
    return dict(yaml.safe_load((root / "examples" / "results" / f"{VARIANTS}.yaml").read_text())[key])


def descriptions(root: Path = PROJECT) -> dict[str, str]:
    """Return the descriptions of the variants that are rows of a table of experiments."""
    return read_entry("descriptions", root)


def read_variant(name: str, root: Path = PROJECT) -> list[RunLog]:
    """Read the logs of a variant; raise ResultsError if there is no log."""
    logs = run_logs.read_logs(name, root)
    if not logs:
        raise ResultsError(f"{name} must have logs, got none. Record it: python tests/benchmarks/results.py run {name}")
    return logs


def scores(logs: Sequence[RunLog]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return two values per seed: the mean over all evaluations in training and the score of the last checkpoint."""
    learning = [np.mean([row.score for row in log.curve]) for log in logs]
    return np.array(learning), np.array([log.last.mean for log in logs])


def replay_table(root: Path = PROJECT) -> str:
    """Return the table of all comparisons of replay settings."""
    heads = (
        *("task", "first against second", "frames", "over training, first", "over training, second"),
        *("last checkpoint, first", "last checkpoint, second"),
    )
    rows = []
    for setting, pairs in read_entry("replay", root).items():
        for task, names in pairs.items():
            (learning, ends), (learning_without, ends_without) = (scores(read_variant(name, root)) for name in names)
            cells = [middle_half(values) for values in (learning, learning_without, ends, ends_without)]
            rows.append((task, setting, frames(names[0], root), *cells))
    return markdown(heads, rows)


def mask_table(root: Path = PROJECT) -> str:
    """Return the table of runs with and without an action mask."""
    rows = []
    for names in read_entry("masks", root).values():
        cells = [spread([log.last.mean for log in read_variant(name, root)]) for name in names]
        command = " ".join(arguments_of(names[0], root))
        rows.append((f"`{command}`", frames(names[0], root), *cells))
    return markdown(("command", "frames", "with the mask", "without the mask"), rows)
