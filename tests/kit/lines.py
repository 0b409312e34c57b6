"""An environment that counts its steps, demonstrations of it, and collectors and policies for it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from torchrl_lightning import Demonstration, DemonstrationSampler, DemonstrationStorage, GymnasiumCollector
from torchrl_lightning._core.moments import Moments
from torchrl_lightning.agents import MLPNetwork
from torchrl_lightning.agents.networks.actors import build_actor
from torchrl_lightning.environments import environment_specs
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer


class Line(gymnasium.Env[Any, Any]):
    """Counts its steps from ``start``, and terminates at the third."""

    def __init__(self, shape: tuple[int, ...] = (1,), start: float = 0.0) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space: Any = spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.t, self.steps, self.start = 0, 0, start

    def _shown(self) -> Any:
        return np.full(self.observation_space.shape, self.start + self.t, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t, self.steps = self.t + 1, self.steps + 1
        return self._shown(), 0.0, self.t == 3, False, {}


def line_demo(length: int = 4, first: float = 100.0, last: float | None = None, **fields: Any) -> Demonstration:
    observation = first + torch.arange(float(length))[:, None]
    steps = TensorDict({"observation": observation, "action": observation - 50}, [length])
    steps["next", "reward"] = torch.eye(length)[:, -1:]
    known = None if last is None else TensorDict({"observation": torch.tensor([last])})
    return Demonstration(steps, last_observation=known, **fields)


class Counting(Line):
    """Observes the number of steps over all its episodes."""

    def _shown(self) -> Any:
        return np.full(1, self.steps, np.float32)


class Scripted(DemonstrationSampler):
    """Draws the given indices of reward demonstrations in order, None for the environment, and repeats the last one."""

    def __init__(self, *places: int | None) -> None:
        super().__init__()
        self.places = list(places)

    def draw(self, storage: DemonstrationStorage) -> Demonstration | None:
        place = self.places.pop(0) if len(self.places) > 1 else self.places[0]
        return None if place is None else storage.reward_demonstrations[place]


def imitator() -> TensorDictModule:
    """Build a policy that copies its observation, with a log-probability of -0.5.

    The value is three times an observation above 50, and otherwise 0.
    """

    def act(observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return observation.clone(), torch.full(observation.shape[:1], -0.5), 3 * observation.where(observation > 50, 0)

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action", "action_log_prob", "state_value"])


def line_collector(replay: Any, num_envs: int = 1, steps: int = 12, policy: Any = None, **kwargs: Any) -> Any:
    made = kwargs.pop("env", Line)
    return GymnasiumCollector(
        made, policy or imitator(), num_envs=num_envs, frames_per_batch=num_envs * steps, replay=replay, **kwargs
    )


def actor_of(env: Any, network: Any = None, normalised: bool = False) -> Any:
    torch.manual_seed(0)
    specs = environment_specs(env)
    actor = build_actor(specs, network or MLPNetwork((8,)))
    if not normalised:
        return actor
    normalizer = ObservationNormalizer(specs, ["observation"], clip=10.0)
    normalizer.advance({"observation": Moments.from_samples(torch.randn(9, 1) * 30 + 40)})
    return NormalizedPolicy(actor, normalizer)


def check_memory(batch: TensorDictBase, policy: Any, key: str) -> None:
    """Assert that a recurrent state ``[N, T]`` is the state of a policy that saw exactly these observations."""
    starts = batch["is_init"][..., 0]
    state = torch.zeros_like(batch[key][:, 0])
    for t in range(batch.shape[1]):
        kept = ~starts[:, t, None, None]
        state = state * kept
        torch.testing.assert_close(batch[key][:, t] * kept, state)
        entries = {"observation": batch["observation"][:, t], key: state, "is_init": starts[:, t, None]}
        state = policy(TensorDict(entries, [len(state)]))["next", key]
        if (written := batch.get(("next", key), None)) is not None:
            torch.testing.assert_close(written[:, t], state)
