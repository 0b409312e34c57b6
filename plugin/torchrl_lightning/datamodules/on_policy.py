"""On-policy experience: one training epoch is one rollout, learned from for some passes and then replaced."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Protocol

from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_lightning.datamodules.discounts import check_discount
from torchrl_lightning.datamodules.episodes import ends_of
from torchrl_lightning.datamodules.sequences import (
    DEFAULT_MINI_BATCHES,
    acts_recurrently,
    check_whole_environments,
    stores_states,
)
from torchrl_lightning.datamodules.updates_per_step import UpdatesDataModule
from torchrl_lightning.environments.origins import env_ids
from torchrl_lightning.fitting import require_fit
from torchrl_lightning.keys import REPLAYED
from torchrl_lightning.protocols import CollectorApi, LearnerApi, UpdateBatches
from torchrl_lightning.ranges import integer, optional
from torchrl_lightning.rollout import GAEBuffer, RolloutBuffer
from torchrl_lightning.settings import Count, setting
from torchrl_lightning.state import Attribute, fields, generator, mapping, whole


class RolloutBufferFactory(Protocol):
    """What builds the buffer; LightningCLI reads from it which arguments are still to come."""

    def __call__(self, *, size: int) -> RolloutBuffer:
        """Build the buffer."""
        ...


_PLACE = fields("place", {"epoch": whole(), "pass": whole(-1), "generator": generator("cpu")})


class OnPolicyDataModule(UpdatesDataModule):
    """Collect a rollout, estimate its advantages and serve it in mini-batches, once each Lightning epoch.

    An epoch has ``num_epochs * num_mini_batch`` updates. The next rollout is collected when the next epoch begins, with
    the weights that the last update left: no batch is ever older than its policy.

    Args:
        buffer: a callable that takes ``size`` and gives the on-policy buffer, e.g. a partial of
            :class:`~torchrl_lightning.GAEBuffer` (the default). If it takes ``gamma``, it is handed that of a learner
            that has one.
        num_epochs: passes over each rollout.
        mini_batch_size: samples (time steps times environments) in a mini-batch, at most; derived from
            ``num_mini_batch`` if None.
        num_mini_batch: mini-batches in a pass; derived from ``mini_batch_size`` if None, or 4 without either. With
            both, a pass has exactly that many batches of exactly that size (environments, for a recurrent policy). For
            a recurrent policy it must divide ``num_envs``, which is checked before anything is collected.
        shuffle: draw the samples of each pass in a new random order.

    The other arguments are those of :class:`UpdatesDataModule`.

    Raises:
        ValueError: if the mini-batches do not fit the rollout, or (before anything is collected) a rollout the memory.

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

    serves, buffer_class = "rollouts", RolloutBuffer
    learner_for_it = "model=ppo (PPOModule)"
    RUN_STATE = {
        **UpdatesDataModule.RUN_STATE,
        "metrics": Attribute(mapping, "_metrics"),
        "place": Attribute(optional(_PLACE), "_place"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._given_batches = self.num_mini_batch, self.mini_batch_size
        self.num_mini_batch, self.mini_batch_size = self._mini_batches(self.num_mini_batch, self.mini_batch_size)
        self._place: dict[str, Any] | None = None  # which epoch the rollout is for, and how far its passes have come
        self._resumed: dict[str, Any] | None = None  # the place that a checkpoint was written at

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
            self.buffer = self._any_buffer(trial=False)
            self.buffer.generator.manual_seed(self._spawn_seed("buffer"))
            self.buffer.attach(self.env, self.envs_per_worker)

    def check_fit(self, learner: Any = None) -> Iterator[str]:
        """Ask the buffer, too."""
        yield from super().check_fit(learner)
        buffer = self._any_buffer(learner, trial=False)
        check_discount(buffer, learner)  # it may have been built for another learner's fit
        require_fit(buffer, self.specs, learner)
        number, size = self._given_batches
        yield "mini_batch_size" if number is None and size is not None else "num_mini_batch"
        self._check_batches(buffer, acts_recurrently(learner, buffer.recurrent_keys))

    def _check_batches(self, buffer: RolloutBuffer, recurrent: bool) -> None:
        """Raise a ValueError if mini-batches are whole environments and cannot be."""
        if recurrent if buffer.recurrent is None else buffer.recurrent:
            check_whole_environments(self.envs_per_worker, self.rollout_length, *self._given_batches)

    @property
    def advantages_standardized_by(self) -> str | None:
        """The name of the buffer if it standardises advantages over each rollout, which a learner then need not do."""
        buffer = self._any_buffer(trial=False)
        return type(buffer).__name__ if buffer.estimator.standardize else None

    def fingerprint(self, learner: Any = None) -> dict[str, Any]:
        """Add the kind of buffer and its capacity."""
        buffer = self._any_buffer(learner, trial=False)
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
        if is_held:  # without Lightning's own counters, the next epoch begins with a new rollout
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
            # A run limited by max_steps restarts after its last batch, and a module may end an epoch early.
            if made >= end or self.stop_if_spent() or not self._fill(learner, buffer, *networks):
                return
        batches = self._passes(buffer, networks, resumed, made)
        yield from self._steps(partial(self._draw, batches, end), made, end)

    def _draw(self, batches: Iterator[tuple[int, TensorDictBase]], end: int, update: int) -> TensorDictBase | None:
        """Return the numbered batch of an update of an epoch of ``end``, leaving out those before it."""
        for number, batch in batches:
            if number == update:
                if number + 1 == end:  # nothing runs after the last update: Lightning never asks for one more
                    self.buffer.after_gradients(None, {})
                    self.stop_if_spent()
                return batch
        return None

    def _fill(self, learner: LearnerApi, buffer: RolloutBuffer, actor: Any, critic: Any) -> bool:
        """Collect a rollout and estimate its advantages; return whether there is one."""
        began = time.perf_counter()
        if self.collector is None:  # a module may have built its policy only now
            self._check_batches(buffer, stores_states(actor, buffer.recurrent_keys))
        rollout = self._collect(actor)
        if rollout is None:
            return False
        self._check(rollout, buffer)
        collected = time.perf_counter()
        cut, ids = self.reset_at_each_batch, env_ids(rollout)
        parts = self._feed.in_parts(rollout, ids)
        seen = self._normalization.rollout(rollout, parts, ids, cut=cut, gamma=buffer.gamma)
        buffer.insert_data_slice(seen, copy=not self._feed.api.gives_rollouts_away)
        buffer.hooks.note_collected(rollout)
        if learner.annotate is not None:
            learner.annotate(buffer.rollout)
        buffer.before_gradients(actor, critic)
        seconds = {"time/collect": collected - began, "time/estimate": time.perf_counter() - collected}
        self._metrics = {**seconds, **buffer.metrics(self._feed.api.policy_version)}
        if ids is None or int(ids.min()) >= 0:  # else, whose episodes these are is unknown
            for part in parts:
                if part.begun is not None:
                    self._episodes.forget_unfinished(part.begun)
                self._episodes.add(**ends_of(part.rollout), env_ids=ids, cut=cut and part.is_last)
            self._metrics |= self._episodes.summary()
        # After all that may fail: a resumed run has either this rollout or another one in its place.
        self._clock.add(rollout.numel(), self.world_size, rollout.get(REPLAYED, None))
        self._feed.accept()
        self._note_pass(buffer, -1)
        self.publish_metrics()
        return True

    def _passes(
        self, buffer: RolloutBuffer, networks: tuple[Any, Any], resumed: dict[str, Any] | None, served: int
    ) -> Iterator[tuple[int, TensorDictBase]]:
        """Yield the numbered batches of all passes over the rollout, starting with the pass that was interrupted.

        That one is told by ``served``, the batches learned from before; ``resumed`` is a checkpoint's place in it.
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
        """Return whether as many frames are collected as were asked for, and learned from."""
        return super()._is_spent() and not self._goes_on()

    def _goes_on(self) -> bool:
        """Return whether a resumed run first learns from the rest of its rollout."""
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
            # With a size alone, batches are as even as possible, so that none is left with a handful of samples.
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
            return options  # there wrap_env() replays
        if make is not None and "replay" not in inspect.signature(make).parameters:
            raise ValueError(
                f"{type(self.buffer).__name__} replays demonstrations, but collector= takes no `replay`. Give it "
                "such a parameter, as GymnasiumCollector and AsynchronousCollector have one."
            )
        return {**options, "replay": replay}

    def _own_collector(self, policy: Any) -> tuple[CollectorApi, Iterator[TensorDictBase]]:
        # One of the user's may act with older weights than those by whose values is learned.
        valued = self._module().valued_policy if self.buffer.keeps_values else None
        return super()._own_collector(policy if valued is None else valued)

    def _wrap_env(self, env: VectorEnv | EnvBase) -> Any:
        return self.buffer.wrap_env(env)

    def _wrap_policy(self, policy: Any) -> Any:
        return self.buffer.wrap_policy(policy)

    def _check(self, rollout: TensorDictBase, buffer: RolloutBuffer) -> None:
        """Say what is wrong with a rollout ``[N, T]``."""
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
