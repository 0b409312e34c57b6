"""On-policy experience: each training epoch collects one rollout and learns from it in several passes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Protocol

from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_lightning._core.errors import check_compatible
from torchrl_lightning._core.keys import REPLAYED
from torchrl_lightning._core.protocols import CollectorApi, LearnerApi
from torchrl_lightning._core.settings import Count, setting
from torchrl_lightning._core.state import Attribute, bounded_integer, fields, generator, mapping
from torchrl_lightning._core.update_batches import UpdateBatches
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.datamodules._run.discounts import check_discount
from torchrl_lightning.datamodules._run.episode_statistics import ends_of
from torchrl_lightning.datamodules._run.sequence_checks import (
    DEFAULT_MINI_BATCHES,
    acts_recurrently,
    check_whole_environments,
    stores_states,
)
from torchrl_lightning.datamodules.updates_per_step import UpdatesDataModule
from torchrl_lightning.environments.env_ids import env_ids
from torchrl_lightning.rollout import GAEBuffer, RolloutBuffer


class RolloutBufferFactory(Protocol):
    """A factory of rollout buffers; LightningCLI reads the runtime arguments from its signature."""

    def __call__(self, *, size: int) -> RolloutBuffer:
        """Build the buffer."""
        ...


_PLACE = fields("place", {"epoch": bounded_integer(), "pass": bounded_integer(-1), "generator": generator("cpu")})


class OnPolicyDataModule(UpdatesDataModule):
    """Collect one rollout per Lightning epoch, estimate its advantages and serve it in mini-batches.

    An epoch has ``num_epochs * num_mini_batch`` updates. The next rollout is collected at the beginning of the next
    epoch with the newest weights.

    Args:
        buffer: a callable that takes ``size`` and returns the on-policy buffer, e.g. a partial of
            :class:`~torchrl_lightning.GAEBuffer` (the default). A parameter ``gamma`` receives the learner's discount,
            if the learner has one.
        num_epochs: passes over each rollout.
        mini_batch_size: largest number of samples (time steps times environments) in a mini-batch; computed from
            ``num_mini_batch`` if None.
        num_mini_batch: mini-batches in a pass; computed from ``mini_batch_size`` if None, or 4 if both are None. If
            both are given, a pass has exactly this number of batches of exactly this size (in environments for a
            recurrent policy). For a recurrent policy it must divide ``num_envs``, which is checked before collection.
        shuffle: draw the samples of each pass in a new random order.

    The other arguments are documented in :class:`UpdatesDataModule`.

    Raises:
        ValueError: The mini-batches do not fit the rollout, or (before collection) the rollout exceeds the memory.

    Examples:
        >>> data = OnPolicyDataModule("CartPole-v1", num_envs=4, frames_per_batch=64, mini_batch_size=32, num_epochs=2)
        >>> data
        OnPolicyDataModule(env=CartPole-v1, num_envs=4, frames_per_batch=64, total_frames=-1, frames=0)
        >>> len(data.train_dataloader())
        4
    """

    make_buffer: RolloutBufferFactory = setting(default=GAEBuffer, alias="buffer")
    num_epochs: Count = 4
    mini_batch_size: Count | None = None
    num_mini_batch: Annotated[int, optional(integer)] = setting(default=None)
    shuffle: bool = True

    stream_kind, buffer_class = "rollouts", RolloutBuffer
    suggested_model = "model=ppo (PPOModule)"
    RUN_STATE = {
        **UpdatesDataModule.RUN_STATE,
        "metrics": Attribute(mapping, "_metrics"),
        "place": Attribute(optional(_PLACE), "_place"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given_batches = self.num_mini_batch, self.mini_batch_size
        self.num_mini_batch, self.mini_batch_size = self._mini_batches(self.num_mini_batch, self.mini_batch_size)
        self._place: dict[str, Any] | None = None  # epoch and current pass of the rollout
        self._resumed: dict[str, Any] | None = None  # the ``_place`` of the loaded checkpoint

    @property
    def updates_of_epoch(self) -> int:
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
            self.buffer = self._get_or_build_buffer(trial=False)
            self.buffer.generator.manual_seed(self._spawn_seed("buffer"))
            self.buffer.attach(self.env, self.envs_per_worker)

    def check_fit(self, learner: Any = None) -> Iterator[str]:
        """Also check the buffer and the mini-batches."""
        yield from super().check_fit(learner)
        buffer = self._get_or_build_buffer(learner, trial=False)
        check_discount(buffer, learner)  # the buffer may have been built for another learner's fit
        check_compatible(buffer, self.specs, learner)
        number, size = self._given_batches
        yield "mini_batch_size" if number is None and size is not None else "num_mini_batch"
        self._check_batches(buffer, acts_recurrently(learner, buffer.recurrent_keys))

    def _check_batches(self, buffer: RolloutBuffer, recurrent: bool) -> None:
        """Raise a ValueError if a recurrent policy would get mini-batches of incomplete environments."""
        if recurrent if buffer.recurrent is None else buffer.recurrent:
            check_whole_environments(self.envs_per_worker, self.rollout_length, *self._given_batches)

    @property
    def advantages_standardized_by(self) -> str | None:
        """Class name of the buffer if it standardises the advantages of each rollout, so that a learner need not."""
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

    def _load_parts(self, own: dict[str, Any]) -> None:
        if self.buffer is not None and "buffer" in own:
            self.buffer.load_state_dict(own["buffer"])

    def _loaded(self, own: dict[str, Any]) -> None:
        super()._loaded(own)
        self._place = self._place if self.buffer is not None and "buffer" in own else None
        self._resumed = self._place

    def _restore_held(self) -> None:
        is_held = self._held is not None
        super()._restore_held()
        if is_held:  # Lightning's counters are not restored then, so that the next epoch begins with a new rollout
            self._place = self._resumed = None

    def _epoch(self) -> Iterator[TensorDictBase | UpdateBatches]:
        self._begin_step()
        learner, buffer = self._module(), self.buffer
        trainer: Any = self.trainer
        made, end = self._begin_epoch()
        networks = self._as_learned(learner.part.policy), self._as_learned(learner.critic)
        resumed, self._resumed = self._resumed, None
        if resumed is not None and (made > 0 or resumed["epoch"] == trainer.current_epoch):
            self._feed.restore_rng()
        else:
            resumed = None
            # A run that max_steps ended restarts after its last batch, and a module may end an epoch early.
            if made >= end or self.stop_if_spent() or not self._fill(learner, buffer, *networks):
                return
        batches = self._passes(buffer, networks, resumed, made)
        yield from self._steps(partial(self._draw, batches, end), made, end)

    def _draw(self, batches: Iterator[tuple[int, TensorDictBase]], end: int, update: int) -> TensorDictBase | None:
        """Skip to the batch of an update and return it; ``end`` is the number of updates in the epoch."""
        for number, batch in batches:
            if number == update:
                if number + 1 == end:  # Lightning does not call the iterator again after the last batch
                    self.buffer.after_gradients(None, {})
                    self.stop_if_spent()
                return batch
        return None

    def _fill(self, learner: LearnerApi, buffer: RolloutBuffer, actor: Any, critic: Any) -> bool:
        """Collect a rollout and estimate its advantages; return False if the collector has ended."""
        began = time.perf_counter()
        if self.collector is None:  # a module may have built its policy after the first check
            self._check_batches(buffer, stores_states(actor, buffer.recurrent_keys))
        rollout = self._collect(actor)
        if rollout is None:
            return False
        self._check(rollout, buffer)
        collected = time.perf_counter()
        cut, ids = self.reset_at_each_batch, env_ids(rollout)
        parts = self._feed.in_parts(rollout, ids)
        seen = self._normalization.rollout(rollout, parts, ids, cut=cut, gamma=buffer.gamma)
        buffer.insert_data_slice(seen, copy=not self._feed.api.yields_owned_rollouts)
        buffer.hooks.on_collected(rollout)
        if learner.annotate is not None:
            learner.annotate(buffer.rollout)
        buffer.before_gradients(actor, critic)
        seconds = {"time/collect": collected - began, "time/estimate": time.perf_counter() - collected}
        self._metrics = {**seconds, **buffer.metrics(self._feed.api.policy_version)}
        if ids is None or int(ids.min()) >= 0:  # negative ids: the environments of the rows are unknown
            for part in parts:
                if part.begun is not None:
                    self._episodes.forget_unfinished(part.begun)
                self._episodes.add(**ends_of(part.rollout), env_ids=ids, cut=cut and part.is_last)
            self._metrics |= self._episodes.summary()
        # Count the rollout after all steps that may fail, so that a resumed run collects a failed rollout again.
        self._clock.add(rollout.numel(), self.world_size, rollout.get(REPLAYED, None))
        self._feed.accept()
        self._note_pass(buffer, -1)
        self.publish_metrics()
        return True

    def _passes(
        self, buffer: RolloutBuffer, networks: tuple[Any, Any], resumed: dict[str, Any] | None, served: int
    ) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield the numbered batches of all passes over the rollout, beginning with the interrupted pass.

        ``served`` is the number of batches before the interruption; ``resumed`` is the ``_place`` of the checkpoint.
        """
        for number in range(served // self.num_mini_batch, self.num_epochs):
            if resumed is not None and number == resumed["pass"]:
                # Draw the order of the pass again.
                buffer.generator.set_state(resumed["generator"].cpu())
            elif number > 0:
                buffer.before_epoch(*networks)
            self._note_pass(buffer, number)
            batches = buffer.generate_batches(self.num_mini_batch, self.mini_batch_size, 1, self.shuffle)
            yield from enumerate(batches, number * self.num_mini_batch)

    def _note_pass(self, buffer: RolloutBuffer, number: int) -> None:
        trainer: Any = self.trainer
        self._place = {"epoch": trainer.current_epoch, "pass": number, "generator": buffer.generator.get_state()}

    def _is_spent(self) -> bool:
        """Return whether ``total_frames`` frames are collected and all updates are made."""
        return super()._is_spent() and not self._goes_on()

    def _goes_on(self) -> bool:
        """Return whether a resumed run still has updates on its stored rollout."""
        trainer: Any = self.trainer
        if self._resumed is None or not trainer.fit_loop.restarting:
            return False
        learned: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return learned < self._epoch_length() if learned else self._resumed["epoch"] == trainer.current_epoch

    def _mini_batches(self, number: int | None, size: int | None) -> tuple[int, int | None]:
        frames = self.frames_per_batch
        if size is not None and size > frames:
            raise ValueError(f"mini_batch_size={size} is larger than a rollout of frames_per_batch={frames}.")
        if number is None:
            number = DEFAULT_MINI_BATCHES if size is None else -(-frames // size)
            # If only the size is given, batches are as even as possible: the last one would otherwise be tiny.
            size = None
        if number * (size or 1) > frames:
            raise ValueError(
                f"num_mini_batch={number} batches of at least {size or 1} samples need {number * (size or 1)}, but a "
                f"rollout has frames_per_batch={frames}."
            )
        return number, size

    def _collector_options(self) -> dict[str, Any]:
        options, replay = super()._collector_options(), None if self.buffer is None else self.buffer.replay
        if replay is None:
            return options
        make = self.make_collector
        if make is None and isinstance(self._environments.built(), EnvBase):
            return options  # wrap_env() adds the replay to a TorchRL environment
        if make is not None and "replay" not in inspect.signature(make).parameters:
            raise ValueError(
                f"{type(self.buffer).__name__} replays demonstrations, but collector= takes no `replay`. Give it "
                "such a parameter, as GymnasiumCollector and AsynchronousCollector have one."
            )
        return {**options, "replay": replay}

    def _own_collector(self, policy: Any) -> tuple[CollectorApi, Iterator[TensorDictBase]]:
        # Only our own collector reuses the values: a user's collector may act with older weights.
        valued = self._module().valued_policy if self.buffer.keeps_values else None
        return super()._own_collector(policy if valued is None else valued)

    def _wrap_env(self, env: VectorEnv | EnvBase) -> Any:
        return self.buffer.wrap_env(env)

    def _wrap_policy(self, policy: Any) -> Any:
        return self.buffer.wrap_policy(policy)

    def _check(self, rollout: TensorDictBase, buffer: RolloutBuffer) -> None:
        """Raise an error if shape or keys of a rollout ``[N, T]`` are wrong."""
        expected = (self.envs_per_worker, self.rollout_length)
        if tuple(rollout.batch_size) != expected:
            raise ValueError(
                f"the collector gave a rollout of shape {tuple(rollout.batch_size)}, expected "
                f"[num_envs, frames_per_batch / num_envs] = {expected}. Give the DataModule the num_envs and "
                "frames_per_batch of the collector; trajectories must not be split or padded."
            )
        missing = [key for key in buffer.required_keys if rollout.get(key, None) is None]
        if missing:
            raise KeyError(
                f"{type(buffer).__name__} needs {missing}, which the policy did not write; the rollout has "
                f"{sorted(map(str, rollout.keys()))}. Let the policy write them, or rename the buffer's keys."
            )
