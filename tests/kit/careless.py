"""Environments that reuse and overwrite their returned memory and keep their actions, and twins that do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import EnvBase

from kit.states import differences, plain

FLOATS = spaces.Box(-1e6, 1e6, (2,), np.float32)
OBSERVATIONS: dict[str, Any] = {
    "box": FLOATS,
    "float64": spaces.Box(-1e6, 1e6, (2,), np.float64),
    "scalar": spaces.Box(-1e6, 1e6, (), np.float32),
    "image": spaces.Box(0, 255, (5, 4), np.uint8),
    "color image": spaces.Box(0, 255, (5, 5, 3), np.uint8),
    "discrete": spaces.Discrete(90),
    "multi-discrete": spaces.MultiDiscrete([90, 80]),
    "multi-binary": spaces.MultiBinary(5),
    "dict": spaces.Dict(
        vector=FLOATS,
        image=spaces.Box(0, 255, (5, 4), np.uint8),
        inner=spaces.Dict(count=spaces.Discrete(90), bits=spaces.MultiBinary(3)),
    ),
}
ACTIONS: dict[str, Any] = {
    "discrete": spaces.Discrete(3),
    "shifted": spaces.Discrete(3, start=2),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "shifted multi-discrete": spaces.MultiDiscrete([3, 4], start=[1, 2]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "float64": spaces.Box(-1, 1, (2,), np.float64),
    "float16": spaces.Box(-1, 1, (2,), np.float16),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "int32": spaces.Box(-3, 3, (2,), np.int32),
    "matrix": spaces.Box(-1, 1, (2, 3), np.float32),
}


def _zeros(space: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _zeros(entry) for name, entry in space.items()}
    return np.zeros(space.shape, space.dtype)


def _put(target: Any, value: float) -> None:
    """Write a number into all entries. Integer entries get 2 instead of NaN, bits get the lowest bits of the number."""
    if isinstance(target, dict):
        for entry in target.values():
            _put(entry, value)
    elif target.dtype.kind == "f":
        target[...] = value
    else:
        number = 2 if np.isnan(value) else int(value)
        is_bits = target.dtype == np.int8 and target.ndim
        target[...] = number >> np.arange(target.size).reshape(target.shape) & 1 if is_bits else number % 80


def _filled(shown: Any, arrays: Any) -> Any:
    """Put arrays into the dicts that an earlier call returned."""
    if not isinstance(arrays, dict):
        return arrays
    before = dict(shown)
    shown.clear()
    for name, entry in arrays.items():
        shown[name] = _filled(before[name] if isinstance(before.get(name), dict) else {}, entry)
    return shown


class Careless(gymnasium.Env[Any, Any]):
    """Observes one number in every entry; it follows from the episode, the step and all actions.

    Each call first overwrites all memory that earlier calls have returned. Each action is scaled in place and kept.
    Kept actions must not change. Episodes last 3 to 5 steps; they terminate and are truncated in turns.

    Args:
        careless: False makes the twin, which always returns new memory and does not change actions.
        buffers: The number of memories that take turns.
        observation: One of ``OBSERVATIONS``.
        action: One of ``ACTIONS``.
        masked: Writes an action mask into the info.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(
        self,
        careless: bool = True,
        buffers: int = 1,
        observation: str = "box",
        action: str = "discrete",
        masked: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self.careless, self.masked, self.render_mode = careless, masked, render_mode
        self.memories = [self._memory() for _ in range(buffers)]
        self.episode, self.t, self.total, self.calls = -1, 0, 0.0, 0
        self.kept: list[tuple[Any, Any]] = []

    def _memory(self) -> dict[str, Any]:
        return {
            "arrays": _zeros(self.observation_space),
            "observation": {},  # the returned dict, which the caller may change
            "reward": np.zeros((), np.float64),
            "terminated": np.zeros((), bool),
            "truncated": np.zeros((), bool),
            "info": {},
            "mask": np.zeros(3, np.int8),
            "success": np.zeros((), bool),
            "list": [0.0],
        }

    def _shown(self, reward: float = 0.0, terminated: bool = False, truncated: bool = False) -> dict[str, Any]:
        self.calls += 1
        if self.careless:
            for memory in self.memories:
                _put(memory["arrays"], np.nan)
                memory["reward"][...], memory["list"][0] = np.nan, np.nan
                memory["terminated"][...] = memory["truncated"][...] = memory["success"][...] = self.calls % 2
                memory["mask"][...] = 0
                memory["info"].clear()
            memory = self.memories[self.calls % len(self.memories)]
        else:
            memory = self._memory()
        _put(memory["arrays"], 20 * (self.episode % 3) + 3 * self.t + round(8 * self.total) % 5)
        memory["observation"] = _filled(memory["observation"], memory["arrays"])
        memory["reward"][...] = reward
        memory["terminated"][...], memory["truncated"][...] = terminated, truncated
        memory["success"][...], memory["list"][0] = self.episode % 3 == 0, self.total
        memory["mask"][...] = 1
        memory["mask"][(self.episode + self.t) % 3] = 0
        memory["info"].update(is_success=memory["success"], seen=memory["list"], deep={"t": memory["reward"]})
        if self.masked:
            memory["info"]["action_mask"] = memory["mask"]
        return memory

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.episode = seed % 7
        self.episode, self.t, self.total = self.episode + 1, 0, 0.0
        memory = self._shown()
        return memory["observation"], memory["info"]

    def step(self, action: Any) -> Any:
        taken = float(np.sum(action, dtype=np.float64))
        self.t, self.total = self.t + 1, self.total + taken
        self._keep(action)
        is_over = self.t >= 3 + self.episode % 3
        cut = self.episode % 2 == 0
        memory = self._shown(taken + self.t, is_over and not cut, is_over and cut)
        return tuple(memory[name] for name in ("observation", "reward", "terminated", "truncated", "info"))

    def _keep(self, action: Any) -> None:
        for array, value in self.kept:
            if not np.array_equal(array, value):
                raise AssertionError(f"an action that was kept has changed from {value} to {array}")
            if isinstance(action, np.ndarray) and np.shares_memory(action, array):
                raise AssertionError("the same memory was given twice")
        if self.careless and isinstance(action, np.ndarray):
            action[...] = action * 3 + 1
            self.kept = [*self.kept[-20:], (action, action.copy())]

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8)


