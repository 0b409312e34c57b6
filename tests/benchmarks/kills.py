"""Kill runs at random moments, resume them and compare them with uninterrupted runs.

    python tests/benchmarks/kills.py [--kills 60] [--seed 0] [--seconds S]

The runs train PPO, DQN, PPO+D, and SAC on sequences. DQN stores its buffer inside the checkpoint, beside it, or in
mapped files. The runs get SIGINT, SIGTERM or SIGKILL at a random moment of their training. In the first 18 kills, each
of the six runs gets each signal once after its first checkpoint and before its end. All other kills come at any moment.

Each run with a checkpoint is resumed from its last checkpoint to its end. It is then compared bit for bit with an
uninterrupted run: weights, optimizers, random states, counters and buffer. Each rollout starts with a reset and has
several steps. No kill starts after ``--seconds``.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from benchmarks.harness import say  # noqa: E402
from benchmarks.resume import warm  # noqa: E402
from cli.stopped_runs import config_of, differences, settings, status_of_sigterm, task, to_its_end, uninterrupted  # noqa: E402
from kit.forks import Forked  # noqa: E402
from torchrl_lightning.callbacks import LastCheckpoint  # noqa: E402
from torchrl_lightning.cli.train import train  # noqa: E402

STREAMS: dict[str, tuple[str, list[str]]] = {
    "PPO": ("ppo_cartpole", []),
    "DQN, inside": ("dqn_cartpole", []),
    "DQN, beside": ("dqn_cartpole", ["data.checkpoint_buffer=beside"]),
    "DQN, mapped": ("dqn_cartpole", ["data.checkpoint_buffer=beside", "+data.buffer.storage.scratch_dir=rings"]),
    "PPO+D": ("ppod_mountaincar", []),
    "SAC on sequences": ("sac_recurrent_pendulum", []),
}
SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
PAIRS = len(STREAMS) * len(SIGNALS)
"""Number of the first kills, which come after the first checkpoint."""
OFTEN = "trainer.check_val_every_n_epoch=1"  # SIGKILL does not write a checkpoint, so each epoch writes one


def durations(experiment: str, folder: Path, *more: str) -> tuple[float, float]:
    """Return the seconds of training before the first and before the last checkpoint of a run."""
    process, into = _noting(experiment, folder, *more)
    last = into / "checkpoints" / "last.ckpt"
    process.waits_for(last.exists)
    first = last.stat().st_mtime
    assert process.ends() == 0, process.said
    began = (folder / "began").stat().st_mtime
    return first - began, last.stat().st_mtime - began


def killed(
    experiment: str, folder: Path, number: int, seconds: float, *more: str, after_checkpoint: bool = False
) -> tuple[int, Path | None]:
    """Send a signal to a run and resume it; return its status and last checkpoint.

    Args:
        experiment: The experiment.
        folder: A new folder.
        number: The signal.
        seconds: Seconds of training before the signal.
        more: Further arguments of the command.
        after_checkpoint: Count the seconds from the first checkpoint, not from the start of training.

    Returns:
        The exit status, and the last checkpoint or None if the run has not written one. The status is 0 if the run
        ended before the signal.
    """
    process, into = _noting(experiment, folder, *more)
    last = into / "checkpoints" / "last.ckpt"
    process.waits_for(last.exists if after_checkpoint else (folder / "began").exists)
    time.sleep(seconds)
    process.send(number)
    status = process.ends()
    if not last.exists():
        return status, None
    arguments, total, _ = settings(experiment)
    rest = {"data.total_frames": total, "trainer.max_steps": -1, "ckpt_path": str(last), "trusted": True}
    resumed_last = to_its_end(folder, [*arguments, *more], folder / "rest", rest, task)
    # A run that had ended before does not write a new checkpoint.
    return status, resumed_last if resumed_last.exists() else last


def _noting(experiment: str, folder: Path, *more: str) -> tuple[Forked, Path]:
    """Start a run that creates a file at the start of training; return the process and the folder of the run."""
    arguments, total, _ = settings(experiment)
    into, changed = folder / "cut", {"data.total_frames": total, "trainer.max_steps": -1}
    config = config_of([*arguments, *more], into, changed)

    def run() -> None:
        starts = LastCheckpoint.on_train_start

        def noting(*given: Any) -> None:
            starts(*given)
            (folder / "began").touch()

        LastCheckpoint.on_train_start = noting  # type: ignore[method-assign]
        with status_of_sigterm():
            train(config)

    return Forked(run, folder), into


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    warm()
    drawn, began = random.Random(arguments.seed), time.monotonic()
    results: dict[str, Counter[str]] = {name: Counter() for name in STREAMS}
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        whole: dict[str, tuple[Path, float, float]] = {}
        for name, (experiment, settings) in STREAMS.items():
            more = [*settings, OFTEN]
            last = uninterrupted(experiment, folder / name, *more)
            whole[name] = last, *durations(experiment, folder / f"{name} again", *more)
        for number in range(arguments.kills):
            if time.monotonic() - began > arguments.seconds:
                break
            name = list(STREAMS)[number % len(STREAMS)]
            kind = SIGNALS[number // len(STREAMS) % len(SIGNALS)]
            (experiment, settings), (expected, first, end) = STREAMS[name], whole[name]
            covers, more = number < PAIRS, [*settings, OFTEN]
            moment = drawn.uniform(0.0, end - first if covers else 1.1 * end)
            for attempt in range(5):
                status, last_of_resumed = killed(
                    experiment, folder / f"{number}_{attempt}", kind, moment, *more, after_checkpoint=covers
                )
                if not covers or status:
                    break
                moment /= 2.0  # the run ended before the signal
            result = "no checkpoint yet"
            if last_of_resumed is not None:
                differ = differences(expected, last_of_resumed)
                result = f"differs in {differ[:3]}" if differ else "same" if status else "same, had ended before"
            results[name][f"{kind.name}{' after a checkpoint' if covers else ''}: {result}"] += 1
            if not result.startswith(("same", "no checkpoint yet")):
                say(f"{name}, {kind.name} after {moment:.2f} s, status {status}: {result}")
    say("| runs | signal: result | kills |")
    say("| --- | --- | --- |")
    for name, counts in results.items():
        for result, count in sorted(counts.items()):
            say(f"| {name} | {result} | {count} |")


if __name__ == "__main__":
    main()
