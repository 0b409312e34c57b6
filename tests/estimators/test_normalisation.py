from __future__ import annotations

import pytest
import torch

from kit.golden import assert_near, cases, load
from torchrl_lightning import IntrinsicRewardNormalizer, standardize
from torchrl_lightning.agents.loss_functions import standardized
from torchrl_lightning.l2r.ppo import population_standardize


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_intrinsic_normalizer_equals_golden_values(dtype: torch.dtype, direction: str) -> None:
    name = "forward" if direction == "forward" else "backward_ref"
    golden = load("intrinsic_reward_normalisation", dtype)
    normalizer = IntrinsicRewardNormalizer(float(golden["gamma_int"]), direction)
    for reward, expected in zip(golden["irew"], golden[f"normalised_{name}"], strict=True):
        received = reward.clone()
        assert_near(normalizer.normalize(received), expected)
        assert torch.equal(received, reward)
    assert normalizer.variance == pytest.approx(float(golden[f"running_var_{name}"][-1]), rel=1e-6)


def test_forward_filter_continues_across_rollouts_and_backward_restarts() -> None:
    reward = torch.rand(20, 2, dtype=torch.float64)
    split, single = IntrinsicRewardNormalizer(0.9), IntrinsicRewardNormalizer(0.9)
    split.normalize(reward[:10])
    split.normalize(reward[10:])
    single.normalize(reward)
    assert split.variance == pytest.approx(single.variance, rel=1e-12)
    backward = IntrinsicRewardNormalizer(0.9, "backward")
    backward.normalize(reward[:, :1])
    backward.normalize(reward)  # the backward filter carries no state, so the number of environments may change


def test_forward_filter_continues_separately_for_each_environment() -> None:
    reward = torch.rand(3, 5, 4, dtype=torch.float64)  # rollouts, steps, environments
    together, apart = IntrinsicRewardNormalizer(0.9), IntrinsicRewardNormalizer(0.9)
    for rollout in reward:
        together.normalize(rollout)
        for ids in (torch.tensor([3, 1]), torch.tensor([0, 2])):  # as two workers deliver them
            apart.normalize(rollout[:, ids], ids)
    assert apart.variance == pytest.approx(together.variance, rel=1e-12)
    assert torch.equal(apart.state_dict()["filter"], together.state_dict()["filter"])
    unknown = IntrinsicRewardNormalizer(0.9)
    for rollout in reward:
        unknown.normalize(rollout, torch.full((4,), -1))
    assert unknown.variance < together.variance  # the filter restarts each time
    for ids in ([0, 1, 1, 2], [0, 1]):
        with pytest.raises(ValueError, match="env_ids"):
            apart.normalize(reward[0], torch.tensor(ids))


def test_constant_zero_rewards_stay_zero() -> None:
    normalizer = IntrinsicRewardNormalizer()
    assert torch.equal(normalizer.normalize(torch.zeros(5, 2)), torch.zeros(5, 2))
    assert torch.equal(IntrinsicRewardNormalizer(direction="backward").normalize(torch.zeros(1, 1)), torch.zeros(1, 1))


def test_standardize_matches_the_documented_formula() -> None:
    for case in cases("returns_gae_done_only"):
        if case["reward"].numel() > 1:
            assert_near(standardize(case["return"] - case["value"][:-1]), _reference(case["return"], case["value"]))
            assert_near(standardize(case["gae_advantage"]), case["gae_advantage_normalised_ref"])


def _reference(returns: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    advantage = returns - value[:-1]
    return (advantage - advantage.mean()) / (advantage.std() + 1e-5)


def test_standardize_ignores_masked_entries() -> None:
    x = torch.randn(7, 3, 1, dtype=torch.float64)
    mask = torch.rand(7, 3, 1) < 0.6
    mask[:2] = True
    x[~mask] = torch.nan
    result = standardize(x, mask)
    assert torch.equal(result[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))
    torch.testing.assert_close(result[mask], standardize(x[mask]), rtol=0, atol=1e-12)
    torch.testing.assert_close(standardize(x.nan_to_num(), torch.ones_like(mask)), standardize(x.nan_to_num()))


def test_standardize_of_one_or_zero_entries_is_zero() -> None:
    assert torch.equal(standardize(torch.tensor([[3.0]])), torch.zeros(1, 1))
    assert torch.equal(standardize(torch.tensor([3.0, 4.0]), torch.tensor([True, False])), torch.zeros(2))
    assert torch.equal(standardize(torch.tensor([3.0, 4.0]), torch.tensor([False, False])), torch.zeros(2))
    assert torch.equal(standardize(torch.full((4,), 2.0)), torch.zeros(4))


def test_standardize_rejects_invalid_input() -> None:
    x = torch.randn(4, 2)
    with pytest.raises(TypeError, match=r"torch\.float32"):
        standardize(x, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"mask has shape \(4,\)"):
        standardize(x, torch.ones(4, dtype=torch.bool))
    with pytest.raises(TypeError, match="floating-point"):
        standardize(torch.ones(4, dtype=torch.long))
    with pytest.raises(ValueError, match="eps"):
        standardize(x, eps=-1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 1e4 + 0.1, -123456.789, 1e9 + 0.1])
@pytest.mark.parametrize("count", [2, 3, 7, 1000, 4099])
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_standardize_of_equal_entries_is_exactly_zero(dtype: torch.dtype, value: float, count: int, eps: float) -> None:
    x, mask = torch.full((count,), value, dtype=dtype), torch.ones(count, dtype=torch.bool)
    mask[count - 1] = False
    kinds = {
        "all": standardize(x, eps=eps or 1e-9),
        "masked": standardize(x, mask, eps or 1e-9),
        "of a path": population_standardize(x, eps),
        "in a mini-batch": standardized(x),
    }
    assert {name: float(result.abs().max()) for name, result in kinds.items()} == dict.fromkeys(kinds, 0.0)


def test_standardize_with_mask_is_exact_at_a_large_offset() -> None:
    x = torch.arange(1000).remainder(5).sub(2) + 1e6
    mask = torch.arange(1000) < 995
    for result in (standardize(x, mask)[mask], population_standardize(x[mask], 0.0)):
        assert abs(float(result.double().mean())) < 1e-6
        assert result.unique().numel() == 5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e9 + 0.1, -3e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standardize_without_eps_returns_zeros_for_equal_entries(
    masked: bool, value: float, dtype: torch.dtype
) -> None:
    x = torch.full((7, 3), value, dtype=dtype)
    mask = torch.ones(7, 3, dtype=torch.bool) if masked else None
    assert torch.equal(standardize(x, mask, eps=0.0), torch.zeros_like(x))
