"""Measure the effect of single replay settings on two tasks over five seeds.

    python tests/benchmarks/ablations.py run cartpole_uniform [--seeds 0 1 2 3 4]
    python tests/benchmarks/ablations.py table

``examples/results/ablations.yaml`` lists the arguments of each run and the pairs of runs to compare. ``run`` trains and
plays with the functions of ``earlier_logs.py`` and writes ``examples/results/ablations/cartpole_uniform.csv``.
``table`` replaces the table after its mark in ``examples/guide/experiments.md``.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import yaml

from benchmarks.earlier_logs import RESULTS, Row, read, run_all, settings_of, write
from benchmarks.results import GUIDE, SEEDS, ResultsError, asked, markdown, middle_half, with_table

FOLDER, MARK = RESULTS / "ablations", "ablations.py"
SAID = yaml.safe_load((RESULTS / "ablations.yaml").read_text())


def given(name: str) -> list[str]:
    """Return the command-line arguments of a run; raise ResultsError if the run does not exist."""
    if name not in SAID["runs"]:
        raise ResultsError(f"there is no run {name}; there are {', '.join(SAID['runs'])}.")
    return list(SAID["runs"][name])


def settings(name: str) -> str:
    """Return the digest of the arguments of a run."""
    return digest(given(name))


def digest(arguments: Sequence[str]) -> str:
    """Return a digest of arguments and of the experiments that they name."""
    experiments = [each.partition("=")[2] for each in arguments if each.startswith("experiment=")]
    said = yaml.safe_dump([[*arguments], *map(settings_of, experiments)])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def scores(rows: Sequence[Row]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return two values per seed: the mean over all evaluations in training and the score of the last checkpoint."""
    seeds = sorted({row.seed for row in rows})
    learning = [np.mean([row.score for row in rows if row.seed == seed and row.minutes is None]) for seed in seeds]
    ends = [row.score for seed in seeds for row in rows if row.seed == seed and row.minutes is not None]
    return np.array(learning), np.array(ends)


def table(folder: Path = FOLDER) -> str:
    """Return the table of all comparisons."""
    heads = ("task", "setting", "frames", "over training", "without", "last checkpoint", "without")
    rows = []
    for question, pairs in SAID["compared"].items():
        for task, (changed, plain) in pairs.items():
            both = [read(folder / f"{name}.csv", settings(name), "ablations.py") for name in (changed, plain)]
            (learning, ends), (learning_without, ends_without) = map(scores, both)
            frames = f"{max(row.frames for row in both[0]):,}"
            cells = [middle_half(each) for each in (learning, learning_without, ends, ends_without)]
            rows.append((task, question, frames, *cells))
    return markdown(heads, rows)


def main() -> None:
    """Run one ablation or write the table."""
    arguments = asked(__doc__, SEEDS)
    if arguments.command == "table":
        GUIDE.write_text(with_table(GUIDE.read_text(), table(), MARK))
        return
    name = arguments.name
    write(name, run_all(given(name), arguments.seeds), FOLDER, settings(name))


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
