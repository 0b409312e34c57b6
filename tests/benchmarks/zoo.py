"""Train the experiments with Stable-Baselines3 at the same settings, and log their scores.

    python tests/benchmarks/zoo.py run NAME [--seeds 0 1 2]

``run`` trains ``experiment=NAME`` with Stable-Baselines3 for the same number of frames. It plays 100 unseen episodes
with the last model of each seed and writes ``examples/results/stable_baselines3/NAME.csv``. ``results.py table`` adds
these scores as a column; ``results.py run NAME`` repeats our own runs. The settings come from the experiment. Settings
without a counterpart in Stable-Baselines3 raise an error. All runs use one thread.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread
from benchmarks.results import PEER, ResultsError, settings_of, write

if __name__ == "__main__":
    one_thread(pin=False)


def main() -> None:
    """Run the twin of an experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("name")
    running.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    settings = settings_of(arguments.name)  # raises if the experiment does not exist
    from benchmarks.twin import Twin

    twin = Twin(arguments.name)
    write(arguments.name, [twin.run(seed) for seed in arguments.seeds], PEER, settings)


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
