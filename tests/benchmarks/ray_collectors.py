"""Collectors over environments that wait: 1, 2 and 4 actors of a Ray cluster, beside worker processes.

    python tests/benchmarks/ray_collectors.py [--json ray.json] [--rounds 5] [--batches 12]

CartPole whose steps wait for 1 ms, so that two cores serve four actors; rollouts of 256 frames; nobody learns, but
weights are published after each batch. Contenders take turns in one process, and the first batches of each turn, which
were collected in the pause, do not count. Reported are frames a second (of the clock on the wall), and the processor
time of the learner's process for a batch. Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread(pin=False)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    warnings.simplefilter("ignore")

import gymnasium

from torchrl_lightning import AsynchronousCollector, RayCollector
from torchrl_lightning.collectors.workers import WorkersCollector

FRAMES = 256


class Waiting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Waits for a millisecond before each step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return self.env.step(action)


def contenders() -> dict[str, WorkersCollector]:
    sizes = {"wrappers": [Waiting], "num_envs": 4, "frames_per_batch": FRAMES, "seed": 0}
    ray = {f"Ray, {n}": RayCollector("CartPole-v1", num_collectors=n, **sizes) for n in (1, 2, 4)}
    return {**ray, "processes, 2": AsynchronousCollector("CartPole-v1", num_workers=2, **sizes)}


def taken(
    collector: WorkersCollector, batches: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return frames a second and milliseconds of processor time a batch."""
    for _ in range(2 * collector.num_workers):
        collector.rollout()
    began, busy = clock(), time.process_time()
    for _ in range(batches):
        collector.rollout()
        collector.update_policy_weights_()
    return batches * FRAMES / (clock() - began), (time.process_time() - busy) / batches * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12)
    options = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
    found: dict[str, list[tuple[float, float]]] = {}
    collectors = contenders()
    for _ in range(options.rounds):
        for name, collector in collectors.items():
            found.setdefault(name, []).append(taken(collector, options.batches))
    for collector in collectors.values():
        collector.shutdown()
    medians = {name: [statistics.median(each) for each in zip(*turns, strict=True)] for name, turns in found.items()}
    for name, (frames, busy) in medians.items():
        say(f"{name:14} {frames:6.0f} frames/s, {busy:5.2f} ms of the learner's processor time a batch")
    rates = {name: frames for name, (frames, _) in medians.items()}
    say(f"2 and 4 actors over 1: {rates['Ray, 2'] / rates['Ray, 1']:.2f}, {rates['Ray, 4'] / rates['Ray, 1']:.2f}")
    say(f"2 actors over 2 processes: {rates['Ray, 2'] / rates['processes, 2']:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
