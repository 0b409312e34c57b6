"""Rollouts, critics and brute-force estimates for several tests."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer
from torchrl.modules import ProbabilisticActor

from torchrl_lightning import MinibatchSampler, RolloutStorage, RolloutWriter


def make_rollout(steps: int = 5, envs: int = 3, seed: int = 0, **extra: Any) -> TensorDict:
    """Build a rollout ``[N, T]`` named ``(None, "time")`` with time-major memory; its observations count the steps."""
    rng = torch.Generator().manual_seed(seed)
    done = torch.rand(steps, envs, 1, generator=rng) < 0.3
    terminated = done & (torch.rand(steps, envs, 1, generator=rng) < 0.5)
    count = torch.arange(steps * envs, dtype=torch.float32).view(steps, envs, 1)
    entries: dict[str, Any] = {
        "observation": count,
        "action": torch.randint(0, 2, (steps, envs), generator=rng),
        "action_log_prob": -torch.rand(steps, envs, generator=rng),
        "is_init": torch.cat((torch.ones(1, envs, 1, dtype=torch.bool), done[:-1])),
        "next": {
            "observation": count + 0.5,
            "reward": torch.randn(steps, envs, 1, generator=rng),
            "done": done,
            "terminated": terminated,
            "truncated": done & ~terminated,
        },
        ("collector", "traj_ids"): torch.zeros(steps, envs, dtype=torch.int64),
    }
    major = TensorDict({}, [steps, envs])
    for key, value in {**entries, **extra}.items():
        major.set(key, value if isinstance(value, Tensor) else TensorDict(value, [steps, envs]))
    data = major.transpose(0, 1)
    data.names = [None, "time"]
    return data


def intrinsic(**settings: Any) -> TensorDict:
    """Build a rollout with intrinsic rewards."""
    data = make_rollout(**settings)
    data["next", "intrinsic_reward"] = torch.rand(*data.shape, 1, generator=torch.Generator().manual_seed(5))
    return data


def transition(t: int = 0, envs: int = 2, **changes: Any) -> dict[str, Any]:
    """Build step ``t`` of some environments with the documented names, without an end."""
    sample = {
        "Observation": torch.full((envs, 1), float(t)),
        "NextObservation": torch.full((envs, 1), float(t + 1)),
        "Action": torch.zeros(envs, dtype=torch.int64),
        "Reward": torch.ones(envs, 1),
        "LogProbability": torch.zeros(envs, 1),
        "Done": torch.zeros(envs, 1),
    }
    return {**sample, **changes}


class Recorder(nn.Module):
    """Computes ``V = scale * observation`` for each scale, and stores its inputs."""

    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.scales = scales
        self.seen: list[Tensor] = []

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        self.seen.append(observation)
        return tuple(scale * observation for scale in self.scales)


def make_critic(out: Any = "state_value", scale: float = 0.1, **others: float) -> TensorDictModule:
    """Build a critic that writes ``out``, and further entries with their own scales."""
    return TensorDictModule(Recorder(scale, *others.values()), in_keys=["observation"], out_keys=[out, *others])


def both_values() -> TensorDictModule:
    return make_critic(intrinsic_state_value=0.3)


def holding(buffer: Any, data: Any = None) -> Any:
    """Write a rollout; return the buffer."""
    buffer.insert_data_slice(make_rollout() if data is None else data)
    return buffer


def estimated(buffer: Any, data: Any = None) -> Any:
    """Write a rollout and estimate it; return the buffer."""
    holding(buffer, data).before_gradients()
    return buffer


def torchrl_buffer(
    size: int = 5, sampler: Any = None, time_dim: int | None = None, batch_size: int = 4, **settings: Any
) -> Any:
    """Build TorchRL's own buffer over our storage, writer and, by default, sampler."""
    parts = {
        "storage": RolloutStorage(size),
        "writer": RolloutWriter(time_dim),
        "sampler": sampler or MinibatchSampler(),
    }
    return TensorDictReplayBuffer(**parts, dim_extend=0, batch_size=batch_size, **settings)


def categorical_actor(network: Any, **options: Any) -> ProbabilisticActor:
    """Build an actor for discrete actions. ``network`` returns the logits, or is a module that writes them."""
    if not isinstance(network, TensorDictModuleBase):
        network = TensorDictModule(network, in_keys=["observation"], out_keys=["logits"])
    kind = torch.distributions.Categorical
    return ProbabilisticActor(network, in_keys=["logits"], distribution_class=kind, return_log_prob=True, **options)


def linear_actor(weight: float = 0.3) -> ProbabilisticActor:
    """Build an actor for two actions. The second one's logit is ``weight`` times the observation."""
    net = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(net.weight)
    net.weight.data[1] = weight
    return categorical_actor(net)


def brute_gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, lmbda: float
) -> Tensor:
    advantage, last = torch.zeros_like(reward), torch.zeros_like(reward[0])
    for t in reversed(range(reward.shape[0])):
        delta = reward[t] + gamma * (~terminated[t]) * next_value[t] - value[t]
        last = delta + gamma * lmbda * (~done[t]) * last
        advantage[t] = last
    return advantage


def brute_returns(reward: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float) -> Tensor:
    out, last = torch.zeros_like(reward), next_value[-1]
    for t in reversed(range(reward.shape[0])):
        last = reward[t] + gamma * torch.where(done[t], (~terminated[t]) * next_value[t], last)
        if t == reward.shape[0] - 1:
            last = reward[t] + gamma * (~terminated[t]) * next_value[t]
        out[t] = last
    return out
