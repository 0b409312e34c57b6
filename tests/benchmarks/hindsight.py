"""Compare hindsight batches of our buffer with HerReplayBuffer of Stable-Baselines3.

    python tests/benchmarks/hindsight.py

A batch has 256 steps, and four fifths of them are relabelled. Both buffers contain the same episodes of 50 steps, the
episode length of FetchReach, from one environment. Both run on one thread, draw single steps with replacement, use
goals from the rest of the episode and compute the reward again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import compare, one_thread, say, table

one_thread()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from gymnasium import spaces  # noqa: E402
from stable_baselines3 import HerReplayBuffer  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from torchrl_lightning import ExperienceBuffer, HindsightRelabel, RingStorage  # noqa: E402

BATCH, LENGTH = 256, 50
SIZES = {"observation": 10, "achieved_goal": 3, "desired_goal": 3}


class Goals(gym.Env[dict[str, Any], Any]):
    """Environment with only the spaces and the reward function, which HerReplayBuffer reads."""

    observation_space = spaces.Dict({key: spaces.Box(-np.inf, np.inf, (n,), np.float64) for key, n in SIZES.items()})
    action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -(np.linalg.norm(achieved - desired, axis=-1) > 0.05).astype(np.float32)


def steps(count: int) -> dict[str, Any]:
    """Return observations before and after each step, actions and episode ends."""
    rng = np.random.default_rng(0)
    path = {key: rng.normal(size=(count // LENGTH, LENGTH + 1, n)) for key, n in SIZES.items()}
    path["desired_goal"][:] = path["desired_goal"][:, :1]
    return {
        "now": {key: value[:, :-1].reshape(count, -1) for key, value in path.items()},
        "after": {key: value[:, 1:].reshape(count, -1) for key, value in path.items()},
        "action": rng.uniform(-1, 1, (count, 4)).astype(np.float32),
        "done": np.arange(count) % LENGTH == LENGTH - 1,
    }


def ours(data: dict[str, Any], count: int) -> ExperienceBuffer:
    now, after = ({key: torch.from_numpy(value) for key, value in data[name].items()} for name in ("now", "after"))
    done = torch.from_numpy(data["done"]).unsqueeze(1)
    reward = torch.from_numpy(Goals().compute_reward(data["after"]["achieved_goal"], data["after"]["desired_goal"], {}))
    after |= {"reward": reward.unsqueeze(1), "done": done, "truncated": done, "terminated": torch.zeros_like(done)}
    buffer = ExperienceBuffer(storage=RingStorage(count), transform=HindsightRelabel(0.8), batch_size=BATCH)
    buffer.extend(TensorDict({**now, "action": torch.from_numpy(data["action"]), "next": after}, [count]))
    return buffer


def theirs(data: dict[str, Any], count: int) -> HerReplayBuffer:
    env = DummyVecEnv([Goals])
    buffer = HerReplayBuffer(count, env.observation_space, env.action_space, env, device="cpu", n_sampled_goal=4)
    # Fill the arrays directly: a million calls of `add` would take a minute.
    for key in SIZES:
        buffer.observations[key][:, 0], buffer.next_observations[key][:, 0] = data["now"][key], data["after"][key]
    buffer.actions[:, 0], buffer.rewards[:], buffer.full = data["action"], -1.0, True
    buffer.dones[:, 0] = buffer.timeouts[:, 0] = data["done"]
    buffer.ep_start[:, 0], buffer.ep_length[:] = np.arange(count) // LENGTH * LENGTH, LENGTH
    return buffer


if __name__ == "__main__":
    for count in (10_000, 100_000, 1_000_000):
        data = steps(count)
        mine, other = ours(data, count), theirs(data, count)
        for share, hits in (
            ("ours", (mine.sample()["next", "reward"] == 0).float().mean()),
            ("theirs", (other.sample(BATCH).rewards == 0).float().mean()),
        ):
            say(f"{share}: {float(hits):.3f} of the rewards are those of a goal reached")
        samples = {"ExperienceBuffer": mine.sample, "HerReplayBuffer": lambda other=other: other.sample(BATCH)}
        say(table(f"{BATCH} of {count} steps", compare(samples), "ExperienceBuffer"))
