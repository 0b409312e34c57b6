"""The checkpoint to resume from, and the best one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from torchrl_lightning._logging import EVALUATION
from torchrl_lightning.callbacks.checkpoint_io import write_atomically
from torchrl_lightning.callbacks.monitors import check_monitor, episode_metrics, unknown_metric
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.environments.faults import EnvironmentFault
from torchrl_lightning.fitting import Fault
from torchrl_lightning.interrupts import interrupts
from torchrl_lightning.protocols import DataApi

logger = logging.getLogger(__name__)


@runtime_checkable
class PartOfMore(Protocol):
    """A callback of a run that is part of something larger.

    Attributes:
        goes_on: How that goes on when the run was stopped.
    """

    goes_on: str


class LastCheckpoint(SparseCallback, Checkpoint):
    """Keep the end of a run, however it ends, in one file that each new state replaces.

    The state is written after each evaluation, at the end of training, and when Ctrl-C or an exception ends it. A run
    that resumes from it makes the updates that were left of its last rollout before it collects anew. Lightning's
    own ``save_last`` writes only where a best checkpoint is written in the same step.

    An end that was not evaluated, because it is no multiple of ``check_val_every_n_epoch``, is evaluated, too. Put this
    callback behind a :class:`BestCheckpoint`, which then chooses among all states, the last one included.

    With several ranks nothing is written on an exception: it ends one of them while the others wait for its gradients,
    and a checkpoint needs the state of all. What was written before stays.

    Unlike Lightning's ``OnExceptionCheckpoint`` it never makes a later run resume by itself: pass the file as
    ``ckpt_path``.

    Args:
        dirpath: The folder to write to, made when it is needed.
        filename: The file's name without its ending.

    Examples:
        >>> str(LastCheckpoint("logs/run").path)
        'logs/run/last.ckpt'
    """

    def __init__(self, dirpath: str | Path, filename: str = "last") -> None:
        super().__init__()
        self.path = Path(dirpath) / f"{filename}.ckpt"
        self._training = False
        self._began = self._evaluated = -1  # batches of the whole run, when it began and when it was evaluated last
        self._collected: tuple[int, str] | None = None  # before it began

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have a trainer that writes in Lightning's own way replace checkpoints as a whole."""
        write_atomically(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching; nothing has been learned by a run that fails earlier."""
        self._training = True
        self._began = self._evaluated = trainer.fit_loop.total_batch_idx
        self._collected = DataApi.of_run(trainer).clock

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the state that was evaluated."""
        if self._training and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._evaluated = trainer.fit_loop.total_batch_idx
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the final state, unless that has been done, and write it."""
        batches = trainer.fit_loop.total_batch_idx
        if batches != self._began:
            # Also after an evaluation: the last epoch is complete only now.
            self._save(trainer)
            if batches != self._evaluated and trainer.enable_validation:
                self._evaluate_beside(trainer)
        self._training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the state while collector and buffer are still alive, and log where, unless it is as it began."""
        training, self._training = self._training, False
        state = trainer.fit_loop.total_batch_idx, DataApi.of_run(trainer).clock
        if not training or _is_trial(trainer) or state == (self._began, self._collected):
            return
        reason = type(exception).__name__
        if trainer.world_size > 1:
            logger.warning("stopped by %s; with several ranks only the regular checkpoints are kept.", reason)
            return
        if interrupts.is_torn:
            last = f"{self.path} keeps the one before" if self.path.exists() else "there is no checkpoint yet"
            logger.warning("stopped by %s within a step, whose state is not saved; %s.", reason, last)
            return
        try:
            self._save(trainer)
        except OSError as error:  # as on a full disk, which may be what has stopped the run
            logger.error("stopped by %s; its end was not written: %s", reason, error)
            return
        if _would_fail_again(exception):
            logger.warning("stopped by %s; the state of the run is in %s.", reason, self.path)
            return
        larger = (
            f"{each.goes_on}; the end of this run is " for each in _callbacks(trainer) if isinstance(each, PartOfMore)
        )
        advice = next(larger, "to resume, run the same command with ckpt_path=")
        logger.warning("stopped by %s; %s%s", reason, advice, self.path)

    def _evaluate_beside(self, trainer: Trainer) -> None:
        """Evaluate the state that was written; a run that goes on from it is as if it had not been evaluated here.

        Of this evaluation it knows what callbacks have made of it, as which state was the best.
        """
        self._training = False  # it is written already
        before = _states(trainer)
        evaluate(trainer)
        behind, files = _states(trainer), trainer.strategy.checkpoint_io
        # Others may still be writing it.
        if behind != before and trainer.is_global_zero and isinstance(files, TorchCheckpointIO) and self.path.exists():
            checkpoint = files.load_checkpoint(self.path, weights_only=False)  # of this process
            files.save_checkpoint({**checkpoint, "callbacks": behind}, self.path)

    def _save(self, trainer: Trainer) -> None:
        if not _is_trial(trainer):
            trainer.save_checkpoint(self.path, weights_only=False)


def _is_trial(trainer: Any) -> bool:
    """Return whether a trainer only runs a few batches and must not write anything."""
    return bool(trainer.fast_dev_run)


def _would_fail_again(exception: BaseException) -> bool:
    """Return whether the same command would end like this again: on an unusable disk, or for a mistake of the user."""
    is_mistake = isinstance(exception, Fault) and not isinstance(exception, EnvironmentFault)
    return is_mistake or (isinstance(exception, OSError) and not isinstance(exception, TimeoutError | ConnectionError))


def _states(trainer: Trainer) -> dict[str, Any]:
    """Return the states of a trainer's callbacks as a checkpoint holds them."""
    return {callback.state_key: state for callback in _callbacks(trainer) if (state := callback.state_dict())}


def _callbacks(trainer: Any) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def evaluate(trainer: Trainer) -> None:
    """Run the evaluation that a fit runs every few epochs, with all its callbacks."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True


class BestCheckpoint(SparseCallback, ModelCheckpoint):
    """Keep the best checkpoint like Lightning's ``ModelCheckpoint``, but of equally good ones keep the latest.

    Where returns are bounded, the first policy that reaches the bound in a few episodes is rarely the best one. With a
    monitor ``eval/...``, validations that play no episodes are passed over, as those of a model of the environment.
    The arguments are those of ``ModelCheckpoint``.

    Examples:
        >>> BestCheckpoint(monitor="eval/return", mode="max").monitor
        'eval/return'
    """

    on_train_batch_end = ModelCheckpoint.on_train_batch_end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have a trainer that writes in Lightning's own way replace checkpoints as a whole."""
        if self.monitor is not None:
            check_monitor(self.monitor, trainer, pl_module)
        write_atomically(trainer)
        super().setup(trainer, pl_module, stage)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the checkpoint if it is among the best; do nothing where no episodes were played."""
        kind, known = EVALUATION, trainer.callback_metrics
        expected = (*known, *episode_metrics(trainer))  # the latter from the first episode on that ends
        if self.monitor is not None and self.monitor not in expected and trainer.state.fn == TrainerFn.FITTING:
            played = [name for name in known if name.startswith(kind)]
            if played and not trainer.sanity_checking:
                raise unknown_metric(self.monitor, known)
        if not str(self.monitor).startswith(kind) or any(name.startswith(kind) for name in trainer.callback_metrics):
            super().on_validation_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether the current policy is at least as good as the worst one that is kept."""
        kept = self.best_k_models.get(self.kth_best_model_path)
        tie = kept is not None and current is not None and bool(current == kept)
        return tie or super().check_monitor_top_k(trainer, current)
