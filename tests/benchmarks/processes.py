"""Compare six processes on one episodic buffer, four writers and two readers, with a single process.

    python tests/benchmarks/processes.py [--json processes.json] [--seconds 60] [--check]

The buffer has rows of about 400 bytes from 8 environments, an episode index and returns. A writer adds one step of its
two environments per call. A reader draws 128 windows of two steps per call. The processes do nothing else, so all of
them always compete for the lock. The single process alternates between writes and draws in the measured ratio of the
processes.

*Waiting* is the share of the time of a process during which it waits for the lock. In the second run, one writer is
killed after half of the time, and each half has its own row. Each drawn row is checked for torn writes. ``--check``
exits with 1 if a row is torn or a process hangs.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread(pin=False)
    warnings.simplefilter("ignore")

import torch
from tensordict import TensorDict

from torchrl_lightning.episodic.episodic_buffer import EpisodicReplayBuffer

WRITERS, READERS, WIDTH, LENGTH, EPISODE, BATCH = 4, 2, 2, 10_000, 250, 128
ENVS = WRITERS * WIDTH
Counts = tuple[int, float, float, bool]
"""Number of calls, seconds, seconds of waiting, and whether all rows were intact."""


class TimedLock:
    """A wrapper of a lock that measures the waiting time of its owner."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.waited = lock, 0.0

    def __enter__(self) -> None:
        start = time.perf_counter()
        self.lock.__enter__()
        self.waited += time.perf_counter() - start

    def __exit__(self, *error: object) -> None:
        self.lock.__exit__(*error)


def rows(env: torch.Tensor, number: int) -> TensorDict:
    code = (env * 10_000_000 + number).double().view(-1, 1)
    end = torch.full((len(env), 1), number % EPISODE == EPISODE - 1)
    after = {"observation": code.expand(-1, 17), "reward": code.float(), "done": end, "terminated": end}
    return TensorDict({"observation": code.expand(-1, 17), "action": code.expand(-1, 6), "next": after}, [len(env)])


def build(shared: bool) -> EpisodicReplayBuffer:
    row = rows(torch.tensor([0]), 0)[0]
    buffer = EpisodicReplayBuffer(row, ENVS, LENGTH, record_episodic_return=True, allow_multiprocess=shared)
    for number in range(EPISODE):
        buffer.add_batch(rows(torch.arange(ENVS), number))
    return buffer


def write(buffer: EpisodicReplayBuffer, env: torch.Tensor, number: int) -> bool:
    return buffer.add_batch(rows(env, number), env)


def draw(buffer: EpisodicReplayBuffer) -> bool:
    batch, _ = buffer.get_batch(BATCH, 2)
    first = batch["observation"][..., :1]
    others = batch["observation"], batch["action"], batch["next", "observation"]
    return all(bool((each == first).all()) for each in others) and bool((first[:, 1] - first[:, 0] == 1).all())


def work(buffer: EpisodicReplayBuffer, first: int, seconds: float, pipe: Any) -> None:
    """Write two environments from ``first`` on, or draw if ``first`` is negative; send the counts of each half."""
    torch.set_num_threads(1)
    lock = TimedLock(buffer._write_lock)
    buffer.write_lock = lock
    env, number = torch.arange(first, first + WIDTH), EPISODE
    for _ in range(2):
        calls, good, lock.waited, start = 0, True, 0.0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds / 2:
            good = (draw(buffer) if first < 0 else write(buffer, env, number)) and good
            calls, number = calls + 1, number + 1
        pipe.send((calls, spent, lock.waited, good))


def together(seconds: float, kill: bool) -> dict[str, list[list[Counts]]]:
    """Run all processes at the same time; return the counts of each half of each process."""
    buffer, context, crew = build(True), multiprocessing.get_context("fork"), []
    for first in [*range(0, ENVS, WIDTH), *[-1] * READERS]:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(buffer, first, seconds, there), daemon=True)
        process.start()
        crew.append((process, here))
    if kill:
        time.sleep(seconds / 2)
        os.kill(crew[0][0].pid or 0, signal.SIGKILL)
        crew.pop(0)
    found: list[list[Counts]] = []
    for process, pipe in crew:
        halves = [pipe.recv() for _ in range(2) if pipe.poll(seconds + 60)]
        process.join(10)
        process.kill()
        found.append(halves)
    return {"writers": found[:-READERS], "readers": found[-READERS:]}


def alone(seconds: float, writes: int) -> Counts:
    """Do the work of all processes in turns; return the counts of writes."""
    buffer, calls, good, start = build(False), 0, True, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        for _ in range(writes):
            first = calls % WRITERS * WIDTH
            write(buffer, torch.arange(first, first + WIDTH), EPISODE + calls // WRITERS)
            calls += 1
        good = draw(buffer) and good
    return calls, spent, 0.0, good


def rate(each: list[list[Counts]], half: slice) -> tuple[float, float]:
    """Return the total calls per second of all processes and their share of waiting time."""
    kept = [counts for halves in each for counts in halves[half]]
    spent = sum(counts[1] for counts in kept)
    return sum(counts[0] for counts in kept) / spent * len(each), sum(counts[2] for counts in kept) / spent


def tell(name: str, found: dict[str, list[list[Counts]]], half: slice) -> dict[str, float]:
    (writes, waiting), (batches, also) = rate(found["writers"], half), rate(found["readers"], half)
    shares = [sum(counts[0] for counts in halves[half]) for halves in found["writers"]]
    say(
        f"  {name:<34}{writes * WIDTH:>9.0f} rows/s{batches:>9.0f} batches/s   waiting: writers {waiting:.0%}, "
        f"readers {also:.0%}; slowest writer over fastest {min(shares) / max(shares):.2f}"
    )
    return {"rows": writes * WIDTH, "batches": batches, "writers_wait": waiting, "readers_wait": also}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a row is torn or anybody hangs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    both = slice(None)
    say(f"processes: {WRITERS} write and {READERS} read for {arguments.seconds:g} s")
    runs = [together(arguments.seconds, kill) for kill in (False, True)]
    results = {"together": tell("together", runs[0], both)}
    results["before"] = tell("those who stay, with the killed one", runs[1], slice(0, 1))
    results["after"] = tell("and after it was killed", runs[1], slice(1, 2))
    every = round(results["together"]["rows"] / WIDTH / max(results["together"]["batches"], 1.0))
    calls, spent, _, whole = alone(min(arguments.seconds, 10.0), max(every, 1))
    results["alone"] = {"rows": calls * WIDTH / spent, "batches": calls / max(every, 1) / spent}
    say(f"  {'one alone, in turns':<34}{calls * WIDTH / spent:>9.0f} rows/s{calls / every / spent:>9.0f} batches/s")
    each = [halves for run in runs for kind in run.values() for halves in kind]
    hung = sum(len(halves) < 2 for halves in each)
    torn = not (whole and all(counts[3] for halves in each for counts in halves))
    say(f"  {hung} of {len(each)} processes hung; torn rows: {'yes' if torn else 'none'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if arguments.check and (hung or torn) else 0


if __name__ == "__main__":
    sys.exit(main())
