"""Collect rollouts from a Gymnasium vector environment into preallocated memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lightning._core.modules import EvaluationMode
from torchrl_lightning._core.state import Attribute, InPlace, bounded_integer, flag
from torchrl_lightning._core.validators import Checked, boolean, check_defaults, frames, one_of
from torchrl_lightning.collectors.base import (
    RECURRENT_STATES,
    CollectorBase,
    check_exploration,
    check_random_frames,
    check_replay,
)
from torchrl_lightning.collectors.rollout_loop import RolloutLoop, RolloutMemory
from torchrl_lightning.collectors.vector_stepper import VectorStepper
from torchrl_lightning.environments.backends.next_step import tracks_resets
from torchrl_lightning.environments.backends.vector_env import check_env_source, make_vector_env, vectorization_of
from torchrl_lightning.environments.policy_calls import Policy, policy_device, recurrent_states
from torchrl_lightning.environments.replay_source import Array, ReplaySource
from torchrl_lightning.environments.seeds import IsolatedRng, check_seed, numbered_seed, spawn_seed, spawn_seeds
from torchrl_lightning.environments.specs import environment_specs


class GymnasiumCollector(CollectorBase):
    """Collect rollouts of a TensorDict policy in a Gymnasium vector environment.

    Batches are TensorDicts ``[N, T]`` named ``(None, "time")`` with time-major memory. They equal the batches of
    ``torchrl.collectors.Collector`` for the same environment with ``InitTracker``. ``("next", observation)`` is the
    true successor, also at the end of an episode. The policy's submodules declare recurrent states by
    ``make_tensordict_primer``. The collector carries these states from ``("next", key)`` to ``key``, and sets them to
    their initial values at the start of an episode.

    During a rollout the policy is in evaluation mode; afterwards its submodules have their previous modes again. The
    policy draws from a separate random stream, derived from ``seed`` and the batch number. torch's global generators
    stay unchanged. With ``reset_at_each_batch=True``, a restored collector therefore repeats the original run exactly.
    Otherwise episodes continue across batches. The inner state of an environment cannot be restored, so the first batch
    after ``load_state_dict`` begins with a reset.

    Environments may reuse and change all objects that they return, and may change and keep the actions. If a ready
    vector environment has a list ``envs``, the collector replaces ``step`` in these environments, to copy the last step
    of each episode. Without this list, ``final_obs`` must not share memory with other observations. In mode
    ``NEXT_STEP`` the environment must report which rows are resets; ``("collector", "mask")`` is False in these rows.

    Args:
        env: An id, a factory of one environment, or a ready vector environment.
        policy: Reads a TensorDict ``[N]`` and writes ``action``; ``None`` draws random actions. The next step
            overwrites the policy's inputs. If the policy has a method ``compute_step(step)`` that returns its outputs
            as a dict, the collector calls this method instead, which halves the time of a small network. MLPs of this
            package are compiled.
        num_envs: Number of environments; ``None`` means one, or the number of a ready vector environment.
        frames_per_batch: Steps per batch, summed over all environments; a multiple of ``num_envs``.
        total_frames: Stop iteration after this number of steps, including replayed steps; -1 means no limit.
        seed: Base seed; :func:`~torchrl_lightning.collectors.spawn_seed` derives the seeds of environments and policy.
            ``None`` draws the base seed from torch's global generator.
        reset_at_each_batch: Begin every batch with seeded resets.
        init_random_frames: Draw random actions in whole batches until this number of frames is reached; all other
            policy outputs are zero in these batches.
        exploration_type: TorchRL's exploration type of the policy.
        device: Device of the policy's inputs and of the batches. With ``None``, inputs are on the device of the
            policy's parameters, and batches are on the CPU.
        storing_device: Device of the batches; ``None`` means ``device``.
        return_same_td: Yield the same memory each time; not allowed if batches are copied to a device.
        clip_actions: Clip the actions to their Box before the environment receives them; stored actions are not
            clipped. The evaluation of the run also clips actions, and so do policies that are loaded or exported from
            its checkpoints.
        replay: A :class:`~torchrl_lightning.collectors.ReplaySource`, which replays recorded steps in some
            environments. Batches then contain the mask of these steps in ``("demo", "mask")`` and the number of the
            recording (-1 without a replay) in ``("demo", "serial")``, both ``[N, T, 1]``. An environment pauses during
            a replay if :func:`make_vector_env` builds it with ``vectorization="sync"``. Other environments keep
            stepping during a replay and are reset at its end, so the vector environment must accept
            ``options={"reset_mask": mask}``.

    ``vectorization``, ``env_kwargs`` and ``wrappers`` are arguments of :func:`make_vector_env`.

    Raises:
        ValueError: Sizes do not fit, a setting has no effect in combination with the others, the id is unknown, or
            actions are NaN. The environment does not report resets in mode ``NEXT_STEP``, or returns values that are
            not finite or outside its spaces.
        TypeError: The environment or policy has an unsupported type, or a space has no TorchRL spec.
        KeyError: The policy writes no ``action``.
        RuntimeError: A replay must reset single environments, but the vector environment does not support this.

    Examples:
        >>> collector = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=8, total_frames=16, seed=0)
        >>> [tuple(batch.shape) for batch in collector]
        [(2, 4), (2, 4)]
        >>> collector.shutdown()
    """

    STATE = {
        **CollectorBase.STATE,
        "trajectories": Attribute(bounded_integer(), "_trajectories"),
        "static_seed": Attribute(flag, "_static_seed"),
        "trajectory_ids": InPlace(attribute="_ids", low=0, exists_if="_has_replay"),
        "recurrent_states": RECURRENT_STATES,
    }

    reset_at_each_batch = Checked(boolean)
    init_random_frames = Checked(frames)
    exploration_type = Checked(lambda value, name: one_of(value, name, (*ExplorationType, None)))
    return_same_td = Checked(boolean)

    def __init__(
        self,
        env: str | Callable[..., gymnasium.Env[Any, Any]] | VectorEnv[Any, Any, Any],
        policy: Policy | None = None,
        *,
        num_envs: int | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        seed: int | None = None,
        reset_at_each_batch: bool = False,
        init_random_frames: int = 0,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        return_same_td: bool = False,
        clip_actions: bool = False,
        replay: ReplaySource | None = None,
        vectorization: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        wrappers: Sequence[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = (),
    ) -> None:
        vectorization = vectorization_of(env, vectorization)
        check_env_source(env, vectorization, env_kwargs, wrappers)
        env_args: dict[str, Any] = {"vectorization": vectorization, "env_kwargs": env_kwargs, "wrappers": wrappers}
        if isinstance(env, VectorEnv):
            num_envs = make_vector_env(env, num_envs, **env_args).num_envs  # only checks
        num_envs = 1 if num_envs is None else num_envs
        super().__init__(env, policy, num_envs, frames_per_batch, total_frames, seed, env_args)
        check_exploration(policy, exploration_type, clip_actions=clip_actions)
        check_replay(replay, num_envs, "the collector")
        self.reset_at_each_batch = reset_at_each_batch
        self.init_random_frames = check_random_frames(init_random_frames, policy)
        self.exploration_type = exploration_type
        self.device = None if device is None else torch.device(device)
        self.storing_device = self.device if storing_device is None else torch.device(storing_device)
        if self.storing_device not in (None, torch.device("cpu")):
            condition, remedy = f"with batches on {self.storing_device}, which are new", "take storing_device='cpu'"
            check_defaults(condition, remedy, return_same_td=(return_same_td, False))
        self.return_same_td, self.clip_actions = return_same_td, clip_actions
        self._replay, self._has_replay = replay, replay is not None
        self._policy_seed_cache = (-1, 0)  # the seed, and the policy's seed that is spawned from it
        self._trajectories = 0
        self._needs_reset = True
        self._restored_states: Mapping[NestedKey, Tensor] | None = None  # recurrent states of a restored collector
        self._static_seed = False
        self._loop: RolloutLoop | None = None
        self._evaluation = EvaluationMode(policy)
        # Look up a parameter only once, because moving a module to another device keeps its parameter objects.
        self._parameter = next(policy.parameters(), None) if isinstance(policy, nn.Module) else None
        self._memory: RolloutMemory | None = None  # reused by several rollouts
        self._ids: Array = np.arange(self.num_envs)  # ids of the running trajectories

    # -- environment -------------------------------------------------------------------------------------------------
    @property
    def env(self) -> VectorEnv[Any, Any, Any]:
        """The vector environment; built at first use so that no process starts earlier than necessary."""
        return self._get_or_build_loop().stepper.env

    def _get_or_build_loop(self) -> RolloutLoop:
        if self.closed:
            raise RuntimeError("The collector was shut down; build a new one.")
        if self._loop is None:
            stepper = VectorStepper(make_vector_env(self._env_source, self.num_envs, **self._env_args))
            try:
                specs = self._specs = environment_specs(stepper.env).with_clipping(self.clip_actions)
                states = recurrent_states(self.policy, self.num_envs)
                self._loop = RolloutLoop(stepper, specs, self.policy, states, self._replay)
            except BaseException:
                stepper.close()
                raise
        return self._loop

    # -- iteration ---------------------------------------------------------------------------------------------------
    def rollout(self) -> TensorDict:
        """Collect one batch, even beyond ``total_frames``."""
        batch = self._collect(new_memory=not self.return_same_td).batch()
        return batch if self.storing_device is None else batch.to(self.storing_device)

    @property
    def yields_shared_memory(self) -> bool:
        """Whether :meth:`reused_rows` yields the same steps as iteration; False if a subclass overrides ``rollout``."""
        is_not_overridden = type(self).rollout is GymnasiumCollector.rollout and not tracks_resets(self._env_source)
        return is_not_overridden and self.storing_device in (None, torch.device("cpu"))

    @property
    def yields_owned_rollouts(self) -> bool:
        """Whether each rollout has separate memory that the collector does not write again."""
        return type(self).rollout is GymnasiumCollector.rollout and not self.return_same_td

    def reused_rows(self, leave_out: Collection[str] = ()) -> Iterator[TensorDict]:
        """Yield batches in the layout of a ring buffer, on the CPU, for a reader that copies each batch immediately.

        Each batch overwrites the memory of the previous one. A batch of one step is a TensorDict ``[N]``; a longer
        batch is ``[T, N]``, named ``("time", None)``. ``leave_out`` names the root keys to omit.

        Examples:
            >>> collector = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=2, total_frames=4, seed=0)
            >>> [tuple(rows.shape) for rows in collector.reused_rows(leave_out=["collector"])]
            [(2,), (2,)]
        """
        return self._collect_until_limit(lambda: self._collect(new_memory=False).rows(leave_out))

    def _collect(self, new_memory: bool) -> RolloutMemory:
        loop = self._get_or_build_loop()
        memory = None if new_memory else self._memory
        if memory is None:
            memory = RolloutMemory(loop.specs, loop.stepper, self.steps, loop.states, self._has_replay, loop.limits)
            self._memory = None if new_memory else memory
        random = self.policy is None or self.frames < self.init_random_frames
        parameter = self._parameter
        device = self.device or (policy_device(self.policy) if parameter is None else parameter.device)
        must_reset = self._needs_reset or self.reset_at_each_batch
        self._needs_reset = True  # if this rollout fails midway, the next one cannot continue it
        with (
            torch.no_grad(),
            self._evaluation,
            set_exploration_type(self.exploration_type),
            IsolatedRng(numbered_seed(self._policy_seed, self._batches), device),
        ):
            if must_reset:
                starts = loop.reset(self._reset_seeds(), None if self.reset_at_each_batch else self._restored_states)
                num_started = int(starts.sum())
                self._ids[starts] = np.arange(self._trajectories, self._trajectories + num_started)
                self._trajectories += num_started
            for _ in loop.steps(memory, device, random):
                pass
        self._number_trajectories(memory)
        self._needs_reset, self._restored_states = False, None
        self._batches += 1
        self.frames += memory.frames
        return memory

    def _number_trajectories(self, memory: RolloutMemory) -> None:
        """Assign numbers to the trajectories of a rollout, in the order of their first steps."""
        memory.trajectories[:] = self._ids
        ends = memory.ends
        count = int(ends.sum())
        if not count:
            return
        new_ids = np.full(ends.shape, -1)
        new_ids[ends] = np.arange(self._trajectories, self._trajectories + count)
        np.maximum.accumulate(new_ids, 0, out=new_ids)  # the number of the latest trajectory
        np.copyto(memory.trajectories[1:], new_ids[:-1], where=new_ids[:-1] >= 0)
        self._ids = np.where(new_ids[-1] >= 0, new_ids[-1], self._ids)
        self._trajectories += count

    @property
    def _policy_seed(self) -> int:
        if self._policy_seed_cache[0] != self.seed:
            self._policy_seed_cache = self.seed, spawn_seed(self.seed, "policy")
        return self._policy_seed_cache[1]

    def _reset_seeds(self) -> list[int]:
        seeds = spawn_seeds(self.seed, "environment", self._batches, count=self.num_envs)
        return [seeds[0]] * len(seeds) if self._static_seed else seeds

    # -- control -----------------------------------------------------------------------------------------------------
    def reset(self) -> None:
        """Reset every environment before the next batch."""
        self._needs_reset, self._restored_states = True, None

    @property
    def _states(self) -> Mapping[NestedKey, Tensor]:
        if self._restored_states is not None:
            return self._restored_states
        return recurrent_states(self.policy, self.num_envs) if self._loop is None else self._loop.recurrent

    @_states.setter
    def _states(self, states: Mapping[NestedKey, Tensor]) -> None:
        self._restored_states = states

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed and reset the environments at the next batch (equally if ``static_seed``), and return the last seed."""
        self.seed, self._static_seed = check_seed(seed), static_seed
        self._batches, self._needs_reset = 0, True
        return self._reset_seeds()[-1]

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environment; repeated calls are allowed. ``timeout`` is ignored."""
        if self.closed:
            return
        self.closed = True
        loop, self._loop, self._memory = self._loop, None, None
        try:
            if close_env and loop is not None:
                loop.stepper.close()
            elif close_env and isinstance(self._env_source, VectorEnv):
                self._env_source.close()
        except Exception:
            if raise_on_error:
                raise
