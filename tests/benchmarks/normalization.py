"""Measure the cost of normalised observations and rewards in whole training runs.

    python tests/benchmarks/normalization.py [--repetitions 7] [--scale 0.5] [--check]

The unit is frames per second of processor time. Each run of ours is repeated with and without ``normalize_observation``
and ``normalize_reward``, interleaved. PPO is also compared with Stable-Baselines3 with and without ``VecNormalize``.
``--check`` exits with 1 if a run loses more than a twentieth of its frames per second.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import warnings
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread, say

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

from benchmarks.end_to_end import Run
from benchmarks.end_to_end import measure as measured
from benchmarks.whole_runs import ours, sb3
from torchrl_lightning.agents import DQNModule, MLPNetwork, SACModule

RAW, NORMALISED = "raw", "normalised"
PEER_RAW, PEER_NORMALISED = "Stable-Baselines3, raw", "Stable-Baselines3, VecNormalize"
KEPT = 0.95  # minimum share of the frames per second


def runs(scale: float) -> list[Run]:
    """Return the runs, each with and without normalisation."""
    updates, rollouts = max(8, round(1000 * scale) // 8 * 8), max(2, round(20 * scale))
    dqn = partial(DQNModule, double=False, learning_rate=1e-3, tau=0.005, target_interval=1)
    sac = partial(SACModule, MLPNetwork([256, 256], "relu"), learning_rate=3e-4)
    found = []
    for title, train in (
        ("DQN CartPole, 8 environments", partial(ours.off_policy, dqn, "CartPole-v1", 8, 128, updates)),
        ("DQN CartPole, 1 environment", partial(ours.off_policy, dqn, "CartPole-v1", 1, 128, updates)),
        ("SAC Pendulum, 1 environment", partial(ours.off_policy, sac, "Pendulum-v1", 1, 256, updates // 2)),
    ):
        found.append(Run(title, {RAW: train(), NORMALISED: train(normalized=True)}, ()))
    for num_envs in (8, 1):
        own = partial(ours.ppo, "CartPole-v1", num_envs, 1024 // num_envs, rollouts)
        peer = partial(sb3.ppo, "CartPole-v1", num_envs, 1024 // num_envs, rollouts)
        contenders = {RAW: own(), NORMALISED: own(normalized=True)}
        contenders |= {PEER_RAW: peer(), PEER_NORMALISED: peer(normalized=True)}
        found.append(Run(f"PPO CartPole, environments: {num_envs}", contenders, ()))
    return found


def kept(speeds: dict[str, list[float]], name: str, raw: str) -> float:
    """Return the remaining share of the speed: the median over pairs of consecutive runs."""
    return statistics.median(with_it / without for with_it, without in zip(speeds[name], speeds[raw], strict=True))


def main() -> int:
    """Run the comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--scale", type=float, default=0.5, help="length of the runs")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    met = True
    for run in runs(arguments.scale):
        speeds = measured(run, arguments.repetitions)
        share = kept(speeds, NORMALISED, RAW)
        met &= share >= KEPT
        say(f"{run.title}: {share:.3f} of {statistics.median(speeds[RAW]):.0f} frames/s are left, wanted {KEPT}")
        if PEER_RAW in speeds:
            say(f"  Stable-Baselines3: {kept(speeds, PEER_NORMALISED, PEER_RAW):.3f} of its own")
    return int(arguments.check and not met)


if __name__ == "__main__":
    sys.exit(main())
