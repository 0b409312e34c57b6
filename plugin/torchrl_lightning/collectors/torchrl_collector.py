"""Collect rollouts from TorchRL environments: TorchRL's collector with this package's seeds, counters and state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType

from torchrl_lightning._core.keys import ACTION_MASK
from torchrl_lightning._core.modules import EvaluationMode
from torchrl_lightning._core.state import Attribute, bounded_integer, tensor
from torchrl_lightning._core.tree import join, next_key
from torchrl_lightning._core.validators import Checked, boolean, frames
from torchrl_lightning.collectors.base import RECURRENT_STATES, CollectorBase, check_random_frames
from torchrl_lightning.environments.actions import half_bounded_sampler
from torchrl_lightning.environments.backends.torchrl_env import (
    ContinueEpisodes,
    copy_calls,
    preserved_replay_state,
    replay_transforms,
    with_bookkeeping,
)
from torchrl_lightning.environments.env_errors import EnvironmentFault, position, reraise_step_error
from torchrl_lightning.environments.masks import action_mask
from torchrl_lightning.environments.observation_limits import check_magnitudes, magnitude_limits
from torchrl_lightning.environments.policy_calls import (
    Policy,
    apply_policy,
    check_finite,
    default_outputs,
    expand_mask,
    policy_device,
    recurrent_states,
)
from torchrl_lightning.environments.seeds import IsolatedRng, check_seed, numbered_seed, spawn_seed
from torchrl_lightning.environments.specs import carried_keys, environment_specs
from torchrl_lightning.environments.workers.threads import close_environment, record_num_threads

if TYPE_CHECKING:
    from torchrl.collectors import Collector

T = TypeVar("T")


class TorchRLCollector(CollectorBase):
    """Collect rollouts of a TensorDict policy in a TorchRL environment, with ``torchrl.collectors.Collector``.

    The collector yields TensorDicts ``[N, T]`` named ``(None, "time")``. Modes, random streams, recurrent states and
    resuming work as in :class:`~torchrl_lightning.GymnasiumCollector`. The collector adds ``is_init`` and recurrent
    states if the environment lacks them.

    Args:
        env: The environment; :func:`make_environment` builds and checks one from a factory.
        policy: Reads a TensorDict ``[N]`` and writes ``action``; ``None`` draws random actions.
        frames_per_batch: Steps per batch, summed over all environments; a multiple of the number of environments.
        total_frames: Stop iteration after this number of steps, including replayed steps; -1 means no limit.
        seed: Base seed of environment and policy; ``None`` draws it from torch's global generator.
        reset_at_each_batch: Begin every batch with a seeded reset.
        init_random_frames: Draw random actions in whole batches until this number of frames is reached; all other
            policy outputs are zero in these batches.

    Batches are on the environment's device. The environment may reuse and change its inputs and outputs, because the
    collector replaces its ``_step`` and ``_reset`` with versions that copy both.

    Raises:
        ValueError: Sizes do not fit, or the environment's values or actions are not finite. With
            ``reset_at_each_batch``, two resets after the same seed differ.
        TypeError: The policy has an unsupported type.
        KeyError: The policy writes no ``action``.

    Examples:
        >>> from torchrl.envs import GymEnv, SerialEnv
        >>> env = SerialEnv(2, lambda: GymEnv("Pendulum-v1"))
        >>> collector = TorchRLCollector(env, frames_per_batch=8, total_frames=16, seed=0)
        >>> [tuple(batch.shape) for batch in collector]
        [(2, 4), (2, 4)]
        >>> collector.shutdown()
    """

    STATE = {
        **CollectorBase.STATE,
        "trajectories": Attribute(bounded_integer(), "_trajectories"),
        "ended": Attribute(
            check_for=lambda owner: tensor(torch.bool, owner.num_envs), attribute="_ended", exists_if="_has_replay"
        ),
        "recurrent_states": RECURRENT_STATES,
    }

    reset_at_each_batch = Checked(boolean)
    init_random_frames = Checked(frames)

    def __init__(
        self,
        env: EnvBase,
        policy: Policy | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        seed: int | None = None,
        reset_at_each_batch: bool = False,
        init_random_frames: int = 0,
    ) -> None:
        record_num_threads(env)
        copy_calls(env)
        super().__init__(env, policy, env.batch_size.numel(), frames_per_batch, total_frames, seed, {})
        self.env = env
        self.reset_at_each_batch = reset_at_each_batch
        self.init_random_frames = check_random_frames(init_random_frames, policy)
        self._specs = environment_specs(env)
        self._mask = action_mask(self._specs.observation, self._specs.action)
        self._form, self._draw = self._specs.action_format, half_bounded_sampler(self._specs.action, env.batch_size)
        self._carried_keys = [key for name in carried_keys(env) for key in (name, ("next", name))]
        self._evaluation = EvaluationMode(policy)
        self._limits = magnitude_limits(policy, self._specs.observation)
        self._needs_reset = True
        self._resumed = False
        self._collector: Collector | None = None
        self._acts_randomly = False
        self._num_actions, self._policy_failed = 0, False  # in this rollout
        self._default_outputs: dict[NestedKey, Tensor] | None = None
        self._trajectories = self._shift = 0
        self._initial = recurrent_states(policy, self.num_envs)
        self._next_states = {join((), next_key(key)): state for key, state in self._initial.items()}
        self._has_replay = any(True for _ in replay_transforms(env))
        self._continue_episodes = ContinueEpisodes()
        # State after the previous batch: mask of the ended episodes, and recurrent states.
        self._ended = torch.ones(self.num_envs, dtype=torch.bool)
        self._states = self._initial

    def rollout(self) -> TensorDict:
        """Collect one batch, even beyond ``total_frames``."""
        device = policy_device(self.policy)
        must_reset = self._needs_reset or self.reset_at_each_batch
        self._needs_reset = True  # if this rollout fails midway, the next one cannot continue it
        policy_seed = numbered_seed(spawn_seed(self.seed, "policy"), self._batches)
        if must_reset and self.reset_at_each_batch and self._collector is None:
            self._check_seeding(policy_seed, device)
        self._acts_randomly = self.policy is None or self.frames < self.init_random_frames
        with self._evaluation, IsolatedRng(policy_seed, device):
            # The first call builds the collector, which calls the policy once and draws random numbers.
            collector = self._call_with_step_errors(self._get_or_build_collector)
        with torch.no_grad(), self._evaluation, IsolatedRng(policy_seed, device):
            collector.reset_at_each_iter = must_reset
            if must_reset:
                self._seed_environment()
            if self._resumed and not self.reset_at_each_batch:
                playing = np.zeros(self.num_envs, dtype=bool)
                for transform in replay_transforms(self.env):
                    transform.resume()
                    playing |= transform.replay.playing
                self._continue_episodes.resume(torch.from_numpy(playing) & ~self._ended, self._states)
            batch = self._call_with_step_errors(collector.rollout)
            if batch.ndim == 1:  # the environment has no batch dimension
                batch = batch.unsqueeze(0)
                batch.names = [None, "time"]
            if self._carried_keys:
                batch = batch.exclude(*self._carried_keys)
            returned = {f"observation {key!r}": batch.get(next_key(key)) for key in self.specs.keys}
            first = {f"first observation {key!r} of an episode": batch.get(key) for key in self.specs.keys}
            check_finite({"reward": batch["next", "reward"], **returned, **first}, rollout=True)
            if self._limits:
                check_magnitudes({key: batch.get(next_key(key)) for key in self._limits}, self._limits)
            self._number_trajectories(batch["collector", "traj_ids"], must_reset)
        self._needs_reset = self._resumed = False
        self._batches += 1
        self.frames += self.frames_per_batch
        if self._has_replay:
            self._ended = batch["next", "done"][:, -1, 0].cpu()
            self._states = {
                key: initial.where(expand_mask(self._ended, initial), batch.get(next_key(key))[:, -1].cpu())
                for key, initial in self._initial.items()
            }
        return batch

    def _call_with_step_errors(self, call: Callable[[], T]) -> T:
        """Call a function that runs environment and policy; add the step number to errors of the environment."""
        self._num_actions, self._policy_failed = 0, False
        position.environment = None
        try:
            return call()
        except (Exception, SystemExit) as error:
            if not self._policy_failed or isinstance(error, EnvironmentFault):
                reraise_step_error(error, f"At step {max(0, self._num_actions - 1)} of the rollout, ")
            raise

    def _number_trajectories(self, ids: Tensor, must_reset: bool) -> None:
        """Count the trajectories from the beginning of the run, also after resuming."""
        if must_reset:
            self._shift = self._trajectories - int(ids.min())
        ids += self._shift
        self._trajectories = int(ids.max()) + 1

    def _get_or_build_collector(self) -> Collector:
        if self.closed:
            raise RuntimeError("The collector was shut down; build a new one.")
        if self._collector is None:
            from torchrl.collectors import Collector  # a slow import that most runs do not need

            env = with_bookkeeping(self.env, self.policy)
            if self._has_replay:
                env = TransformedEnv(env, self._continue_episodes, auto_unwrap=False)
            with preserved_replay_state(self.env):  # the environment is reset again before the first step
                self._collector = Collector(
                    env,
                    self._act,
                    frames_per_batch=self.frames_per_batch,
                    exploration_type=ExplorationType.RANDOM,
                    env_device=env.device,
                    policy_device=env.device,  # _act moves the policy's inputs itself
                    storing_device=env.device,
                    trust_policy=True,
                    use_buffers=False,
                    auto_register_policy_transforms=False,
                )
        return self._collector

    def _act(self, step: TensorDictBase) -> TensorDictBase:
        position.environment = None
        try:
            return self._choose_action(step)
        except BaseException:
            self._policy_failed = True
            raise

    def _choose_action(self, step: TensorDictBase) -> TensorDictBase:
        self._num_actions += 1
        mask = self._mask
        if mask is not None:
            mask.check(step[ACTION_MASK].flatten(0, -2))
        if not self._acts_randomly:
            assert self.policy is not None
            if self._limits:
                check_magnitudes({key: step.get(key) for key in self._limits}, self._limits)
            outputs = apply_policy(self.policy, step, policy_device(self.policy), self._form)
            if mask is not None:
                masks = outputs[ACTION_MASK].flatten(0, -2)
                mask.check_actions(outputs["action"].reshape(len(masks), -1), masks, self._num_actions - 1)
            return outputs
        if self._default_outputs is None:
            self._default_outputs = {}
            if self.policy is not None:
                device = policy_device(self.policy)
                self._default_outputs = default_outputs(self.policy, step, device, self._next_states)
        if mask is not None:
            step["action"] = mask.draw(step[ACTION_MASK])
        elif self._draw is not None:
            step["action"] = self._draw().to(self.env.device)
        else:
            self.env.rand_action(step)
        step["action"] = step["action"].to(self.specs.action.dtype)
        # The recurrent states keep their initial values, so that the batch has its usual keys.
        for key, state in {**self._default_outputs, **self._next_states}.items():
            step.set(key, state.reshape(*step.shape, *state.shape[1:]).clone())
        return step

    def _seed_environment(self) -> None:
        self.env.set_seed(spawn_seed(self.seed, "environment", self._batches))

    def _check_seeding(self, policy_seed: int, device: torch.device) -> None:
        """Check that two resets after the same seed are equal; raise ValueError if a resumed run would differ."""
        starts = []
        for _ in range(2):
            with torch.no_grad(), IsolatedRng(policy_seed, device), preserved_replay_state(self.env):
                self._seed_environment()
                starts.append(self.env.reset().select(*self.specs.keys).clone())
        for key in self.specs.keys:
            first, second = (start[key] for start in starts)
            if not bool(((first == second) | ((first != first) & (second != second))).all()):
                raise ValueError(
                    f"reset_at_each_batch must be False for {type(self.env).__name__}, got True: observation {key!r} "
                    "differs between two resets after the same set_seed, so a resumed run would not repeat this one. "
                    "Let _set_seed seed every generator that _reset uses, or set reset_at_each_batch=False."
                )

    def reset(self) -> None:
        """Reset the environment before the next batch."""
        self._needs_reset, self._resumed = True, False

    def _post_load(self) -> None:
        self._resumed = self._has_replay

    def set_seed(self, seed: int) -> int:
        """Seed the environment, reset it before the next batch, and return the seed."""
        self.seed = check_seed(seed)
        self._batches, self._needs_reset = 0, True
        return self.seed

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environment and its processes; repeated calls are allowed. ``timeout`` is ignored."""
        if self.closed:
            return
        self.closed = True
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.shutdown(close_env=False, raise_on_error=False)
        try:
            if close_env:
                close_environment(self.env)
        except Exception:
            if raise_on_error:
                raise
