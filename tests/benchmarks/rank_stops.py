"""Stop runs with several ranks at random moments, resume them and compare them with complete runs.

    python tests/benchmarks/rank_stops.py [--stops 60] [--seed 0] [--seconds S] [--ranks 2]

The runs train PPO, DQN and SAC with the command, or with a script with its own Trainer. One rank or all ranks get
SIGTERM, SIGINT or SIGKILL. The signal comes at a random moment of training; in six of every 36 stops it comes before
training. Each run must end within 60 seconds, and no process may outlive it.

After SIGTERM and SIGINT, ``last.ckpt`` contains the end of the run. The command must also return the status of the
signal and print at most 10 lines. Each run is resumed to its end and compared bit for bit with an uninterrupted run. No
stop starts after ``--seconds``.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from benchmarks.harness import say  # noqa: E402
from cli.rank_runs import FAMILIES, RankRun, frames_of, weights  # noqa: E402

FRAMES = {"PPO": 3_072, "DQN": 1_536, "SAC": 1_536}
"""Frames of a complete run. They take some seconds."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
PROGRAMS = ("command", "Trainer")


class Stops:
    """Stopped runs, each compared with the complete run of its family and program."""

    def __init__(self, home: Path, ranks: int, seed: int) -> None:
        self.home, self.ranks, self.random = home, ranks, random.Random(seed)
        self._complete: dict[tuple[str, str], tuple[Path, float]] = {}

    def start(self, folder: Path, family: str, program: str, resumed: Path | None = None) -> RankRun:
        """Start a run, or resume one."""
        if program == "Trainer":
            return RankRun.of_trainer(folder, family, FRAMES[family], resumed or "", self.ranks)
        more = [] if resumed is None else [f"ckpt_path={resumed}"]
        settings = [*FAMILIES[family], f"data.total_frames={FRAMES[family]}", *more]
        return RankRun.of_command(folder, *settings, ranks=self.ranks)

    def complete(self, family: str, program: str) -> tuple[Path, float]:
        """Return the last checkpoint of an uninterrupted run and the seconds after its first checkpoint."""
        if (family, program) not in self._complete:
            run = self.start(self.home / f"{family}_{program}", family, program)
            run.wait_for_checkpoint()
            first = time.monotonic()
            assert run.status() == 0, run.lines()
            run.kill()
            self._complete[family, program] = run.last, time.monotonic() - first
        return self._complete[family, program]

    def stop(self, family: str, program: str, number: signal.Signals, is_one: bool, is_early: bool) -> str:
        """Stop a run, resume it and return the result. A run that ends before its signal is repeated."""
        _, seconds = self.complete(family, program)
        moment = self.random.uniform(0.0, 4.0 if is_early else seconds)
        for _ in range(4):
            result = self._stop_at(moment, family, program, number, is_one, is_early)
            if result != "had ended before":
                break
            moment /= 2
        return result

    def _stop_at(
        self, moment: float, family: str, program: str, number: signal.Signals, is_one: bool, is_early: bool
    ) -> str:
        complete, _ = self.complete(family, program)
        folder = self.home / "stopped"
        shutil.rmtree(folder, ignore_errors=True)
        run = self.start(folder, family, program)
        try:
            if is_early:
                run.wait_until(lambda: len(run.pids()) == self.ranks)
            else:
                run.wait_for_checkpoint()
            time.sleep(moment)
            ranks = [self.random.randrange(self.ranks)] if is_one else list(range(self.ranks))
            if not run.ended() and len(run.pids()) == self.ranks:
                run.send(number, ranks)
            sent = time.monotonic()
            try:
                status = run.status(60)
            except subprocess.TimeoutExpired:
                return f"hangs 60 s after {number.name} to {ranks}: {run.lines()[-3:]}"
            waited = time.monotonic() - sent
            if left := run.left(max(60 - waited, 1)):
                return f"leaves processes after {number.name} to {ranks}: {left}"
        finally:
            run.kill()
        lines = run.lines()
        if not run.last.exists():
            return "ends before a checkpoint" if is_early else "has no checkpoint"
        is_complete = weights(run.last) == weights(complete)
        if is_complete:  # the signal came in the last step, or in the evaluation after the training
            return "had ended before"
        if status == 0:
            return "ended with other weights"
        if program == "command" and number != signal.SIGKILL and not is_early:
            expected = 143 if number == signal.SIGTERM else 1
            if status != expected or len(lines) > 10:
                return f"status {status}, {len(lines)} lines after {number.name} to {ranks}: {lines[-3:]}"
        if len(frames_of(run.last)) != 1:
            return f"the ranks stored {frames_of(run.last)} frames"
        resumed = self.start(self.home / "resumed", family, program, run.last)
        try:
            if resumed.status() != 0:
                return f"does not resume: {resumed.lines()[-3:]}"
        finally:
            resumed.kill()
        same = weights(resumed.last) == weights(complete)
        shutil.rmtree(resumed.folder)
        return "same" if same else f"differs after {number.name} to {ranks}"


def main() -> None:
    """Stop runs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    began, counts = time.monotonic(), Counter[tuple[str, str]]()
    runs = [(family, program) for program in PROGRAMS for family in FAMILIES]
    kinds = [(number, is_one) for number in SIGNALS for is_one in (True, False)]
    with tempfile.TemporaryDirectory() as home:
        stops = Stops(Path(home), arguments.ranks, arguments.seed)
        for stop in range(arguments.stops):
            if time.monotonic() - began > arguments.seconds:
                break
            (number, is_one), (family, program) = kinds[stop % 6], runs[(stop // 6 + stop) % 6]
            is_early = stop // 6 % 6 == 5
            result = stops.stop(family, program, number, is_one, is_early)
            kind = f"{number.name}, {'one rank' if is_one else 'all ranks'}{', before training' if is_early else ''}"
            counts[kind, result] += 1
            say(f"{stop}: {family}, {program}, {kind}: {result}")
    say("| signal | result | stops |")
    say("| --- | --- | --- |")
    for (kind, result), count in sorted(counts.items()):
        say(f"| {kind} | {result} | {count} |")


if __name__ == "__main__":
    main()
