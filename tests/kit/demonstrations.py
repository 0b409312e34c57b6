"""Small demonstrations for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded

from kit.golden import tensors
from torchrl_lightning import (
    Demonstration,
    DemonstrationStorage,
    EnvironmentSpecs,
    record_demonstrations,
    write_demonstration,
)

CARTPOLE = EnvironmentSpecs(Composite(observation=Unbounded((4,))), Categorical(2), 1)
IMAGES = EnvironmentSpecs(
    Composite(observation=Bounded(0, 255, (3, 5, 5), dtype=torch.uint8)), Categorical(3, dtype=torch.int64), 1
)


def demo(*rewards: float, **options: Any) -> Demonstration:
    """Build a demonstration with these rewards. Its observations and actions count the steps."""
    steps = torch.arange(len(rewards))
    entries = {
        "image": steps.to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 2),
        "inner": {"vector": steps[:, None].float().expand(-1, 3)},
        "action": steps % 2,
        "next": {"reward": torch.tensor(rewards, dtype=torch.float32)[:, None]},
    }
    return Demonstration(TensorDict(entries, [len(rewards)]), **options)


def rewarded(total: float = 1.0, length: int = 1, **options: Any) -> Demonstration:
    """Build a demonstration with ``length`` steps and one reward at its end."""
    return demo(*[0.0] * (length - 1), total, **options)


def names(demonstrations: tuple[Demonstration, ...]) -> list[str]:
    """Return the names of the demonstrations."""
    return [each.name for each in demonstrations]


def stored(*demonstrations: Demonstration) -> DemonstrationStorage:
    """Return a storage with these demonstrations."""
    storage = DemonstrationStorage(10)
    storage.replace(demonstrations, [])
    return storage


def golden_replay() -> tuple[dict[str, torch.Tensor], Demonstration]:
    """Return the reference's recording of a replayed demonstration, and the demonstration."""
    golden = {key: value.float() for key, value in tensors("ppod_replay_sequence").items()}
    entries = {"observation": golden["demo_observation"][:, None], "action": golden["demo_action"][:, None]}
    steps = TensorDict({**entries, "next": {"reward": golden["demo_reward"][:, None]}}, [4])
    return golden, Demonstration(steps)


def check_golden(row: TensorDictBase, golden: dict[str, torch.Tensor]) -> None:
    """Assert that the steps of one environment equal the reference's recording."""
    found = {
        "observation": row["observation"],
        "action": row["action"],
        "reward": row["next", "reward"],
        "logp_ref": row["action_log_prob"],
        "value": row["state_value"],
        "is_demo": row["demo", "mask"],
    }
    for key, value in found.items():
        assert value.flatten().tolist() == golden[key].tolist(), key


def episode(length: int = 3, total: float = 1.0, **fields: Any) -> Demonstration:
    """Build a demonstration that fits CartPole. Its observations count, and its reward is at the end."""
    steps = TensorDict({"observation": torch.arange(4.0 * length).view(length, 4)}, [length])
    steps["action"], steps["next", "reward"] = torch.arange(length) % 2, torch.eye(length)[:, -1:] * total
    return Demonstration(steps, **fields)


def saved(path: Path, *demonstrations: Demonstration) -> str:
    """Write demonstrations into a folder, with their numbers as file names; return the folder's path."""
    path.mkdir(parents=True, exist_ok=True)
    for number, demonstration in enumerate(demonstrations):
        write_demonstration(path / f"{number}.safetensors", demonstration)
    return str(path)


def coin(step: TensorDictBase) -> TensorDictBase:
    """Take one of two actions at random."""
    return step.set("action", torch.randint(2, step.batch_size))


def recorded(path: Path, env: Any = "CartPole-v1", policy: Any = coin, episodes: int = 6) -> str:
    """Write episodes of a policy into a folder; return the folder's path."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return saved(path, *record_demonstrations(env, policy, episodes, seed=0))
