"""Logs of earlier versions of the code: one file per experiment with all its seeds.

The digest of these logs covers the YAML of the experiment and its demonstrations, but not the groups of the config.
``run_logs.py`` has the present format.
"""

from __future__ import annotations

import csv
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.run_logs import PROJECT, Evaluation, ResultsError

RESULTS, CONF = PROJECT / "examples" / "results", PROJECT / "conf" / "experiment"
DEMONSTRATIONS = PROJECT / "conf" / "demonstrations"
VERSION, EPISODES = 1, 100


@dataclass(frozen=True)
class Row:
    """An evaluation in training, or the end of a run. Only the end has ``minutes`` of processor time.

    ``success`` is the share of episodes that end at the goal, if the environment has a goal.
    """

    seed: int
    frames: int
    score: float
    deviation: float
    episodes: int
    minutes: float | None = None
    success: float | None = None


def settings_of(name: str) -> str:
    """Return a digest of the YAML of an experiment and its defaults, without comments.

    The digest includes the demonstrations of the experiment.

    Raises:
        ResultsError: The experiment does not exist.
    """
    path = CONF / f"{name}.yaml"
    if not path.is_file():
        raise ResultsError(f"NAME must be an experiment of {CONF}, got {name}.")
    config = yaml.safe_load(path.read_text())
    parents = [settings_of(item) for item in config.get("defaults", []) if isinstance(item, str) and item != "_self_"]
    text = yaml.safe_dump([config, parents])
    digest = hashlib.sha256(text.encode())
    for folder in re.findall(r"\$\{paths\.demonstrations\}/(\w+)", text):
        for file in sorted((DEMONSTRATIONS / folder).iterdir()):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def read(path: Path, script: str = "results.py") -> list[Row]:
    """Read the results of an experiment; ``script`` repeats the run.

    Raises:
        ResultsError: The file has another version or other settings.
    """
    head, *lines = path.read_text().splitlines()
    remedy = f"Run it again: python tests/benchmarks/{script} run {path.stem}."
    match = re.fullmatch(r"# version (\d+), settings (\w+)", head)
    if match is None or int(match[1]) != VERSION:
        raise ResultsError(f"{path} must begin with '# version {VERSION}', got {head!r}. {remedy}")
    present = settings_of(path.stem)
    if match[2] != present:
        raise ResultsError(f"settings of {path} must be {present}, got {match[2]}. {remedy}")
    rows = csv.DictReader(lines)
    return [
        Row(
            *(int(float(row[key])) for key in ("seed", "frames")),
            *(float(row[key]) for key in ("score", "deviation")),
            int(row["episodes"]),
            *(float(row[key]) if row.get(key) else None for key in ("minutes", "success")),
        )
        for row in rows
    ]


def to_row(seed: int, evaluation: Evaluation, episodes: int = 0, minutes: float | None = None) -> Row:
    """Return an evaluation as a row."""
    frames, score, deviation, success = evaluation
    return Row(seed, frames, score, deviation, episodes, minutes, success)
