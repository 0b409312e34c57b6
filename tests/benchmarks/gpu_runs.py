"""Compare whole training runs with networks on a GPU and environments on the CPU with Stable-Baselines3.

    python tests/benchmarks/gpu_runs.py [sac dqn_pong ppo_pong ...] [--device cuda] [--repetitions 3] [--scale 1.0]

The runs are interleaved. Settings and names are the same as in ``end_to_end.py``. Speeds are frames per second of
wall-clock time. Needs the extras ``bench`` and ``atari``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

if __name__ == "__main__":
    warnings.simplefilter("ignore")

import torch

from benchmarks.end_to_end import (
    Run,
    Sides,
    continuous_sides,
    dqn_pong_sides,
    measure,
    ppo_pong_sides,
    report,
)
from benchmarks.harness import say
from benchmarks.whole_runs.names import LEAN, OURS, SB3

COMPILED = "ours, compiled"
RUNS: dict[str, tuple[str, Callable[..., Sides], int]] = {
    "sac": ("SAC Pendulum, 1 environment", partial(continuous_sides, "SAC"), 1000),
    "dqn_pong": ("DQN Pong, 4 environments", dqn_pong_sides, 600),
    "ppo_pong": ("PPO Pong, 8 environments", ppo_pong_sides, 4),
}
"""Title, both sides, and length in updates or rollouts of each run."""


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
        title, sides, length = RUNS[name]
        own, peer = sides(max(2, round(length * arguments.scale)), device=arguments.device)
        lean = peer(lean=True, optimizer="fused")
        run = Run(title, {OURS: own(), COMPILED: own(compiled=True), SB3: peer(), LEAN: lean}, ())
        report(run, measure(run, arguments.repetitions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
