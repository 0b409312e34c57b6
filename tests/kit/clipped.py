"""An environment that rejects actions outside its Box, and a policy that acts outside it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Independent, Normal
from torchrl.modules import ProbabilisticActor, ValueOperator

from kit.actor_critic import TinyActorCritic

SPACES = {
    "float32": spaces.Box(-1, 1, (2,), np.float32),
    "float16": spaces.Box(-2, 3, (2,), np.float16),
    "float64": spaces.Box(0.1, 0.3, (2,), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "one side": spaces.Box(np.array([-np.inf, 0.1]), np.array([0.3, np.inf]), dtype=np.float64),
}


class Strict(gymnasium.Env[Any, Any]):
    """Raises an error if an action is outside its space. Episodes have three steps."""

    observation_space = spaces.Box(-9, 9, (3,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, action_space: Any = SPACES["float32"], render_mode: str | None = None) -> None:
        self.action_space, self.render_mode = action_space, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.normal(size=3).astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return self.np_random.normal(size=3).astype(np.float32), 1.0, False, self.t >= 3, {}

    def render(self) -> Any:
        return np.zeros((16, 16, 3), np.uint8)


class FarActorCritic(TinyActorCritic):
    """A Gaussian policy without bounds. Its actions are far outside every space above."""

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        specs = self.trainer.datamodule.specs  # type: ignore[attr-defined]
        size, actions = specs.observation["observation"].shape[-1], specs.action.shape[-1]
        layer = nn.Linear(size, 2 * actions)
        nn.init.zeros_(layer.weight)
        with torch.no_grad():
            layer.bias.copy_(torch.tensor([50.0, -50.0, 0.0, 0.0] if actions == 2 else [50.0, 0.0]))
        network = TensorDictModule(nn.Sequential(layer, NormalParamExtractor()), ["observation"], ["loc", "scale"])
        self.policy = ProbabilisticActor(
            network,
            in_keys=["loc", "scale"],
            distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1),
            return_log_prob=True,
            log_prob_key="action_log_prob",
        )
        self.critic = ValueOperator(nn.Linear(size, 1))
