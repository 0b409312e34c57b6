"""A user's own actor-critic, and short rollouts of CartPole for its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torchrl.modules import ValueOperator

from kit.rollouts import categorical_actor
from kit.runs import trainer
from torchrl_lightning import OnPolicyDataModule


class TinyActorCritic(L.LightningModule):
    """An agent that implements only the documented protocol and inherits from none of our learners."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.updates = 0

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        specs = self.trainer.datamodule.specs  # type: ignore[attr-defined]
        size = specs.observation["observation"].shape[-1]
        network = nn.Linear(size, specs.action.n)
        self.policy: Any = categorical_actor(network, out_keys=["action"], log_prob_key="action_log_prob")
        self.critic = ValueOperator(nn.Linear(size, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        log_prob = self.policy.get_dist(batch).log_prob(batch["action"])
        value = self.critic(batch.select("observation"))["state_value"]
        self.updates += 1
        return -(log_prob * batch["advantage"].squeeze(-1)).mean() + (value - batch["value_target"]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("eval/return", batch["episode_return"].mean(), batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Unlucky(TinyActorCritic):
    """Raises an error after ``fails_after`` updates."""

    def __init__(self, fails_after: int = 0) -> None:
        super().__init__()
        self.fails_after = fails_after

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.updates == self.fails_after:
            raise RuntimeError("out of luck")
        return super().training_step(batch, batch_idx)


def rollouts(**settings: Any) -> OnPolicyDataModule:
    """Make data of four environments. An epoch has 64 frames and four updates."""
    sizes = {"num_envs": 4, "frames_per_batch": 64, "mini_batch_size": 32, "num_epochs": 2, "eval_episodes": 2}
    return OnPolicyDataModule(**{"env": "CartPole-v1", **sizes, "seed": 0, **settings})


def fit(
    folder: Path, data: Any = None, module: Any = None, ckpt_path: Any = None, *, seed: int = 0, **settings: Any
) -> tuple[Any, L.Trainer]:
    """Fit a module to rollouts, without evaluations. The seed determines its initial weights."""
    module = TinyActorCritic() if module is None else module
    run = trainer(folder, **{"limit_val_batches": 0, **settings})
    torch.manual_seed(seed)
    run.fit(module, datamodule=rollouts() if data is None else data, ckpt_path=ckpt_path)
    return module, run
