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


@pytest.mark.parametrize("kind", CHOSEN)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"head_sizes": 64}, r"head_sizes must list the width of each layer, such as \[64, 64\], got 64"),
        ({"head_sizes": "64"}, "head_sizes must list the width of each layer"),
        ({"head_sizes": [64, 0]}, r"Each width in head_sizes=\[64, 0\] must be a positive integer, got 0"),
        ({"activation": "swash"}, "activation must be one of 'elu', 'gelu'"),
    ],
)
def test_layers_that_cannot_be_built_are_refused_at_once(kind, given, says):
    with pytest.raises((TypeError, ValueError), match=says):
        kind(**given)
