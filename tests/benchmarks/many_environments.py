"""CartPoles that EnvPool steps behind our collector, with random actions: frames per CPU second.

    python tests/benchmarks/many_environments.py [--check]

``--check`` exits with 1 where a budget is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import compare, one_thread, say, table

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import torch

from torchrl_lightning import EnvironmentRecipe, GymnasiumCollector

BUDGETS = {64: 130_000, 512: 400_000}
STEPS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    recipe = EnvironmentRecipe("CartPole-v1", vectorization="envpool")
    collectors = {n: GymnasiumCollector(recipe, num_envs=n, frames_per_batch=n * STEPS, seed=0) for n in BUDGETS}
    contenders = {str(n): collector.rollout for n, collector in collectors.items()}
    timings = compare(contenders, seconds=0.1, clock=time.process_time)
    say(table("rollouts of 32 steps", timings, "64"))
    missed = False
    for timing, (number, budget) in zip(timings, BUDGETS.items(), strict=True):
        rate = number * STEPS / timing.median * 1e6
        say(f"{number} environments: {rate:,.0f} frames per CPU second, asked are {budget:,}")
        missed |= rate < budget
    for collector in collectors.values():
        collector.shutdown()
    return int(check and missed)


if __name__ == "__main__":
    sys.exit(main())
