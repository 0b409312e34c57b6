"""Adapt Lightning's callbacks to manual optimization and to loggers that count frames."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, LearningRateMonitor, ModelCheckpoint

Hook = Callable[..., Any]


class AdaptedCallbacks:
    """Replace hooks of Lightning's callbacks during a fit, so that they have the effect that their pages describe.

    * ``ModelCheckpoint``: under manual optimization, Lightning ignores ``train_time_interval``, and a checkpoint of
      ``every_n_train_steps`` is ranked by an old score although an evaluation follows. The hook of automatic
      optimization does neither, and works for any module.
    * ``LearningRateMonitor`` and ``DeviceStatsMonitor``: rows have the frame count as their step, like all other rows.
    * ``LearningRateMonitor``: the rate of an epoch is logged at its first batch. Modules change their rates in
      ``on_train_epoch_start``, which Lightning calls after the same hook of callbacks.

    Args:
        data: The DataModule.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._replaced: list[tuple[Callback, str]] = []

    def attach(self, trainer: Any, learner: Any) -> None:
        """Replace the hooks of a trainer's callbacks."""
        self.release()
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and not learner.automatic_optimization:
                if callback._every_n_train_steps or callback._train_time_interval is not None:
                    self._replace(callback, "on_train_batch_end", _save_as_automatic(callback, learner))
            elif isinstance(callback, LearningRateMonitor):
                self._log_rates_over_frames(callback)
            elif isinstance(callback, DeviceStatsMonitor):
                for stage in ("train", "validation"):
                    for end in ("start", "end"):
                        name = f"on_{stage}_batch_{end}"
                        self._replace(callback, name, self._over_frames(getattr(callback, name)))

    def release(self) -> None:
        """Restore the callbacks' own hooks."""
        for callback, name in self._replaced:
            vars(callback).pop(name, None)
        self._replaced = []

    def _replace(self, callback: Callback, name: str, hook: Hook) -> None:
        if name not in vars(callback):  # a user has replaced the hook
            vars(callback)[name] = hook
            self._replaced.append((callback, name))

    def _over_frames(self, original: Hook) -> Hook:
        """Return a hook whose rows have the frame count as their step."""

        @wraps(original)
        def hook(trainer: Any, *arguments: Any, **keywords: Any) -> None:
            loggers = trainer.loggers
            trainer.loggers = [_FrameLogger(logger, self._data) for logger in loggers]
            try:
                original(trainer, *arguments, **keywords)
            finally:
                trainer.loggers = loggers

        return hook

    def _log_rates_over_frames(self, monitor: LearningRateMonitor) -> None:
        log_epoch, log_step = (
            self._over_frames(monitor.on_train_epoch_start),
            self._over_frames(monitor.on_train_batch_start),
        )
        begins_epoch = False

        @wraps(monitor.on_train_epoch_start)
        def on_train_epoch_start(*_: Any, **__: Any) -> None:
            nonlocal begins_epoch
            begins_epoch = True

        @wraps(monitor.on_train_batch_start)
        def on_train_batch_start(trainer: Any, *arguments: Any, **keywords: Any) -> None:
            nonlocal begins_epoch
            if begins_epoch:
                begins_epoch = False
                log_epoch(trainer, *arguments, **keywords)
            log_step(trainer, *arguments, **keywords)

        self._replace(monitor, "on_train_epoch_start", on_train_epoch_start)
        self._replace(monitor, "on_train_batch_start", on_train_batch_start)


def _save_as_automatic(callback: ModelCheckpoint, learner: Any) -> Hook:
    """Return the hook of a checkpoint callback for a module that seems to optimize automatically."""
    original: Hook = callback.on_train_batch_end
    view = _AutomaticView(learner)

    @wraps(original)
    def on_train_batch_end(trainer: Any, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        # Lightning saves the weights in ``saved_models`` instead, if a module has them.
        saves_own_weights = callback._every_n_train_steps and hasattr(pl_module, "saved_models")
        original(trainer, pl_module if saves_own_weights else view, *arguments, **keywords)

    return on_train_batch_end


class _AutomaticView:
    """A LightningModule whose ``automatic_optimization`` is True; all other attributes and the class are the module's.

    A subclass of ``ModelCheckpoint`` may also read and set attributes of the module.
    """

    automatic_optimization = True

    def __init__(self, module: Any) -> None:
        vars(self)["_module"] = module

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class _FrameLogger:
    """A logger whose rows have the DataModule's frame count as their step."""

    def __init__(self, logger: Any, data: Any) -> None:
        self._logger, self._data = logger, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._logger.log_metrics(metrics, step=self._data.clock[0])
