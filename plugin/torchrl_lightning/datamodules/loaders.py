"""Sized loaders of training batches and of evaluations for Lightning, and the clock of frames that ends them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from torchrl_lightning._logging import count_rows_by_clock, count_rows_by_lightning, publish
from torchrl_lightning.datamodules.due_evaluation import DueEvaluation
from torchrl_lightning.datamodules.learner import acting
from torchrl_lightning.datamodules.trainer_checks import is_endless
from torchrl_lightning.entries import is_tensordict
from torchrl_lightning.interrupts import interrupts
from torchrl_lightning.protocols import LearnerApi
from torchrl_lightning.ranks import gathered
from torchrl_lightning.state import Attribute, Stated, whole

logger = logging.getLogger(__name__)


class FrameClock(Stated):
    """Count the frames of all ranks, and apart from them replayed steps, such as those of demonstrations.

    Args:
        total: Frames after which a run ends, or as many replayed steps without a single frame; -1 for never.
        frames: Frames that were collected before.

    Attributes:
        frames: Frames of the run.
        count: Replayed steps of the run.
        alone: Replayed steps since the last frame.

    Examples:
        >>> import torch
        >>> clock = FrameClock(9)
        >>> clock.add(3, 1, torch.tensor([[[True], [False], [True]]]))
        >>> clock.frames, clock.count, clock.is_spent
        (1, 2, False)
    """

    OWNER = "replayed steps"
    STATE = {"count": Attribute(whole()), "alone": Attribute(whole())}

    def __init__(self, total: int, frames: int = 0) -> None:
        self.total, self.frames = total, frames
        self.count = self.alone = 0
        self._has_warned = False

    @property
    def is_spent(self) -> bool:
        """Whether as many frames are collected as were asked for, or as many steps replayed without one."""
        return 0 <= self.total <= max(self.frames, self.alone)

    def announce(self, rollout: int, trainer: Any) -> None:
        """Log that a run has no end, or collects more, because rollouts, of so many frames of all ranks, are whole."""
        self.check_end(trainer)
        if self.total > 0 and self.total % rollout:
            last = -(-self.total // rollout) * rollout
            logger.info("total_frames=%d becomes %d: rollouts of %d frames are whole.", self.total, last, rollout)

    def check_end(self, trainer: Any, collected: float = -1) -> None:
        """Warn once if nothing ends a run: neither its total, nor its trainer, nor a collector of so many frames."""
        has_end = self.total >= 0 or 0 <= collected < float("inf")  # TorchRL's collectors say inf for -1
        if self._has_warned or trainer is None or has_end or not is_endless(trainer):
            return
        self._has_warned = True
        if trainer.is_global_zero:
            logger.warning(
                "nothing ends this run: the DataModule has total_frames=%d, and the Trainer no max_epochs, "
                "max_steps or max_time. Set one of them.",
                self.total,
            )

    def announce_warmup(self, frames: int) -> None:
        """Log that a run collects more than its total, because its warm-up alone does."""
        if 0 <= self.total < frames:
            logger.warning(
                "total_frames=%d becomes %d: warmup_frames=%d come before the only update. Raise total_frames, or "
                "lower warmup_frames.",
                self.total,
                frames,
                frames,
            )

    def add(self, steps: int, world_size: int, replayed: Tensor | None) -> None:
        """Count the steps of a rollout of each rank, of which those in the mask were replayed; none without a mask.

        A warning says that as many steps were replayed without a frame as were asked for.
        """
        if replayed is None:
            self.frames += steps * world_size
            return
        again = int(replayed.sum())
        counts = gathered((replayed.numel() - again, again))
        own, again = (sum(each) for each in zip(*counts, strict=True))
        self.frames += own
        self.count += again
        self.alone = 0 if own else self.alone + again
        if 0 <= self.total <= self.alone:
            logger.warning(self.reason)

    def metrics(self) -> dict[str, float]:
        """Return ``frames``, and ``frames/replayed`` where steps were replayed."""
        return {"frames": float(self.frames), **({"frames/replayed": float(self.count)} if self.count else {})}

    @property
    def reason(self) -> str:
        """Why a run ends that has come so far."""
        if self.frames >= self.total:
            return f"all {self.frames} frames are collected; raise total_frames={self.total} to go on."
        return (
            f"the last {self.alone} steps were all replayed, none came from the environment: training stops after "
            f"{self.frames} of total_frames={self.total}; lower the probability of a replay (rho + phi of PPODBuffer)."
        )


class Batches:
    """A sized, re-iterable stream of ``length`` batches that does nothing before it is iterated.

    When a loader has no length, Lightning fetches one batch ahead of the training step, so that every batch would be
    one update stale. It is not a :class:`torch.utils.data.DataLoader`, whose collation takes a TensorDict apart.
    """

    def __init__(self, length: int, make_iterator: Callable[[], Iterator[Any]]) -> None:
        self._length = length
        self._make_iterator = make_iterator

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._make_iterator()

    def state_dict(self) -> dict[str, int]:
        """Return nothing, as the DataModule knows where the stream is; Lightning resumes within an epoch unwarned."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing, as there is nothing to load."""


def is_there(batch: Any, device: torch.device) -> bool:
    """Return whether a batch lies on a device, as the first tensor of a TensorDict tells."""
    for value in batch.values() if is_tensordict(batch) else ():
        if isinstance(value, torch.Tensor):
            return value.device == device
    return False


