"""Callbacks that save the last and the best checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.metric_logging import EVALUATION
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning.callbacks.checkpoint_io import write_atomically
from torchrl_lightning.callbacks.monitors import check_monitor, episode_metrics, unknown_metric
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.environments.env_errors import EnvironmentFault

logger = logging.getLogger(__name__)


@runtime_checkable
class InSearch(Protocol):
    """A callback of a run that belongs to a search.

    Attributes:
        goes_on: How the search continues after the run was stopped.
    """

    goes_on: str


class LastCheckpoint(SparseCallback, Checkpoint):
    """Save the latest state of a run in one file, also if Ctrl-C or an exception ends the run.

    The callback saves after each evaluation, at the end of training, and on Ctrl-C or an exception. A resumed run
    first makes the remaining updates of its last rollout, then collects the next one. Lightning's own ``save_last``
    saves only in steps that also save a best checkpoint.

    If the last epoch is not a multiple of ``check_val_every_n_epoch``, the callback also evaluates the final state.
    Put this callback after a :class:`BestCheckpoint`, so that the best checkpoint can be the last state.

    With several ranks, an exception saves nothing: it ends one rank while the others wait for its gradients, and a
    checkpoint needs the state of all ranks. The previous checkpoint stays.

    Unlike Lightning's ``OnExceptionCheckpoint``, the file never makes a later run resume automatically: pass it as
    ``ckpt_path``.

    Args:
        dirpath: The output folder, created when needed.
        filename: The file name without its suffix.

    Examples:
        >>> str(LastCheckpoint("logs/run").path)
        'logs/run/last.ckpt'
    """

    def __init__(self, dirpath: str | Path, filename: str = "last") -> None:
        super().__init__()
        self.path = Path(dirpath) / f"{filename}.ckpt"
        self._training = False
        self._began = self._evaluated = -1  # batches of the whole run at its start and at its last evaluation
        self._collected: tuple[int, str] | None = None  # clock at the start of training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the trainer write checkpoints atomically."""
        write_atomically(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching: a run that fails earlier has not learned anything."""
        self._training = True
        self._began = self._evaluated = trainer.fit_loop.total_batch_idx
        self._collected = DataApi.of_run(trainer).clock

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the evaluated state."""
        if self._training and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._evaluated = trainer.fit_loop.total_batch_idx
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final state, and evaluate it if it is not yet evaluated."""
        batches = trainer.fit_loop.total_batch_idx
        if batches != self._began:
            # Save even after an evaluation: the last epoch is complete only now.
            self._save(trainer)
            if batches != self._evaluated and trainer.enable_validation:
                self._evaluate_beside(trainer)
        self._training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state before collector and buffer close, and log the path; do nothing without new progress."""
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
        except OSError as error:  # for example a full disk, which may also have stopped the run
            logger.error("stopped by %s; its end was not written: %s", reason, error)
            return
        if _would_fail_again(exception):
            logger.warning("stopped by %s; the state of the run is in %s.", reason, self.path)
            return
        larger = (
            f"{each.goes_on}; the end of this run is " for each in _callbacks(trainer) if isinstance(each, InSearch)
        )
        advice = next(larger, "to resume, run the same command with ckpt_path=")
        logger.warning("stopped by %s; %s%s", reason, advice, self.path)

    def _evaluate_beside(self, trainer: Trainer) -> None:
        """Evaluate the saved state without changing it, except for the states of the callbacks.

        The checkpoint then includes the results of this evaluation in callbacks, such as the path of the best state.
        """
        self._training = False  # on_validation_end must not save again
        before = _states(trainer)
        evaluate(trainer)
        behind, files = _states(trainer), trainer.strategy.checkpoint_io
        # Other checkpoint plugins may still be writing the file.
        if behind != before and trainer.is_global_zero and isinstance(files, TorchCheckpointIO) and self.path.exists():
            checkpoint = files.load_checkpoint(self.path, weights_only=False)  # written by this process
            files.save_checkpoint({**checkpoint, "callbacks": behind}, self.path)

    def _save(self, trainer: Trainer) -> None:
        if not _is_trial(trainer):
            trainer.save_checkpoint(self.path, weights_only=False)


def _is_trial(trainer: Any) -> bool:
    """Return True if the trainer only runs a few batches and must not write files."""
    return bool(trainer.fast_dev_run)


def _would_fail_again(exception: BaseException) -> bool:
    """Return True if the same command would fail again: with an unusable disk, or through a user error."""
    is_mistake = isinstance(exception, UserError) and not isinstance(exception, EnvironmentFault)
    return is_mistake or (isinstance(exception, OSError) and not isinstance(exception, TimeoutError | ConnectionError))


def _states(trainer: Trainer) -> dict[str, Any]:
    """Return the states of a trainer's callbacks in the checkpoint format."""
    return {callback.state_key: state for callback in _callbacks(trainer) if (state := callback.state_dict())}


def _callbacks(trainer: Any) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def evaluate(trainer: Trainer) -> None:
    """Run the validation loop of a fit, with all callbacks."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True


class BestCheckpoint(SparseCallback, ModelCheckpoint):
    """Keep the best checkpoint like Lightning's ``ModelCheckpoint``, and prefer the latest of equal scores.

    If returns are bounded, the first policy that reaches the bound in a few episodes is rarely the best one. With a
    monitor ``eval/...``, the callback skips validations without episodes, such as the validation of an environment
    model. It accepts the arguments of ``ModelCheckpoint``.

    Examples:
        >>> BestCheckpoint(monitor="eval/return", mode="max").monitor
        'eval/return'
    """

    on_train_batch_end = ModelCheckpoint.on_train_batch_end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Validate the monitor, and make the trainer write checkpoints atomically."""
        if self.monitor is not None:
            check_monitor(self.monitor, trainer, pl_module)
        write_atomically(trainer)
        super().setup(trainer, pl_module, stage)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the checkpoint if it is among the best; skip validations without episodes."""
        kind, known = EVALUATION, trainer.callback_metrics
        expected = (*known, *episode_metrics(trainer))  # the latter are logged once an episode ends
        if self.monitor is not None and self.monitor not in expected and trainer.state.fn == TrainerFn.FITTING:
            played = [name for name in known if name.startswith(kind)]
            if played and not trainer.sanity_checking:
                raise unknown_metric(self.monitor, known)
        if not str(self.monitor).startswith(kind) or any(name.startswith(kind) for name in trainer.callback_metrics):
            super().on_validation_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return True if the current policy is at least as good as the worst saved policy."""
        kept = self.best_k_models.get(self.kth_best_model_path)
        tie = kept is not None and current is not None and bool(current == kept)
        return tie or super().check_monitor_top_k(trainer, current)
