"""Random network distillation: exact moments, novelty, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Unbounded

from kit.modes import dropping
from kit.specs import TWO_CHOICES, specs_of
from torchrl_lightning.agents import MLPNetwork, RandomNetworkDistillation

SPECS = specs_of(Unbounded(1), observation=Unbounded(3))


def rollout(observation: torch.Tensor) -> TensorDict:
    return TensorDict({"next": {"observation": observation}}, observation.shape[:2])


def test_moments_cover_all_observations() -> None:
    rnd = RandomNetworkDistillation(MLPNetwork([4])).build(SPECS)
    met = [torch.randn(t, 2, 3) * 5 + 100 for t in (1, 7, 30)]
    for observation in met:
        rnd.annotate(rollout(observation))
    everything = torch.cat([o.reshape(-1, 3) for o in met]).double()
    torch.testing.assert_close(rnd.mean_0, everything.mean(0))
    torch.testing.assert_close(rnd.variance_0, everything.var(0, correction=0))
    assert int(rnd.count) == 76


@pytest.mark.parametrize(
    "observation",
    [
        {"flags": Bounded(False, True, (3,), dtype=torch.bool)},
        {"bits": Binary(3), "vector": Unbounded(2)},
        {"nothing": Unbounded((0,)), "vector": Unbounded(2)},
        {"a": Unbounded((0, 3)), "b": Categorical(3)},
    ],
    ids=lambda entries: "-".join(entries),
)
def test_flags_and_empty_entries_need_no_moments(observation: dict[str, Any]) -> None:
    torch.manual_seed(0)
    specs = specs_of(Unbounded(1), **observation)
    rnd = RandomNetworkDistillation(MLPNetwork([4])).build(specs)
    data = TensorDict({"next": specs.observation.expand(5, 2).rand()}, [5, 2])
    rnd.annotate(data)
    assert data["next", "intrinsic_reward"].shape == (5, 2, 1)
    assert bool(data["next", "intrinsic_reward"].isfinite().all())


def test_observation_without_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="must contain numbers for random network distillation"):
        RandomNetworkDistillation(MLPNetwork([4])).build(specs_of(Unbounded(1), nothing=Unbounded((0,))))


def test_training_lowers_the_reward_of_familiar_observations_only() -> None:
    torch.manual_seed(0)
    rnd = RandomNetworkDistillation(MLPNetwork([32], "relu"), embedding_size=8).build(SPECS)
    familiar, novel = rollout(torch.rand(50, 4, 3)), rollout(-2 * torch.rand(50, 4, 3))
    rnd.annotate(rollout(torch.randn(100, 4, 3)))
    optimizer = torch.optim.Adam(rnd.predictor_parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        rnd.loss(familiar).backward()
        optimizer.step()
    rnd.annotate(familiar)
    rnd.annotate(novel)
    key = ("next", "intrinsic_reward")
    assert familiar[key].shape == (50, 4, 1)
    assert not familiar[key].requires_grad
    assert familiar[key].mean() < 0.2 * novel[key].mean()


def test_loss_of_a_fraction_of_a_batch_is_the_mean_over_it() -> None:
    losses = []
    for fraction in (1.0, 0.25, 1e-6):
        torch.manual_seed(0)
        rnd = RandomNetworkDistillation(MLPNetwork([4]), update_fraction=fraction).build(SPECS)
        losses.append(rnd.loss(rollout(torch.ones(100, 4, 3))).item())  # all errors are equal
    assert losses[0] > 0.0
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == 0.0


def test_discrete_entries_are_not_whitened_and_constants_do_no_harm() -> None:
    rnd = RandomNetworkDistillation().build(specs_of(Unbounded(1), cell=Categorical(4), speed=Unbounded(2)))
    td = TensorDict({"next": {"cell": torch.randint(0, 4, (6, 2)), "speed": torch.full((6, 2, 2), 7.3)}}, [6, 2])
    rnd.annotate(td)
    assert td["next", "intrinsic_reward"].isfinite().all()


def test_missing_networks_and_entries_raise() -> None:
    with pytest.raises(RuntimeError, match="build"):
        list(RandomNetworkDistillation().predictor_parameters())
    with pytest.raises(KeyError, match="next"):
        RandomNetworkDistillation().build(SPECS).loss(TensorDict({"observation": torch.zeros(2, 3)}, [2]))


def test_rewards_are_estimated_in_evaluation_mode() -> None:
    rnd: Any = dropping(RandomNetworkDistillation(MLPNetwork([32], "relu")).build(TWO_CHOICES))
    modes: set[bool] = set()
    rnd.target.register_forward_hook(lambda module, *_: modes.add(module.encoder.training))
    rewards = []
    for _ in range(2):
        rollout = TensorDict({"next": {"observation": torch.arange(32.0).view(4, 2, 4)}}, [4, 2])
        rnd.count.zero_()
        rnd.annotate(rollout)
        rewards.append(rollout["next", "intrinsic_reward"])
    assert torch.equal(*rewards)
    rnd.loss(rollout)
    assert modes == {False}
    assert all(part.training for part in rnd.modules())


@pytest.mark.parametrize(
    ("dtype", "offset"), [(torch.float64, 1700000037.0), (torch.int64, 1_700_000_037), (torch.float64, -1e12)]
)
def test_rewards_do_not_depend_on_the_origin_of_the_observations(dtype: torch.dtype, offset: float) -> None:
    steps, rewards = torch.randn(30, 2, 3).mul(4).round(), []
    for kind, origin in ((torch.float32, 0.0), (dtype, offset)):
        torch.manual_seed(0)
        rnd = RandomNetworkDistillation(MLPNetwork([8])).build(
            specs_of(Unbounded(1), observation=Unbounded(3, dtype=kind))
        )
        batch = rollout((steps.to(torch.int64) + int(origin)).to(kind))
        rnd.annotate(batch)
        rewards += [batch["next", "intrinsic_reward"], rnd.loss(batch).detach()[None]]
    torch.testing.assert_close(rewards[2], rewards[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(rewards[3], rewards[1], atol=1e-5, rtol=1e-4)


def whitened(rnd: RandomNetworkDistillation, entry: torch.Tensor) -> torch.Tensor:
    return rnd._whiten([entry])[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("value", [0.1, 1e9 + 0.1, -1700000037.25])
def test_constant_is_whitened_to_exactly_zero(dtype: torch.dtype, value: float) -> None:
    rnd = RandomNetworkDistillation(MLPNetwork([4])).build(
        specs_of(Unbounded(1), observation=Unbounded(3, dtype=dtype))
    )
    constant = torch.full((7, 2, 3), value, dtype=torch.float64).to(dtype)
    for steps in (1, 7, 3):
        rnd.annotate(rollout(constant[:steps]))
        white = whitened(rnd, constant)
        assert white.dtype is torch.float32
        assert (white == 0).all()


def test_single_precision_is_whitened_in_single_precision() -> None:
    rnd = RandomNetworkDistillation(MLPNetwork([4])).build(SPECS)
    steps = torch.randn(20, 2, 3) * 5 + 100
    rnd.annotate(rollout(steps))
    expected = ((steps - rnd.mean_0.float()) * rnd.variance_0.rsqrt().float()).clamp(-5.0, 5.0)
    assert torch.equal(whitened(rnd, steps), expected)
