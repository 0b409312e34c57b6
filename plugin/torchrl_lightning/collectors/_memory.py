"""The time-major memory that one rollout is written into."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._compat import new_tensordict
from torchrl_lightning.collectors._stepper import VectorStepper
from torchrl_lightning.collectors.specs import EnvironmentSpecs
from torchrl_lightning.entries import Path, next_key, path_of

Array = NDArray[Any]
FLAGS = ("done", "terminated", "truncated")


class RolloutMemory:
    """Tensors of one rollout, ``[T, N, *F]``, with a view of every step, made once; it may serve any number of them.

    Args:
        specs: Of the environment.
        stepper: Says in which order and shapes observations come.
        steps: ``T``.
        states: Recurrent states of one step, ``[N, *state]`` each.
    """

    def __init__(
        self, specs: EnvironmentSpecs, stepper: VectorStepper, steps: int, states: Mapping[NestedKey, Tensor]
    ) -> None:
        self.steps, self.num_envs = steps, specs.num_envs
        self._entries: dict[Path, Tensor] = {}
        self._reserve(("is_init",), torch.bool, 1)
        for path in [*((name,) for name in FLAGS), ("next", "is_init")]:
            self._reserve(path, torch.bool, 1).zero_()
        self._reserve(("next", "reward"), torch.float32, 1)
        for name in FLAGS:
            self._reserve(("next", name), torch.bool, 1)
        self.trajectories = self._reserve(("collector", "traj_ids"), torch.int64).numpy()
        for key in stepper.keys:
            spec = specs.observation[key]
            for path in (path_of(key), next_key(key)):
                self._reserve(path, spec.dtype, *spec.shape)
        for key, state in states.items():
            self._reserve(path_of(key), state.dtype, *state.shape[1:])
        shapes = [space.shape or () for space in stepper.spaces]
        self.observations = self._by_step([path_of(key) for key in stepper.keys], shapes)
        self.next_observations = self._by_step([next_key(key) for key in stepper.keys], shapes)
        self.starts = self._views(("is_init",))
        self.ends: Array = self._entries["next", "done"].numpy()[..., 0]
        self.rewards = self._views(("next", "reward"))
        self.done, self.terminated, self.truncated = (self._views(("next", name)) for name in FLAGS)
        self.states = {key: self._entries[path_of(key)].unbind(0) for key in states}
        self._action_shape = stepper.action_shape
        self.outputs: dict[NestedKey, tuple[Tensor, ...]] = {}
        self.actions: list[Array] = []
        self._layout: dict[NestedKey, tuple[torch.Size, torch.dtype]] = {}
        self._written: dict[NestedKey, Tensor] = {}
        self._ready: dict[object, TensorDict] = {}

    def _reserve(self, path: Path, dtype: torch.dtype, *shape: int) -> Tensor:
        value = self._entries[path] = torch.empty(self.steps, self.num_envs, *shape, dtype=dtype)
        return value

    def _views(self, path: Path, shape: tuple[int, ...] = ()) -> list[Array]:
        # numpy's views of a step have the shape of the space, TorchRL's that of the spec ([1] for a scalar Box).
        return list(self._entries[path].numpy().reshape(self.steps, self.num_envs, *shape))

    def _by_step(self, paths: Sequence[Path], shapes: Sequence[tuple[int, ...]]) -> list[tuple[Array, ...]]:
        return list(zip(*(self._views(path, shape) for path, shape in zip(paths, shapes, strict=True)), strict=True))

    def fits(self, outputs: Mapping[NestedKey, Tensor]) -> bool:
        """Return whether memory is reserved for what the policy writes at a step."""
        layout = self._layout
        return (
            bool(layout)
            and len(layout) == len(outputs)
            and all(layout.get(key) == (value.shape, value.dtype) for key, value in outputs.items())
        )

    def reserve(self, outputs: Mapping[NestedKey, Tensor]) -> None:
        """Reserve memory for what the policy writes at each step."""
        self._layout = {key: (value.shape, value.dtype) for key, value in outputs.items()}
        self._written = {
            key: torch.empty(self.steps, *shape, dtype=dtype) for key, (shape, dtype) in self._layout.items()
        }
        self.outputs = {key: value.unbind(0) for key, value in self._written.items()}
        self.actions = list(self._written["action"].numpy().reshape(self.steps, *self._action_shape))
        self._ready.clear()

    def batch(self) -> TensorDict:
        """Return the rollout as ``[N, T]``, over this memory."""
        if None not in self._ready:
            tree = self._tree(lambda value: value.transpose(0, 1))
            self._ready[None] = _tensordict(tree, torch.Size([self.num_envs, self.steps]), (None, "time"))
        return self._ready[None]

    def rows(self, leave_out: Collection[str] = ()) -> TensorDict:
        """Return the rollout as a ring takes it, over this memory: ``[T, N]``, or ``[N]`` if it has one step.

        Args:
            leave_out: First names of entries that are not wanted.
        """
        wanted = tuple(leave_out)
        if wanted not in self._ready:
            one = self.steps == 1
            tree = self._tree((lambda value: value[0]) if one else (lambda value: value), wanted)
            shape = torch.Size([self.num_envs] if one else [self.steps, self.num_envs])
            self._ready[wanted] = _tensordict(tree, shape, None if one else ("time", None))
        return self._ready[wanted]

    def _tree(self, view: Any, leave_out: Collection[str] = ()) -> dict[str, Any]:
        entries = dict(self._entries)
        for key, value in self._written.items():
            path = path_of(key)
            if path[0] != "next" or path not in entries:  # the environment decides what follows a step
                entries[path] = value
        tree: dict[str, Any] = {}
        for path, value in entries.items():
            if path[0] in leave_out:
                continue
            branch = tree
            for name in path[:-1]:
                branch = branch.setdefault(name, {})
            branch[path[-1]] = view(value)
        return tree


def _tensordict(tree: dict[str, Any], shape: torch.Size, names: tuple[str | None, ...] | None) -> TensorDict:
    filled = {
        key: _tensordict(entry, shape, names) if isinstance(entry, dict) else entry for key, entry in tree.items()
    }
    return new_tensordict(filled, shape, names)