class CarelessVector(VectorEnv[Any, Any, Any]):
    """Copies of one counter in a single array that all calls return, without separate environments.

    Args:
        mode: The autoreset mode.
        final: The memory of the final observations in mode ``SAME_STEP``: ``"own"`` memory, the ``"shared"`` array, its
            ``"rows"``, or a ``"late"`` copy that is made after the reset.
        careless: False returns new memory.
        num_envs: The number of copies.
    """

    def __init__(
        self,
        mode: AutoresetMode = AutoresetMode.SAME_STEP,
        final: str = "own",
        careless: bool = True,
        num_envs: int = 2,
    ) -> None:
        self.metadata, self.mode, self.final = {"autoreset_mode": mode}, mode, final
        self.num_envs, self.careless = num_envs, careless
        self.single_observation_space, self.single_action_space = FLOATS, ACTIONS["box"]
        self.observation_space = batch_space(FLOATS, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.state, self.episodes = np.zeros((num_envs, 2), np.float32), np.zeros(num_envs, int)
        self.shown, self.rewards = np.zeros((num_envs, 2), np.float32), np.zeros(num_envs)
        self.flags, self.success = np.zeros((2, num_envs), bool), np.zeros(num_envs, bool)
        self.info: dict[str, Any] = {}
        self.kept: list[tuple[Any, Any]] = []

    def _begin(self, which: Any) -> None:
        self.episodes[which] += 1
        self.state[which] = np.stack([10.0 * self.episodes, np.zeros(self.num_envs)], -1)[which]

    def _returned(self, array: Any) -> Any:
        return array if self.careless else array.copy()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._begin(np.ones(self.num_envs, bool) if options is None else options["reset_mask"])
        self.shown[...] = self.state
        self.rewards[...], self.flags[...], self.success[...] = -77, True, ~self.success
        self.info.clear()
        return self._returned(self.shown), self.info

    def step(self, actions: Any) -> Any:
        for array, value in self.kept:
            assert np.array_equal(array, value)
            assert not np.shares_memory(array, actions)
        self.state[:, 1] += 1 + actions.sum(1)
        over = self.episodes % 2 + 3 <= np.ceil(np.abs(self.state[:, 1]))
        self.rewards[...] = actions.sum(1)
        self.flags[...] = over & (self.episodes % 2 == 0), over & (self.episodes % 2 == 1)
        self.success[...] = self.episodes % 3 == 0
        self.info.clear()
        self.info["is_success"] = self.success
        if self.careless:
            actions[...] = 99
            self.kept.append((actions, actions.copy()))
        self.shown[...] = self.state
        if self.mode is AutoresetMode.SAME_STEP and over.any():
            before = self.shown.copy()
            self._begin(over)
            self.shown[...] = self.state
            self.info["final_info"] = {"is_success": self.success}
            rows = np.full(self.num_envs, None, object)
            source = {"own": before, "shared": self.shown, "rows": self.shown, "late": self.shown.copy()}[self.final]
            for i in np.flatnonzero(over):
                rows[i] = source[i]
            self.info["final_obs"] = source if self.final == "shared" else rows
        flags = [self._returned(flag) for flag in self.flags]
        return self._returned(self.shown), self._returned(self.rewards), *flags, self.info


class CarelessTorchRL(EnvBase):
    """A TorchRL environment, batched or not, that writes everything into the same tensors and keeps its actions."""

    def __init__(self, batch_size: Any = (), careless: bool = True, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(batch_size=torch.Size(batch_size))
        shape = self.batch_size
        self.observation_spec = Composite(
            observation=Unbounded((*shape, 2)),
            inner=Composite(count=CategoricalSpec(500, shape=shape), shape=shape),
            shape=shape,
        )
        self.action_spec = Bounded(-1.0, 1.0, (*shape, 2), dtype=dtype)
        self.reward_spec = Unbounded((*shape, 1))
        flag = CategoricalSpec(2, shape=(*shape, 1), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape)
        self.careless = careless
        self.steps, self.episodes = torch.zeros(*shape, 1), torch.zeros(*shape, 1)
        self.total = torch.zeros(*shape, 1)
        self.memory: dict[str, torch.Tensor] = {
            "observation": torch.zeros(*shape, 2),
            "count": torch.zeros(shape, dtype=torch.int64),
            "reward": torch.zeros(*shape, 1),
            **{name: torch.zeros(*shape, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")},
        }
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _set_seed(self, seed: int | None) -> None:
        self.episodes.zero_()

    def _spoil(self, given: Any) -> None:
        """Overwrite all returned tensors and the passed ones."""
        if self.careless:
            entries = [*self.memory.values(), *([] if given is None else given.values(True, True))]
            for value in entries:
                value.fill_(1 if value.dtype == torch.bool else 99)

    def _shown(self, **entries: torch.Tensor) -> TensorDict:
        known = {
            "observation": torch.cat([10 * self.episodes + self.steps, self.total], -1),
            "count": (self.episodes * 10 + self.steps).long().squeeze(-1),
            **entries,
        }
        if self.careless:
            for name, value in known.items():
                self.memory[name].copy_(value)
            known = {name: self.memory[name] for name in known}
        count = known.pop("count")
        return TensorDict({**known, "inner": TensorDict({"count": count}, self.batch_size)}, self.batch_size)

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        which = torch.ones(*self.batch_size, 1, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict:
            which = tensordict["_reset"].reshape(which.shape).clone()
        self._spoil(tensordict)
        self.episodes = torch.where(which, self.episodes + 1, self.episodes)
        self.steps, self.total = (torch.where(which, 0.0, value) for value in (self.steps, self.total))
        return self._shown()

    def _step(self, tensordict: Any) -> TensorDict:
        action = tensordict["action"]
        for kept, value in self.kept:
            assert torch.equal(kept, value), "an action that was kept has changed"
            assert kept.data_ptr() != action.data_ptr(), "the same memory was given twice"
        taken = action.float().sum(-1, keepdim=True)
        self._spoil(tensordict)
        if self.careless:
            self.kept = [*self.kept[-20:], (action, action.clone())]
        self.steps, self.total = self.steps + 1, self.total + taken
        over = self.steps >= 3 + self.episodes % 2
        cut = self.episodes % 3 == 0
        ends = {"terminated": over & ~cut, "truncated": over & cut, "done": over}
        return self._shown(reward=taken + self.steps, **ends)


def pair(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Callable[[], Any]]:
    """Return picklable factories of a careless environment and of its twin."""
    return [partial(kind, *args, **kwargs, careless=careless) for careless in (True, False)]


def assert_alike(careless: Any, tidy: Any) -> None:
    """Compare rollouts bit for bit. They must have more than four ends, and steps without an end."""
    assert not differences(plain(careless), plain(tidy))
    done = tidy["next", "done"]
    assert done.sum() > 4
    assert not done.all()
