"""Is a resumed run the same run? Every experiment, short, stopped in five ways, beside one that is not stopped.

    python tests/benchmarks/resume.py [EXPERIMENT ...] [--ways epoch end SIGINT SIGTERM SIGKILL] [--set a.b=value ...]
        [--quick]

A run is stopped inside an epoch (by ``max_steps``), at its regular end, or by a signal, after which it resumes from its
last checkpoint by ``ckpt_path=`` and a later end. Compared are weights, optimizers, random states, all counters and the
collected rows that the last checkpoints hold. ``same`` is bit for bit; else there is the number of entries that differ.
Both Pongs keep their buffer here, and each rollout begins with a reset.
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
    """Do what ``task`` does by the whole command, which composes its config itself."""

    def train() -> None:
        from torchrl_lightning.cli.train import main

        given = [f"{name}={value}" for name, value in changed.items()]
        sys.argv = ["torchrl-lightning-train", *arguments, f"hydra.run.dir={into}", *given]
        main()

    return forked(folder, train, stop)


def row(experiment: str, ways: list[str], more: list[str], folder: Path, run: Runner) -> list[str]:
    """Return what came of each way, in a word or two."""
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
    """Import here what each process would import anew."""
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
