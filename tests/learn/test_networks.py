from __future__ import annotations

import warnings

import pytest
from lightning.pytorch.cli import LightningCLI

from torchrl_lightning import (
    CNNNetwork,
    DQNModule,
    MLPNetwork,
    OnPolicyDataModule,
    PPOModule,
    RecurrentNetwork,
    ReplayDataModule,
)

CHOSEN = {
    MLPNetwork: {"hidden_sizes": [8, 4]},
    CNNNetwork: {"shared": False},
    RecurrentNetwork: {"hidden_size": 8, "cell": "lstm"},
}


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize(("model", "data"), [(PPOModule, OnPolicyDataModule), (DQNModule, ReplayDataModule)])
def test_lightnings_cli_chooses_a_network(model, data, kind):
    args = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--data.env=CartPole-v1"]
    args += ["--data.buffer=torchrl_lightning.ExperienceBuffer"] if data is ReplayDataModule else []
    args += [f"--model.network=torchrl_lightning.{kind.__name__}"]
    args += [f"--model.network.{name}={value}" for name, value in CHOSEN[kind].items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about jsonargparse
        network = LightningCLI(model, data, run=False, save_config_callback=None, args=args).model.network
    assert type(network) is kind
    assert {name: getattr(network, name) for name in CHOSEN[kind]} == CHOSEN[kind]
