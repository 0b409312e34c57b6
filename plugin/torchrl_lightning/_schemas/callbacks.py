"""Schemas of the callbacks. Generated from the constructors by ``tests/conf/schema_source.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING


@dataclass
class BestCheckpointSchema:
    """Arguments of :class:`torchrl_lightning.BestCheckpoint`."""

    _target_: str = "torchrl_lightning.BestCheckpoint"
    _convert_: str = "all"
    dirpath: str | None = None
    filename: str | None = None
    monitor: str | None = None
    verbose: bool = False
    save_last: bool | str | None = None
    save_top_k: int = 1
    save_on_exception: bool = False
    save_weights_only: bool = False
    mode: str = "min"
    auto_insert_metric_name: bool = True
    every_n_train_steps: int | None = None
    train_time_interval: Any = None
    every_n_epochs: int | None = None
    save_on_train_epoch_end: bool | None = None
    enable_version_counter: bool = True


@dataclass
class ExperienceLogSchema:
    """Arguments of :class:`torchrl_lightning.ExperienceLog`."""

    _target_: str = "torchrl_lightning.ExperienceLog"
    _convert_: str = "all"
    every_n_epochs: int = 1


@dataclass
class FramesProgressBarSchema:
    """Arguments of :class:`torchrl_lightning.FramesProgressBar`."""

    _target_: str = "torchrl_lightning.FramesProgressBar"
    _convert_: str = "all"
    refresh_every: float = 0.2


@dataclass
class LastCheckpointSchema:
    """Arguments of :class:`torchrl_lightning.LastCheckpoint`."""

    _target_: str = "torchrl_lightning.LastCheckpoint"
    _convert_: str = "all"
    dirpath: str = MISSING
    filename: str = "last"


SCHEMAS: dict[tuple[str, str], Any] = {
    ("callback", "best_checkpoint"): BestCheckpointSchema,
    ("callback", "experience_log"): ExperienceLogSchema,
    ("callback", "frames_bar"): FramesProgressBarSchema,
    ("callback", "last_checkpoint"): LastCheckpointSchema,
}
