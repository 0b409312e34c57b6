"""Measure frames per CPU second of our collector on EnvPool's CartPoles with random actions.

    python tests/benchmarks/many_environments.py [--check]

``EnvPool`` is a plain loop with the same work: random actions, and a reset of each environment in the same step as
its end. It runs interleaved with ours, so that the ratio does not depend on the load of the machine. ``--check`` exits
with 1 if a budget is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import compare, one_thread, say, table

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import envpool
import numpy as np
import torch

from torchrl_lightning import EnvironmentRecipe, GymnasiumCollector

BUDGETS = {64: 130_000, 512: 400_000}
STEPS = 32


def bare(number: int) -> Callable[[], None]:
    """Return a function that steps EnvPool's CartPoles."""
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=number, num_threads=1, seed=0)
    pool.reset()
    random = np.random.default_rng(0)

    def steps() -> None:
        for _ in range(STEPS):
            _, _, terminated, truncated, _ = pool.step(random.integers(0, 2, number))
            ended = np.flatnonzero(terminated | truncated)
            if len(ended):
                pool.reset(ended)

    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    recipe = EnvironmentRecipe("CartPole-v1", vectorization="envpool")
    collectors = {n: GymnasiumCollector(recipe, num_envs=n, frames_per_batch=n * STEPS, seed=0) for n in BUDGETS}
    missed = False
    for number, budget in BUDGETS.items():
        contenders = {"ours": collectors[number].rollout, "EnvPool": bare(number)}
        timings = compare(contenders, repetitions=31, seconds=0.1, clock=time.process_time)
        say(table(f"{number} environments, rollouts of {STEPS} steps", timings, "EnvPool"))
        rate, raw = (number * STEPS / timing.median * 1e6 for timing in timings)
        say(f"{rate:,.0f} frames per CPU second, {rate / raw:.2f} of EnvPool's {raw:,.0f}; asked are {budget:,}")
        missed |= rate < budget
    for collector in collectors.values():
        collector.shutdown()
    return int(check and missed)


if __name__ == "__main__":
    sys.exit(main())
