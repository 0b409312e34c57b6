"""Apply the changed settings of a resumed run after its checkpoint is restored."""

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
        changed_names: The names of the changed settings. Optimizers and schedules keep their restored settings if none
            of these names affects them.
    """

    # Progress entries in the states of torch schedulers; all other entries are settings.
    _PROGRESS = frozenset(
        ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i")
    )

    def __init__(self, changed_names: Iterable[str]) -> None:
        super().__init__()
        self.changed_names = list(changed_names)
        self._built_values: dict[str, Any] = {}
        self._param_groups: list[list[dict[str, Any]]] = []
        self._scheduler_states: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Record the DataModule's settings before Lightning restores its state."""
        self._built_values = self._current_values(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the settings of optimizers and schedulers before Lightning restores their states."""
        self._param_groups = [
            [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        self._scheduler_states = [
            copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the changes at the restored point of schedules; raise UsageError if the state overwrote a setting."""
        if changes_rates(self.changed_names):
            self._set_rates(trainer)
        # Without a changed model setting, the scheduled values stay as restored until the next epoch.
        follow = LearnerApi.of(pl_module).apply_schedules
        if follow is not None and any(name.startswith("model.") for name in self.changed_names):
            follow()
        for name, restored in self._current_values(trainer).items():
            if restored != self._built_values.get(name, restored):
                raise UsageError(
                    f"{name}={self._built_values[name]} would not take effect: it is a part of the state that the "
                    f"checkpoint restores, {restored}. Remove it, or start a new run without ckpt_path."
                )

    def _current_values(self, trainer: Trainer) -> dict[str, Any]:
        """Return the current values of the DataModule's changed settings that are plain attributes."""
        values: dict[str, Any] = {}
        for name in self.changed_names:
            group, *path = name.split(".")
            value: Any = DataApi.of_run(trainer).part if group == "data" else None
            for attribute in path:
                value = getattr(value, attribute, None)
            if isinstance(value, bool | int | float | str):
                values[name] = value
        return values

    def _set_rates(self, trainer: Trainer) -> None:
        for optimizer, groups in zip(trainer.optimizers, self._param_groups, strict=True):
            for group, built in zip(optimizer.param_groups, groups, strict=True):
                initial, built_rate = (values.get("initial_lr", values["lr"]) for values in (group, built))
                progress = group["lr"] / initial if initial else 1.0
                group.update(
                    built, lr=built_rate * progress, **{"initial_lr": built_rate} if "initial_lr" in group else {}
                )
        for config, built in zip(trainer.lr_scheduler_configs, self._scheduler_states, strict=True):
            settings = {key: value for key, value in built.items() if key not in self._PROGRESS}
            config.scheduler.load_state_dict({**config.scheduler.state_dict(), **settings})
