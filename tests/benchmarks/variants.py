"""Tables of runs with other settings than an experiment: settings of a replay, and action masks.

``examples/results/variants.yaml`` lists their arguments. ``results.py`` records the runs and writes the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks import run_logs
from benchmarks.run_logs import PROJECT, VARIANTS, ResultsError, RunLog, arguments_of
from benchmarks.tables import markdown, middle_half, spread

MASKED = ("ppo_taxi", "dqn_taxi")
"""Variants with an action mask. ``ppo_taxi_unmasked`` is ``ppo_taxi`` without it."""


def listed(key: str, root: Path = PROJECT) -> dict[str, Any]:
    """Return an entry of ``variants.yaml``."""
    return dict(yaml.safe_load((root / "examples" / "results" / f"{VARIANTS}.yaml").read_text())[key])


def descriptions(root: Path = PROJECT) -> dict[str, dict[str, str]]:
    """Return the descriptions of the variants that are rows of a table of experiments."""
    return {name: {"description": text} for name, text in listed("descriptions", root).items()}


def read_variant(name: str, root: Path = PROJECT) -> list[RunLog]:
    """Read the logs of a variant; raise ResultsError if there is no log."""
    logs = run_logs.read_logs(name, root)
    if not logs:
        raise ResultsError(f"{name} must have logs, got none. Record it: python tests/benchmarks/results.py run {name}")
    return logs


def command_line(name: str, root: Path = PROJECT) -> str:
    """Return the arguments of the training command for an experiment or a variant."""
    return " ".join(arguments_of(name, root))


def scores(logs: Sequence[RunLog]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return two values per seed: the mean over all evaluations in training and the score of the last checkpoint."""
    learning = [np.mean([row.score for row in log.curve]) for log in logs]
    return np.array(learning), np.array([log.last.mean for log in logs])


@cache
def frames(name: str, root: Path = PROJECT) -> str:
    """Return ``data.total_frames``; with demonstrations, the last rollout of a run may exceed it."""
    return f"{run_logs.composed(name, root).data.total_frames:,}"


def replay_table(root: Path = PROJECT) -> str:
    """Return the table of all comparisons of replay settings."""
    heads = ("task", "setting", "frames", "over training", "without", "last checkpoint", "without")
    rows = []
    for setting, pairs in listed("replay", root).items():
        for task, names in pairs.items():
            (learning, ends), (learning_without, ends_without) = (scores(read_variant(name, root)) for name in names)
            cells = [middle_half(values) for values in (learning, learning_without, ends, ends_without)]
            rows.append((task, setting, frames(names[0], root), *cells))
    return markdown(heads, rows)


def mask_table(root: Path = PROJECT) -> str:
    """Return the table of runs with and without an action mask."""
    rows = []
    for name in MASKED:
        both = (read_variant(key, root) for key in (name, f"{name}_unmasked"))
        cells = [spread([log.last.mean for log in logs]) for logs in both]
        rows.append((f"`{command_line(name, root)}`", frames(name, root), *cells))
    return markdown(("command", "frames", "with the mask", "without the mask"), rows)
