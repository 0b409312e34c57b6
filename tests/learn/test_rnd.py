"""Random network distillation: exact moments, novelty, checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded

from torchrl_lightning.learn import MLPNetwork, RandomNetworkDistillation

SPECS = SimpleNamespace(observation=Composite(observation=Unbounded(3)))


def rollout(observation: torch.Tensor) -> TensorDict:
    return TensorDict({"next": {"observation": observation}}, observation.shape[:2])


def test_moments_are_those_of_all_that_was_met() -> None:
    rnd = RandomNetworkDistillation(MLPNetwork([4])).build(SPECS)
    met = [torch.randn(t, 2, 3) * 5 + 100 for t in (1, 7, 30)]
    for observation in met:
        rnd.annotate(rollout(observation))
    everything = torch.cat([o.reshape(-1, 3) for o in met]).double()
    torch.testing.assert_close(rnd.mean_0, everything.mean(0))
    torch.testing.assert_close(rnd.variance_0, everything.var(0, correction=0))
    assert int(rnd.count) == 76


def test_training_makes_the_familiar_dull_and_leaves_the_novel() -> None:
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


def test_checkpoint_gives_the_same_rewards() -> None:
    torch.manual_seed(0)
    rnd, observation = RandomNetworkDistillation().build(SPECS), torch.randn(5, 2, 3)
    rnd.annotate(rollout(torch.randn(9, 2, 3)))
    twin = RandomNetworkDistillation().build(SPECS)
    twin.load_state_dict(rnd.state_dict())
    a, b = rollout(observation), rollout(observation)
    rnd.annotate(a)
    twin.annotate(b)
    assert torch.equal(a["next", "intrinsic_reward"], b["next", "intrinsic_reward"])
    assert torch.equal(rnd.variance_0, twin.variance_0)


def test_discrete_entries_are_not_whitened_and_constants_do_no_harm() -> None:
    specs = SimpleNamespace(observation=Composite(cell=Categorical(4), speed=Unbounded(2)))
    rnd = RandomNetworkDistillation().build(specs)
    td = TensorDict({"next": {"cell": torch.randint(0, 4, (6, 2)), "speed": torch.full((6, 2, 2), 7.3)}}, [6, 2])
    rnd.annotate(td)
    assert td["next", "intrinsic_reward"].isfinite().all()


def test_bad_use_is_said() -> None:
    with pytest.raises(ValueError, match="update_fraction"):
        RandomNetworkDistillation(update_fraction=0.0)
    with pytest.raises(RuntimeError, match="build"):
        list(RandomNetworkDistillation().predictor_parameters())
    with pytest.raises(KeyError, match="next"):
        RandomNetworkDistillation().build(SPECS).loss(TensorDict({"observation": torch.zeros(2, 3)}, [2]))
