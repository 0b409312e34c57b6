"""A world model as a TorchRL environment for rollouts, planners and transforms."""

from __future__ import annotations

from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs.model_based import ModelBasedEnvBase

from torchrl_lightning._core.keys import MEMBER
from torchrl_lightning._core.mixins import SignatureDescriptor
from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.tree import entry_of
from torchrl_lightning.agents.model_based.world_models import WorldModel
from torchrl_lightning.dynamics import DynamicsTargets


class WorldModelEnvironment(ModelBasedEnvBase):
    """Step a :class:`WorldModel` as an environment of any batch size.

    Observations have the keys and shapes of the real environment, but no bounds. All observations are float64 if any
    real observation is float64 or an integer, else float32. An episode ends when the world model predicts a
    termination. With ``propagation="trajectory"`` the entry ``member`` is the elite of a row, assigned by ``reset`` or
    by the first step. ``reset`` keeps the observations that it receives. Without observations, it samples them from the
    spec.

    Args:
        world_model: The world model.
        device: Device of the environment.

    Examples:
        >>> from torchrl_lightning import DynamicsTargets, GaussianEnsemble, environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> model = WorldModel(GaussianEnsemble(2, 4, 4, [8]), DynamicsTargets(specs.observation, specs.action))
        >>> env = WorldModelEnvironment(model)
        >>> env.rollout(5, tensordict=env.reset(specs.observation.zero([7])), auto_reset=False).shape
        torch.Size([7, 5])
    """

    __signature__ = SignatureDescriptor()
    world_model: WorldModel
    targets: DynamicsTargets

    def __new__(cls, world_model: WorldModel, device: torch.device | str = "cpu") -> Self:
        """Define the constructor's signature, because TorchRL hides its own signature from readers and configs."""
        return super().__new__(world_model, device=device)

    def __init__(self, world_model: WorldModel, device: torch.device | str = "cpu") -> None:
        super().__init__(world_model, device=device)
        # Do not register the targets, because the owner of their transform saves its state.
        targets = world_model.targets
        set_unregistered(self, targets=targets)
        entries = targets.split(torch.zeros(world_model.observations, dtype=targets.column_dtype)).items()
        observation = Composite({key: Unbounded(zeros.shape, dtype=zeros.dtype) for key, zeros in entries})
        self._column_dtype = targets.column_dtype
        self._keeps_member = world_model.propagation == "trajectory" and len(world_model.elites) > 1
        state = observation.clone()
        if self._keeps_member:
            state[MEMBER] = Categorical(len(world_model.elites), dtype=torch.int64)
        self.observation_spec, self.state_spec = observation.to(device), state.to(device)
        self.action_spec, self.reward_spec = targets.action_spec.to(device), Unbounded((1,), device=device)

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        keys = self.targets.observation_keys
        shape = self.batch_size if tensordict is None else tensordict.batch_size
        if tensordict is None or any(entry_of(tensordict, key) is None for key in keys):
            tensordict = self.observation_spec.expand(shape).rand()
        state = tensordict.select(*keys)
        return state.set(MEMBER, self._assign_members(shape)) if self._keeps_member else state

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        targets, shape = self.targets, tensordict.batch_size
        observation = targets.observation(tensordict).reshape(shape.numel(), -1).to(self._column_dtype)
        action = targets.action(tensordict.get("action"), shape).reshape(shape.numel(), -1)
        member = None
        if self._keeps_member:
            if MEMBER not in tensordict:  # TorchRL copies this constant state to later steps
                tensordict.set(MEMBER, self._assign_members(shape))
            member = tensordict.get(MEMBER).flatten()
        with torch.no_grad():
            next_observation, reward, terminated = self.world_model.step(observation, action, member)
        terminated = terminated.view(*shape, 1)
        entries = targets.split(next_observation.view(*shape, -1))
        flags: dict[NestedKey, Tensor] = {"terminated": terminated, "done": terminated.clone()}
        return TensorDict({**entries, **flags, "reward": reward.view(*shape, 1)}, shape, device=tensordict.device)

    def _assign_members(self, shape: torch.Size) -> Tensor:
        return self.world_model.assign_members(shape.numel()).view(shape)

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            torch.manual_seed(seed)
