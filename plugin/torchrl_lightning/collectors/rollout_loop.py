"""The loop of one rollout: call the policy, step the environment, write time-major memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import ACTION_MASK, FLAGS, LOG_PROB, VALID
from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.tree import Path, join, next_key, path_of, raw_items, tensordict_of
from torchrl_lightning.collectors.vector_stepper import VectorStepper
from torchrl_lightning.environments.actions import check_clipping, half_bounded_sampler
from torchrl_lightning.environments.copies import copied
from torchrl_lightning.environments.env_errors import EnvironmentFault, position
from torchrl_lightning.environments.masks import action_mask
from torchrl_lightning.environments.observation_limits import expected_magnitude, magnitude_limits
from torchrl_lightning.environments.policy_calls import (
    Outputs,
    Policy,
    bound_call,
    default_outputs,
    fast_call,
    policy_outputs,
)
from torchrl_lightning.environments.replay_source import Array, ReplayedRows, ReplaySource, ReplayTracker
from torchrl_lightning.environments.specs import EnvironmentSpecs


class RolloutLoop:
    """Fill rollout memories step by step; the collector counts batches and frames and sets seeds.

    One TensorDict ``[N]`` holds the policy's inputs. It is kept after a rollout, so that the next rollout continues.
    """

    def __init__(
        self,
        stepper: VectorStepper,
        specs: EnvironmentSpecs,
        policy: Policy | None,
        states: Mapping[NestedKey, Tensor],
        replay: ReplaySource | None = None,
    ) -> None:
        check_clipping(specs.action_format, stepper.env.single_action_space)
        self.stepper, self.specs, self.policy, self.states = stepper, specs, policy, dict(states)
        self._form = specs.action_format
        self.limits = magnitude_limits(policy, specs.observation)
        num_envs = specs.num_envs
        self._replay = None if replay is None else ReplayTracker(replay, num_envs)
        self._action_shape = (num_envs, *specs.action.shape)
        sample = half_bounded_sampler(specs.action, [num_envs])
        self._draw: Callable[[], Tensor] = sample or specs.action.expand(*self._action_shape).rand
        flags = {name: torch.zeros(num_envs, 1, dtype=torch.bool) for name in (*FLAGS, "is_init")}
        self._step = TensorDict(flags, [num_envs])
        self._starts = flags["is_init"].numpy()[:, 0]
        self._mask = action_mask(specs.observation, specs.action)
        self.info: dict[str, Any] = {}  # info of the latest step
        self._observations: list[Array] = []
        for key, space in zip(stepper.keys, stepper.spaces, strict=True):
            spec = specs.observation[key]
            value = torch.zeros(num_envs, *spec.shape, dtype=spec.dtype)
            self._step[key] = value
            self._observations.append(value.numpy().reshape(num_envs, *(space.shape or ())))
        self.recurrent = {key: value.clone() for key, value in self.states.items()}  # recurrent states before each step
        for key, value in self.recurrent.items():
            self._step[key] = value
        self._next_states = {key: join((), next_key(key)) for key in self.states}
        # A function bound to the tensors of the step, which keep their memory.
        self._bound_call: Callable[[], Outputs] | None = None
        self._default_outputs: dict[NestedKey, Tensor] | None = None
        self._is_new = True  # the first rollout gets additional checks
        self._is_nested = any(isinstance(value, TensorDictBase) for value in raw_items(self._step).values())

    def reset(self, seeds: list[int] | None, resumed: Mapping[NestedKey, Tensor] | None = None) -> Array:
        """Begin an episode in every environment, and return the mask of the new episodes.

        If ``resumed`` is given, running replays continue, and ``resumed`` has the recurrent states of their
        environments.
        """
        for source, target in zip(self.stepper.reset(seeds), self._observations, strict=True):
            np.copyto(target, source)
        self._starts[:] = True
        for key, value in self.states.items():
            self.recurrent[key].copy_(value)
        if resumed is not None and self._replay is not None:
            continued = self._replay.resume()
            self._starts[continued] = False
            for key, value in resumed.items():
                self.recurrent[key][continued] = value[continued]
        return self._starts

    def steps(
        self, memory: RolloutMemory, device: torch.device, random: bool = False, first_step: int = 0
    ) -> Iterator[int]:
        """Fill a memory, and yield the index of each completed step; ``first_step`` is the number of earlier steps.

        Raise an error if an action is missing, NaN or of the wrong shape, if the policy returns no TensorDict, or if
        the environment returns invalid values.
        """
        completed = 0
        try:
            for t in self._steps(memory, device, random):
                completed = t + 1
                yield t
        except EnvironmentFault as fault:
            if fault.__cause__ is not None:  # the cause may be an invalid value that the environment returned earlier
                memory.check_part(completed, first_step)
            fault.with_prefix(f"At step {first_step + completed} of the rollout, ")
            raise
        except Exception:
            # The policy may have failed because of an invalid observation.
            memory.check_part(completed, first_step)
            observations = zip(self.stepper.keys, self._observations, strict=True)
            named_values = [
                (f"observation {key!r}", values[None], self.limits.get(key, math.inf)) for key, values in observations
            ]
            _check_finite(named_values, first_step + completed)
            raise
        finally:
            position.environment = position.step = None
        if self._is_new:
            memory.check_part(memory.steps, first_step)
            self._is_new = False
        memory.check(first_step)

    def _steps(self, memory: RolloutMemory, device: torch.device, random: bool) -> Iterator[int]:
        act = self._random_actor(device) if random or self.policy is None else self._actor(device)
        if self._replay is not None:
            memory.clear_marks()
        for t in range(memory.steps):
            position.step = t
            replayed = None if self._replay is None else self._replay.next_rows(self._starts)
            if replayed is not None:
                self._write_replayed_observations(self._observations, replayed.observation)
            if self._mask is not None:
                self._mask.check(self._step[ACTION_MASK])
            for source, target in zip(self._observations, memory.observations[t], strict=True):
                np.copyto(target, source)
            memory.starts[t][:] = self._starts
            for key, state in self.recurrent.items():
                memory.states[key][t].copy_(state)
            outputs = act()
            if not t and not memory.fits(outputs):
                self._check_outputs(outputs)
                memory.reserve(outputs)
            for key, views in memory.outputs.items():
                value = outputs.get(key)
                if value is None:
                    raise KeyError(f"The policy wrote {key!r} at the first step of a rollout, but not at step {t}.")
                views[t].copy_(value)
            if replayed is not None:
                self._write_replayed_actions(memory, t, replayed, device)
            if self._mask is not None:
                self._mask.check_actions(torch.from_numpy(memory.actions[t]), self._step[ACTION_MASK], t)
            for key, state in self.recurrent.items():
                state.copy_(outputs[self._next_states[key]])
            self._advance(memory, t, replayed)
            if self.recurrent and self._starts.any():
                for key, state in self.recurrent.items():
                    state[self._starts] = self.states[key][self._starts]
            yield t

    def _actor(self, device: torch.device) -> Callable[[], Outputs]:
        policy, step, call = self.policy, self._step, fast_call(self.policy)
        on_accelerator = device.type != "cpu"
        if call is not None and on_accelerator:
            return lambda: call(step.to(device))
        if call is not None:
            if self._bound_call is None:
                self._bound_call = bound_call(policy, step)
            assert self._bound_call is not None
            return self._bound_call
        assert policy is not None

        def call_policy() -> Outputs:
            # The policy writes its outputs into its input. Copy the input, so that the next step does not contain them.
            if on_accelerator:
                inputs: TensorDictBase = step.to(device)
            elif self._is_nested:
                inputs = step.copy()
            else:
                inputs = new_tensordict(raw_items(step), step.batch_size)
            return policy_outputs(policy, inputs)

        return call_policy

    def _random_actor(self, device: torch.device) -> Callable[[], Outputs]:
        # Include the initial recurrent states, so that all batches have the same keys.
        initial_states = {self._next_states[key]: state for key, state in self.states.items()}
        if self._default_outputs is None:
            self._default_outputs = (
                {} if self.policy is None else default_outputs(self.policy, self._step, device, initial_states)
            )
        constant_outputs = {**self._default_outputs, **initial_states}
        mask, draw = self._mask, self._draw
        if mask is not None:
            return lambda: {**constant_outputs, "action": mask.draw(self._step[ACTION_MASK])}
        return lambda: {**constant_outputs, "action": draw()}

    def _check_outputs(self, outputs: Outputs) -> None:
        missing = [key for key in ("action", *self._next_states.values()) if key not in outputs]
        if missing:
            raise KeyError(
                f"The policy does not write {', '.join(map(repr, missing))}; it writes "
                f"{', '.join(map(repr, outputs)) or 'nothing'}. Add it to the policy's out_keys."
            )
        shape = tuple(outputs["action"].shape)
        if shape != self._action_shape:
            raise ValueError(
                f"The policy must write actions of shape {self._action_shape}, got {shape}; the environment takes "
                f"{self.specs.action}. Discrete actions are integers here, not one-hot vectors "
                "(torch.distributions.Categorical, or TorchRL's categorical_action_encoding=True)."
            )

    def _write_replayed_actions(self, memory: RolloutMemory, t: int, rows: ReplayedRows, device: torch.device) -> None:
        """Mark the replayed rows of step ``t``, and replace the policy's actions in these rows."""
        assert self._replay is not None
        envs, actions = self._replay.indices, memory.actions[t]
        memory.replayed_mask[t][envs], memory.serials[t][envs] = True, rows.serial
        actions[envs] = rows.action.reshape(len(envs), *actions.shape[1:])
        log_probs = memory.log_probs
        if log_probs is None:
            return
        if rows.log_prob is not None:
            log_probs[t][envs] = rows.log_prob
            return
        get_dist = getattr(self.policy, "get_dist", None)
        if get_dist is None:
            raise TypeError(
                "The policy must have get_dist(td), as TorchRL's ProbabilisticActor, for log-probabilities of replayed "
                f"actions, got {type(self.policy).__name__}. Or set log_prob='deterministic' in the replay."
            )
        # The policy's inputs, including recurrent states, are still unchanged.
        env_index = torch.from_numpy(envs)
        inputs, action = self._step[env_index].to(device), memory.outputs["action"][t][env_index].to(device)
        log_probs[t][envs] = get_dist(inputs).log_prob(action).cpu().numpy()

    def _advance(self, memory: RolloutMemory, t: int, replayed: ReplayedRows | None) -> None:
        """Step the environment with the actions of step ``t``, and write the results."""
        stepper = self.stepper
        action = memory.actions[t]
        if action.dtype.kind == "f" and np.isnan(np.minimum.reduce(action, axis=None)):
            raise ValueError(
                f"The policy returned NaN actions at step {t} of the rollout in environments "
                f"{np.flatnonzero(np.isnan(action.reshape(len(action), -1)).any(1)).tolist()}: "
                "its weights or its inputs are not finite. Check the learning rate and the gradient norm."
            )
        # Copy the action, because environments may change and keep it.
        action = self._form.to_environment(action)
        paused = None if replayed is None else replayed.mask
        leaves, memory.rewards[t][:], terminated, truncated, self.info = stepper.step(action, paused)
        memory.terminated[t][:], memory.truncated[t][:] = terminated, truncated
        done = np.logical_or(terminated, truncated, out=self._starts)
        memory.done[t][:] = done
        successor = memory.next_observations[t]
        for source, target in zip(leaves, successor, strict=True):
            np.copyto(target, source)
        if np.count_nonzero(done):  # five times as fast as done.any() for a few environments
            if stepper.mode is AutoresetMode.DISABLED:
                self.info = copied(self.info)  # the reset may change it
            leaves, finals = stepper.finish_episodes(done, leaves, self.info, paused, self._observations)
            for index, final in finals:
                for target, source in zip(successor, final, strict=True):
                    target[index] = source
        for source, target in zip(leaves, self._observations, strict=True):
            np.copyto(target, source)
        if (resets := stepper.resets) is not None and memory.valid is not None:
            np.logical_not(resets, out=memory.valid[t])
            if self._mask is not None:  # a resetting row repeats its last observation and ignores its action
                self._step[ACTION_MASK][torch.from_numpy(done)] = 1
            done[:] = resets  # in mode NEXT_STEP, an episode begins one step later
        if replayed is not None and self._replay is not None:
            envs = self._replay.indices
            memory.rewards[t][envs] = replayed.reward
            memory.terminated[t][envs], memory.truncated[t][envs] = replayed.terminated, replayed.truncated
            done[envs] = memory.done[t][envs] = has_ended = replayed.terminated | replayed.truncated
            self._write_replayed_observations(successor, replayed.next_observation)
            if not stepper.can_pause and has_ended.any():
                # The environment's own episode has continued during the replay, so reset it.
                ended = envs[has_ended]
                mask = np.zeros_like(done)
                mask[ended] = True
                for source, target in zip(stepper.reset_some(mask, leaves), self._observations, strict=True):
                    target[ended] = source[ended]

    def _write_replayed_observations(self, targets: Sequence[Array], values: Mapping[NestedKey, Array]) -> None:
        """Replace the observations of replaying environments with the recorded observations."""
        assert self._replay is not None
        envs = self._replay.indices
        for key, target in zip(self.stepper.keys, targets, strict=True):
            target[envs] = values[key].reshape(len(envs), *target.shape[1:])


