"""The evaluation that was due when a checkpoint was written: a resumed run makes it before it goes on."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from torchrl_lightning._compat import should_validate
from torchrl_lightning.callbacks.checkpoints import evaluate
from torchrl_lightning.callbacks.sparse import SparseCallback


class DueEvaluation(SparseCallback):
    """Have a resumed run make the evaluation that the interrupted run would have made next.

    Lightning evaluates after ``on_train_batch_end``, in which callbacks write checkpoints. If a run resumes from one of
    these, Lightning skips that evaluation, and at the end of an epoch also the hooks that follow it. The best
    checkpoint and early stopping would miss a score.

    Args:
        data: The DataModule.
    """

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data
        self._was_due = False  # when the checkpoint was written that this run resumes from
        self._is_running = self._resumes = self._ends_run = False
        self._count = 0  # evaluations before the one that is running

    @property
    def is_due(self) -> bool:
        """Whether an evaluation follows that is not complete yet."""
        trainer: Any = self.data.trainer
        if self._was_due or trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return self._was_due
        if trainer.validating:
            return self._is_running
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        return batches.processed > batches.completed and should_validate(trainer)

    @is_due.setter
    def is_due(self, value: bool) -> None:
        self._was_due = value

    @property
    def count(self) -> int:
        """Complete evaluations of the run."""
        trainer: Any = self.data.trainer
        is_running = self._is_running and trainer is not None and trainer.validating
        return self._count if is_running else int(self.data.num_evaluations)

    @count.setter
    def count(self, value: int) -> None:
        self.data.num_evaluations = value

    def attach(self, trainer: Any) -> None:
        """Put this callback behind all others of a trainer, once, so that they are ready for an evaluation."""
        if self not in trainer.callbacks:
            trainer.callbacks.append(self)
            trainer.callbacks.insert(0, _EvaluationBounds(self))  # before those that write checkpoints

    def reopen(self, trainer: Any) -> bool:
        """Have Lightning resume within the evaluation that was due; return whether there is one.

        Call it when a loader is asked for.
        """
        if self._was_due:
            loop = trainer.fit_loop.epoch_loop
            for batches in (loop.batch_progress.current, loop.batch_progress.total):
                batches.completed = batches.processed
            episodes, over = loop.val_loop.batch_progress, loop.val_loop.batch_progress.total.completed
            episodes.current.load_state_dict({"ready": 1, "started": 1, "processed": 0, "completed": 0})
            episodes.total.load_state_dict({"ready": over + 1, "started": over + 1, "processed": over})
        return self._was_due

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate now if the interrupted run was about to end, because Lightning evaluates only at intervals."""
        if not self._was_due or trainer.datamodule is not self.data:
            return
        self._was_due = False
        if should_validate(trainer):
            self._resumes = True
            return
        self._ends_run = True
        if trainer.enable_validation:
            evaluate(trainer)
        trainer.fit_loop.epoch_loop.val_loop.reset_restart_stage()

    def ends_epoch(self) -> bool:
        """Return whether a resumed run has only to end its epoch, and end the run then; ask before the first batch."""
        ends, self._ends_run = self._ends_run, False
        return ends and bool(self.data.stop_if_spent())

    def begin(self) -> None:
        """Note that an evaluation begins."""
        self._is_running, self._count = True, int(self.data.num_evaluations)

    def end(self) -> None:
        """Note that an evaluation has ended; end the run if it has nothing else to do."""
        self._is_running = False
        if self._resumes:
            self._resumes = False
            self.data.stop_if_spent()


class _EvaluationBounds(SparseCallback):
    """Note when an evaluation begins and ends, before other callbacks write checkpoints there."""

    def __init__(self, due: DueEvaluation) -> None:
        super().__init__()
        self._due = due

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due.begin()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due.end()
