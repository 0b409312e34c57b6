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
from torchrl_lightning.environments.actions import check_clipping, half_bounded_drawer
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

    One TensorDict ``[N]`` holds the policy's inputs. It persists, so each rollout continues after the previous one.
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
        self._playing = None if replay is None else ReplayTracker(replay, num_envs)
        self._action_shape = (num_envs, *specs.action.shape)
        drawn = half_bounded_drawer(specs.action, [num_envs])
        self._draw: Callable[[], Tensor] = drawn or specs.action.expand(*self._action_shape).rand
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
        # A call prepared for the step's tensors; they keep their memory.
        self._standing: Callable[[], Outputs] | None = None
        self._unsaid: dict[NestedKey, Tensor] | None = None
        self._is_new = True  # the first rollout gets additional checks
        self._is_nested = any(isinstance(value, TensorDictBase) for value in raw_items(self._step).values())

    def reset(self, seeds: list[int] | None, resumed: Mapping[NestedKey, Tensor] | None = None) -> Array:
        """Begin an episode in every environment, and return the mask of the new episodes.

        In a resumed run, environments in a replay continue it with the recurrent states ``resumed``.
        """
        for source, target in zip(self.stepper.reset(seeds), self._observations, strict=True):
            np.copyto(target, source)
        self._starts[:] = True
        for key, value in self.states.items():
            self.recurrent[key].copy_(value)
        if resumed is not None and self._playing is not None:
            going_on = self._playing.resume()
            self._starts[going_on] = False
            for key, value in resumed.items():
                self.recurrent[key][going_on] = value[going_on]
        return self._starts

    def steps(
        self, memory: RolloutMemory, device: torch.device, random: bool = False, before: int = 0
    ) -> Iterator[int]:
        """Fill a memory, and yield the index of each completed step; ``before`` is the number of earlier steps.

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
                memory.check_part(completed, before)
            fault.within(f"At step {before + completed} of the rollout, ")
            raise
        except Exception:
            # The policy may have failed because of an invalid observation.
            memory.check_part(completed, before)
            read = zip(self.stepper.keys, self._observations, strict=True)
            named = [(f"observation {key!r}", values[None], self.limits.get(key, math.inf)) for key, values in read]
            _refuse_not_finite(named, before + completed)
            raise
        finally:
            position.environment = position.step = None
        if self._is_new:
            memory.check_part(memory.steps, before)
            self._is_new = False
        memory.check(before)

    def _steps(self, memory: RolloutMemory, device: torch.device, random: bool) -> Iterator[int]:
        act = self._random_actor(device) if random or self.policy is None else self._actor(device)
        if self._playing is not None:
            memory.clear_marks()
        for t in range(memory.steps):
            position.step = t
            played = None if self._playing is None else self._playing.next_rows(self._starts)
            if played is not None:
                self._put(self._observations, played.observation)
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
            if played is not None:
                self._write_played(memory, t, played, device)
            if self._mask is not None:
                self._mask.check_actions(torch.from_numpy(memory.actions[t]), self._step[ACTION_MASK], t)
            for key, state in self.recurrent.items():
                state.copy_(outputs[self._next_states[key]])
            self._advance(memory, t, played)
            if self.recurrent and self._starts.any():
                for key, state in self.recurrent.items():
                    state[self._starts] = self.states[key][self._starts]
            yield t

    def _actor(self, device: torch.device) -> Callable[[], Outputs]:
        policy, step, bare = self.policy, self._step, fast_call(self.policy)
        move = device.type != "cpu"
        if bare is not None and move:
            return lambda: bare(step.to(device))
        if bare is not None:
            if self._standing is None:
                self._standing = bound_call(policy, step)
            assert self._standing is not None
            return self._standing
        assert policy is not None

        def dispatched() -> Outputs:
            # The policy writes its outputs into its input; a copy keeps them out of the next step.
            if move:
                given: TensorDictBase = step.to(device)
            elif self._is_nested:
                given = step.copy()
            else:
                given = new_tensordict(dict(raw_items(step)), step.batch_size)
            return policy_outputs(policy, given)

        return dispatched

    def _random_actor(self, device: torch.device) -> Callable[[], Outputs]:
        # Include the initial recurrent states, so that all batches have equal keys.
        kept = {self._next_states[key]: state for key, state in self.states.items()}
        if self._unsaid is None:
            self._unsaid = {} if self.policy is None else default_outputs(self.policy, self._step, device, kept)
        others = {**self._unsaid, **kept}
        mask, draw = self._mask, self._draw
        if mask is not None:
            return lambda: {**others, "action": mask.draw(self._step[ACTION_MASK])}
        return lambda: {**others, "action": draw()}

    def _check_outputs(self, outputs: Outputs) -> None:
        missing = [key for key in ("action", *self._next_states.values()) if key not in outputs]
        if missing:
            raise KeyError(
                f"The policy does not write {', '.join(map(repr, missing))}; it writes "
                f"{', '.join(map(repr, outputs)) or 'nothing'}. Name it in the policy's out_keys."
            )
        shape = tuple(outputs["action"].shape)
        if shape != self._action_shape:
            raise ValueError(
                f"The policy writes actions of shape {shape}, but the environment takes {self._action_shape}: "
                f"{self.specs.action}. Discrete actions are integers here, not one-hot vectors "
                "(torch.distributions.Categorical, or TorchRL's categorical_action_encoding=True)."
            )

    def _write_played(self, memory: RolloutMemory, t: int, rows: ReplayedRows, device: torch.device) -> None:
        """Mark the replayed rows of step ``t``, and replace the policy's actions in these rows."""
        assert self._playing is not None
        where, actions = self._playing.where, memory.actions[t]
        memory.played[t][where], memory.serials[t][where] = True, rows.serial
        actions[where] = rows.action.reshape(len(where), *actions.shape[1:])
        written = memory.log_probs
        if written is None:
            return
        if rows.log_prob is not None:
            written[t][where] = rows.log_prob
            return
        get_dist = getattr(self.policy, "get_dist", None)
        if get_dist is None:
            raise TypeError(
                "The policy must offer get_dist(td), as TorchRL's ProbabilisticActor does, to tell how likely replayed "
                f"actions are, got {type(self.policy).__name__}; replay with log_prob='deterministic' to do without."
            )
        # The policy's inputs, including recurrent states, are still unchanged.
        places = torch.from_numpy(where)
        read, action = self._step[places].to(device), memory.outputs["action"][t][places].to(device)
        written[t][where] = get_dist(read).log_prob(action).cpu().numpy()

    def _advance(self, memory: RolloutMemory, t: int, played: ReplayedRows | None) -> None:
        """Step the environment with the actions of step ``t``, and write the results."""
        stepper = self.stepper
        action = memory.actions[t]
        if action.dtype.kind == "f" and np.isnan(np.minimum.reduce(action, axis=None)):
            raise ValueError(
                f"The policy chose NaN actions at step {t} of the rollout in environments "
                f"{np.flatnonzero(np.isnan(action.reshape(len(action), -1)).any(1)).tolist()}: "
                "its weights or its inputs are not finite. Look at the learning rate and the gradient norm."
            )
        # A copy, because environments may change and keep it.
        action = self._form.to_environment(action)
        resting = None if played is None else played.mask
        leaves, memory.rewards[t][:], terminated, truncated, self.info = stepper.step(action, resting)
        memory.terminated[t][:], memory.truncated[t][:] = terminated, truncated
        done = np.logical_or(terminated, truncated, out=self._starts)
        memory.done[t][:] = done
        successor = memory.next_observations[t]
        for source, target in zip(leaves, successor, strict=True):
            np.copyto(target, source)
        if done.any():
            if stepper.mode is AutoresetMode.DISABLED:
                self.info = copied(self.info)  # the reset may change it
            leaves, finals = stepper.finish(done, leaves, self.info, resting, self._observations)
            for index, final in finals:
                for target, source in zip(successor, final, strict=True):
                    target[index] = source
        for source, target in zip(leaves, self._observations, strict=True):
            np.copyto(target, source)
        if (resets := stepper.resets) is not None and memory.made is not None:
            np.logical_not(resets, out=memory.made[t])
            if self._mask is not None:  # a resetting row repeats its last observation and ignores its action
                self._step[ACTION_MASK][torch.from_numpy(done)] = 1
            done[:] = resets  # in this mode, an episode begins one step later
        if played is not None and self._playing is not None:
            where = self._playing.where
            memory.rewards[t][where] = played.reward
            memory.terminated[t][where], memory.truncated[t][where] = played.terminated, played.truncated
            done[where] = memory.done[t][where] = over = played.terminated | played.truncated
            self._put(successor, played.next_observation)
            if not stepper.can_rest and over.any():
                # The environment's own episode has continued during the replay, so reset it.
                ended = where[over]
                mask = np.zeros_like(done)
                mask[ended] = True
                for source, target in zip(stepper.restart(mask, leaves), self._observations, strict=True):
                    target[ended] = source[ended]

    def _put(self, targets: Sequence[Array], values: Mapping[NestedKey, Array]) -> None:
        """Replace the observations of replaying environments with the recorded observations."""
        assert self._playing is not None
        where = self._playing.where
        for key, target in zip(self.stepper.keys, targets, strict=True):
            target[where] = values[key].reshape(len(where), *target.shape[1:])


