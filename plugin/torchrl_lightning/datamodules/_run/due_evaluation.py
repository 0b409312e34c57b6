"""Let a resumed run first make the evaluation that was due when its checkpoint was written."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from torchrl_lightning._core.torchrl_compat import should_validate
from torchrl_lightning.callbacks.checkpoints import run_validation
from torchrl_lightning.callbacks.sparse import SparseCallback


class DueEvaluation(SparseCallback):
    """Let a resumed run make the evaluation that the interrupted run would have made next.

    Callbacks write checkpoints in ``on_train_batch_end``, before Lightning evaluates. Without this class, a run that
    resumes from one of these checkpoints skips the evaluation and, at the end of an epoch, also the hooks after it. The
    callbacks for the best checkpoint and for early stopping would then miss a score.

    Args:
        data: The DataModule.
    """

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data
        self._was_due = False  # whether an evaluation was due when the loaded checkpoint was written
        self._is_running = self._resumes = self._finishes_run = False
        self._count = 0  # number of evaluations before the current one

    @property
    def is_due(self) -> bool:
        """Whether an evaluation is due and not complete yet."""
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
        """Number of complete evaluations of the run."""
        trainer: Any = self.data.trainer
        is_running = self._is_running and trainer is not None and trainer.validating
        return self._count if is_running else int(self.data.num_evaluations)

    @count.setter
    def count(self, value: int) -> None:
        self.data.num_evaluations = value

    def attach(self, trainer: Any) -> None:
        """Append this callback to a trainer's callbacks, once, so that all earlier ones are ready for an evaluation."""
        if self not in trainer.callbacks:
            trainer.callbacks.append(self)
            trainer.callbacks.insert(0, _EvaluationBounds(self))  # before callbacks that write checkpoints

    def reopen(self, trainer: Any) -> bool:
        """Return whether an evaluation is due; if so, let Lightning begin with this evaluation.

        Call this method when Lightning requests a loader.
        """
        if self._was_due:
            loop = trainer.fit_loop.epoch_loop
            for batches in (loop.batch_progress.current, loop.batch_progress.total):
                batches.completed = batches.processed
            progress, completed = loop.val_loop.batch_progress, loop.val_loop.batch_progress.total.completed
            progress.current.load_state_dict({"ready": 1, "started": 1, "processed": 0, "completed": 0})
            progress.total.load_state_dict({"ready": completed + 1, "started": completed + 1, "processed": completed})
        return self._was_due

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Evaluate now if the interrupted run was about to end, because Lightning evaluates only at intervals."""
        if not self._was_due or trainer.datamodule is not self.data:
            return
        self._was_due = False
        if should_validate(trainer):
            self._resumes = True
            return
        self._finishes_run = True
        if trainer.enable_validation:
            run_validation(trainer)
        trainer.fit_loop.epoch_loop.val_loop.reset_restart_stage()

    def finish_run(self) -> bool:
        """End a resumed run if only its last evaluation was missing; return whether the run ends.

        Call this method before the first batch.
        """
        ends, self._finishes_run = self._finishes_run, False
        return ends and bool(self.data.stop_if_finished())

    def begin(self) -> None:
        """Record the beginning of an evaluation."""
        self._is_running, self._count = True, int(self.data.num_evaluations)

    def end(self, *, counts: bool) -> None:
        """Record the end of an evaluation; end the run if nothing is left to do.

        Args:
            counts: False for the evaluation of a sanity check. The next evaluation then uses the same seeds, so that
                the check changes no later score.
        """
        self._is_running = False
        if not counts:
            self.data.num_evaluations = self._count
        if self._resumes:
            self._resumes = False
            self.data.stop_if_finished()


class _EvaluationBounds(SparseCallback):
    """Record when evaluations begin and end, before other callbacks write checkpoints in the same hooks."""

    def __init__(self, due: DueEvaluation) -> None:
        super().__init__()
        self._due_evaluation = due

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due_evaluation.begin()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._due_evaluation.end(counts=not trainer.sanity_checking)
