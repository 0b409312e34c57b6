"""Compare collection from four environments in one process, in four processes, and by four workers.

    python tests/benchmarks/more_cores.py [--seconds 3] [--check]

One environment waits for a millisecond per step, like a remote simulator, so one core is enough. The other one is
CartPole, which computes. Each row contains frames per second of wall-clock time, the share of the ideal rate, and
microseconds of processor time per frame over all processes.

``bare`` steps one environment with Gymnasium only, interleaved with ours. The ideal rate is four times this speed: at
most 4,000 frames/s for the environment that waits. ``--check`` exits with 1 if a budget is missed. With fewer than four
free cores the results are lower bounds.
"""

from __future__ import annotations

import argparse
import os
import resource
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

import gymnasium
import torch

from torchrl_lightning import AsynchronousCollector, GymnasiumCollector, MLPNetwork, build_actor

ENVS, STEPS = 4, 64
BUDGETS = {"async": 0.55, "process": 0.8}
"""Minimum shares of the ideal rate: 2,200 and 3,200 of 4,000 frames/s."""


class Waiting(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wait for a millisecond in each step."""

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        return self.env.step(action)


def waiting() -> Any:
    return Waiting(gymnasium.make("CartPole-v1"))


def computing() -> Any:
    return gymnasium.make("CartPole-v1")


def collectors(env: Any) -> dict[str, Any]:
    sizes = {"frames_per_batch": ENVS * STEPS, "seed": 0}
    one = GymnasiumCollector(env, num_envs=ENVS, **sizes)
    policy = build_actor(one.specs, MLPNetwork([64, 64]))
    one.shutdown()
    return {
        "sync": GymnasiumCollector(env, policy, num_envs=ENVS, **sizes),
        "async": GymnasiumCollector(env, policy, num_envs=ENVS, vectorization="async", **sizes),
        "process": AsynchronousCollector(env, policy, num_workers=ENVS, frames_per_batch=STEPS, seed=0),
    }


class Bare:
    """One environment with random actions, stepped by Gymnasium only."""

    def __init__(self, env: Any) -> None:
        self.env = env()
        self.env.reset(seed=0)

    def rollout(self) -> torch.Tensor:
        """Step the environment and return its rewards."""
        rewards = torch.empty(ENVS * STEPS)
        for step in range(len(rewards)):
            _, reward, terminated, truncated, _ = self.env.step(self.env.action_space.sample())
            rewards[step] = reward
            if terminated or truncated:
                self.env.reset()
        return rewards

    def shutdown(self) -> None:
        """Close the environment."""
        self.env.close()


def spent() -> float:
    """Return the processor time of this process and of its live children, read from /proc."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    missed = False
    for what, env in (("waiting", waiting), ("computing", computing)):
        made = {"bare": Bare(env), **collectors(env)}
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for collector in made.values():
            for _ in range(2 * ENVS):
                collector.rollout()
        for _ in range(3):
            for name, collector in made.items():
                frames, began, cpu = 0, time.perf_counter(), spent()
                while time.perf_counter() - began < arguments.seconds / 3:
                    frames += collector.rollout().numel()
                rates[name].append((frames / (time.perf_counter() - began), (spent() - cpu) / frames * 1e6))
        middle = {name: [sorted(each)[1] for each in zip(*found, strict=True)] for name, found in rates.items()}
        for name, collector in made.items():
            rate, cost = middle[name]
            share = rate / middle["bare"][0] / ENVS
            say(f"{what:<10}{name:<9}{rate:>8,.0f} frames/s{share:>6.2f}{cost:>8.0f} us of processor time a frame")
            missed |= what == "waiting" and share < BUDGETS.get(name, 0)
            collector.shutdown()
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main())
