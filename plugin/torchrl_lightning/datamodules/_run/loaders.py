"""Sized loaders of training batches and evaluations for Lightning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch import Trainer

from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.metric_logging import log_over_clock, log_over_lightning_steps, publish_metrics
from torchrl_lightning._core.protocols import LearnerApi
from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning._core.tree import is_tensordict
from torchrl_lightning.datamodules._run.due_evaluation import DueEvaluation
from torchrl_lightning.datamodules._run.frames import FrameClock
from torchrl_lightning.datamodules._run.trainer_checks import check_trainer
from torchrl_lightning.datamodules.networks import get_learner

logger = logging.getLogger(__name__)


class Batches:
    """A sized, re-iterable loader of ``length`` batches that does nothing before it is iterated.

    If a loader does not have a length, Lightning fetches each batch one training step earlier. Each batch would then be
    one update stale. A :class:`torch.utils.data.DataLoader` is not used, because its collation splits a TensorDict.
    """

    def __init__(self, length: int, make_iterator: Callable[[], Iterator[Any]]) -> None:
        self._length = length
        self._make_iterator = make_iterator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._make_iterator()

    def state_dict(self) -> dict[str, int]:
        """Return an empty state, which avoids a warning of Lightning on resume; the DataModule stores the position."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: the state is empty."""


def is_on_device(batch: Any, device: torch.device) -> bool:
    """Return whether the first tensor of a TensorDict is on a device; False for other batches."""
    for value in batch.values() if is_tensordict(batch) else ():
        if isinstance(value, torch.Tensor):
            return value.device == device
    return False


def batches_served(trainer: Any) -> int:
    """Return the number of batches that this epoch served before the checkpoint from which the run resumes."""
    return 0 if trainer is None else int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def reopen_epoch(trainer: Trainer) -> None:
    """Let a resumed run continue an epoch that ``max_steps``, ``max_time`` or the last frame had ended early.

    Lightning counts this epoch as done. Call this function when Lightning requests a loader.
    """
    loop: Any = trainer.fit_loop
    batches, epochs = loop.epoch_loop.batch_progress, loop.epoch_progress
    is_done = epochs.current.processed == epochs.current.ready
    if loop.is_resuming and is_done and batches.current.ready and not batches.is_last_batch:
        for count in (epochs.current, epochs.total):
            count.processed -= 1
            count.completed = count.processed
        loop.restarting = True


def end_restarted_epoch(trainer: Trainer, length: int) -> None:
    """Let a run that resumes after the last batch of an epoch begin the next epoch, of ``length`` batches, at batch 0.

    Lightning compares the batch count of the finished epoch with the new length, and would skip this number of batches
    in a longer epoch. Call this function when Lightning requests the loader of the next epoch.
    """
    loop: Any = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    if loop.restarting and loop.epoch_loop.restarted_on_train_batch_end and batches.is_last_batch:
        batches.current.completed = max(batches.current.completed, length - 1)  # Lightning counts the last batch itself


