from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torchrl.data import Unbounded

from kit.specs import BOX
from torchrl_lightning import (
    CNNNetwork,
    DQNModule,
    MLPNetwork,
    OnPolicyDataModule,
    PPOModule,
    RecurrentNetwork,
    ReplayDataModule,
)
from torchrl_lightning.agents.networks.q_networks import ActionValue, CriticEnsemble

SETTINGS = {
    MLPNetwork: {"hidden_sizes": [8, 4]},
    CNNNetwork: {"shared": False},
    RecurrentNetwork: {"hidden_size": 8, "cell": "lstm"},
}


@pytest.mark.parametrize("network_class", SETTINGS)
@pytest.mark.parametrize(("model", "data"), [(PPOModule, OnPolicyDataModule), (DQNModule, ReplayDataModule)])
def test_lightning_cli_selects_a_network(model, data, network_class):
    args = ["--trainer.logger=false", "--trainer.accelerator=cpu", "--data.env=CartPole-v1"]
    args += ["--data.buffer=torchrl_lightning.ExperienceBuffer"] if data is ReplayDataModule else []
    args += [f"--model.network=torchrl_lightning.{network_class.__name__}"]
    args += [f"--model.network.{name}={value}" for name, value in SETTINGS[network_class].items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own, about jsonargparse
        network = LightningCLI(model, data, run=False, save_config_callback=None, args=args).model.network
    assert type(network) is network_class
    assert {name: getattr(network, name) for name in SETTINGS[network_class]} == SETTINGS[network_class]


@pytest.mark.parametrize("network_class", SETTINGS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head_sizes": 64}, r"head_sizes must list the width of each layer, such as \[64, 64\], got 64"),
        ({"head_sizes": "64"}, "head_sizes must list the width of each layer"),
        ({"head_sizes": [64, 0]}, r"Each width in head_sizes=\[64, 0\] must be a positive integer, got 0"),
        ({"activation": "swash"}, "activation must be one of 'elu', 'gelu'"),
    ],
)
def test_invalid_layer_settings_raise(network_class, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        network_class(**settings)


def test_layer_norm_precedes_activation_also_in_critic_ensemble():
    torch.manual_seed(0)
    network = MLPNetwork([9, 8], "tanh", layer_norm=True)
    critics = [ActionValue(BOX, network) for _ in range(2)]
    entries, action = [torch.randn(5, *BOX.observation["observation"].shape) * 50], BOX.action.rand([5])
    values = CriticEnsemble(critics)(entries, action)
    for critic, value in zip(critics, values, strict=True):
        assert torch.allclose(critic(*entries, action).squeeze(-1), value, atol=1e-5)
        hidden = critic.encoder.layers[:2](critic.encoder.flat(*entries, action))
        assert torch.allclose(hidden.mean(-1), torch.zeros(5), atol=1e-5)
        assert torch.allclose(hidden.std(-1, correction=0), torch.ones(5), atol=1e-3)


@pytest.mark.parametrize("shape", [(4, 12, 10), (12, 10, 4), (12, 10)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_image_features_do_not_depend_on_layout_or_vmap(shape, dtype):
    torch.manual_seed(0)
    encoder = CNNNetwork([8, 4], [3, 3], [2, 1], [16]).encoder([Unbounded(shape, dtype=dtype)])
    images = torch.randint(0, 256, (2, 3, *shape)).to(dtype)
    before = images.clone()
    planes = images.float() / (255.0 if dtype is torch.uint8 else 1.0)
    planes = planes.unsqueeze(-3) if len(shape) == 2 else planes.movedim(-1, -3) if shape[-1] == 4 else planes
    expected = encoder.layers(encoder.convolutions(planes.flatten(0, 1).contiguous()).flatten(1)).reshape(2, 3, -1)
    for features in (encoder(images), torch.vmap(encoder)(images)):
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(images, before)


@pytest.mark.parametrize(
    ("side", "kernels", "features"),
    [(84, [8, 4, 3], 64 * 7 * 7), (36, [8, 4, 3], 64), (35, [4, 3, 2], 64 * 6 * 6), (12, [4, 3, 2], 64),
     (11, [2, 2, 2], 64 * 8 * 8), (4, [2, 2, 2], 64)],
)  # fmt: skip
def test_convolutions_depend_on_the_shorter_side_of_the_image(side, kernels, features):
    encoder = CNNNetwork(hidden_sizes=[]).encoder([Unbounded((3, side, side), dtype=torch.uint8)])
    assert [layer.kernel_size[0] for layer in encoder.convolutions if isinstance(layer, torch.nn.Conv2d)] == kernels
    assert encoder.features == features == encoder(torch.zeros(1, 3, side, side, dtype=torch.uint8)).shape[-1]


def test_explicit_convolutions_apply_to_any_image_size():
    encoder = CNNNetwork([8], [5], [1], []).encoder([Unbounded((3, 84, 9))])
    assert encoder.features == 8 * 80 * 5
    strided = CNNNetwork(strides=[1, 1, 1], hidden_sizes=[]).encoder([Unbounded((3, 84, 84))])
    assert strided.features == 64 * (84 - 7 - 3 - 2) ** 2


def test_large_layer_after_convolutions_logs_a_warning(caplog):
    small = {"channels": [16, 32, 64], "kernels": [2, 2, 2], "strides": [1, 1, 1], "hidden_sizes": [64]}
    pixels = [Unbounded((3, 36, 36), dtype=torch.uint8)]
    CNNNetwork(**small).encoder(pixels)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "4460544 weights, because images of 36 x 36" in message
    assert "model/network=cnn" in message
    caplog.clear()
    CNNNetwork().encoder(pixels)
    CNNNetwork().encoder([Unbounded((4, 84, 84), dtype=torch.uint8)])
    CNNNetwork(**small).encoder([Unbounded((7, 7, 3), dtype=torch.uint8)])
    assert not caplog.records
