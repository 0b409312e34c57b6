"""A supervised module under automatic optimization, and PPO, DQN and SAC with epochs of the same number of steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from kit.actor_critic import rollouts
from kit.replay import dqn, experience, replay_data
from kit.runs import trainer
from torchrl_lightning import MLPNetwork, PPOModule, ReplayDataModule, SACModule

EPOCHS, STEPS = 3, 4  # steps of an epoch


class Regression(L.LightningModule):
    """A linear model under automatic optimization. Its learning rate falls linearly to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("eval/return", self.net(batch[0]).mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, EPOCHS)]


class RegressionData(L.LightningDataModule):
    """Four batches of random rows for training, and one for evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows), batch_size=8)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.rows[:8]), batch_size=8)

    test_dataloader = val_dataloader


def supervised() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return Regression(), RegressionData()


def ppo(updates_per_step: Any = 1, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = PPOModule(MLPNetwork([8]), **{"schedule": "linear", **settings})
    return module, rollouts(updates_per_step=updates_per_step)


def deep_q(updates_per_step: Any = 1, **settings: Any) -> tuple[Any, Any]:
    module = dqn(**{"schedule": "linear", **settings})
    return module, replay_data(updates_per_epoch=STEPS, updates_per_step=updates_per_step)


def sac(updates_per_step: Any = 1, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    sizes = {"num_envs": 2, "batch_size": 8, "updates_per_epoch": STEPS, "warmup_frames": 40, "eval_episodes": 2}
    data = ReplayDataModule("Pendulum-v1", buffer=experience(), seed=0, updates_per_step=updates_per_step, **sizes)
    return SACModule(MLPNetwork([8], "relu"), **{"schedule": "linear", **settings}), data


LEARNERS: dict[str, Callable[..., tuple[Any, Any]]] = {"ppo": ppo, "dqn": deep_q, "sac": sac}


class Rows(Logger):
    """Stores all rows and hyperparameters."""

    name, version = "rows", "0"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.settings: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        self.settings.append(params)

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, or of all metrics that begin with ``name`` if it ends with ``-``."""
        rows = (pair for _, row in self.rows for pair in row.items())
        return [value for key, value in rows if key == name or (name.endswith("-") and key.startswith(name))]


class Watch(L.Callback):
    """Stores the step and the score of each evaluation, and the parameters after each step."""

    def __init__(self) -> None:
        self.evaluations: list[tuple[bool, int]] = []
        self.scores: list[float] = []
        self.weights: list[Tensor] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.evaluations.append((trainer.sanity_checking, trainer.global_step))
        if not trainer.sanity_checking and "eval/return" in trainer.callback_metrics:
            self.scores.append(float(trainer.callback_metrics["eval/return"]))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.weights.append(torch.nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone())


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


class Run:
    """A fit with callbacks and settings, or another use of a trainer, and its results."""

    def __init__(
        self,
        make: Callable[[], tuple[Any, Any]],
        folder: Path,
        callbacks: Callable[[Path], Sequence[L.Callback]] = lambda folder: (),
        prepare: Callable[[Any, Any], None] | None = None,
        use: Callable[[L.Trainer, Any, Any], Any] = lambda run, module, data: run.fit(module, datamodule=data),
        raises: type[Exception] | tuple[type[Exception], ...] = (),
        **settings: Any,
    ) -> None:
        self.folder, self.watch, self.logger, messages = folder, Watch(), Rows(), Messages()
        self.module, self.data = make()
        if prepare is not None:
            prepare(self.module, self.data)
        self.callbacks = list(callbacks(folder))
        parts: dict[str, Any] = {"callbacks": [self.watch, *self.callbacks], "logger": self.logger}
        self.error: Exception | None = None
        self.result: Any = None
        logging.getLogger("lightning.pytorch").addHandler(messages)
        output = StringIO()
        try:
            self.trainer = trainer(folder, **{"max_epochs": EPOCHS, **parts, **settings})
            with redirect_stdout(output):
                self.result = use(self.trainer, self.module, self.data)
        except raises as error:
            self.error = error
        finally:
            logging.getLogger("lightning.pytorch").removeHandler(messages)
        self.messages, self.output = messages.texts, output.getvalue()

    @property
    def files(self) -> list[str]:
        """The paths of the written checkpoints in the folder."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.ckpt"))

    @property
    def length(self) -> tuple[int, int, int]:
        """The numbers of epochs, steps and batches."""
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
        return self.trainer.current_epoch, self.trainer.global_step, batches
