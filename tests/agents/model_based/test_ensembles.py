"""The ensemble of Gaussian perceptrons equals separate perceptrons."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchrl_lightning.agents import GaussianEnsemble
from torchrl_lightning.agents.networks.encoders import ACTIVATIONS
from torchrl_lightning.dynamics import StandardScaler

M, INPUTS, OUTPUTS, B = 3, 5, 2, 7


def member(ensemble: GaussianEnsemble, number: int, activation: str) -> nn.Sequential:
    """Return one member as ordinary layers."""
    layers: list[nn.Module] = []
    for weight, bias in zip(ensemble.weights, ensemble.biases, strict=True):
        layer = nn.Linear(*weight.shape[1:])
        layer.weight.data, layer.bias.data = weight[number].detach().mT.clone(), bias[number, 0].detach().clone()
        layers += [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("activation", ["silu", "tanh"])
@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("hidden", [[], [8, 6]])
@pytest.mark.parametrize("terminates", [False, True])
def test_members_equal_separate_networks(
    activation: str, probabilistic: bool, hidden: list[int], terminates: bool
) -> None:
    torch.manual_seed(0)
    ensemble = GaussianEnsemble(M, INPUTS, OUTPUTS, hidden, activation, probabilistic, OUTPUTS if terminates else 0)
    for bias in ensemble.biases:
        nn.init.normal_(bias)
    for scale in ensemble.buffers():
        nn.init.uniform_(scale, 0.5, 2.0)
    inputs, targets = torch.randn(M, B, INPUTS), torch.randn(M, B, OUTPUTS)
    ended = (torch.rand(M, B, 1) < 0.5).float()
    mean, log_variance = ensemble(inputs)
    terms = ensemble.loss(inputs, targets, 0.01, ended if terminates else None)
    sum(value for name, value in terms.items() if name.startswith("loss_")).backward()
    for number in range(M):
        network = member(ensemble, number, activation)
        low, high = (torch.full((OUTPUTS,), value, requires_grad=True) for value in (-10.0, 0.5))
        out = network(inputs[number])
        expected = out[:, :OUTPUTS]
        error = (expected - targets[number]).square()
        torch.testing.assert_close(mean[number], expected)
        if probabilistic:
            bounded = high - F.softplus(high - out[:, OUTPUTS:])
            bounded = low + F.softplus(bounded - low)
            torch.testing.assert_close(log_variance[number], bounded)
            loss = (error * (-bounded).exp()).mean() + bounded.mean() + 0.01 * (high.sum() - low.sum())
        else:
            assert log_variance is None
            loss = error.mean()
        if terminates:
            ends = member(ensemble.ends, number, activation)
            change = targets[number, :, :OUTPUTS] * ensemble.target_std + ensemble.target_mean
            next_observation = inputs[number, :, :OUTPUTS] + change / ensemble.input_std[:OUTPUTS]
            loss = loss + F.binary_cross_entropy_with_logits(ends(next_observation), ended[number])
        weights = [layer.weight for layer in network if isinstance(layer, nn.Linear)]
        (loss + 0.01 * sum(weight.square().sum() for weight in weights)).backward()
        for parameter, weight in zip(ensemble.weights, weights, strict=True):
            torch.testing.assert_close(parameter.grad[number], weight.grad.mT)
        if terminates:
            torch.testing.assert_close(ensemble.ends.weights[0].grad[number], ends[0].weight.grad.mT)
        if probabilistic:
            torch.testing.assert_close(ensemble.min_log_variance.grad[number, 0], low.grad)
            torch.testing.assert_close(ensemble.max_log_variance.grad[number, 0], high.grad)


def test_termination_network_does_not_change_other_initial_weights() -> None:
    states = []
    for ends_by in (0, OUTPUTS):
        torch.manual_seed(0)
        states.append(GaussianEnsemble(M, INPUTS, OUTPUTS, [8], ends_by=ends_by).state_dict())
    plain, learning = states
    assert all(name in plain or name.startswith("ends.") for name in learning)
    assert all(torch.equal(learning[name], value) for name, value in plain.items())


def test_log_variances_stay_within_their_bounds() -> None:
    ensemble = GaussianEnsemble(M, INPUTS, OUTPUTS, [8])
    for weight in ensemble.weights:
        weight.data *= 100.0
    _, log_variance = ensemble(100.0 * torch.randn(M, 50, INPUTS))
    assert (log_variance >= -10.0).all()
    assert (log_variance <= 0.5 + 1e-3).all()
    assert log_variance.min() < -9.9
    assert log_variance.max() > 0.4


def test_initial_weights_are_truncated_normals() -> None:
    torch.manual_seed(0)
    weight = GaussianEnsemble(M, 100, OUTPUTS, [400]).weights[0].detach()
    assert weight.abs().max() <= 0.1
    assert float(weight.std()) == pytest.approx(0.05 * 0.88, rel=0.02)  # truncated at two deviations
    assert not torch.equal(weight[0], weight[1])


def test_errors_are_summed_over_shared_rows() -> None:
    ensemble = GaussianEnsemble(M, INPUTS, OUTPUTS, [8])
    inputs, targets = torch.randn(B, INPUTS), torch.randn(B, OUTPUTS)
    mean, _ = ensemble(inputs.expand(M, B, INPUTS))
    expected = (mean - targets).square().mean((1, 2))
    torch.testing.assert_close(ensemble.errors(inputs, targets) / B, expected)


def test_masked_members_and_all_scales_are_copied() -> None:
    first, second = GaussianEnsemble(M, INPUTS, OUTPUTS, [8]), GaussianEnsemble(M, INPUTS, OUTPUTS, [8])
    before = second.weights[0].detach().clone()
    first.standardise(
        StandardScaler("abcde").fit(torch.randn(9, INPUTS)), StandardScaler("ab").fit(torch.randn(9, OUTPUTS))
    )
    second.copy_members(first, torch.tensor([False, True, False]))
    assert torch.equal(second.weights[0][1], first.weights[0][1])
    assert torch.equal(second.weights[0][0], before[0])
    assert torch.equal(second.target_std, first.target_std)
    second.copy_members(first)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
