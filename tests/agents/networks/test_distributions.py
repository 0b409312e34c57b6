"""Our distributions: probabilities sum to one, samples follow them, and gradients stay finite."""

from __future__ import annotations

import pytest
import torch
from torch import distributions as D

from torchrl_lightning.agents import ClippedNormal, MultiCategorical


def test_clipped_normal_has_total_mass_one() -> None:
    loc, scale = torch.tensor([0.7], dtype=torch.double), torch.tensor([0.9], dtype=torch.double)
    low, high = torch.tensor([-1.0]).double(), torch.tensor([1.5]).double()
    dist = ClippedNormal(loc, scale, low, high)
    grid = torch.linspace(-1, 1.5, 20001, dtype=torch.double)
    inside = torch.trapezoid(dist.log_prob(grid[1:-1, None]).exp(), grid[1:-1])
    edges = dist.log_prob(torch.stack([low, high])).exp().sum()
    assert float(inside + edges) == pytest.approx(1.0, abs=1e-3)


def test_clipped_normal_samples_stay_inside_with_the_right_mass_on_the_bounds() -> None:
    torch.manual_seed(0)
    low, high = torch.tensor([-1.0, -0.5]), torch.tensor([1.0, 2.0])
    dist = ClippedNormal(torch.tensor([0.5, 0.0]), torch.tensor([1.0, 2.0]), low, high)
    sample = dist.sample((200_000,))
    assert ((sample >= low) & (sample <= high)).all()
    normal = D.Normal(dist.loc, dist.scale)
    torch.testing.assert_close((sample == low).float().mean(0), normal.cdf(low), atol=5e-3, rtol=0)
    torch.testing.assert_close((sample == high).float().mean(0), 1 - normal.cdf(high), atol=5e-3, rtol=0)


def test_clipped_normal_score_has_mean_zero() -> None:
    # The policy gradient is unbiased only if the expected score vanishes.
    torch.manual_seed(0)
    loc = torch.tensor([0.8], requires_grad=True)
    dist = ClippedNormal(loc, torch.tensor([0.7]), torch.tensor([-1.0]), torch.tensor([1.0]))
    (score,) = torch.autograd.grad(dist.log_prob(dist.sample((200_000,))).mean(), loc)
    assert abs(float(score)) < 0.01


def test_clipped_normal_gradients_are_finite_far_out_and_without_bounds() -> None:
    loc = torch.tensor([[50.0, 1.0, -50.0]], requires_grad=True)
    scale = torch.full((3,), 0.1, requires_grad=True)
    low, high = torch.tensor([-1.0, -torch.inf, -1.0]), torch.tensor([1.0, torch.inf, 1.0])
    log_prob = ClippedNormal(loc, scale, low, high).log_prob(torch.tensor([[-1.0, 7.0, 1.0], [1.0, 0.0, -1.0]]))
    log_prob.sum().backward()
    assert log_prob.isfinite().all()
    assert loc.grad.isfinite().all()
    assert scale.grad.isfinite().all()


def test_multi_categorical_is_the_product_of_its_parts() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 7)
    dist = MultiCategorical(logits, [2, 3, 2])
    parts = [D.Categorical(logits=part) for part in logits.split([2, 3, 2], -1)]
    action = dist.sample((4,))
    assert action.shape == (4, 5, 3)
    torch.testing.assert_close(dist.log_prob(action), sum(p.log_prob(action[..., i]) for i, p in enumerate(parts)))
    torch.testing.assert_close(dist.entropy(), sum(p.entropy() for p in parts))
    assert torch.equal(dist.mode, torch.stack([p.mode for p in parts], -1))


def test_multi_categorical_entropy_is_finite_with_forbidden_choices() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0, 0.0]])
    assert float(MultiCategorical(logits, [2, 2]).entropy()) == pytest.approx(0.6931, abs=1e-4)
