"""Train the short runs of the guide's learning curves, and store their evaluations.

    python tests/benchmarks/curves.py run ppo_cartpole [--seeds 0 1 2]

``examples/results/curves.yaml`` lists the arguments of each run. ``run`` trains with each seed and writes
``examples/results/curves/ppo_cartpole.csv`` in the format of ``results.py``. The last row of a seed is the evaluation
after training. ``redraw.py`` draws the pictures from these files.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from benchmarks import results
from benchmarks.ablations import digest
from benchmarks.results import RESULTS, ResultsError, Row, asked, ended, logged, read, write

FOLDER = RESULTS / "curves"
RUNS: dict[str, list[str]] = yaml.safe_load((RESULTS / "curves.yaml").read_text())


def arguments_of(name: str) -> list[str]:
    """Return the command-line arguments of a run; raise ResultsError if the run does not exist."""
    if name not in RUNS:
        raise ResultsError(f"NAME must be one of {', '.join(RUNS)}, got {name}.")
    return list(RUNS[name])


def run(arguments: Iterable[str], seed: int, folder: Path) -> Iterator[Row]:
    """Train with the command and a seed, and yield the evaluations in training and the evaluation after training."""
    began = results.processor_time()
    output = results.command(
        results.TRAIN, *arguments, f"seed={seed}", "eval_checkpoint=last", f"hydra.run.dir={folder}"
    )
    log = folder / "csv" / "metrics.csv"
    yield from [*logged(log, seed)] or collected(log, seed)
    yield ended(output, seed, (results.processor_time() - began) / 60)


def collected(path: Path, seed: int) -> Iterator[Row]:
    """Yield the mean returns of collected episodes, for a run without evaluations in training."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row.get("train/return"):
                yield Row(seed, int(float(row["step"])), float(row["train/return"]), 0.0, 0)


def read_curve(name: str) -> list[Row]:
    """Read the rows of a run; raise ResultsError if its settings have changed since."""
    return read(FOLDER / f"{name}.csv", digest(arguments_of(name)), "curves.py")


def main() -> None:
    """Train one run with each seed."""
    options = asked(__doc__, [0, 1, 2], has_table=False)
    arguments = arguments_of(options.name)
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            write(options.name, run(arguments, seed, Path(folder, str(seed))), FOLDER, digest(arguments))


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
