"""Compare the cost of a step with half of the environments in replay with the cost of a normal step.

    python tests/benchmarks/demonstrations.py [--repetitions 15] [--check]

The first environment is CartPole, one of the fastest. The second one takes 0.1 ms per step and returns small images.
``--check`` exits with 1 if replay is not cheaper than stepping.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import compare, one_thread, say, table

if __name__ == "__main__":
    one_thread()

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from torchrl_lightning import (
    Demonstration,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    GymnasiumCollector,
)
from torchrl_lightning.agents import MLPNetwork
from torchrl_lightning.agents.networks.actors import build_actor
from torchrl_lightning.environments import environment_specs, make_vector_env

NONE, HALF, NEVER = "no replay", "half of the environments replay", "replay that is never drawn"
STEPS = 64


class SlowImages(gymnasium.Env[Any, Any]):
    """Environment with small images and 0.1 ms per step."""

    observation_space = spaces.Box(0, 255, (3, 24, 24), np.uint8)
    action_space = spaces.Discrete(4)

    def __init__(self) -> None:
        self._image, self._t = np.zeros((3, 24, 24), np.uint8), 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        self._t = 0
        return self._image, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait for 0.1 ms."""
        until = time.perf_counter() + 1e-4
        while time.perf_counter() < until:
            pass
        self._t += 1
        return self._image, 0.0, False, self._t == 100, {}


class First(DemonstrationSampler):
    """Draw demonstrations for the first ``count`` environments that start an episode, then none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def draw(self, storage: DemonstrationStorage) -> Demonstration | None:
        """Return the next demonstration, or None after ``count`` draws."""
        self._left -= 1
        kept = storage.reward_demonstrations
        return kept[self._left % len(kept)] if self._left >= 0 else None


def collectors(env: str | Callable[[], gymnasium.Env[Any, Any]], num_envs: int) -> dict[str, GymnasiumCollector]:
    """Return the contenders with the same policy.

    Each demonstration is longer than the benchmark, so the share of replaying environments stays at one half.
    """
    specs = environment_specs(make_vector_env(env, 1))
    spec, length = specs.observation["observation"], 100_000 if env == "CartPole-v1" else 4000
    torch.manual_seed(0)
    actor = build_actor(specs, MLPNetwork((64, 64)))
    storage = DemonstrationStorage()
    for _ in range(4):
        steps = TensorDict({"observation": torch.zeros(length, *spec.shape, dtype=spec.dtype)}, [length])
        steps["action"] = torch.randint(specs.action.n, (length,))
        steps["next", "reward"] = torch.zeros(length, 1)
        storage.replace([*storage.reward_demonstrations, Demonstration(steps)], [])
    frames = num_envs * STEPS
    made = {NONE: GymnasiumCollector(env, actor, num_envs=num_envs, frames_per_batch=frames, seed=0)}
    for name, count in ((HALF, num_envs // 2), (NEVER, 0)):
        replay = DemonstrationReplay(storage, First(count), num_envs)
        made[name] = GymnasiumCollector(env, actor, num_envs=num_envs, frames_per_batch=frames, seed=0, replay=replay)
    return made


def main() -> int:
    """Run the comparisons and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    met = True
    for title, env, num_envs in (
        ("CartPole, 8 environments", "CartPole-v1", 8),
        ("CartPole, 32 environments", "CartPole-v1", 32),
        ("100 us a step, images, 8 environments", SlowImages, 8),
    ):
        made = collectors(env, num_envs)
        timings = compare({name: each.rollout for name, each in made.items()}, repetitions=arguments.repetitions)
        share = made[HALF].rollout()["demo", "mask"].float().mean().item()
        say(table(f"{title}, {STEPS} steps each ({share:.2f} of the steps replayed)", timings, NONE))
        median = {timing.name: timing.median for timing in timings}
        met &= median[HALF] < median[NONE]
    return int(arguments.check and not met)


if __name__ == "__main__":
    sys.exit(main())
