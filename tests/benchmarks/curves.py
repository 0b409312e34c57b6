"""Train the short runs of the guide's learning curves, and store their evaluations.

    python tests/benchmarks/curves.py run ppo_cartpole [--seeds 0 1 2]

``examples/results/curves.yaml`` lists the arguments of each run. ``run`` trains with each seed and writes
``examples/results/curves/ppo_cartpole.csv`` in the format of ``earlier_logs.py``. The last row of a seed is the
evaluation after training. ``redraw.py`` draws the pictures from these files.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml

from benchmarks.ablations import digest
from benchmarks.earlier_logs import RESULTS, Row, read, run, write
from benchmarks.results import ResultsError, asked

FOLDER = RESULTS / "curves"
RUNS: dict[str, list[str]] = yaml.safe_load((RESULTS / "curves.yaml").read_text())


def arguments_of(name: str) -> list[str]:
    """Return the command-line arguments of a run; raise ResultsError if the run does not exist."""
    if name not in RUNS:
        raise ResultsError(f"NAME must be one of {', '.join(RUNS)}, got {name}.")
    return list(RUNS[name])


def read_curve(name: str) -> list[Row]:
    """Read the rows of a run; raise ResultsError if its settings have changed since."""
    return read(FOLDER / f"{name}.csv", digest(arguments_of(name)), "curves.py")


def main() -> None:
    """Train one run with each seed."""
    options = asked(__doc__, [0, 1, 2], has_table=False)
    arguments = arguments_of(options.name)
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            rows = run(arguments, seed, Path(folder, str(seed)), plays_last=False)
            write(options.name, rows, FOLDER, digest(arguments))


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
