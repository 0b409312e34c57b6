"""Callbacks that call a DataModule in hooks that Lightning offers only to callbacks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.metric_logging import EVALUATION, RESERVED
from torchrl_lightning._core.protocols import LearnerApi
from torchrl_lightning._core.rank_stop import rank_stop
from torchrl_lightning.callbacks.checkpoints import BestCheckpoint
from torchrl_lightning.callbacks.sparse import SparseCallback
from torchrl_lightning.datamodules._run.adapted_callbacks import AdaptedCallbacks

logger = logging.getLogger(__name__)


class WaitingMonitors:
    """Let Lightning's callbacks wait for metrics that are logged later, such as the first episode's return.

    Otherwise ``EarlyStopping`` and ``ModelCheckpoint`` raise an error in one of their hooks if their metric does not
    exist yet.
    """

    def __init__(self) -> None:
        self.changed: list[tuple[Any, str, Any]] = []  # callback, attribute, original value

    def wait(self, trainer: Any, delayed: Collection[str]) -> None:
        """Disable callbacks until the next call if they monitor a ``delayed`` metric that is not logged yet."""
        self.release()
        known = trainer.callback_metrics
        for callback in (*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks):
            if not isinstance(callback, EarlyStopping | ModelCheckpoint):
                continue
            name, off = ("strict", False) if isinstance(callback, EarlyStopping) else ("save_top_k", 0)
            if callback.monitor in delayed and callback.monitor not in known:
                self.changed.append((callback, name, getattr(callback, name)))
                setattr(callback, name, off)

    def release(self) -> None:
        """Enable the callbacks again."""
        changed, self.changed = self.changed, []
        for callback, name, value in changed:
            setattr(callback, name, value)


def warn_of_missing_metrics(trainer: Any, episode_metrics: Collection[str]) -> None:
    """Log a warning for each callback that has had no effect, because its metric was never logged."""
    known = {*trainer.callback_metrics, *RESERVED, None}
    for callback in trainer.callbacks:
        if not isinstance(callback, EarlyStopping | ModelCheckpoint) or callback.monitor in known:
            continue
        if isinstance(callback, BestCheckpoint) and str(callback.monitor).startswith(EVALUATION):
            continue  # it skips fits of a world model, which are not evaluated by episodes
        reason = "no evaluation or step logged it. Correct the name, or evaluate more often"
        if callback.monitor in episode_metrics:
            reason = "no episode ended. Raise total_frames or set a time limit for the environment"
        logger.warning(
            "monitor=%s of %s had no value and no effect in this run, because %s.",
            callback.monitor,
            type(callback).__name__,
            reason,
        )


class DataHooks(SparseCallback):
    """A callback that calls a DataModule in hooks that Lightning offers only to callbacks."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data
        self._monitors = WaitingMonitors()
        self._adapted = AdaptedCallbacks(data)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Adapt Lightning's callbacks for a fit."""
        if stage == "fit" and self.is_active_in(trainer):
            self._adapted.attach(trainer, pl_module)

    def attach(self, trainer: Any) -> None:
        """Insert this callback before all others of a trainer, once."""
        if self not in trainer.callbacks:
            trainer.callbacks.insert(0, self)

    def is_active_in(self, trainer: Any) -> bool:
        """Return whether the trainer currently uses this DataModule; a later fit may use another one."""
        return trainer.datamodule is self.data

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Delay Ctrl-C until the end of a step, and let all ranks stop at the same step after a stop signal."""
        if not self.is_active_in(trainer):
            return
        if trainer.world_size == 1:
            interrupts.hold(self.data)
        else:
            rank_stop.begin(self.data, trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the DataModule's metrics before the callbacks that monitor them run."""
        if self.is_active_in(trainer):
            self.data.publish_metrics()
            self._monitors.wait(trainer, self._delayed_metrics(trainer, pl_module))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enable the callbacks that the last hook has let wait; within an epoch, Lightning's hooks wait themselves."""
        self._monitors.release()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the callbacks after this one wait for metrics that are logged later."""
        if self.is_active_in(trainer) and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._monitors.wait(trainer, self._delayed_metrics(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop after a last signal to any rank."""
        self._monitors.release()
        if self.is_active_in(trainer):
            rank_stop.check(now=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Release other callbacks, also after an evaluation; exit if Ctrl-C was pressed meanwhile."""
        self._monitors.release()
        self._adapted.release()
        if stage == "fit":
            rank_stop.end(self.data)
            if self.is_active_in(trainer) and trainer.callback_metrics:
                warn_of_missing_metrics(trainer, self.data.episode_metrics)
        if stage == "fit" and interrupts.release(self.data):
            raise SystemExit(1)  # like Lightning after Ctrl-C; from here on, Lightning ignores Ctrl-C

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Release other callbacks, and let this rank report the failure."""
        self._monitors.release()
        self._adapted.release()
        if self.is_active_in(trainer):
            rank_stop.keep_process()

    def _delayed_metrics(self, trainer: Trainer, pl_module: LightningModule) -> tuple[str, ...]:
        """Return the metrics that exist only after the first finished episode, in training or in an evaluation."""
        evaluated = LearnerApi.of(pl_module).evaluation_metrics
        is_evaluated = not trainer.enable_validation or any(name in trainer.callback_metrics for name in evaluated)
        return (*self.data.episode_metrics, *(() if is_evaluated else evaluated))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publish the DataModule's metrics for callbacks that run at the end of an evaluation."""
        if self.is_active_in(trainer) and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.data.publish_metrics()


class StepHooks(DataHooks):
    """End each step of a DataModule.

    This callback runs before all others, so that a checkpoint of another callback contains the results of the step.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step. An evaluation within the epoch may have let other callbacks wait."""
        if self._monitors.changed:
            self._monitors.release()
        if self.is_active_in(trainer):
            self.data.end_step()


class ReplayHooks(StepHooks):
    """End each step by writing priorities to the buffer, and write the buffer with each checkpoint."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write a buffer that is stored in ``buffer_dir``, and add a reference to the checkpoint."""
        if self.is_active_in(trainer) and self.data.save_buffer():
            checkpoint[type(self.data).__qualname__] = self.data.state_dict()


class FitHooks(DataHooks):
    """End a run after the last fit of a model. The validation may end this fit."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop training if all frames are collected and the last fit has ended."""
        super().on_train_epoch_end(trainer, pl_module)
        if self.is_active_in(trainer):
            self.data.stop_if_finished()


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Disable a training step's autocast while a rollout is collected, and clear the autocast cache of old weights."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                torch.clear_autocast_cache()  # the update has made the cached weights outdated
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
