"""Model-based experience: fit an ensemble to all transitions for some epochs, then collect more with its planner."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.errors import check_compatible
from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.keys import REPEATED
from torchrl_lightning._core.protocols import CollectorApi, LearnerApi
from torchrl_lightning._core.rank_metrics import plain_metrics, read_metrics
from torchrl_lightning._core.settings import Boolean, Positive, PositiveInt, computed, setting
from torchrl_lightning._core.state import Attribute, Child, bounded_integer
from torchrl_lightning._core.torchrl_compat import new_tensordict
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.datamodules._run.buffer_factories import ReplayBufferFactory
from torchrl_lightning.datamodules._run.episode_statistics import read_episode_data
from torchrl_lightning.datamodules._run.loaders import Batches, batches_served, end_restarted_epoch, reopen_epoch
from torchrl_lightning.datamodules._run.step_writer import Steps
from torchrl_lightning.datamodules._run.trainer_checks import check_batches
from torchrl_lightning.datamodules._run.trainer_hooks import FitHooks
from torchrl_lightning.datamodules.base import ExperienceDataModule
from torchrl_lightning.dynamics import DynamicsTargets, HoldoutSplit
from torchrl_lightning.dynamics.scaler import check_finite
from torchrl_lightning.environments import spawn_seed
from torchrl_lightning.environments.env_ids import ring_ids
from torchrl_lightning.environments.normalization import EPSILON
from torchrl_lightning.replay import ExperienceBuffer

ROWS_AT_ONCE = 8192  # rows to read together for several small batches


class DynamicsDataModule(ExperienceDataModule):
    """Serve transitions to a model of the environment in fits, and collect new frames between fits.

    A Lightning epoch is one pass over the training part. A fit ends when the module ends it, or after
    ``max_epochs_per_fit`` epochs. The next epoch then collects ``frames_per_fit`` frames with the module's policy and
    begins a new fit to all stored rows. The moments of the training part standardise the rows. Before the first fit,
    ``warmup_frames`` frames are collected with random actions.

    ``train_dataloader`` yields batches ``[M, B]`` from :class:`~torchrl_lightning.DynamicsTargets`:
    ``inputs [M, B, D_in]``, ``targets [M, B, D_out]`` and optionally ``terminated [M, B, 1]``. Each of the ``M``
    members has its own rows, drawn with replacement once per fit and shuffled each epoch; the last batch may be short.
    ``val_dataloader`` yields the held-out rows ``[B]``, the same for all members. ``test_dataloader`` yields finished
    episodes of the policy. The entries of a batch are views of one block of memory.

    The module may have ``check_transitions``, ``begin_fit`` and ``fit_is_over`` in addition to ``policy``; see
    :class:`torchrl_lightning._core.protocols.LearnerApi`. Frames are collected when Lightning requests the loader of an
    epoch, because new frames increase the loader's number of batches. Therefore ``setup`` sets
    ``reload_dataloaders_every_n_epochs`` of the trainer. ``setup`` also disables the sanity check, because no rows are
    held out before the first fit.

    Args:
        buffer: a callable that takes ``num_envs`` and returns the buffer, e.g. a partial of
            :class:`~torchrl_lightning.MBReplayBuffer`.
        batch_size: rows of each member in a batch.
        num_members: members of the ensemble, ``M``.
        frames_per_fit: new frames of all environments before each fit except the first. Fit ``f`` (counted from 0)
            begins after ``warmup_frames + f * frames_per_fit`` frames, rounded up to whole rollouts.
        warmup_frames: frames collected with random actions before the first fit; a collector given as ``collector=``
            needs its own ``init_random_frames`` for them.
        max_epochs_per_fit: largest number of epochs in a fit.
        validation_fraction: share of the rows that is held out. A row stays on its side of the split for the whole run.
        max_validation: largest number of held-out rows.
        observation_keys: the observations to learn, in the order of their columns; all of them if None.
        reward: an analytic reward (see :class:`~torchrl_lightning.DynamicsTargets`), which replaces the learned reward.
        terminated: whether batches contain ``terminated``. A :class:`~torchrl_lightning.DynamicsEnsemble` without a
            function ``terminated`` learns from this entry when episodes terminate.
        frames_per_batch: frames of a rollout. None uses ``frames_per_fit``, rounded up to whole steps.

    The other arguments are documented in :class:`ExperienceDataModule`.

    Raises:
        ValueError: A number is out of range. In ``setup``: an observation is discrete. At the beginning of a fit: a
            part of the split is empty, the training part is smaller than a batch, or a stored number is NaN or
            infinite; the message then names its column.

    Examples:
        >>> from torchrl_lightning import MBReplayBuffer
        >>> buffer = lambda num_envs: MBReplayBuffer(1000, num_envs=num_envs)
        >>> data = DynamicsDataModule("Pendulum-v1", buffer=buffer, frames_per_fit=200, num_members=5)
        >>> data
        DynamicsDataModule(env=Pendulum-v1, num_envs=1, frames_per_batch=200, total_frames=-1, frames=0)
        >>> data.targets.target_columns
        ('observation[0]', 'observation[1]', 'observation[2]', 'reward')
        >>> data.close()
    """

    make_buffer: ReplayBufferFactory = setting(alias="buffer")
    batch_size: PositiveInt = 256
    num_members: PositiveInt = 1
    frames_per_fit: PositiveInt = 250
    warmup_frames: PositiveInt = 1000
    max_epochs_per_fit: PositiveInt = 100
    validation_fraction: float = 0.2
    max_validation: int = 5000
    observation_keys: Sequence[NestedKey] | None = None
    reward: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    terminated: bool = False
    frames_per_batch: Annotated[int, optional(integer)] = setting(default=None)
    num_envs: PositiveInt = 1

    stream_kind, buffer_class = "fits", ExperienceBuffer
    suggested_model, supports_several_ranks = "model=pets (DynamicsEnsemble)", False
    RUN_STATE = {
        **ExperienceDataModule.RUN_STATE,
        "metrics": Attribute(read_metrics, "_metrics", plain_metrics),
        "split": Child(attribute="split"),
        "fits": Attribute(bounded_integer()),
        "epochs_of_fit": Attribute(bounded_integer()),
        "pass_of": Attribute(optional(bounded_integer()), "_epoch_of_pass"),
        "order_seed": Attribute(bounded_integer(), "_order_seed"),
    }

    normalize_observation: bool | Sequence[NestedKey] = computed()
    normalize_reward: bool = computed()
    normalize_clip: Positive = computed()
    normalize_epsilon: Positive = computed()
    freeze_statistics: Boolean = computed()

    def __post_init__(self) -> None:
        if self.frames_per_batch is None:
            self.frames_per_batch = -(-self.frames_per_fit // self.envs_per_worker) * self.envs_per_worker
        # The scalers of the targets standardise the data instead.
        self.normalize_observation = self.normalize_reward = self.freeze_statistics = False
        self.normalize_clip, self.normalize_epsilon = 10.0, EPSILON
        super().__post_init__()
        self.split = HoldoutSplit(self.validation_fraction, self.max_validation)
        self.fits = 0
        self.epochs_of_fit = 0
        self._order_seed = 0
        self._epoch_of_pass: int | None = None  # the Lightning epoch of the current pass
        self._resumed = False  # whether a checkpoint was restored but Lightning has not requested a loader yet
        # Data of the current fit, empty before the first read. One tensor has all columns, because separate tensors
        # take 50 % longer to read.
        self._training = torch.zeros(0, 0)
        self._validation = torch.zeros(0, 0)
        self._bootstrap = torch.zeros(0, 0, dtype=torch.int32)  # rows of the training part, [M, N]
        self._hooks = FitHooks(self)

    # ------------------------------------------------------------------ read by the LightningModule

    @cached_property
    def targets(self) -> DynamicsTargets:
        """The conversion of transitions into inputs and targets, with the scalers of the last fit."""
        specs = self.specs
        options: dict[str, Any] = {"observation_keys": self.observation_keys, "terminated": self.terminated}
        return DynamicsTargets(specs.observation, specs.action, reward=self.reward, **options)

    @property
    def build_options(self) -> dict[str, Any]:
        """Arguments of a learner's ``build``: ``num_members`` and ``targets``."""
        return {"num_members": self.num_members, "targets": self.targets}

    @property
    def batches_per_epoch(self) -> int:
        """Batches of the current pass; 1 before the first pass."""
        return max(1, -(-len(self._training) // self.batch_size))

    def metrics(self) -> dict[str, float]:
        """Add the numbers of fits, stored rows and held-out rows; returns cover the last collection."""
        size = {} if self.buffer is None else {"replay/size": float(len(self.buffer))}
        return {**super().metrics(), **size, "holdout/size": float(len(self._validation)), "fits": float(self.fits)}

    # ------------------------------------------------------------------ Lightning's hooks

    def setup(self, stage: str) -> None:
        """Build environment and buffer, once, and prepare the trainer for epochs of different lengths."""
        trainer: Any = self.trainer
        if stage == "fit" and trainer is not None and trainer.reload_dataloaders_every_n_epochs > 1:
            raise ValueError(
                "reload_dataloaders_every_n_epochs must be 0 or 1 for a DynamicsDataModule, got "
                f"{trainer.reload_dataloaders_every_n_epochs}, because batches change with each epoch. Leave it out."
            )
        super().setup(stage)
        self._epoch_of_pass = None if stage == "fit" else self._epoch_of_pass
        if stage == "fit" and trainer is not None:
            trainer.reload_dataloaders_every_n_epochs = 1
            trainer.num_sanity_val_steps = 0
            self._hooks.attach(trainer)

    def check_fit(self, learner: Any = None) -> Iterator[str]:
        """Also check the targets and the number of rows at the first fit."""
        yield from super().check_fit(learner)
        yield "observation_keys"
        check_compatible(self.targets)
        yield "batch_size"
        if self.make_collector is None and self.seed is not None and not self.frames:
            self._check_first_fit(self._get_or_build_buffer(learner))

    def _check_first_fit(self, buffer: Any) -> None:
        """Validate the numbers of rows and batches of the first fit; raise ValueError if one is too small."""
        warmup = self.warmup_frames if self.total_frames < 0 else min(self.warmup_frames, self.total_frames)
        frames = max(1, -(-warmup // self.frames_per_batch)) * self.frames_per_batch
        steps = min(frames, int(buffer.storage.max_size)) // self.num_envs
        rows = steps * self.num_envs
        training = self._new_split().count_training(self.num_envs, steps)
        if training < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} must be at most the number of training rows, but the training part will "
                f"have {training} of {rows} stored rows when the first fit begins. Lower batch_size or "
                f"validation_fraction={self.validation_fraction}, or raise warmup_frames={self.warmup_frames}."
            )
        if training == rows:
            raise ValueError(
                f"validation_fraction={self.validation_fraction} and max_validation={self.max_validation} leave none "
                f"of {rows} rows for validation when the first fit begins. Raise one of them, or warmup_frames="
                f"{self.warmup_frames}."
            )
        if self.trainer is not None:
            size = self.batch_size
            check_batches(self.trainer, -(-training // size), -(-(rows - training) // size))

    def _new_split(self) -> HoldoutSplit:
        return HoldoutSplit(self.validation_fraction, self.max_validation, seed=self._spawn_seed("split"))

    def _build_parts(self) -> None:
        vars(self)["buffer"] = self._get_or_build_buffer(trial=False)
        if not self.frames:
            self.buffer.generator.manual_seed(self._spawn_seed("buffer"))
            self._order_seed = self._spawn_seed("order")
            self.split = self._new_split()

    def train_dataloader(self) -> Batches:
        """Return the loader of the current epoch's pass; if a fit has ended, collect frames first."""
        trainer: Any = self.trainer
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.fit_loop.done:
            reopen_epoch(trainer)
            is_due = self._due_evaluation.reopen(trainer)  # nothing is collected before a due evaluation
            continues = self._continues_pass(trainer) or is_due
            if not continues and self._is_finished():
                return super().train_dataloader()  # logs the reason and ends the run
            if self.fits and not len(self._training):
                self._load_rows()
            if not continues:
                self._begin_pass(self._learner_api())
                end_restarted_epoch(trainer, self.batches_per_epoch)
            self._epoch_of_pass = trainer.current_epoch
        return Batches(self.batches_per_epoch, self._epoch)

    def val_dataloader(self) -> Batches:
        """Return the loader of the held-out rows; outside of a fit, the loader of :meth:`test_dataloader`."""
        trainer: Any = self.trainer
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return self.test_dataloader()
        return Batches(max(1, -(-len(self._validation) // self.batch_size)), self._validation_batches)

    def test_dataloader(self) -> Batches:
        """Return a loader with one batch of finished evaluation episodes, played in separate environments."""
        return super().val_dataloader()

    # ------------------------------------------------------------------ fits and passes

    def _continues_pass(self, trainer: Trainer) -> bool:
        """Return whether the current epoch continues a pass from a checkpoint."""
        resumed, self._resumed = self._resumed, False
        if self._epoch_of_pass == trainer.current_epoch:
            return True
        # If max_steps ended the run, Lightning counts the epoch as done and continues after its last batch.
        return resumed and trainer.fit_loop.restarting and batches_served(self.trainer) > 0

    def _rollouts(self, collector: CollectorApi) -> Iterator[TensorDictBase]:
        if collector.marks_trajectory_starts:
            self._stream.skip_successor_checks(self.buffer)
        return super()._rollouts(collector)

    def _begin_pass(self, learner: LearnerApi) -> None:
        """Continue the fit with another pass, or collect frames and begin a new fit."""
        self._metrics = {}
        if self._fit_is_over():
            start = time.perf_counter()
            if not self._collect_frames(learner.policy):
                return
            collected = time.perf_counter()
            self.split.extend(self.buffer.writer)
            self._load_rows(fit=True)
            self._metrics = {
                "time/collect": collected - start,
                "time/prepare": time.perf_counter() - collected,
                **self._episodes.summary(),
            }
            self.publish_metrics()
            if learner.check_transitions is not None:
                learner.check_transitions(self.buffer.storage.get(self.buffer.writer.rings.filled_cells()))
            if learner.begin_fit is not None:
                learner.begin_fit(self.targets)
        self.epochs_of_fit += 1

    def _fit_is_over(self) -> bool:
        """Return whether the last fit has ended, or no fit has begun yet."""
        is_new = not self.fits or self.epochs_of_fit >= self.max_epochs_per_fit
        return is_new or self._learner_api().fit_is_over

    def _is_finished(self) -> bool:
        """Return whether all frames are collected and the last fit has ended."""
        return super()._is_finished() and self._fit_is_over() and not self._is_within_pass()

    def _is_within_pass(self) -> bool:
        """Return whether the current epoch's pass has batches left."""
        trainer: Any = self.trainer
        is_open = trainer is not None and self._epoch_of_pass == trainer.current_epoch
        return is_open and 0 < batches_served(trainer) < self._epoch_length()

    def _collect_frames(self, policy: Any) -> bool:
        """Collect the frames for the next fit; return False if the collector has ended."""
        buffer = self.buffer
        target_frames = self.warmup_frames + self.fits * self.frames_per_fit
        target_frames = target_frames if self.total_frames < 0 else min(target_frames, self.total_frames)
        while True:
            interrupts.between_steps = True
            rollout = self._collect(policy)
            if rollout is None:
                return False
            ids = ring_ids(rollout, self.num_envs)
            ends = read_episode_data(rollout)
            self._clock.add(rollout.numel(), self.world_size, ends["replayed"])
            self._stream.accept()
            if self._stream.trajectories is not None:  # a user's collector
                steps = Steps(rollout, self.num_envs, [*REPEATED], self._stream.trajectories)
                steps.store_in_parts(buffer, False, self._stream, self._episodes)
                if self.reset_at_each_batch:
                    self._episodes.forget_unfinished()
            else:
                self._episodes.add(**ends, env_ids=ids, cut=self.reset_at_each_batch)
                buffer.extend(rollout.exclude(*REPEATED), env_ids=ids)
            if self.frames + self._clock.replayed >= target_frames:
                return True

    def _load_rows(self, *, fit: bool = False) -> None:
        """Read the standardised rows of both parts; for a new fit, first fit the scalers to the training part."""
        buffer, targets = self.buffer, self.targets
        cells = buffer.writer.rings.filled_cells()
        training, validation = self.split.parts(cells[targets.usable(buffer.storage.get(cells))])
        if len(training) < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} must be at most the number of training rows, but the training part has "
                f"{len(training)} of {len(cells)} stored rows. Lower batch_size, or raise warmup_frames."
            )
        rows = buffer.storage.get(training)
        if fit:
            targets.fit(rows)
            self.fits, self.epochs_of_fit = self.fits + 1, 0
        self._training, self._validation = (
            torch.cat([*targets(part).select(*self._widths).values()], -1)
            for part in (rows, buffer.storage.get(validation))
        )
        check_finite(self._validation, [*targets.input_columns, *targets.target_columns, "terminated"])
        rng = torch.Generator().manual_seed(spawn_seed(self._order_seed, "bootstrap", self.fits))
        shape = (self.num_members, len(training))
        self._bootstrap = torch.randint(len(training), shape, generator=rng, dtype=torch.int32)

    @property
    def _widths(self) -> dict[str, int]:
        """Number of columns of each entry of a batch."""
        targets = self.targets
        widths = {"inputs": len(targets.input_columns), "targets": len(targets.target_columns)}
        return {**widths, "terminated": 1} if targets.has_terminated else widths

    def _epoch(self) -> Iterator[TensorDictBase]:
        self._stream.restore_rng()
        count, size, columns = len(self._training), self.batch_size, self._training
        # The seed depends only on the numbers of the fit and its epoch, so that a resumed run draws the same order.
        seed = spawn_seed(self._order_seed, "order", self.fits, self.epochs_of_fit)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        bootstrap = torch.stack([member.index_select(0, order) for member in self._bootstrap]).to(columns.device)
        names, widths = list(self._widths), list(self._widths.values())
        begin = batches_served(self.trainer) * size
        while begin < count:
            number, length = max(1, min(ROWS_AT_ONCE // (size * len(bootstrap)), (count - begin) // size)), size
            if begin + size > count:
                length = count - begin
            end = begin + number * length
            rows = bootstrap[:, begin:end].reshape(-1, number, length).transpose(0, 1)
            block = columns.index_select(0, rows.reshape(-1)).view(*rows.shape, columns.shape[1])
            for batch in zip(*(part.unbind() for part in block.split(widths, -1)), strict=True):
                yield new_tensordict(dict(zip(names, batch, strict=True)), rows.shape[1:])
            begin = end

    def _validation_batches(self) -> Iterator[TensorDictBase]:
        for batch in self._validation.split(self.batch_size):
            parts = batch.split(list(self._widths.values()), -1)
            yield new_tensordict(dict(zip(self._widths, parts, strict=True)), batch.shape[:1])

    def _collector_options(self) -> dict[str, Any]:
        return {**super()._collector_options(), "init_random_frames": self.warmup_frames}

    # ------------------------------------------------------------------ state

    def fingerprint(self, learner: Any = None) -> dict[str, Any]:
        """Add class and capacity of the buffer, the columns, and the settings of the batches."""
        buffer = self._get_or_build_buffer(learner)
        return {
            **super().fingerprint(learner),
            "buffer": type(buffer).__name__,
            "capacity": int(buffer.storage.max_size),
            "input_columns": ", ".join(self.targets.input_columns),
            "target_columns": ", ".join(self.targets.target_columns),
            "batch_size": self.batch_size,
            "num_members": self.num_members,
            "frames_per_fit": self.frames_per_fit,
            "warmup_frames": self.warmup_frames,
            "validation_fraction": self.split.validation_fraction,
            "max_validation": self.split.max_validation,
        }

    def _statistics_loaders(self, state: dict[str, Any]) -> list[tuple[Callable[[Any], Any], Any]]:
        return [*super()._statistics_loaders(state), (self.targets.load_state_dict, state["ranks"][0]["targets"])]

    def _parts_state(self) -> dict[str, Any]:
        buffer = {} if self.buffer is None else {"buffer": self.buffer.state_dict()}
        return {**buffer, "targets": dict(self.targets.state_dict())}

    def _load_parts(self, rank_state: dict[str, Any]) -> None:
        self.buffer.load_state_dict(rank_state["buffer"])

    def _post_load(self, rank_state: dict[str, Any]) -> None:
        super()._post_load(rank_state)
        self._resumed = True
        self._training, self._validation = torch.zeros(0, 0), torch.zeros(0, 0)
