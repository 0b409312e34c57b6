"""The loop over one rollout: policy, environment, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.collectors._memory import RolloutMemory
from torchrl_lightning.collectors._policy import Policy, bare_call
from torchrl_lightning.collectors._stepper import Array, VectorStepper
from torchrl_lightning.collectors.specs import EnvironmentSpecs
from torchrl_lightning.entries import next_key, path_of


class RolloutLoop:
    """The loop that fills rollout memories step by step; batches, frames and seeds are the collector's concern."""

    def __init__(
        self,
        stepper: VectorStepper,
        specs: EnvironmentSpecs,
        policy: Policy | None,
        states: Mapping[NestedKey, Tensor],
        clip_actions: bool = False,
    ) -> None:
        if clip_actions and stepper.bounds is None:
            raise ValueError(f"clip_actions=True needs a Box of actions, got {stepper.env.single_action_space}.")
        self.stepper, self.specs, self.policy, self.states = stepper, specs, policy, dict(states)
        self.clip_actions = clip_actions
        self._action_spec = specs.action.expand(specs.num_envs, *specs.action.shape)

    def reset(self, memory: RolloutMemory, seeds: Sequence[int] | None) -> None:
        """Start the rollout with a new episode in every environment."""
        for source, target in zip(self.stepper.reset(seeds), memory.observation_views[0], strict=True):
            np.copyto(target, source)
        memory.is_init[0] = True
        for key, value in self.states.items():
            memory.states[key][0].copy_(value)

    def steps(self, memory: RolloutMemory, device: torch.device, random: bool = False) -> Iterator[int]:
        """Fill a memory whose first row is set, and yield the index of each completed step.

        Raises:
            KeyError: The policy does not write ``action`` or the next value of a recurrent state.
            TypeError: The policy returns something other than a TensorDict.
            ValueError: Actions have the wrong shape or are NaN.
        """
        bare = None if random else bare_call(self.policy)
        policy: Any = self._draw if random or self.policy is None else bare or self.policy
        move = device.type != "cpu"
        actions: list[Array] = []
        states = [] if random else [(view, next_key(key), key) for key, view in memory.state_views.items()]
        for t, step in enumerate(memory.inputs()):
            given = step.to(device) if move else step
            if t:
                written = policy(given)
                for key, view in memory.output_views:
                    value = written.get(key)
                    if value is None:
                        raise KeyError(f"The policy wrote {key!r} at the first step of a rollout, but not at step {t}.")
                    view[t].copy_(value)
            else:
                actions = self._first_step(policy, given, memory, [key for _, key, _ in states], bare is not None)
                outputs = dict(memory.output_views)
            for view, key, _ in states:
                view[t + 1].copy_(outputs[key][t])
            action = actions[t]
            if action.dtype.kind == "f" and np.isnan(action).any():
                raise ValueError(
                    f"The policy chose NaN actions at step {t} of the rollout in environments "
                    f"{np.flatnonzero(np.isnan(action.reshape(len(action), -1)).any(1)).tolist()}: "
                    "its weights or its inputs are not finite. Look at the learning rate and the gradient norm."
                )
            self._step(memory, t, action)
            if not random and memory.is_init_views[t + 1].any():
                started = memory.is_init[t + 1, :, 0]
                for view, _, name in states:
                    view[t + 1][started] = self.states[name][started]
            yield t
        if random:
            self._hold_states(memory)

    def _step(self, memory: RolloutMemory, t: int, action: Array) -> None:
        stepper = self.stepper
        if action.dtype != stepper.action_dtype:
            action = action.astype(stepper.action_dtype)
        if self.clip_actions and stepper.bounds is not None:
            action = np.clip(action, *stepper.bounds)
        leaves, memory.reward_views[t][:], terminated, truncated, info = stepper.step(action)
        memory.terminated_views[t][:], memory.truncated_views[t][:] = terminated, truncated
        done = np.logical_or(terminated, truncated, out=memory.is_init_views[t + 1])
        successor = memory.next_observation_views[t]
        for source, target in zip(leaves, successor, strict=True):
            np.copyto(target, source)
        if done.any():
            leaves, finals = stepper.finish(done, leaves, info)
            for index, final in finals:
                for target, source in zip(successor, final, strict=True):
                    target[index] = source
        for source, target in zip(leaves, memory.observation_views[t + 1], strict=True):
            np.copyto(target, source)

    def _draw(self, step: TensorDictBase) -> TensorDictBase:
        return step.set("action", self._action_spec.rand())

    def _first_step(
        self, policy: Any, step: TensorDictBase, memory: RolloutMemory, next_states: Sequence[NestedKey], bare: bool
    ) -> list[Array]:
        """Call the policy for the first time, find out what it writes, and reserve memory for it."""
        before = {} if bare else dict(step.items(include_nested=True, leaves_only=True))
        written = policy(step)
        outputs = check_outputs(dict(written), next_states) if bare else policy_outputs(before, written, next_states)
        action = outputs["action"]
        expected = tuple(self._action_spec.shape)
        if tuple(action.shape) != expected:
            raise ValueError(
                f"The policy writes actions of shape {tuple(action.shape)}, but the environment takes {expected}: "
                f"{self.specs.action}. Discrete actions are integers here, not one-hot vectors "
                "(torch.distributions.Categorical, or TorchRL's categorical_action_encoding=True)."
            )
        memory.allocate_outputs({key: (value.shape, value.dtype) for key, value in outputs.items()})
        for key, view in memory.output_views:
            view[0].copy_(outputs[key])
        return list(memory.outputs["action"].numpy().reshape(memory.steps, *self.stepper.action_shape))

    def _hold_states(self, memory: RolloutMemory) -> None:
        # Without a policy the recurrent states keep their initial values, and the batch still has its usual keys.
        for key, value in self.states.items():
            memory.states[key][:] = value
            memory.outputs[next_key(key)] = memory.states[key][:-1].clone()


def policy_outputs(
    before: Mapping[NestedKey, Tensor], written: object, next_states: Sequence[NestedKey] = ()
) -> dict[NestedKey, Tensor]:
    """List what a policy wrote, without private keys (those with a leading underscore).

    Raises:
        KeyError: ``action`` or the next value of a recurrent state is missing.
        TypeError: The result is not a TensorDict, or has entries that are not tensors.
    """
    if not isinstance(written, TensorDictBase):
        raise TypeError(
            f"The policy must return a TensorDict, got {type(written).__name__}; wrap it in "
            "tensordict.nn.TensorDictModule(policy, in_keys=['observation'], out_keys=['action'])."
        )
    outputs: dict[NestedKey, Tensor] = {}
    for raw, value in written.items(include_nested=True, leaves_only=True):
        key = unravel_key(raw)
        if before.get(key) is value or any(name.startswith("_") for name in path_of(key)):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"The policy wrote {key!r} as {type(value).__name__}; only tensors can be stored.")
        outputs[key] = value
    return check_outputs(outputs, next_states)


def check_outputs(outputs: dict[NestedKey, Tensor], next_states: Sequence[NestedKey] = ()) -> dict[NestedKey, Tensor]:
    """Refuse what a policy wrote if ``action`` or the next value of a recurrent state is missing.

    Raises:
        KeyError: It is.
    """
    missing = [key for key in ("action", *next_states) if key not in outputs]
    if missing:
        raise KeyError(
            f"The policy does not write {', '.join(map(repr, missing))}; it writes "
            f"{', '.join(map(repr, outputs)) or 'nothing'}. Name it in the policy's out_keys."
        )
    return outputs
