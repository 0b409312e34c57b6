from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

# The DataModule and LightningModule of the datamodules' tests serve here too.
from datamodules.conftest import make_data, make_module, make_trainer, tiny_actor_critic  # noqa: F401


class Regression(L.LightningModule):
    """Nothing to do with reinforcement learning."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(L.LightningDataModule):
    """Counts no frames."""

    def train_dataloader(self):
        return DataLoader(torch.ones(6, 2), batch_size=3)


@pytest.fixture
def regression():
    return Regression()


@pytest.fixture
def numbers():
    return Numbers()
