"""Step batched TorchRL environments like Gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, MultiCategorical, TensorSpec, Unbounded
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_lightning._core.keys import FLAGS, REWARD
from torchrl_lightning._core.torchrl_compat import entries_of, new_tensordict
from torchrl_lightning._core.tree import Path
from torchrl_lightning.environments.copies import copied
from torchrl_lightning.environments.env_errors import env_errors
from torchrl_lightning.environments.policy_calls import expand_mask
from torchrl_lightning.environments.replay_source import Array
from torchrl_lightning.environments.specs import environment_specs, observation_leaves, torchrl_specs
from torchrl_lightning.environments.workers.threads import close_environment


class BatchVectorEnv(VectorEnv[Any, Any, Any]):
    """A batched TorchRL environment on the CPU, in mode ``SAME_STEP``; a reset can be limited to some copies.

    It calls the environment's ``_step`` and ``_reset`` directly, because TorchRL's code around these methods takes
    longer than a step of a small environment. All copies share one seed.

    Args:
        env: the environment, with one batch dimension.

    Raises:
        TypeError: no Gymnasium space exists for a spec.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, env: EnvBase) -> None:
        specs = torchrl_specs(env)
        self.env, self.num_envs = env, env.batch_size.numel()
        entries = {str(key): _space(spec) for key, spec in specs.observation.items()}
        self._is_single_entry = list(entries) == ["observation"]
        self.single_observation_space = entries["observation"] if self._is_single_entry else spaces.Dict(entries)
        self.single_action_space = _space(env.action_spec_unbatched)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._shapes = [
            (path or ("observation",), (self.num_envs, *(space.shape or ())))
            for path, _, space in observation_leaves(self.single_observation_space)
        ]
        self._state: dict[str, Any] = {}  # inputs of the next step
        self._carried_keys = {*env.observation_spec.keys(), *FLAGS}  # outputs that become inputs of the next step

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in all copies, or in the copies of ``options["reset_mask"]``."""
        mask = None if options is None else options.get("reset_mask")
        with torch.no_grad(), env_errors("reset"):
            if seed is not None:
                self.env.set_seed(int(np.atleast_1d(seed)[0]))
            if mask is None:
                self._state = _clone_entries(entries_of(self.env.reset()))
            else:
                self._reset_copies(torch.from_numpy(np.array(mask, dtype=bool))[:, None])
        return self._observation(), {}

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every copy and reset ended ones; ``final_obs`` holds the observations before the reset."""
        action = torch.from_numpy(actions).clone()  # the environment may change and keep the action
        with torch.no_grad(), env_errors("step"):
            inputs = new_tensordict({**self._state, "action": action}, self.env.batch_size)
            returned = entries_of(self.env._step(inputs))
        reward = returned[REWARD[-1]]
        terminated, done = returned["terminated"], returned["done"]
        truncated = returned.get("truncated")
        truncated = done & ~terminated if truncated is None else truncated
        self._state = {**self._state, **{name: value for name, value in returned.items() if name in self._carried_keys}}
        info = {}
        if done.any():
            # The reset may overwrite the memory of these tensors.
            info["final_obs"] = copied(self._observation())
            reward, terminated, truncated, done = reward.clone(), terminated.clone(), truncated.clone(), done.clone()
            with torch.no_grad(), env_errors("reset"):
                self._reset_copies(done.reshape(-1, 1))
        flags = (flag.reshape(-1).numpy() for flag in (terminated, truncated))
        return self._observation(), reward.reshape(-1).numpy(), *flags, info

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environment."""
        close_environment(self.env)

    def _reset_copies(self, mask: Tensor) -> None:
        """Reset the copies in ``mask``, ``[N, 1]``, and keep the state of the others."""
        inputs = new_tensordict({**self._state, "_reset": mask.clone()}, self.env.batch_size)
        previous = _clone_entries(self._state)  # the reset may overwrite the state's memory
        initial = entries_of(self.env._reset(inputs))
        merged = {name: _merge_rows(mask, value, previous[name]) for name, value in initial.items() if name != "_reset"}
        flags = {name: previous[name] & ~mask for name in FLAGS if name in previous}
        self._state = {**previous, **merged, **flags}

    def _observation(self) -> Any:
        arrays = [_leaf_at(self._state, path).numpy().reshape(shape) for path, shape in self._shapes]
        if self._is_single_entry:
            return arrays[0]
        observation: dict[str, Any] = {}
        for (path, _), array in zip(self._shapes, arrays, strict=True):
            level = observation
            for name in path[:-1]:
                level = level.setdefault(name, {})
            level[path[-1]] = array
        return observation

    def __repr__(self) -> str:
        return type(self.env).__name__


def as_batch_vector_env(env: EnvBase) -> BatchVectorEnv | None:
    """Wrap a batched TorchRL environment in :class:`BatchVectorEnv`; return None if TorchRL has to step it.

    TorchRL has to step these environments:

    * unbatched environments, a SerialEnv and a ParallelEnv
    * environments with transforms, or with their own ``step``, ``reset`` or ``maybe_reset``
    * environments on other devices than the CPU, because their observations should stay on the device
    * environments with specs that no Gymnasium space can express

    Examples:
        >>> from torchrl.envs import GymEnv
        >>> as_batch_vector_env(GymEnv("Pendulum-v1")) is None
        True
    """
    while isinstance(env, TransformedEnv) and isinstance(env.transform, Compose) and not len(env.transform):
        env = env.base_env  # a recipe without settings adds an empty Compose
    if (
        isinstance(env, TransformedEnv | BatchedEnvBase)
        or len(env.batch_size) != 1
        or (env.device is not None and env.device.type != "cpu")
        or any(getattr(type(env), name) is not getattr(EnvBase, name) for name in ("step", "reset", "maybe_reset"))
    ):
        return None
    try:
        vector_env = BatchVectorEnv(env)
    except TypeError:
        return None
    return vector_env if environment_specs(vector_env) == torchrl_specs(env) else None


def _space(spec: TensorSpec) -> spaces.Space[Any]:
    """Return the Gymnasium space of a spec; raise TypeError if no space exists."""
    if isinstance(spec, Composite):
        return spaces.Dict({str(key): _space(entry) for key, entry in spec.items()})
    shape, dtype = tuple(spec.shape), torch.empty(0, dtype=spec.dtype).numpy().dtype
    # Use the name of the exact class, because TorchRL derives some kinds of spec from others.
    kind = type(spec).__name__.removesuffix("Continuous").removesuffix("Discrete")
    if kind == Unbounded.__name__ and dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if kind == Unbounded.__name__:
        limits = np.iinfo(dtype)
        return spaces.Box(limits.min, limits.max, shape, dtype.type)
    if kind == Bounded.__name__:
        low, high = (bound.expand(shape).numpy() for bound in (spec.space.low, spec.space.high))
        return spaces.Box(low, high, shape, dtype.type)
    choice_dtype: Any = np.int64 if dtype.kind == "b" else dtype.type  # dtype of choices
    if kind == Categorical.__name__:
        if not shape:
            return spaces.Discrete(spec.space.n, dtype=choice_dtype)
        return spaces.MultiDiscrete(np.full(shape, spec.space.n), dtype=choice_dtype)
    if kind == MultiCategorical.__name__:
        return spaces.MultiDiscrete(spec.nvec.numpy(), dtype=choice_dtype)
    raise TypeError(f"{spec} has no space")


def _clone_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of an environment's entries, because the environment may overwrite them."""
    return {name: value.clone() for name, value in entries.items()}


def _leaf_at(tree: Any, path: Path) -> Tensor:
    for name in path:
        tree = tree[name]
    leaf: Tensor = tree
    return leaf


def _merge_rows(mask: Tensor, new: Any, old: Any) -> Any:
    """Return an entry ``[N, *F]`` with the rows of ``new`` if ``mask`` ``[N, 1]`` is true, else the rows of ``old``."""
    if isinstance(new, TensorDictBase):
        return new.where(mask[:, 0], old)
    return torch.where(expand_mask(mask[:, 0], new), new, old)
