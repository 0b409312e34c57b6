from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torchrl.modules import ValueOperator

from datamodules.replay_parts import trainer
from kit.rollouts import categorical_actor
from torchrl_lightning import OnPolicyDataModule


class TinyActorCritic(L.LightningModule):
    """Somebody's own module: the documented protocol and nothing of our learning room."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.updates = 0

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        specs = self.trainer.datamodule.specs
        size = specs.observation["observation"].shape[-1]
        network = nn.Linear(size, specs.action.n)
        self.policy = categorical_actor(network, out_keys=["action"], log_prob_key="action_log_prob")
        self.critic = ValueOperator(nn.Linear(size, 1))

    def training_step(self, batch, batch_idx):
        log_prob = self.policy.get_dist(batch).log_prob(batch["action"])
        value = self.critic(batch.select("observation"))["state_value"]
        self.updates += 1
        return -(log_prob * batch["advantage"].squeeze(-1)).mean() + (value - batch["value_target"]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("eval/return", batch["episode_return"].mean(), batch_size=len(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


@pytest.fixture
def make_data():
    made = []

    def make(**kwargs):
        settings = {
            "env": "CartPole-v1",
            "num_envs": 4,
            "frames_per_batch": 64,
            "mini_batch_size": 32,
            "num_epochs": 2,
            "eval_episodes": 2,
            "seed": 0,
        }
        data = OnPolicyDataModule(**{**settings, **kwargs})
        made.append(data)
        return data

    yield make
    for data in made:
        data.close()


@pytest.fixture
def make_trainer(tmp_path):
    return partial(trainer, tmp_path)


@pytest.fixture
def make_module():
    def make(module_class=TinyActorCritic, seed=0, **kwargs):
        torch.manual_seed(seed)
        return module_class(**kwargs)

    return make


@pytest.fixture
def tiny_actor_critic():
    return TinyActorCritic
