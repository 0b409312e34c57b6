"""The time-major memory that one rollout is written into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.collectors._stepper import VectorStepper
from torchrl_lightning.collectors.specs import EnvironmentSpecs
from torchrl_lightning.entries import next_key, path_of

Array = NDArray[Any]


class RolloutMemory:
    """Tensors of one rollout, ``[T, N, *F]``, with a view of every step, made once.

    What the policy reads (observations, ``is_init``, recurrent states) has one more row ``T``: the start of the next
    rollout.
    """

    def __init__(
        self, specs: EnvironmentSpecs, stepper: VectorStepper, steps: int, states: Mapping[NestedKey, Tensor]
    ) -> None:
        num_envs = specs.num_envs
        self.steps, self.num_envs = steps, num_envs
        self.states: dict[NestedKey, Tensor] = {
            key: torch.empty(steps + 1, *value.shape, dtype=value.dtype) for key, value in states.items()
        }
        self.observations: dict[NestedKey, Tensor] = {}
        self.next_observations: dict[NestedKey, Tensor] = {}
        views, next_views = [], []
        for key, space in zip(stepper.keys, stepper.spaces, strict=True):
            spec = specs.observation[key]
            root = torch.empty(steps + 1, num_envs, *spec.shape, dtype=spec.dtype)
            successor = torch.empty(steps, num_envs, *spec.shape, dtype=spec.dtype)
            self.observations[key], self.next_observations[key] = root, successor
            # numpy's views of a step have the shape of the space, TorchRL's that of the spec ([1] for a scalar Box).
            shape = (num_envs, *(space.shape or ()))
            views.append(list(root.numpy().reshape(steps + 1, *shape)))
            next_views.append(list(successor.numpy().reshape(steps, *shape)))
        self.observation_views: list[tuple[Array, ...]] = list(zip(*views, strict=True))
        self.next_observation_views: list[tuple[Array, ...]] = list(zip(*next_views, strict=True))
        self.is_init = torch.empty(steps + 1, num_envs, 1, dtype=torch.bool)
        self.reward = torch.empty(steps, num_envs, 1)
        self.terminated = torch.empty(steps, num_envs, 1, dtype=torch.bool)
        self.truncated = torch.empty(steps, num_envs, 1, dtype=torch.bool)
        self.is_init_views = list(self.is_init.numpy()[..., 0])
        self.reward_views = list(self.reward.numpy()[..., 0])
        self.terminated_views = list(self.terminated.numpy()[..., 0])
        self.truncated_views = list(self.truncated.numpy()[..., 0])
        self.state_views = {key: value.unbind(0) for key, value in self.states.items()}
        self.outputs: dict[NestedKey, Tensor] = {}
        self.output_views: list[tuple[NestedKey, tuple[Tensor, ...]]] = []

    def inputs(self) -> list[TensorDictBase]:
        """Return what the policy reads at each step: ``T`` TensorDicts ``[N]`` over this memory."""
        steps, num_envs = self.steps, self.num_envs
        never = torch.zeros(steps, num_envs, 1, dtype=torch.bool)
        root = TensorDict({"done": never, "terminated": never, "truncated": never}, [steps, num_envs])
        root["is_init"] = self.is_init[:steps]
        for key, value in (*self.observations.items(), *self.states.items()):
            root[key] = value[:steps]
        return list(root.unbind(0))

    def allocate_outputs(self, outputs: Mapping[NestedKey, tuple[torch.Size, torch.dtype]]) -> None:
        """Reserve memory for what the policy writes, given shape and dtype of one step; reuse memory that fits."""
        old, self.outputs, self.output_views = self.outputs, {}, []
        for key, (shape, dtype) in outputs.items():
            kept = old.get(key)
            fits = kept is not None and kept.shape[1:] == shape and kept.dtype == dtype
            self.outputs[key] = kept if kept is not None and fits else torch.empty(self.steps, *shape, dtype=dtype)
            self.output_views.append((key, self.outputs[key].unbind(0)))

    def begin(self, carry: RolloutMemory) -> None:
        """Start where another rollout, or the previous one in this memory, ended."""
        self.is_init[0].copy_(carry.is_init[-1])
        for key, value in self.observations.items():
            value[0].copy_(carry.observations[key][-1])
        for key, value in self.states.items():
            value[0].copy_(carry.states[key][-1])

    def finish(self, trajectories: Array) -> TensorDict:
        """Return the rollout as ``[N, T]`` over this memory."""
        never = torch.zeros(self.steps, self.num_envs, 1, dtype=torch.bool)
        entries: dict[tuple[str, ...], Tensor] = {
            ("is_init",): self.is_init[:-1],
            ("done",): never,
            ("terminated",): never.clone(),
            ("truncated",): never.clone(),
            ("next", "is_init"): never.clone(),
            ("next", "reward"): self.reward,
            ("next", "done"): self.terminated | self.truncated,
            ("next", "terminated"): self.terminated,
            ("next", "truncated"): self.truncated,
            ("collector", "traj_ids"): torch.from_numpy(trajectories),
        }
        for key, value in self.observations.items():
            entries[path_of(key)] = value[:-1]
            entries[next_key(key)] = self.next_observations[key]
        for key, value in self.states.items():
            entries[path_of(key)] = value[:-1]
        for key, value in self.outputs.items():
            path = path_of(key)
            if path[0] != "next" or path not in entries:  # the environment decides what follows a step
                entries[path] = value
        return _nested(entries, [self.num_envs, self.steps])


def trajectory_ids(first: Array, done: Array, counter: int) -> tuple[Array, Array, int]:
    """Assign numbers to the trajectories of a rollout, in the order in which they begin.

    Args:
        first: The ids that the environments are in, ``[N]``.
        done: Which steps end a trajectory, ``[T, N]``.
        counter: The next free id.

    Returns:
        The ids ``[T, N]``, those after the last step ``[N]``, and the next free id.
    """
    ends = np.cumsum(done.reshape(-1)).reshape(done.shape)
    ids = np.empty((done.shape[0] + 1, done.shape[1]), dtype=np.int64)
    ids[0] = first
    # Ids only grow within an environment, so the running maximum extends each one to the end of its trajectory.
    ids[1:] = np.where(done, counter + ends - 1, -1)
    np.maximum.accumulate(ids, axis=0, out=ids)
    return ids[:-1], ids[-1].copy(), counter + int(ends[-1, -1])


def _nested(entries: Mapping[tuple[str, ...], Tensor], shape: list[int]) -> TensorDict:
    tree: dict[str, Any] = {}
    for key, value in entries.items():
        branch = tree
        for name in key[:-1]:
            branch = branch.setdefault(name, {})
        branch[key[-1]] = value.transpose(0, 1)
    return _tensordict(tree, shape)


def _tensordict(tree: dict[str, Any], shape: list[int]) -> TensorDict:
    filled = {key: _tensordict(value, shape) if isinstance(value, dict) else value for key, value in tree.items()}
    return TensorDict(filled, shape, names=[None, "time"])