def _refuse_not_finite(parts: Iterable[tuple[str, Array, float]], first_step: int = 0) -> None:
    """Check named values ``[T, N, *F]``; raise EnvironmentFault if one is not finite or exceeds its limit."""
    for name, values, limit in parts:
        _refuse(
            name,
            values,
            ~np.isfinite(values),
            "finite numbers. Mend the environment or the wrapper that computes it; "
            "gymnasium.wrappers.TransformObservation and TransformReward can replace such values.",
            first_step,
        )
        if limit < math.inf:
            _refuse(name, values, np.abs(values) > limit, expected_magnitude(limit), first_step)


def _refuse(name: str, values: Array, wrong: Array, expected: str, first_step: int = 0) -> None:
    places = np.argwhere(wrong)
    if len(places):
        step, index = places[0][:2]
        raise EnvironmentFault(
            f"At step {first_step + step} of the rollout, environment {index} returned {name} with "
            f"{values[tuple(places[0])]}, expected {expected}"
        )


class RolloutMemory:
    """Preallocated tensors of one rollout, ``[T, N, *F]``, with a view of every step; rollouts can reuse them.

    The stepper defines the order and shapes of the observations. ``states`` are recurrent states, ``[N, *state]`` each.
    With ``plays``, the memory also holds the mask of replayed steps and the serial numbers of their recordings.
    """

    def __init__(
        self,
        specs: EnvironmentSpecs,
        stepper: VectorStepper,
        steps: int,
        states: Mapping[NestedKey, Tensor],
        plays: bool = False,
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
        self.made: Array | None = None  # mask of the steps, if some rows are resets
        if stepper.resets is not None:
            self.made = self._reserve(VALID, torch.bool).numpy()
        self._plays = plays
        if plays:
            self._reserve(("demo", "mask"), torch.bool, 1)
            self._reserve(("demo", "serial"), torch.int64, 1)
            self.played, self.serials = self._views(("demo", "mask")), self._views(("demo", "serial"))
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
        # Check results of steps first: an invalid value that is left in the observations then comes from a reset.
        most = {key: limits.get(key, math.inf) for key in stepper.keys}
        read = [(f"observation {key!r}", self._entries[next_key(key)], most[key]) for key in stepper.keys]
        read.append(("reward", self._entries["next", "reward"], math.inf))
        first = ((f"first observation {key!r} of an episode", path_of(key), most[key]) for key in stepper.keys)
        read += [(name, self._entries[path], limit) for name, path, limit in first]
        self._floats = [(name, value.numpy(), limit) for name, value, limit in read if value.is_floating_point()]
        named = {name: value for name, value, _ in read}
        self._choices = [
            (name, named[name].numpy().reshape(steps, self.num_envs, *(space.shape or ())), space)
            for what in ("observation {!r}", "first observation {!r} of an episode")
            for key, space in zip(stepper.keys, stepper.spaces, strict=True)
            if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (name := what.format(key))
        ]
        self._flats = [(value.reshape(-1), limit * limit) for _, value, limit in self._floats]
        self._action_shape = stepper.action_shape
        self.outputs: dict[NestedKey, tuple[Tensor, ...]] = {}
        self.actions: list[Array] = []
        self.log_probs: list[Array] | None = None  # only if a replay may replace some
        self._layout: dict[NestedKey, tuple[torch.Size, torch.dtype]] = {}
        self._written: dict[NestedKey, Tensor] = {}
        self._ready: dict[object, TensorDict] = {}

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
        return self.steps * self.num_envs if self.made is None else int(self.made.sum())

    def clear_marks(self) -> None:
        """Clear the marks of replayed steps from the previous rollout."""
        self._entries["demo", "mask"].zero_()
        self._entries["demo", "serial"].fill_(-1)

    def check(self, before: int = 0) -> None:
        """Check the rollout; raise EnvironmentFault if a value is not finite or too large."""
        for flat, limit in self._flats:
            # The fastest test for few numbers. A square can overflow although the number is finite.
            if not flat.dot(flat) < limit:
                self.check_part(self.steps, before)

    def check_part(self, steps: int, before: int = 0) -> None:
        """Check the first ``steps`` steps in the same way, and check that discrete values are inside their spaces."""
        _refuse_not_finite(((name, values[:steps], limit) for name, values, limit in self._floats), before)
        for name, values, space in self._choices:
            shown, number = values[:steps], space.n if isinstance(space, spaces.Discrete) else space.nvec
            outside = (shown < space.start) | (shown >= space.start + number)
            _refuse(
                name, shown, outside, f"one of {space} as its space says: fix observation_space or the environment."
            )

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
        self._written = {
            key: torch.empty(self.steps, *shape, dtype=dtype) for key, (shape, dtype) in self._layout.items()
        }
        self.outputs = {key: value.unbind(0) for key, value in self._written.items()}
        self.actions = list(self._written["action"].numpy().reshape(self.steps, *self._action_shape))
        if self._plays and LOG_PROB in self._written:
            self.log_probs = list(self._written[LOG_PROB].numpy())
        self._ready.clear()

    def batch(self) -> TensorDict:
        """Return the rollout as a TensorDict ``[N, T]`` over this memory."""
        if None not in self._ready:
            entries = {path: value.transpose(0, 1) for path, value in self._all_entries().items()}
            self._ready[None] = tensordict_of(entries, torch.Size([self.num_envs, self.steps]), (None, "time"))
        return self._ready[None]

    def rows(self, leave_out: Collection[str] = ()) -> TensorDict:
        """Return the rollout for a ring buffer, ``[T, N]`` or one step ``[N]``, without the root keys ``leave_out``."""
        wanted = tuple(leave_out)
        if wanted not in self._ready:
            entries = {path: value for path, value in self._all_entries().items() if path[0] not in wanted}
            if self.steps == 1:
                one = {path: value[0] for path, value in entries.items()}
                self._ready[wanted] = tensordict_of(one, torch.Size([self.num_envs]), None)
            else:
                shape = torch.Size([self.steps, self.num_envs])
                self._ready[wanted] = tensordict_of(entries, shape, ("time", None))
        return self._ready[wanted]

    def _all_entries(self) -> dict[Path, Tensor]:
        written = {path_of(key): value for key, value in self._written.items()}
        # For entries under "next", the environment's values take precedence over the policy's outputs.
        return {**self._entries, **{p: v for p, v in written.items() if p[0] != "next" or p not in self._entries}}