def _check_finite(parts: Iterable[tuple[str, Array, float]], first_step: int = 0) -> None:
    """Check named values ``[T, N, *F]``; raise EnvironmentFault if a value is not finite or exceeds its limit."""
    for name, values, limit in parts:
        _raise_if_any(
            name,
            values,
            ~np.isfinite(values),
            "finite numbers. Fix the environment or the wrapper that computes it; "
            "gymnasium.wrappers.TransformObservation and TransformReward can replace such values.",
            first_step,
        )
        if limit < math.inf:
            _raise_if_any(name, values, np.abs(values) > limit, expected_magnitude(limit), first_step)


def _raise_if_any(name: str, values: Array, is_invalid: Array, expected: str, first_step: int = 0) -> None:
    positions = np.argwhere(is_invalid)
    if len(positions):
        step, index = positions[0][:2]
        raise EnvironmentFault(
            f"At step {first_step + step} of the rollout, environment {index} returned {name} with "
            f"{values[tuple(positions[0])]}, expected {expected}"
        )


class RolloutMemory:
    """Preallocated tensors of one rollout, ``[T, N, *F]``, with a view of every step; later rollouts can reuse them.

    The stepper defines the order and shapes of the observations. ``states`` are recurrent states, ``[N, *state]`` each.
    With ``has_replay``, the memory also holds the mask of replayed steps and the serial numbers of their recordings.
    """

    def __init__(
        self,
        specs: EnvironmentSpecs,
        stepper: VectorStepper,
        steps: int,
        states: Mapping[NestedKey, Tensor],
        has_replay: bool = False,
        limits: Mapping[NestedKey, float] = MappingProxyType({}),
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
        self.valid: Array | None = None  # mask of the rows that are steps, in mode NEXT_STEP; None in other modes
        if stepper.resets is not None:
            self.valid = self._reserve(VALID, torch.bool).numpy()
        self._has_replay = has_replay
        if has_replay:
            self._reserve(("demo", "mask"), torch.bool, 1)
            self._reserve(("demo", "serial"), torch.int64, 1)
            self.replayed_mask, self.serials = self._views(("demo", "mask")), self._views(("demo", "serial"))
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
        # Check the results of steps first. An invalid value that is found later then comes from a reset.
        key_limits = {key: limits.get(key, math.inf) for key in stepper.keys}
        checked = [(f"observation {key!r}", self._entries[next_key(key)], key_limits[key]) for key in stepper.keys]
        checked.append(("reward", self._entries["next", "reward"], math.inf))
        first_checks = (
            (f"first observation {key!r} of an episode", path_of(key), key_limits[key]) for key in stepper.keys
        )
        checked += [(name, self._entries[path], limit) for name, path, limit in first_checks]
        self._float_checks = [
            (name, value.numpy(), limit) for name, value, limit in checked if value.is_floating_point()
        ]
        values = {name: value for name, value, _ in checked}
        self._discrete_checks = [
            (name, values[name].numpy().reshape(steps, self.num_envs, *(space.shape or ())), space)
            for label in ("observation {!r}", "first observation {!r} of an episode")
            for key, space in zip(stepper.keys, stepper.spaces, strict=True)
            if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (name := label.format(key))
        ]
        self._norm_checks = [(value.reshape(-1), limit * limit) for _, value, limit in self._float_checks]
        self._action_shape = stepper.action_shape
        self.outputs: dict[NestedKey, tuple[Tensor, ...]] = {}
        self.actions: list[Array] = []
        self.log_probs: list[Array] | None = None  # only if a replay may replace log-probabilities
        self._layout: dict[NestedKey, tuple[torch.Size, torch.dtype]] = {}
        self._output_tensors: dict[NestedKey, Tensor] = {}
        self._tensordicts: dict[object, TensorDict] = {}

    def _reserve(self, path: Path, dtype: torch.dtype, *shape: int) -> Tensor:
        value = self._entries[path] = torch.empty(self.steps, self.num_envs, *shape, dtype=dtype)
        return value

    def _views(self, path: Path, shape: tuple[int, ...] = ()) -> list[Array]:
        # NumPy views have the shape of the space; the tensors have the shape of the spec ([1] for a scalar Box).
        return list(self._entries[path].numpy().reshape(self.steps, self.num_envs, *shape))

    def _by_step(self, paths: Sequence[Path], shapes: Sequence[tuple[int, ...]]) -> list[tuple[Array, ...]]:
        return list(zip(*(self._views(path, shape) for path, shape in zip(paths, shapes, strict=True)), strict=True))

    @property
    def frames(self) -> int:
        """Number of environment steps, without resets."""
        return self.steps * self.num_envs if self.valid is None else int(self.valid.sum())

    def clear_marks(self) -> None:
        """Clear the marks of replayed steps from the previous rollout."""
        self._entries["demo", "mask"].zero_()
        self._entries["demo", "serial"].fill_(-1)

    def check(self, first_step: int = 0) -> None:
        """Check the rollout; raise EnvironmentFault if a value is not finite or too large."""
        for flat, limit in self._norm_checks:
            # A dot product is the fastest test of few numbers. It can overflow for finite ones, so check each number.
            if not flat.dot(flat) < limit:
                self.check_part(self.steps, first_step)

    def check_part(self, steps: int, first_step: int = 0) -> None:
        """Check the first ``steps`` steps like :meth:`check`; also check discrete values against their spaces."""
        _check_finite(((name, values[:steps], limit) for name, values, limit in self._float_checks), first_step)
        for name, values, space in self._discrete_checks:
            observed, num_choices = values[:steps], space.n if isinstance(space, spaces.Discrete) else space.nvec
            outside = (observed < space.start) | (observed >= space.start + num_choices)
            _raise_if_any(name, observed, outside, f"a value of {space}. Fix observation_space or the environment.")

    def fits(self, outputs: Mapping[NestedKey, Tensor]) -> bool:
        """Return True if the reserved memory fits the policy's outputs at a step."""
        layout = self._layout
        for key, value in outputs.items():
            if layout.get(key) != (value.shape, value.dtype):
                return False
        return bool(layout) and len(layout) == len(outputs)

    def reserve(self, outputs: Mapping[NestedKey, Tensor]) -> None:
        """Reserve memory for the policy's outputs at each step."""
        self._layout = {key: (value.shape, value.dtype) for key, value in outputs.items()}
        self._output_tensors = {
            key: torch.empty(self.steps, *shape, dtype=dtype) for key, (shape, dtype) in self._layout.items()
        }
        self.outputs = {key: value.unbind(0) for key, value in self._output_tensors.items()}
        self.actions = list(self._output_tensors["action"].numpy().reshape(self.steps, *self._action_shape))
        if self._has_replay and LOG_PROB in self._output_tensors:
            self.log_probs = list(self._output_tensors[LOG_PROB].numpy())
        self._tensordicts.clear()

    def batch(self) -> TensorDict:
        """Return the rollout as a TensorDict ``[N, T]`` that shares this memory."""
        if None not in self._tensordicts:
            entries = {path: value.transpose(0, 1) for path, value in self._all_entries().items()}
            self._tensordicts[None] = tensordict_of(entries, torch.Size([self.num_envs, self.steps]), (None, "time"))
        return self._tensordicts[None]

    def rows(self, leave_out: Collection[str] = ()) -> TensorDict:
        """Return the rollout for a ring buffer, ``[T, N]`` or one step ``[N]``, without the root keys ``leave_out``."""
        excluded = tuple(leave_out)
        if excluded not in self._tensordicts:
            entries = {path: value for path, value in self._all_entries().items() if path[0] not in excluded}
            if self.steps == 1:
                step = {path: value[0] for path, value in entries.items()}
                self._tensordicts[excluded] = tensordict_of(step, torch.Size([self.num_envs]), None)
            else:
                shape = torch.Size([self.steps, self.num_envs])
                self._tensordicts[excluded] = tensordict_of(entries, shape, ("time", None))
        return self._tensordicts[excluded]

    def _all_entries(self) -> dict[Path, Tensor]:
        outputs = {path_of(key): value for key, value in self._output_tensors.items()}
        # For entries under "next", the environment's values take precedence over the policy's outputs.
        return {**self._entries, **{p: v for p, v in outputs.items() if p[0] != "next" or p not in self._entries}}
