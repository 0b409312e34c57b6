"""Apply the changed settings of a resumed run over the values restored from its checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from torchrl_lightning._core.protocols import DataApi, LearnerApi
from torchrl_lightning.cli.config.resume import changes_rates
from torchrl_lightning.cli.error_messages import UsageError


class ChangedSettings(Callback):
    """Apply the changed settings of a resumed run after the checkpoint is restored, or raise UsageError.

    Args:
        differing: The names of the changed settings. Optimizers and schedules keep their restored settings if none of
            these names affects them.
    """

    # State entries of torch schedulers that record progress; all others are settings.
    _PROGRESS = frozenset(
        ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i")
    )

    def __init__(self, differing: Iterable[str]) -> None:
        super().__init__()
        self.differing = list(differing)
        self._built: dict[str, Any] = {}
        self._groups: list[list[dict[str, Any]]] = []
        self._schedulers: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the DataModule's settings before Lightning restores its state."""
        self._built = self._present(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the settings of optimizers and schedulers before Lightning restores their states."""
        self._groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in each.param_groups]
            for each in trainer.optimizers
        ]
        self._schedulers = [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the changes at the current point of the schedule; raise UsageError if the state overwrote a setting."""
        if changes_rates(self.differing):
            self._set_rates(trainer)
        # Without a change to the learner, its schedules keep their restored values within an epoch.
        follow = LearnerApi.of(pl_module).follow_schedules
        if follow is not None and any(name.startswith("model.") for name in self.differing):
            follow()
        for name, restored in self._present(trainer).items():
            if restored != self._built.get(name, restored):
                raise UsageError(
                    f"{name}={self._built[name]} would not take effect: it is a part of the state that the checkpoint "
                    f"restores, {restored}. Leave it out, or start anew without ckpt_path."
                )

    def _present(self, trainer: Trainer) -> dict[str, Any]:
        """Return the current values of the DataModule's changed settings, as far as they are plain attributes."""
        found: dict[str, Any] = {}
        for name in self.differing:
            group, *path = name.split(".")
            value: Any = DataApi.of_run(trainer).part if group == "data" else None
            for attribute in path:
                value = getattr(value, attribute, None)
            if isinstance(value, bool | int | float | str):
                found[name] = value
        return found

    def _set_rates(self, trainer: Trainer) -> None:
        for optimizer, groups in zip(trainer.optimizers, self._groups, strict=True):
            for group, given in zip(optimizer.param_groups, groups, strict=True):
                initial, wanted = (each.get("initial_lr", each["lr"]) for each in (group, given))
                reached = group["lr"] / initial if initial else 1.0
                group.update(given, lr=wanted * reached, **{"initial_lr": wanted} if "initial_lr" in group else {})
        for config, given in zip(trainer.lr_scheduler_configs, self._schedulers, strict=True):
            told = {key: value for key, value in given.items() if key not in self._PROGRESS}
            config.scheduler.load_state_dict({**config.scheduler.state_dict(), **told})
