"""Our own runs, plain or with the additions of the command."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from benchmarks.whole_runs.clock import CELLS, WARMUP, Stopwatch, Training
from torchrl_lightning import (
    EnvironmentRecipe,
    FramesProgressBar,
    OnPolicyDataModule,
    ReplayDataModule,
    RolloutMetricsLogger,
)
from torchrl_lightning.agents import Network, PPOModule
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, UniformSampler


class StartWatch(L.Callback):
    """Start a stopwatch with the second epoch."""

    def __init__(self, device: str) -> None:
        self.watch = Stopwatch(device)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the stopwatch in the second epoch."""
        if trainer.current_epoch == 1:
            self.watch.start(trainer.datamodule.frames)  # type: ignore[attr-defined]


@contextlib.contextmanager
def command_settings() -> Iterator[dict[str, Any]]:
    """Yield the Trainer arguments of ``torchrl-lightning-train``."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        yield {
            "logger": CSVLogger(folder, flush_logs_every_n_steps=1),
            "enable_checkpointing": True,
            "enable_progress_bar": True,
            "callbacks": [FramesProgressBar(), RolloutMetricsLogger(), ModelCheckpoint(folder, every_n_epochs=10)],
        }


def fit(
    module: L.LightningModule, data: L.LightningDataModule, epochs: int, command: bool = False, device: str = "cpu"
) -> float:
    """Train, and return the speed from the second epoch on."""
    start = StartWatch(device)
    plain: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "callbacks": [],
    }
    with command_settings() if command else contextlib.nullcontext(plain) as settings:
        L.Trainer(
            accelerator="cpu" if device == "cpu" else "gpu",
            devices=1,
            max_epochs=epochs,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            **{**settings, "callbacks": [start, *settings["callbacks"]]},
        ).fit(module, datamodule=data)
    return start.watch.speed(data.frames)  # type: ignore[attr-defined]


def off_policy(
    make_module: Callable[..., L.LightningModule],
    env: str | EnvironmentRecipe,
    num_envs: int,
    batch_size: int,
    updates: int,
    *,
    updates_per_step: int | str = "auto",
    n_steps: int = 1,
    cells: int = CELLS,
    compiled: bool = False,
    command: bool = False,
    normalized: bool = False,
    device: str = "cpu",
) -> Training:
    """Return a training run with one update per step of all environments."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        data = ReplayDataModule(
            env,
            num_envs=num_envs,
            buffer=lambda num_envs: ExperienceBuffer(
                storage=RingStorage(cells), sampler=UniformSampler(), num_envs=num_envs, n_steps=n_steps
            ),
            batch_size=batch_size,
            updates_per_epoch=updates // 2,
            updates_per_step=updates_per_step,
            frames_per_update=num_envs,
            warmup_frames=WARMUP,
            normalize_observation=normalized,
            normalize_reward=normalized,
            seed=seed,
        )
        return fit(make_module(compile=compiled), data, 3, command, device)

    return run


def ppo(
    env: str | EnvironmentRecipe,
    num_envs: int,
    steps: int,
    rollouts: int,
    *,
    mini_batch_size: int = 256,
    network: Network | None = None,
    compiled: bool = False,
    command: bool = False,
    normalized: bool = False,
    device: str = "cpu",
) -> Training:
    """Return a training run of PPO with 4 epochs."""

    def run(seed: int) -> float:
        torch.manual_seed(seed)
        data = OnPolicyDataModule(
            env,
            num_envs=num_envs,
            frames_per_batch=num_envs * steps,
            num_epochs=4,
            mini_batch_size=mini_batch_size,
            normalize_observation=normalized,
            normalize_reward=normalized,
            seed=seed,
        )
        return fit(PPOModule(network, learning_rate=3e-4, compile=compiled), data, rollouts + 1, command, device)

    return run