class LoadersDataModule(L.LightningDataModule):
    """A DataModule with sized loaders; subclasses implement their iterators."""

    _clock: FrameClock
    _due_evaluation: DueEvaluation
    _learner_api_cache: LearnerApi | None = None
    episode_metrics: ClassVar[tuple[str, ...]] = ("train/return", "train/length", "train/episodes")
    """Metrics that :meth:`metrics` returns after the first finished training episode."""

    def setup(self, stage: str) -> None:
        """Validate the trainer, and use the frame count as the step of its loggers."""
        if self.trainer is not None:
            self.check_trainer(self.trainer, self._learner, stage)
            log_over_clock(self.trainer)

    def check_trainer(self, trainer: Any, learner: Any, stage: str = "fit") -> None:
        """Validate a trainer's callbacks and settings; raise IncompatibleError if one of them cannot work.

        The command and :meth:`setup` call this method.
        """
        check_trainer(trainer, learner, self, stage)

    def teardown(self, stage: str) -> None:
        """Restore Lightning's own step for the loggers."""
        if self.trainer is not None:
            log_over_lightning_steps(self.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Restore loggers and Ctrl-C: after an exception Lightning does not call :meth:`teardown`."""
        interrupts.release(self)
        if self.trainer is not None:
            log_over_lightning_steps(self.trainer)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this rank's last rollout or epoch."""
        raise NotImplementedError

    def publish_metrics(self) -> None:
        """Publish :meth:`metrics`, combined over the ranks, for the trainer's callbacks."""
        if self.trainer is not None:
            publish_metrics(self.trainer, self.metrics())

    @property
    def world_size(self) -> int:
        """Number of ranks that collect."""
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _root_folder(self) -> Path:
        return Path("." if self.trainer is None else self.trainer.default_root_dir)

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _learner(self) -> Any:
        return self.trainer.lightning_module if self.trainer is not None else None

    def _learner_api(self) -> LearnerApi:
        """Return the abilities of the trainer's module, which are read once per fit."""
        if self._learner_api_cache is None or self._learner_api_cache.part is not self._learner:
            self._learner_api_cache = get_learner(self.trainer, type(self).__name__)
        return self._learner_api_cache

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in one training epoch, the same on every rank."""
        raise NotImplementedError

    def _epoch(self) -> Iterator[Any]:
        raise NotImplementedError

    def _epoch_length(self) -> int:
        """Return the number of batches that Lightning uses in an epoch; ``limit_train_batches`` may reduce it."""
        limit = self.trainer.num_training_batches if self.trainer is not None else self.batches_per_epoch
        return int(min(self.batches_per_epoch, limit))

    def train_dataloader(self) -> Batches:
        """Return the sized loader of training batches; nothing is collected before it is iterated.

        If nothing is left to collect or to learn from, training ends before the first batch.
        """
        epoch = self._epoch
        if self.trainer is not None:
            reopen_epoch(self.trainer)
            if self._due_evaluation.reopen(self.trainer):
                epoch = self._epoch_with_due_evaluation
            elif self.stop_if_finished():
                logger.warning(self._clock.end_reason)
        return Batches(self.batches_per_epoch, epoch)

    def _epoch_with_due_evaluation(self) -> Iterator[Any]:
        if not self._due_evaluation.finish_run():
            yield from self._epoch()

    def val_dataloader(self) -> Batches:
        """Return a loader with one batch of finished evaluation episodes, played in separate environments."""
        return Batches(1, self._evaluation_or_stop)

    def test_dataloader(self) -> Batches:
        """Return the loader of :meth:`val_dataloader`."""
        return self.val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch if it is on another device. Lightning's own check takes 2 % of a small agent's training time."""
        return batch if is_on_device(batch, device) else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _transfer(self, batch: Any) -> Any:
        """Transfer a batch with all of Lightning's transfer hooks, for a step with several updates."""
        batch = self.on_before_batch_transfer(batch, 0)
        if self.trainer is not None:
            batch = self.transfer_batch_to_device(batch, self.trainer.strategy.root_device, 0)
        return self.on_after_batch_transfer(batch, 0)

    def stop_if_finished(self) -> bool:
        """Stop training if nothing is left to do; return whether this call stopped it."""
        if self.trainer is None or self.trainer.should_stop or not self._is_finished():
            return False
        self._stop()
        return True

    def _stop(self) -> None:
        """Stop training after the current step, if there is a trainer; log a warning if a minimum continues the run."""
        trainer: Any = self.trainer
        if trainer is None:
            return
        if self._clock.is_exhausted and not trainer.should_stop and not trainer.fit_loop._can_stop_early:
            logger.warning(
                "total_frames=%d may be exceeded, because the trainer has min_epochs=%s and min_steps=%s.",
                self._clock.run.total_frames,
                trainer.min_epochs,
                trainer.min_steps,
            )
        trainer.should_stop = True

    def _is_finished(self) -> bool:
        """Return whether nothing is left to collect or to learn from."""
        return self._clock.is_exhausted

    def _evaluation_or_stop(self) -> Iterator[Any]:
        # A resumed run repeats an evaluation that Ctrl-C has ended. Ctrl-C does not end the last evaluation of a run.
        ends_run = self.trainer is not None and self.trainer.should_stop
        with nullcontext() if ends_run else interrupts.interruptible(), rank_stop.evaluating():
            batches = list(self._evaluation())
        yield from batches

    def _evaluation(self) -> Iterator[Any]:
        raise NotImplementedError
