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
from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning._core.ranks import is_lost_rank
from torchrl_lightning.callbacks.checkpoint_io import use_atomic_checkpoints
from torchrl_lightning.callbacks.monitors import check_monitor, episode_metrics, unknown_metric
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.environments.env_errors import EnvironmentFault

logger = logging.getLogger(__name__)


@runtime_checkable
class InSearch(Protocol):
    """A callback of a run that belongs to a search.

    Attributes:
        resume_advice: Part of a log message: how to continue the search after a stop of the run.
    """

    resume_advice: str


@runtime_checkable
class WithResumeSettings(Protocol):
    """A callback that knows which settings a command needs to resume the run, besides those of the stopped command.

    Attributes:
        resume_settings: Settings in the syntax of the command line, such as ``["trusted=true"]``.
    """

    resume_settings: list[str]


class LastCheckpoint(SparseCallback, Checkpoint):
    """Save the latest state of a run in one file.

    The callback saves after each evaluation, at the end of training, and on Ctrl-C or an exception. A resumed run first
    makes the remaining updates of its last rollout, and then collects the next rollout. In contrast, Lightning's
    ``save_last`` saves only in steps that also save a best checkpoint.

    If the last epoch is not a multiple of ``check_val_every_n_epoch``, the callback also evaluates the final state.
    Put this callback after :class:`BestCheckpoint` in the list, so that the final state can become the best checkpoint.

    With several ranks, Ctrl-C and SIGTERM stop all ranks at the same step, and all ranks save. After an exception in
    one rank, nothing is saved, because a checkpoint needs the state of all ranks and the other ranks wait for
    gradients. The previous checkpoint stays.

    Unlike with Lightning's ``OnExceptionCheckpoint``, a later run does not resume automatically. Pass the file as
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
        self._start_batches = self._evaluated_batches = -1  # batches of the run at its start and last evaluation
        self._start_clock: tuple[int, str] | None = None  # clock at the start of training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the trainer write checkpoints atomically."""
        use_atomic_checkpoints(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching; before this hook, a run has not learned anything that must be saved."""
        self._training = True
        self._start_batches = self._evaluated_batches = trainer.fit_loop.total_batch_idx
        self._start_clock = DataApi.of_run(trainer).clock

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the evaluated state."""
        if self._training and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._evaluated_batches = trainer.fit_loop.total_batch_idx
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the final state, and evaluate this state unless it is already evaluated."""
        batches = trainer.fit_loop.total_batch_idx
        if batches != self._start_batches:
            # Save again even if an evaluation has just saved, because the last epoch is complete only now.
            self._save(trainer)
            if batches != self._evaluated_batches and trainer.enable_validation:
                self._evaluate_saved_state(trainer)
        self._training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the state before collector and buffer close, and log the path; do nothing if nothing was learned."""
        was_training, self._training = self._training, False
        state = trainer.fit_loop.total_batch_idx, DataApi.of_run(trainer).clock
        if not was_training or _is_fast_dev_run(trainer) or state == (self._start_batches, self._start_clock):
            return
        reason = type(exception).__name__
        if trainer.world_size > 1 and rank_stop.agreed is None:
            if not (is_lost_rank(exception) or rank_stop.first_rank_reports):
                logger.warning(
                    "rank %d stopped by %s; %s", trainer.global_rank, reason, resume_hint(self.path, trainer)
                )
            return
        if interrupts.interrupted_within_step:
            checkpoint = f"{self.path} is the previous state" if self.path.exists() else "there is no checkpoint yet"
            logger.warning("stopped by %s within a step, so the state is not saved; %s.", reason, checkpoint)
            return
        try:
            self._save(trainer)
        except OSError as error:  # for example a full disk, which may also have stopped the run
            logger.error("stopped by %s; the final checkpoint was not written: %s", reason, error)
            return
        if not trainer.is_global_zero:
            return
        if _would_fail_again(exception):
            logger.warning("stopped by %s; the state of the run is in %s.", reason, self.path)
            return
        advice_of_searches = (
            f"{callback.resume_advice}; the final checkpoint of this run is "
            for callback in _callbacks(trainer)
            if isinstance(callback, InSearch)
        )
        advice = next((f"{advice}{self.path}" for advice in advice_of_searches), resume_hint(self.path, trainer))
        logger.warning("stopped by %s; %s", reason, advice)

    def _evaluate_saved_state(self, trainer: Trainer) -> None:
        """Evaluate the saved state without changing it, except for the states of the callbacks.

        The checkpoint then also contains the callbacks' results of this evaluation, such as the path of the best
        checkpoint.
        """
        self._training = False  # on_validation_end must not save again
        before = _callback_states(trainer)
        run_validation(trainer)
        after, checkpoint_io = _callback_states(trainer), trainer.strategy.checkpoint_io
        # Other checkpoint plugins may still be writing the file.
        if (
            after != before
            and trainer.is_global_zero
            and isinstance(checkpoint_io, TorchCheckpointIO)
            and self.path.exists()
        ):
            checkpoint = checkpoint_io.load_checkpoint(self.path, weights_only=False)  # written by this process
            checkpoint_io.save_checkpoint({**checkpoint, "callbacks": after}, self.path)

    def _save(self, trainer: Trainer) -> None:
        if not _is_fast_dev_run(trainer):
            trainer.save_checkpoint(self.path, weights_only=False)


def resume_hint(path: Path, trainer: Trainer) -> str:
    """Return how to resume a run from its last checkpoint, if it has one."""
    if not path.exists():
        return "there is no checkpoint yet."
    callbacks = (callback for callback in _callbacks(trainer) if isinstance(callback, WithResumeSettings))
    settings = [setting for callback in callbacks for setting in callback.resume_settings]
    return f"to resume, run the same command with {' '.join([f'ckpt_path={path}', *settings])}"


def _is_fast_dev_run(trainer: Any) -> bool:
    """Return True if the trainer only runs a few batches and must not write files."""
    return bool(trainer.fast_dev_run)


def _would_fail_again(exception: BaseException) -> bool:
    """Return True if the same command would fail again, because of an unusable disk or a user error."""
    is_user_error = isinstance(exception, UserError) and not isinstance(exception, EnvironmentFault)
    return is_user_error or (
        isinstance(exception, OSError) and not isinstance(exception, TimeoutError | ConnectionError)
    )


def _callback_states(trainer: Trainer) -> dict[str, Any]:
    """Return the states of a trainer's callbacks in the checkpoint format."""
    return {callback.state_key: state for callback in _callbacks(trainer) if (state := callback.state_dict())}


def _callbacks(trainer: Any) -> list[Any]:
    callbacks: list[Any] = trainer.callbacks
    return callbacks


def run_validation(trainer: Trainer) -> None:
    """Run the validation loop of a fit, with all callbacks."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    trainer.validating = True
    try:
        loop.run()
    finally:
        trainer.training = True


class BestCheckpoint(SparseCallback, ModelCheckpoint):
    """Keep the best checkpoint like Lightning's ``ModelCheckpoint``; of equal scores, keep the latest checkpoint.

    If returns are bounded, the first policy that reaches the bound in a few episodes is rarely the best policy. If the
    monitor begins with ``eval/``, the callback skips validations without episodes, such as the validation of an
    environment model. The callback accepts the arguments of ``ModelCheckpoint``.

    Examples:
        >>> BestCheckpoint(monitor="eval/return", mode="max").monitor
        'eval/return'
    """

    on_train_batch_end = ModelCheckpoint.on_train_batch_end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Validate the monitor, and make the trainer write checkpoints atomically."""
        if self.monitor is not None:
            check_monitor(self.monitor, trainer, pl_module)
        use_atomic_checkpoints(trainer)
        super().setup(trainer, pl_module, stage)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the checkpoint if it is among the best; skip validations without episodes."""
        kind, known = EVALUATION, trainer.callback_metrics
        expected = (*known, *episode_metrics(trainer))  # episode metrics are logged after the first end of an episode
        if self.monitor is not None and self.monitor not in expected and trainer.state.fn == TrainerFn.FITTING:
            evaluation_metrics = [name for name in known if name.startswith(kind)]
            if evaluation_metrics and not trainer.sanity_checking:
                raise unknown_metric(self.monitor, known)
        if not str(self.monitor).startswith(kind) or any(name.startswith(kind) for name in trainer.callback_metrics):
            super().on_validation_end(trainer, pl_module)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return True if the current score is at least as good as the worst saved score."""
        worst_saved = self.best_k_models.get(self.kth_best_model_path)
        is_tie = worst_saved is not None and current is not None and bool(current == worst_saved)
        # Lightning reduces its decision over the ranks. A metric of the user may differ, so that only some ranks tie.
        is_better = super().check_monitor_top_k(trainer, current)
        return is_better or bool(trainer.strategy.reduce_boolean_decision(is_tie, all=True))