def batches_served(trainer: Any) -> int:
    """Return how many batches of this epoch were served before a checkpoint that was written within it."""
    return 0 if trainer is None else int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def reopen_epoch(trainer: Trainer) -> None:
    """Let a resumed run go on within the epoch in which it ended, as by ``max_steps``, ``max_time`` or its last frame.

    Lightning counts such an epoch as done. Call it when a loader is asked for.
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
    """Let a run that resumes behind the last batch of an epoch begin the next one, of ``length`` batches, in front.

    Lightning compares the batches of the epoch that has ended with this length, and would leave as many out of a longer
    one. Call it when the loader of the next epoch is asked for.
    """
    loop: Any = trainer.fit_loop
    batches = loop.epoch_loop.batch_progress
    if loop.restarting and loop.epoch_loop.restarted_on_train_batch_end and batches.is_last_batch:
        batches.current.completed = max(batches.current.completed, length - 1)  # Lightning adds the last one


class LoadersDataModule(L.LightningDataModule):
    """A DataModule of sized streams, as its subclasses fill them."""

    _clock: FrameClock
    _due: DueEvaluation
    _acting: LearnerApi | None = None
    episode_metrics: ClassVar[tuple[str, ...]] = ("train/return", "train/length", "train/episodes")
    """Metrics that :meth:`metrics` has from the first episode on that ends in training."""

    def setup(self, stage: str) -> None:
        """Let the rows that the trainer's loggers write have the count of frames as their step."""
        if self.trainer is not None:
            count_rows_by_clock(self.trainer)

    def teardown(self, stage: str) -> None:
        """Leave the rows to Lightning again."""
        if self.trainer is not None:
            count_rows_by_lightning(self.trainer)

    def on_exception(self, exception: BaseException) -> None:
        """Leave rows and Ctrl-C to others again: after an exception Lightning does not call :meth:`teardown`."""
        interrupts.release(self)
        if self.trainer is not None:
            count_rows_by_lightning(self.trainer)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last rollout or epoch."""
        raise NotImplementedError

    def publish_metrics(self) -> None:
        """Let the trainer's callbacks monitor :meth:`metrics`; on several ranks, the means over them."""
        if self.trainer is not None:
            publish(self.trainer, self.metrics())

    @property
    def world_size(self) -> int:
        """Number of ranks that collect."""
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    @property
    def _learner(self) -> Any:
        return self.trainer.lightning_module if self.trainer is not None else None

    def _module(self) -> LearnerApi:
        """Return the abilities of the module that is fitted; they are read once in a fit."""
        if self._acting is None or self._acting.part is not self._learner:
            self._acting = acting(self.trainer, type(self).__name__)
        return self._acting

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in one training epoch, the same on every rank."""
        raise NotImplementedError

    def _epoch(self) -> Iterator[Any]:
        raise NotImplementedError

    def _epoch_length(self) -> int:
        """Return how many batches Lightning asks for in an epoch: fewer under ``limit_train_batches``."""
        asked = self.trainer.num_training_batches if self.trainer is not None else self.batches_per_epoch
        return int(min(self.batches_per_epoch, asked))

    def train_dataloader(self) -> Batches:
        """Return the sized stream of training batches; nothing is collected before it is iterated.

        Training that has nothing left to collect or to learn from ends before it begins.
        """
        epoch = self._epoch
        if self.trainer is not None:
            reopen_epoch(self.trainer)
            if self._due.reopen(self.trainer):
                epoch = self._epoch_with_due_evaluation
            elif self.stop_if_spent():
                logger.warning(self._clock.reason)
        return Batches(self.batches_per_epoch, epoch)

    def _epoch_with_due_evaluation(self) -> Iterator[Any]:
        if not self._due.ends_epoch():
            yield from self._epoch()

    def val_dataloader(self) -> Batches:
        """Return a loader with one batch of finished evaluation episodes, played in separate environments."""
        return Batches(1, self._evaluation_or_stop)

    def test_dataloader(self) -> Batches:
        """Return the same as :meth:`val_dataloader`."""
        return self.val_dataloader()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch only if it is on another device: Lightning's own way takes 2 % of a small agent's training."""
        return batch if is_there(batch, device) else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _transferred(self, batch: Any) -> Any:
        """Do to a batch of several what Lightning does to a batch."""
        batch = self.on_before_batch_transfer(batch, 0)
        if self.trainer is not None:
            batch = self.transfer_batch_to_device(batch, self.trainer.strategy.root_device, 0)
        return self.on_after_batch_transfer(batch, 0)

    def stop_if_spent(self) -> bool:
        """Stop training if all frames are collected; return whether this call stopped it."""
        if self.trainer is None or self.trainer.should_stop or not self._is_spent():
            return False
        self._stop()
        return True

    def _stop(self) -> None:
        """Stop training behind the present step, if a trainer runs."""
        if self.trainer is not None:
            self.trainer.should_stop = True

    def _is_spent(self) -> bool:
        """Return whether nothing is left to collect, and to learn from."""
        return self._clock.is_spent

    def _evaluation_or_stop(self) -> Iterator[Any]:
        # A resumed run makes the evaluation again. The last one of a run is completed, as the epoch that it ends.
        ends_run = self.trainer is not None and self.trainer.should_stop
        with nullcontext() if ends_run else interrupts.not_held():
            batches = list(self._evaluation())
        yield from batches

    def _evaluation(self) -> Iterator[Any]:
        raise NotImplementedError
