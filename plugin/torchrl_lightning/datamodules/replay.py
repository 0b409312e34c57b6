"""Off-policy experience: draw batches from a replay buffer and collect frames in a fixed ratio to updates."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from inspect import signature
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.errors import check_compatible
from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.protocols import CollectorApi, LearnerApi, SourceApi, no_keys
from torchrl_lightning._core.rank_metrics import Sum
from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning._core.ranks import broadcast_from_rank_zero
from torchrl_lightning._core.settings import PositiveInt, choices, setting
from torchrl_lightning._core.state import Attribute, bounded_integer
from torchrl_lightning._core.tree import nested_keys
from torchrl_lightning._core.update_batches import UpdateBatches
from torchrl_lightning._core.validators import exact_ratio, integer, non_negative, optional, positive
from torchrl_lightning.datamodules._run.arguments import buffer_fingerprint, unchanged_non_negative
from torchrl_lightning.datamodules._run.batch_state import plain_batch, read_batch
from torchrl_lightning.datamodules._run.buffer_factories import ReplayBufferFactory
from torchrl_lightning.datamodules._run.discounts import check_discount, discount_of
from torchrl_lightning.datamodules._run.environments import is_ready
from torchrl_lightning.datamodules._run.sequence_checks import check_windows, passes_batches_unchanged
from torchrl_lightning.datamodules._run.snapshots import BufferSnapshots, check_folder
from torchrl_lightning.datamodules._run.step_writer import SharedMemorySteps, Steps, check_resets, split_at_resets
from torchrl_lightning.datamodules._run.trainer_hooks import ReplayHooks
from torchrl_lightning.datamodules._run.write_back import check_collected_keys, check_later_keys, check_stored_keys
from torchrl_lightning.datamodules.sources.dataset import BufferedDataset, DatasetMix, check_no_collection
from torchrl_lightning.datamodules.sources.protocol import (
    BatchSource,
    buffers_of,
    build_source,
    check_first_fit,
    check_rows,
    check_source,
    check_transforms,
    set_goals,
)
from torchrl_lightning.datamodules.updates_per_step import UpdatesDataModule
from torchrl_lightning.demonstrations.io.demo_dataset import dataset_path
from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.replay.builders import check_lengths, excluded_keys

logger = logging.getLogger(__name__)


class ReplayDataModule(UpdatesDataModule):
    """Serve batches from a replay buffer and collect frames in a fixed ratio to updates.

    An epoch has ``updates_per_epoch`` updates. Before update ``u`` (counted from 0 over the whole run) each rank has
    collected ``warmup_frames + u * frames_per_update`` frames, rounded up to a multiple of ``frames_per_batch``. A
    resumed run keeps this ratio. A batch is drawn when its update begins; the priorities are updated afterwards.

    Args:
        buffer: a callable that takes ``num_envs``, optionally also ``gamma``, and returns the replay buffer of a rank.
        source: a callable that takes the buffer and returns the source of batches, e.g. a partial of
            :class:`~torchrl_lightning.MixedReplay`; if None, batches come from the buffer. The source's method
            ``prepare`` receives the LightningModule before each batch. A ``ReplayService`` stores the rows itself.
        dataset: demonstrations of ``env`` that fill the buffer before the first update: a directory, one of its files,
            ``"minari:ID"`` or a ``minari.MinariDataset``. By default such a run collects nothing: ``frames`` stays 0,
            ``num_envs`` is 1, and loggers count updates. If ``frames_per_update`` is set, collected steps follow the
            data and overwrite them in a full buffer. The metadata define how episodes end (default: termination).
        dataset_share: the share of each batch that is drawn from the data (RLPD, Ball et al. 2023). The data then have
            their own buffer and are never overwritten. By default, data and collected steps share one buffer.
        batch_size: samples (or sequences) in a batch.
        updates_per_epoch: updates of one epoch.
        frames_per_update: new frames of each rank per update; may be below 1. Default: 1, or 0 with a data set.
        warmup_frames: frames collected with random actions before the first update. A collector given as
            ``collector=`` needs its own ``init_random_frames`` for them. Default: 1000, or 0 with a data set.
        write_back: keys that the module may rewrite in a batch; the rewritten entries replace the stored ones.
            Default: the keys that the module's method ``rewritten_keys(batch)`` returns, if it has one.
        checkpoint_buffer: ``"inside"`` stores the buffer in the checkpoint. ``"beside"`` stores it in ``buffer_dir``,
            once for each state, and without a copy if the cells are memory-mapped files. After ``"none"``, a resumed
            run collects ``warmup_frames`` again. With several ranks, ``"inside"`` acts like ``"beside"``.
        buffer_dir: the folder for ``"beside"``; by default ``buffer`` below the trainer's root folder.
        frames_per_batch: frames collected at a time; by default one step of every environment.

    The other arguments are documented in :class:`UpdatesDataModule`.

    Raises:
        ValueError: A number is out of range, ``checkpoint_buffer`` is unknown, or a run without collection has an
            argument of collection.

    Examples:
        >>> data = ReplayDataModule("CartPole-v1", buffer=ExperienceBuffer, num_envs=2, updates_per_epoch=100)
        >>> data
        ReplayDataModule(env=CartPole-v1, num_envs=2, frames_per_batch=2, total_frames=-1, frames=0)
        >>> len(data.train_dataloader())
        100
    """

    make_buffer: ReplayBufferFactory = setting(alias="buffer")
    make_source: Callable[[ExperienceBuffer], BatchSource] | None = setting(default=None, alias="source")
    dataset: Any = None
    dataset_share: float | None = None
    batch_size: PositiveInt = 256
    updates_per_epoch: PositiveInt = 1000
    frames_per_update: Annotated[float, optional(non_negative)] = setting(default=None)
    warmup_frames: Annotated[int, optional(unchanged_non_negative)] = setting(default=None)
    write_back: Sequence[NestedKey] | None = None
    checkpoint_buffer: Annotated[str, choices("inside", "beside", "none")] = "inside"
    buffer_dir: str | Path | None = None
    frames_per_batch: Annotated[int, optional(integer)] = setting(default=None)
    num_envs: PositiveInt = 1

    stream_kind, buffer_class, drops_reset_rows = "replay", ExperienceBuffer, True
    NOT_IN_FILES = (*UpdatesDataModule.NOT_IN_FILES, "dataset", "buffer_dir")
    HOOKS, suggested_model = ReplayHooks, "model=dqn (DQNModule)"
    RUN_STATE = {
        **UpdatesDataModule.RUN_STATE,
        "updates": Attribute(bounded_integer(), "_finished_updates"),
        "refilled": Attribute(bounded_integer(), "_refill_frames"),
        "batch": Attribute(read_batch, "_unfinished_batch", plain_batch),
    }

    def __post_init__(self) -> None:
        collects = self.dataset is None or self.dataset_share is not None
        if self.dataset_share is not None:
            self.make_source = DatasetMix(self.make_buffer, self.dataset_share, self.dataset, self.make_source)
        self.write_back = None if self.write_back is None else nested_keys(self.write_back)
        per_update, warmup = (1.0, 1000) if collects else (0.0, 0)
        self.frames_per_update = per_update if self.frames_per_update is None else self.frames_per_update
        self.warmup_frames = warmup if self.warmup_frames is None else self.warmup_frames
        if collects:
            positive(self.frames_per_update, "frames_per_update")
        elif not self.frames_per_update:
            self.num_envs = self.num_envs if is_ready(self.env) else 1  # one ring holds an episode of any length
        self._check_settings()
        self.frames_per_batch = self.envs_per_worker if self.frames_per_batch is None else self.frames_per_batch
        super().__post_init__()
        # An exact fraction: in floating point 30 * 0.1 exceeds 3, so that a fourth frame would be collected.
        self._ratio = exact_ratio(self.frames_per_update)
        self._clock.announce_warmup(self.warmup_frames)
        self.updates = self._refill_frames = 0  # drawn batches; frames to collect again, as a checkpoint had no buffer
        self._dataset: BufferedDataset | None = None  # None after the buffer is filled
        self._source: Any = None  # a BatchSource after setup
        self._row_store: Any = None  # the source, if it stores the rows itself
        self._write_target: Any = None  # the target of writes: the buffer, or a source that stores the rows
        self._stores_rollouts = True  # False if the collector's processes write the rollouts
        self._prepare: Callable[[Any], None] | None = None  # the source's method that runs before each batch
        self._can_draw: Callable[[int], bool] | None = None  # the method of a source that can lose rows
        self._shared_steps: SharedMemorySteps | None = None  # the last written steps
        # Whether the collector delivers its steps in the layout of the rings; whether the learner lacks a drawn batch.
        self._shares_memory = self._is_drawn = False
        self._current_batch: TensorDictBase | None = None  # the batch of the current update
        self._resumed_batch: TensorDictBase | None = None  # the first batch of a resumed run
        self._rewritten_keys: Callable[[Any], Sequence[NestedKey]] = no_keys  # the method of the learner
        self._gamma, self._num_ranks, self._seconds = 0.99, 1, dict[str, float]()  # seconds: durations in this epoch
        self._written: dict[str, Any] = {}  # the last written states of buffer and source; empty after a change

    def _check_settings(self) -> None:
        if not self.frames_per_update:
            check_no_collection(self.make_collector, self.warmup_frames, self.total_frames)

    @property
    def _finished_updates(self) -> int:
        """Number of finished updates; a resumed run repeats an update that was not finished."""
        return self.updates - (self._current_batch is not None)

    @_finished_updates.setter
    def _finished_updates(self, updates: int) -> None:
        self.updates = updates

    @property
    def _unfinished_batch(self) -> TensorDictBase | None:
        """The batch of an unfinished update; None if checkpoints do not store the buffer."""
        batch = self._resumed_batch if self._current_batch is None else self._current_batch
        return None if self._buffer_mode == "none" else batch

    @_unfinished_batch.setter
    def _unfinished_batch(self, batch: TensorDictBase | None) -> None:
        self._resumed_batch = batch

    source = property(attrgetter("_source"), doc="The source of batches; None before the first fit.")

    @property
    def resolved_updates_per_epoch(self) -> int:
        """``updates_per_epoch``."""
        return self.updates_per_epoch

    @property
    def _rows_of_update(self) -> int:
        return self.batch_size

    @property
    def clock(self) -> tuple[int, str]:
        """Count and unit for loggers and progress bars: frames, or updates if the run collects nothing."""
        return super().clock if self.warmup_frames or self.frames_per_update else (self.updates, "updates")

    def metrics(self) -> dict[str, float]:
        """Add the number of updates and, as ``replay/size``, the number of stored steps."""
        sizes = {} if self.buffer is None else {"replay/size": Sum(len(self.buffer))}
        sizes = sizes if self._row_store is None else self._row_store.metrics()
        return {**super().metrics(), "updates": float(self.updates), **sizes}

    def _build_parts(self) -> None:
        super()._build_parts()
        vars(self)["buffer"] = buffer = self._get_or_build_buffer(trial=False)
        self._source = self._get_or_build_source(buffer, self._learner)
        data = buffer if self.dataset_share is None else self._source.buffers[1]
        set_goals(buffers_of(self._source, buffer), self._environments.goals)
        api = SourceApi.of(self._source)
        self._row_store = self._source if api.stores_rows else None
        self._write_target = buffer if self._row_store is None else self._row_store
        self._prepare, self._can_draw = api.prepare, api.can_draw
        self._rewritten_keys = LearnerApi.of(self._learner).rewritten_keys
        self._gamma, self._num_ranks = discount_of(self._learner, buffer), self.world_size
        if not len(buffer) and not self.updates:
            data.generator.manual_seed(self._spawn_seed("dataset"))
            buffer.generator.manual_seed(self._spawn_seed("buffer"))
        if self.dataset is not None and not len(data):
            self._dataset = BufferedDataset(self.dataset, self.env, self._environments.specs, data)

    def check_fit(self, learner: Any = None) -> Iterator[str]:
        """Also check the parts of the buffer, the source and the data set."""
        yield from super().check_fit(learner)
        buffer = self._get_or_build_buffer(learner)
        check_discount(buffer, learner)  # the buffer may have been built for another learner's fit
        check_lengths(buffer)
        check_compatible(buffer, self.specs, learner)
        check_resets(self._environments.env, buffer, self.world_size)
        for name, part in (("storage", buffer.storage), ("sampler", buffer.sampler), ("writer", buffer.writer)):
            yield f"buffer.{name}"
            check_compatible(part, self.specs, learner)
        yield "buffer.transform"
        check_transforms([buffer], self._environments.goals, self.specs, learner)
        yield "source"
        source = self._get_or_build_source(buffer, learner)
        check_compatible(source, self.specs, learner)
        check_first_fit(source, None if self.updates else self._warmup_steps, self.seed, self._spawn_seed)
        check_transforms(buffers_of(source, buffer)[1:], self._environments.goals, self.specs, learner)
        check_rows(source, self._normalization.is_on and self._collector_writes_to(source))
        yield "buffer.sampler"
        recurrent = LearnerApi.of(learner).has_memory and passes_batches_unchanged(self, learner)
        for number, source_buffer in enumerate(buffers_of(source, buffer)):
            check_windows(source_buffer, None if number else self._warmup_steps, recurrent)
        yield "write_back"
        check_later_keys(self.write_back, buffer.n_steps)
        yield "buffer_dir"
        if self.buffer_dir is not None:
            check_folder(Path(self.buffer_dir), self._buffer_mode, self.checkpoint_buffer)
        yield "dataset"
        if self.dataset is not None:
            dataset_path(self.dataset)  # raises an error if the data set does not exist

    @property
    def _warmup_steps(self) -> int | None:
        """Steps of each environment before the first update; None if the collector or a data set defines the number."""
        if self.make_collector is not None or self.dataset is not None:
            return None
        rollouts = max(1, -(-self.warmup_frames // self.frames_per_batch))
        return rollouts * self.frames_per_batch // self.envs_of_rank

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keep the transferred batch, because the module's loss writes the new priorities into this batch."""
        if self._is_drawn:
            self._is_drawn, self._current_batch = False, batch
        return batch

    def _epoch(self) -> Iterator[TensorDictBase | UpdateBatches]:
        learner = self._learner_api()
        self._stream.restore_rng()
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            is_first = self._normalization.is_on and not self.updates
            dataset.write(learner.policy, self._update_statistics if is_first else None)
        self._seconds = {"time/collect": 0.0, "time/sample": 0.0}
        update, end = self._begin_epoch()
        yield from self._steps(partial(self._draw, learner, end), update, end)

    def _end_update(self) -> bool:
        if self._is_finished():
            return False
        self.apply_feedback()
        return True

    def end_step(self) -> None:
        """Write priorities and rewritten entries of the step's last update to the buffer."""
        self.apply_feedback()
        super().end_step()

    def _draw(self, learner: LearnerApi, end: int, update: int) -> TensorDictBase | None:
        """Collect frames for one of the epoch's ``end`` updates; return its batch, or None if the collector ended."""
        start = time.perf_counter()
        while self._waits_for_frames() or (not len(self.buffer) if self._row_store is None else self._lacks_rows()):
            if not self._collect_frames(learner):
                return None
            if interrupts.between_steps and (interrupts.pending or rank_stop.is_active):
                interrupts.check()
                rank_stop.check()
        collected = time.perf_counter()
        batch, self._resumed_batch = self._resumed_batch, None
        if batch is None:
            if self._prepare is not None:
                self._prepare(learner.part)
            batch = self._source.draw(self.batch_size)
            if not self.updates:
                check_stored_keys(self.write_back, self.buffer, batch)
            if self._normalization.is_on:
                self._normalization.advance_if_due()
                self._normalization.normalize_(batch)
        self.updates += 1
        self._written, self._is_drawn = {}, True
        self._seconds["time/collect"] += collected - start
        self._seconds["time/sample"] += time.perf_counter() - collected
        if (is_finished := self._is_finished()) or update + 1 == end:
            self._metrics = {**self._seconds, **self._episodes.summary()}
            self.publish_metrics()
        if is_finished:
            self._stop()
        return batch

    def _waits_for_frames(self) -> bool:
        """Return whether the next update needs more frames than the run has collected."""
        collected = (self._clock.frames + self._clock.replayed) // self._num_ranks
        frames = (collected - self.warmup_frames - self._refill_frames) * self._ratio.denominator
        return self.updates * self._ratio.numerator > frames

    def _lacks_rows(self) -> bool:
        """Return whether a source that stores the rows lacks rows on any rank; all ranks collect again then."""
        can_draw = self._can_draw if self._resumed_batch is None else None
        is_ready = len(self._row_store) > 0 and (can_draw is None or can_draw(self.batch_size))
        trainer: Any = self.trainer
        return not trainer.strategy.reduce_boolean_decision(is_ready)

    def _is_finished(self) -> bool:
        """Return whether all frames are collected and all updates are made."""
        return self._clock.is_exhausted and self._waits_for_frames()

    def _collect_frames(self, learner: LearnerApi) -> bool:
        """Collect and store one rollout; return False when the collector has ended."""
        if self._stream.collector is None:
            check_collected_keys(self.write_back, self, self._environments.get_or_build(), learner.policy)
            self._open_collector(learner.policy)
        if (rollout := self._next_rollout()) is None:
            return False
        if self._shares_memory:
            if self._shared_steps is None or self._shared_steps.rows is not rollout:
                self._shared_steps = SharedMemorySteps(rollout)
            self._store(self._shared_steps)
        else:
            for part in (parts := split_at_resets(self._stream.with_env_ids(rollout))):
                steps = Steps(part, self.envs_of_rank, excluded_keys(self.buffer), self._stream.trajectories)
                self._store(steps, part is parts[-1])
        return True

    def _store(self, steps: Steps | SharedMemorySteps, is_last: bool = True) -> None:
        """Count and store a rollout, or one part of it."""
        cut = self.reset_at_each_batch and is_last
        self._clock.add(steps.rollout.numel(), self._num_ranks, steps.episode_data["replayed"])
        self._written = {}
        target = self._write_target if self._stores_rollouts else None
        if steps.trajectories is not None:  # a user's collector
            update_statistics = self._update_statistics if self._normalization.is_on else None
            steps.store_in_parts(target, cut, self._stream, self._episodes, update_statistics)
            return
        self._episodes.add(**steps.episode_data, env_ids=steps.ids, cut=cut)
        if self._normalization.is_on:
            self._update_statistics(steps.rollout, steps.ids, cut=cut)
        if target is not None:
            steps.write(target, cut)

    def _update_statistics(self, rollout: TensorDictBase, ids: Tensor | None, *, cut: bool = False) -> None:
        self._normalization.update(rollout, ids, cut=cut, gamma=self._gamma)

    def _rollouts(self, collector: CollectorApi) -> Iterator[TensorDictBase]:
        """Return the stream of rollouts; if possible, all in one block of memory with the layout of the rings."""
        self._stores_rollouts = collector.service is None
        if collector.marks_trajectory_starts:
            self._stream.skip_successor_checks(self.buffer)
        self._shares_memory = self._write_target.accepts_shared_rows and collector.yields_shared_memory
        shared_rows = collector.part.reused_rows(excluded_keys(self.buffer)) if self._shares_memory else None
        return super()._rollouts(collector) if shared_rows is None else iter(shared_rows)

    def apply_feedback(self) -> None:
        """Write priorities and rewritten entries of the last learned batch to the buffer, if there is a batch."""
        batch, self._current_batch = self._current_batch, None
        if batch is None:
            return
        self._written = {}
        self._source.update_tensordict_priority(batch)
        if keys := self._rewritten_keys(batch) if self.write_back is None else self.write_back:
            self._source.write_back(batch, keys)

    def _get_or_build_source(self, buffer: ExperienceBuffer, learner: Any) -> Any:
        """Return the source; build it over a buffer if it is not built yet, and raise an error if it is invalid."""
        if self._source is not None:
            return self._source
        folder = self._root_folder / "service" / (f"rank_{self._rank}" if self.world_size > 1 else "")
        source = buffer if self.make_source is None else build_source(self.make_source, buffer, folder)
        check_source(source, learner, normalizes=bool(self.normalize_observation), has_data=self.dataset is not None)
        return source

    def _collector_options(self) -> dict[str, Any]:
        return {**super()._collector_options(), "init_random_frames": self.warmup_frames}

    def _user_collector_options(self) -> dict[str, Any]:
        """Add the source as ``service`` if the collector's processes write into it."""
        options = super()._user_collector_options()
        return {**options, "service": self._source} if self._collector_writes_to(self._source) else options

    def _collector_writes_to(self, source: Any) -> bool:
        """Return whether the collector, and not this process, writes into a source that stores the rows."""
        make = self.make_collector
        return make is not None and SourceApi.of(source).stores_rows and "service" in signature(make).parameters

    def teardown(self, stage: str) -> None:
        """Save the state of a source that stores the rows, for a checkpoint that is written after the fit."""
        if stage == "fit" and self._row_store is not None and "source" not in self._written:
            self._source.state_dict()
        super().teardown(stage)

    def close(self) -> None:
        """Close collector and environment, and shut down a source that stores the rows."""
        try:
            if self._row_store is not None:
                self._row_store.shutdown()
        finally:
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rewritten_keys": no_keys, "_shared_steps": None}

    def fingerprint(self, learner: Any = None) -> dict[str, Any]:
        """Add class and capacity of the buffer, and the settings of the ratio of frames to updates."""
        return {
            **super().fingerprint(learner),
            **buffer_fingerprint(self._get_or_build_buffer(learner)),
            "frames_per_update": str(self._ratio),
            "warmup_frames": self.warmup_frames,
        }

    def has_imagined_rows(self, learner: Any) -> bool:
        """Return whether batches contain steps that a learner's world model generates."""
        return SourceApi.of(self._get_or_build_source(self._get_or_build_buffer(learner), learner)).prepare is not None

    def _parts_state(self) -> dict[str, Any]:
        if self.buffer is None or self._buffer_mode == "none":
            return {}
        # A source that stores the rows writes them with each state.
        if self.make_source is not None and (self._row_store is None or "source" not in self._written):
            self._written["source"] = self._source.state_dict()
        return {**self._written, **({"buffer": self.buffer.state_dict()} if self._buffer_mode == "inside" else {})}

    def save_buffer(self) -> bool:
        """Write the buffer to ``buffer_dir``; return False if the settings do not store the buffer in this folder.

        An unchanged buffer is not written again. The :meth:`state_dict` of the checkpoint refers to the written files.
        """
        if self.buffer is None or self._buffer_mode != "beside":
            return False
        if "snapshot" not in self._written:
            self._written["snapshot"] = self._snapshots.save(self.buffer, self.updates)
        return True

    def _load_parts(self, rank_state: dict[str, Any]) -> None:
        buffer = self._get_or_build_buffer(trial=False)
        if "buffer" in rank_state:
            buffer.load_state_dict(rank_state["buffer"])
        elif "snapshot" in rank_state:
            self._snapshots.load(buffer, rank_state["snapshot"])
        vars(self)["buffer"] = buffer
        if "source" in rank_state:
            self._source = self._get_or_build_source(buffer, self._learner)
            self._source.load_state_dict(rank_state["source"])

    def _post_load(self, rank_state: dict[str, Any]) -> None:
        super()._post_load(rank_state)
        self._current_batch, self._written = None, {}
        if "buffer" not in rank_state and "snapshot" not in rank_state:
            self._refill_frames += self.warmup_frames
            logger.warning(
                "the checkpoint does not contain the replay buffer (checkpoint_buffer='none'): %s%d frames are "
                "collected again before the next update. Set checkpoint_buffer='inside' or 'beside' to store it.",
                "" if self.dataset is None else "the data set is read and ",
                self.warmup_frames,
            )

    @property
    def _buffer_mode(self) -> str:
        """Place of the buffer in checkpoints: ``inside``, ``beside`` or ``none``."""
        return "beside" if self.checkpoint_buffer == "inside" and self.world_size > 1 else self.checkpoint_buffer

    @cached_property
    def _snapshots(self) -> BufferSnapshots:
        folder = Path(self.buffer_dir or self._root_folder / "buffer")
        return BufferSnapshots(folder, self._rank, broadcast_from_rank_zero(secrets.token_hex(4)))
