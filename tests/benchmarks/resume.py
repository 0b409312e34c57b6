"""Stop short runs of all experiments in five ways, resume them and compare them with uninterrupted runs.

    python tests/benchmarks/resume.py [EXPERIMENT ...] [--ways epoch end SIGINT SIGTERM SIGKILL] [--set a.b=value ...]
        [--quick]

A run stops inside an epoch because of ``max_steps``, at its regular end, or by a signal. It then resumes from its last
checkpoint with ``ckpt_path=`` and a later end. The script compares weights, optimizers, random states, all counters and
the collected rows of the last checkpoints. ``same`` means equality bit for bit; otherwise the table contains the number
of different entries. Both Pongs store their buffer in this benchmark, and each rollout starts with a reset.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from benchmarks.harness import say  # noqa: E402
from cli.stopped_runs import WAYS, Runner, Stop, differences, forked, resumed, task, uninterrupted  # noqa: E402
from torchrl_lightning._hydra.paths import CONF_DIR  # noqa: E402

EXPERIMENTS = sorted(path.stem for path in (CONF_DIR / "experiment").glob("*.yaml"))


def command(
    folder: Path, arguments: Sequence[str], into: Path, changed: Mapping[str, object], stop: Stop | None
) -> int:
    """Do the same as ``task`` with the complete command, which composes its own config."""

    def train() -> None:
        from torchrl_lightning.cli.train import main

        given = [f"{name}={value}" for name, value in changed.items()]
        sys.argv = ["torchrl-lightning-train", *arguments, f"hydra.run.dir={into}", *given]
        main()

    return forked(folder, train, stop)


def row(experiment: str, ways: list[str], more: list[str], folder: Path, run: Runner) -> list[str]:
    """Return the result of each way in a few words."""
    cells = []
    try:
        whole = uninterrupted(experiment, folder, *more, run=run)
    except RuntimeError as error:
        said = str(error).splitlines()[-1]
        return [f"not run: {said[:100]}", *[""] * (len(ways) - 1)]
    for way in ways:
        try:
            differ = differences(whole, resumed(experiment, folder, way, *more, run=run))
            cells.append(f"{len(differ)} differ, {differ[0]}" if differ else "same")
        except RuntimeError as error:
            cells.append(f"not run: {str(error).splitlines()[-1][:100]}")
    return cells


def warm() -> None:
    """Import the modules once, before the processes fork."""
    import torchrl_lightning
    import torchrl_lightning.cli.config.instantiate
    import torchrl_lightning.cli.config.resume
    import torchrl_lightning.cli.plot
    import torchrl_lightning.cli.train

    for name in torchrl_lightning.__all__:
        getattr(torchrl_lightning, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", default=EXPERIMENTS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--quick", action="store_true", help="without Hydra, in a third of the time")
    arguments = parser.parse_args()
    run = task if arguments.quick else command
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    warm()
    say(f"| experiment | {' | '.join(arguments.ways)} |")
    say(f"|{' --- |' * (1 + len(arguments.ways))}")
    with tempfile.TemporaryDirectory() as folder:
        for experiment in arguments.experiments:
            cells = row(experiment, arguments.ways, arguments.set, Path(folder) / experiment, run)
            say(f"| `{experiment}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
