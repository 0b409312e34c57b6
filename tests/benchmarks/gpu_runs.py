"""Whole training runs with networks on a GPU and environments on the CPU, beside Stable-Baselines3's, interleaved.

    python tests/benchmarks/gpu_runs.py [sac dqn_pong ppo_pong ...] [--device cuda] [--repetitions 3] [--scale 1.0]

Settings and names are those of ``end_to_end.py``; speeds are frames per second of the clock on the wall. Needs the
extras ``bench`` and ``atari``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

if __name__ == "__main__":
    warnings.simplefilter("ignore")

import torch

from benchmarks.end_to_end import IMAGES, LEAN, OURS, SB3, Run, measure, report
from benchmarks.harness import say
from benchmarks.whole_runs import ours, pong, sb3
from benchmarks.whole_runs.clock import Training
from torchrl_lightning.learn import CNNNetwork, DQNModule, MLPNetwork, SACModule

COMPILED = "ours, compiled"


def contenders(own: Callable[..., Training], peer: Callable[..., Training]) -> dict[str, Training]:
    """Return both ways of each side."""
    return {OURS: own(), COMPILED: own(compiled=True), SB3: peer(), LEAN: peer(lean=True, optimizer="fused")}


def sac(device: str, scale: float) -> Run:
    """SAC on Pendulum: one environment, batch 256, 256 x 256, an update a frame."""
    updates = round(1000 * scale)

    def own(compiled: bool = False) -> Training:
        module = partial(SACModule, MLPNetwork([256, 256], "relu"), learning_rate=3e-4, compile=compiled)
        return ours.off_policy(module, "Pendulum-v1", 1, 256, updates, device=device)

    peer = partial(
        sb3.off_policy,
        *("SAC", "Pendulum-v1", 1, 256, updates),
        policy_kwargs={"net_arch": [256, 256]},
        learning_rate=3e-4,
        device=device,
    )
    return Run("SAC Pendulum, 1 environment", contenders(own, peer), ())


def dqn_pong(device: str, scale: float) -> Run:
    """DQN on images of Pong: batch 32, the convolutions of Mnih et al., an update for each step of 4 environments."""
    updates = round(600 * scale)
    target: dict[str, Any] = {"tau": 1.0, "target_interval": 250}
    acting: dict[str, Any] = {"epsilon_start": 0.05, "epsilon_end": 0.05}

    def own(compiled: bool = False) -> Training:
        module = partial(
            DQNModule, CNNNetwork(), double=False, learning_rate=1e-4, compile=compiled, **target, **acting
        )
        return ours.off_policy(module, pong.ours(), 4, 32, updates, cells=IMAGES, device=device)

    peer = partial(
        sb3.off_policy,
        *("DQN", "Pong", 4, 32, updates),
        policy="CnnPolicy",
        policy_kwargs={},
        cells=IMAGES,
        build=pong.theirs,
        device=device,
        learning_rate=1e-4,
        tau=1.0,
        target_update_interval=1000,  # frames
        exploration_initial_eps=0.05,
        exploration_final_eps=0.05,
    )
    return Run("DQN Pong, 4 environments", contenders(own, peer), ())


def ppo_pong(device: str, scale: float) -> Run:
    """PPO on images of Pong: rollouts of 1024 frames, batch 256, 4 epochs, the convolutions of Mnih et al., shared."""
    rollouts = max(2, round(4 * scale))
    own = partial(ours.ppo, pong.ours(), 8, 128, rollouts, network=CNNNetwork(), device=device)
    peer = partial(sb3.ppo, "Pong", 8, 128, rollouts, policy="CnnPolicy", build=pong.theirs, device=device)
    return Run("PPO Pong, 8 environments", contenders(own, peer), ())


RUNS = {"sac": sac, "dqn_pong": dqn_pong, "ppo_pong": ppo_pong}


def main() -> int:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", choices=[*RUNS, []], help="all of them by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="length of the runs")
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("torchrl_lightning").setLevel(logging.WARNING)
    if arguments.device != "cpu":
        say(torch.cuda.get_device_name(arguments.device))
    for name in arguments.runs or RUNS:
        run = RUNS[name](arguments.device, arguments.scale)
        report(run, measure(run, arguments.repetitions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
