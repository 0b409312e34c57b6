"""On-policy experience: each training epoch collects one rollout and learns from it in several passes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_lightning._core.errors import check_compatible
from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning._core.protocols import CollectorApi, LearnerApi
from torchrl_lightning._core.rank_metrics import plain_metrics, read_metrics
from torchrl_lightning._core.settings import PositiveInt, setting
from torchrl_lightning._core.state import Attribute, bounded_integer, fields, generator
from torchrl_lightning._core.update_batches import UpdateBatches
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.datamodules._run.buffer_factories import RolloutBufferFactory
from torchrl_lightning.datamodules._run.discounts import check_discount
from torchrl_lightning.datamodules._run.episode_statistics import read_episode_data
from torchrl_lightning.datamodules._run.sequence_checks import (
    DEFAULT_MINI_BATCHES,
    check_whole_environments,
    has_recurrent_policy,
    has_recurrent_states,
)
from torchrl_lightning.datamodules.updates_per_step import UpdatesDataModule
from torchrl_lightning.environments.env_ids import env_ids
from torchrl_lightning.rollout import GAEBuffer, RolloutBuffer

_POSITION = fields("position", {"epoch": bounded_integer(), "pass": bounded_integer(-1), "generator": generator("cpu")})


class OnPolicyDataModule(UpdatesDataModule):
    """Collect one rollout per Lightning epoch, estimate its advantages and serve it in mini-batches.

    An epoch has ``num_epochs * num_mini_batch`` updates. The next rollout is collected at the beginning of the next
    epoch with the newest weights.

    Args:
        buffer: a callable that takes ``size`` and returns the on-policy buffer, e.g. a partial of
            :class:`~torchrl_lightning.GAEBuffer` (the default). Its parameter ``gamma``, if any, receives the discount
            of a learner that has a discount.
        num_epochs: passes over each rollout.
        mini_batch_size: largest number of samples (time steps times environments) in a mini-batch; computed from
            ``num_mini_batch`` if None.
        num_mini_batch: mini-batches in a pass; computed from ``mini_batch_size`` if None, or 4 if both are None. If
            both are set, a pass has exactly this number of batches of exactly this size. With a recurrent policy, the
            size counts environments, and ``num_mini_batch`` must divide ``num_envs``; this is checked before
            collection.
        shuffle: draw the samples of each pass in a new random order.

    The other arguments are documented in :class:`UpdatesDataModule`.

    Raises:
        ValueError: The mini-batches do not fit the rollout. Or, before collection, a rollout does not fit into memory.

    Examples:
        >>> data = OnPolicyDataModule("CartPole-v1", num_envs=4, frames_per_batch=64, mini_batch_size=32, num_epochs=2)
        >>> data
        OnPolicyDataModule(env=CartPole-v1, num_envs=4, frames_per_batch=64, total_frames=-1, frames=0)
        >>> len(data.train_dataloader())
        4
    """

    make_buffer: RolloutBufferFactory = setting(default=GAEBuffer, alias="buffer")
    num_epochs: PositiveInt = 4
    mini_batch_size: PositiveInt | None = None
    num_mini_batch: Annotated[int, optional(integer)] = setting(default=None)
    shuffle: bool = True

    stream_kind, buffer_class = "rollouts", RolloutBuffer
    suggested_model = "model=ppo (PPOModule)"
    RUN_STATE = {
        **UpdatesDataModule.RUN_STATE,
        "metrics": Attribute(read_metrics, "_metrics", plain_metrics),
        "place": Attribute(optional(_POSITION), "_position"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._requested_batches = self.num_mini_batch, self.mini_batch_size
        self.num_mini_batch, self.mini_batch_size = self._resolve_mini_batches(
            self.num_mini_batch, self.mini_batch_size
        )
        self._position: dict[str, Any] | None = None  # epoch and current pass of the rollout
        self._resumed_position: dict[str, Any] | None = None  # the ``_position`` of the loaded checkpoint

    @property
    def resolved_updates_per_epoch(self) -> int:
        """``num_epochs * num_mini_batch``, the same on every rank."""
        return self.num_epochs * self.num_mini_batch

    @property
    def _rows_of_update(self) -> int:
        return -(-self.frames_per_batch // self.num_mini_batch)

    @property
    def rollout_length(self) -> int:
        """Time steps of one rollout."""
        return self.frames_per_batch // self.envs_per_worker

    def _build_parts(self) -> None:
        super()._build_parts()
        if self.buffer is None:
            vars(self)["buffer"] = buffer = self._get_or_build_buffer(trial=False)
            buffer.generator.manual_seed(self._spawn_seed("buffer"))
            buffer.attach(self.env, self.envs_per_worker)

    def check_fit(self, learner: Any = None) -> Iterator[str]:
        """Also check the buffer and the mini-batches."""
        yield from super().check_fit(learner)
        buffer = self._get_or_build_buffer(learner, trial=False)
        check_discount(buffer, learner)  # the buffer may have been built for another learner's fit
        check_compatible(buffer, self.specs, learner)
        number, size = self._requested_batches
        yield "mini_batch_size" if number is None and size is not None else "num_mini_batch"
        self._check_batches(buffer, has_recurrent_policy(learner, buffer.recurrent_keys))

    def _check_batches(self, buffer: RolloutBuffer, recurrent: bool) -> None:
        """Raise a ValueError if a recurrent policy would get mini-batches of incomplete environments."""
        if recurrent if buffer.recurrent is None else buffer.recurrent:
            check_whole_environments(self.envs_per_worker, self.rollout_length, *self._requested_batches)

    @property
    def advantages_standardized_by(self) -> str | None:
        """Class name of a buffer that standardises advantages per rollout instead of the learner; else None."""
        buffer = self._get_or_build_buffer(trial=False)
        return type(buffer).__name__ if buffer.estimator.standardize else None

    def fingerprint(self, learner: Any = None) -> dict[str, Any]:
        """Add class and capacity of the buffer."""
        buffer = self._get_or_build_buffer(learner, trial=False)
        return {**super().fingerprint(learner), "buffer": type(buffer).__name__, "capacity": self.rollout_length}

    @property
    def _buffer_sizes(self) -> dict[str, int]:
        return {"size": self.rollout_length}

    def _parts_state(self) -> dict[str, Any]:
        return {} if self.buffer is None else {"buffer": self.buffer.state_dict()}

    def _load_parts(self, rank_state: dict[str, Any]) -> None:
        if self.buffer is not None and "buffer" in rank_state:
            self.buffer.load_state_dict(rank_state["buffer"])

    def _post_load(self, rank_state: dict[str, Any]) -> None:
        super()._post_load(rank_state)
        self._position = self._position if self.buffer is not None and "buffer" in rank_state else None
        self._resumed_position = self._position

    def _restore_pending_state(self) -> None:
        was_pending = self._pending_state is not None
        super()._restore_pending_state()
        if was_pending:  # Lightning's counters are not restored then, so that the next epoch begins with a new rollout
            self._position = self._resumed_position = None

    def _epoch(self) -> Iterator[TensorDictBase | UpdateBatches]:
        self._begin_step()
        learner, buffer = self._learner_api(), self.buffer
        trainer: Any = self.trainer
        update, end = self._begin_epoch()
        networks = self._with_training_autocast(learner.part.policy), self._with_training_autocast(learner.critic)
        position, self._resumed_position = self._resumed_position, None
        if position is not None and (update > 0 or position["epoch"] == trainer.current_epoch):
            self._stream.restore_rng()
        else:
            position = None
            # If max_steps ended the run, it resumes after its last batch. A module may also end an epoch early.
            if update >= end or self.stop_if_finished() or not self._collect_rollout(learner, buffer, *networks):
                return
        batches = self._passes(buffer, networks, position, update)
        yield from self._steps(partial(self._draw, batches, end), update, end)

    def _draw(self, batches: Iterator[tuple[int, TensorDictBase]], end: int, update: int) -> TensorDictBase | None:
        """Skip to the batch of an update and return it; ``end`` is the number of updates in the epoch."""
        for number, batch in batches:
            if number == update:
                if number + 1 == end:  # Lightning does not call the iterator again after the last batch
                    self.buffer.after_gradients(None, {})
                    self.stop_if_finished()
                return batch
        return None

    def _collect_rollout(self, learner: LearnerApi, buffer: RolloutBuffer, actor: Any, critic: Any) -> bool:
        """Collect a rollout and estimate its advantages; return False if the collector has ended."""
        start = time.perf_counter()
        if self.collector is None:  # a module may have built its policy after the first check
            self._check_batches(buffer, has_recurrent_states(actor, buffer.recurrent_keys))
        rollout = self._collect(actor)
        if rollout is None:
            return False
        self._check_rollout(rollout, buffer)
        collected = time.perf_counter()
        cut, ids = self.reset_at_each_batch, env_ids(rollout)
        parts = self._stream.split_at_cuts(rollout, ids)
        normalized = self._normalization.normalize_rollout(rollout, parts, ids, cut=cut, gamma=buffer.gamma)
        buffer.insert_data_slice(normalized, copy=not self._stream.api.yields_owned_rollouts)
        buffer.hooks.on_collected(rollout)
        if learner.annotate is not None:
            learner.annotate(buffer.rollout)
        buffer.before_gradients(actor, critic)
        seconds = {"time/collect": collected - start, "time/estimate": time.perf_counter() - collected}
        self._metrics = {**seconds, **buffer.metrics(self._stream.api.policy_version)}
        if ids is None or int(ids.min()) >= 0:  # negative ids: the environments of the rows are unknown
            for part in parts:
                if part.cut_env_ids is not None:
                    self._episodes.forget_unfinished(part.cut_env_ids)
                self._episodes.add(**read_episode_data(part.rollout), env_ids=ids, cut=cut and part.is_last)
            self._metrics |= self._episodes.summary()
        # Count the rollout after all steps that may fail, so that a resumed run collects a failed rollout again.
        self._clock.add(rollout.numel(), self.world_size, rollout.get(REPLAYED, None))
        self._stream.accept()
        self._record_position(buffer, -1)
        self.publish_metrics()
        return True

    def _passes(
        self, buffer: RolloutBuffer, networks: tuple[Any, Any], position: dict[str, Any] | None, update: int
    ) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield the numbered batches of all passes over the rollout, beginning with the interrupted pass.

        ``update`` is the number of batches before the interruption. ``position`` is the checkpoint's record of the
        interrupted pass.
        """
        for number in range(update // self.num_mini_batch, self.num_epochs):
            if position is not None and number == position["pass"]:
                # Draw the order of the pass again.
                buffer.generator.set_state(position["generator"].cpu())
            elif number > 0:
                buffer.before_epoch(*networks)
            self._record_position(buffer, number)
            batches = buffer.generate_batches(self.num_mini_batch, self.mini_batch_size, 1, self.shuffle)
            yield from enumerate(batches, number * self.num_mini_batch)

    def _record_position(self, buffer: RolloutBuffer, number: int) -> None:
        trainer: Any = self.trainer
        self._position = {"epoch": trainer.current_epoch, "pass": number, "generator": buffer.generator.get_state()}

    def _is_finished(self) -> bool:
        """Return whether ``total_frames`` frames are collected and all updates are made."""
        return super()._is_finished() and not self._has_updates_left()

    def _has_updates_left(self) -> bool:
        """Return whether a resumed run still has updates on its stored rollout."""
        trainer: Any = self.trainer
        if self._resumed_position is None or not trainer.fit_loop.restarting:
            return False
        processed: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return (
            processed < self._epoch_length() if processed else self._resumed_position["epoch"] == trainer.current_epoch
        )

    def _resolve_mini_batches(self, number: int | None, size: int | None) -> tuple[int, int | None]:
        frames = self.frames_per_batch
        if size is not None and size > frames:
            raise ValueError(f"mini_batch_size must be at most frames_per_batch={frames}, got {size}. Lower it.")
        if number is None:
            number = DEFAULT_MINI_BATCHES if size is None else -(-frames // size)
            # If only the size is given, batches are as even as possible. Otherwise the last batch could be tiny.
            size = None
        if number * (size or 1) > frames:
            raise ValueError(
                f"num_mini_batch={number} batches of at least {size or 1} samples need {number * (size or 1)} frames, "
                f"but a rollout has frames_per_batch={frames}. Lower num_mini_batch or mini_batch_size."
            )
        return number, size

    def _collector_options(self) -> dict[str, Any]:
        options, replay = super()._collector_options(), None if self.buffer is None else self.buffer.replay
        if replay is None:
            return options
        make = self.make_collector
        if make is None and isinstance(self._environments.get_or_build(), EnvBase):
            return options  # wrap_env() adds the replay to a TorchRL environment
        if make is not None and "replay" not in inspect.signature(make).parameters:
            raise ValueError(
                f"collector= must have a parameter `replay`, because {type(self.buffer).__name__} replays "
                "demonstrations. Add it, as in GymnasiumCollector and AsynchronousCollector."
            )
        return {**options, "replay": replay}

    def _build_default_collector(self, policy: Any) -> tuple[CollectorApi, Iterator[TensorDictBase]]:
        # Only our own collector may reuse the policy's values: a user's collector may act with older weights.
        policy_with_values = self._learner_api().collection_policy if self.buffer.uses_policy_values else None
        return super()._build_default_collector(policy if policy_with_values is None else policy_with_values)

    def _wrap_env(self, env: VectorEnv | EnvBase) -> Any:
        return self.buffer.wrap_env(env)

    def _wrap_policy(self, policy: Any) -> Any:
        return self.buffer.wrap_policy(policy)

    def _check_rollout(self, rollout: TensorDictBase, buffer: RolloutBuffer) -> None:
        """Raise an error if shape or keys of a rollout ``[N, T]`` are wrong."""
        expected = (self.envs_per_worker, self.rollout_length)
        if tuple(rollout.batch_size) != expected:
            raise ValueError(
                f"rollouts of the collector must have the shape [num_envs, frames_per_batch / num_envs] = {expected}, "
                f"got {tuple(rollout.batch_size)}. Set num_envs and frames_per_batch of the DataModule as in the "
                "collector; trajectories must not be split or padded."
            )
        missing = [key for key in buffer.required_keys if rollout.get(key, None) is None]
        if missing:
            raise KeyError(
                f"{type(buffer).__name__} needs the entries {missing}, but the policy wrote only "
                f"{sorted(map(str, rollout.keys()))}. Let the policy write them, or rename the buffer's keys."
            )
