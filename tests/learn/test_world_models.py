"""World models: which member predicts which row, rewards, termination, and returns beside a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kit.world_models import NEAR_AND_FAR, known_reward, targets_of, world_model
from torchrl_lightning.learn import OutsideBox, WorldModel


def predicted(world: WorldModel, observation: Tensor, action: Tensor, member: int) -> tuple[Tensor, Tensor]:
    """Return what the means of one member of the whole ensemble say, next observations and rewards."""
    targets = world.targets
    inputs = targets.input_scaler(torch.cat([observation, action], -1))
    mean, _ = world.ensemble(inputs.expand(3, *inputs.shape))
    following, reward = targets.inverse(observation, mean[member].detach())
    return following, torch.empty(0) if reward is None else reward[:, 0]


def end_logits(world: WorldModel, following: Tensor, member: int) -> Tensor:
    """Return how sure one member of the whole ensemble is that the episode has terminated there."""
    inputs = world.targets.input_scaler
    x = (following - inputs.mean[:2].float()) / inputs.std[:2].float()
    return world.ensemble.ends(x.expand(3, *x.shape))[0][member, :, 0].detach()


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("elites", [[0, 1, 2], [2, 0], [1]])
def test_each_row_is_predicted_by_its_own_elite(elites: list[int], learnt: bool) -> None:
    world = world_model(targets_of(terminated=learnt), elites=elites)
    observation, action = torch.randn(7, 2), torch.randn(7, 1)
    members = torch.tensor([0, 0, 1, 0, 0, 1, 0]) % len(elites)  # uneven shares
    following, reward, told = world.step(observation, action, members)
    for row, member in enumerate(members.tolist()):
        expected = predicted(world, observation, action, elites[member])
        torch.testing.assert_close(following[row], expected[0][row])
        torch.testing.assert_close(reward[row], expected[1][row])
        assert bool(told[row]) is (learnt and bool(end_logits(world, expected[0], elites[member])[row] > 0))
    assert not learnt or 0 < int(told.sum()) < 7


def test_rows_are_dealt_evenly_and_at_random() -> None:
    world = world_model()
    dealt = torch.stack([world.deal(9) for _ in range(200)])
    assert all(row.bincount().tolist() == [3, 3, 3] for row in dealt)
    share = (dealt == 0).float().mean(0)
    assert ((share - 1 / 3).abs() < 0.15).all()
    assert world.deal(7).bincount(minlength=3).max() <= 3
    observation, action = torch.randn(7, 2), torch.randn(7, 1)
    every = torch.stack([predicted(world, observation, action, member)[0] for member in range(3)])
    following = world.step(observation, action)[0]
    assert ((following - every).abs().amax(-1).amin(0) < 1e-5).all()


def test_weights_that_change_are_seen() -> None:
    world = world_model()
    observation, action, members = torch.randn(4, 2), torch.randn(4, 1), torch.tensor([0, 1, 2, 0])
    world.step(observation, action, members)
    with torch.no_grad():
        world.ensemble.weights[0].mul_(2.0)
        world.ensemble.target_mean.add_(1.0)
    world.targets.target_scaler.mean.add_(1.0)
    expected = predicted(world, observation, action, 1)[0]
    torch.testing.assert_close(world.step(observation, action, members)[0][1], expected[1])
    world.elites.copy_(torch.tensor([2, 2, 2]))
    expected = predicted(world, observation, action, 2)[0]
    torch.testing.assert_close(world.step(observation, action, members)[0], expected)


@pytest.mark.parametrize("learnt", [False, True])
def test_samples_have_the_member_s_mean_and_deviation(learnt: bool) -> None:
    world = world_model(targets_of(terminated=learnt), elites=[1], sample=True)
    observation, action = torch.randn(1, 2), torch.randn(1, 1)
    inputs = world.targets.input_scaler(torch.cat([observation, action], -1))
    mean, log_variance = (each[1, 0].detach() for each in world.ensemble(inputs.expand(3, 1, 3)))
    following, reward, told = world.step(observation.expand(20_000, 2), action.expand(20_000, 1))
    change = torch.cat([following - observation, reward[:, None]], 1)
    drawn = world.targets.target_scaler(change)
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.04, rtol=0.0)
    torch.testing.assert_close(drawn.std(0), (0.5 * log_variance).exp(), atol=0.0, rtol=0.03)
    assert torch.equal(told, end_logits(world, following, 1) > 0 if learnt else torch.zeros_like(told))


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("ends", [None, "told", "learnt"])
def test_returns_are_rewards_until_the_end(propagation: str, known: bool, ends: str | None) -> None:
    targets = targets_of(reward=known_reward if known else None, terminated=ends == "learnt")
    terminated = OutsideBox([-1.0, None], [1.0, None]) if ends == "told" else None
    world = world_model(targets, elites=[2], propagation=propagation, terminated=terminated)
    observation, actions = 0.5 * torch.randn(20, 2), torch.rand(6, 20, 1) * 2.0 - 1.0
    if ends == "learnt":  # some of the first steps
        world.ensemble.ends.biases[-1].data -= end_logits(world, observation, 2).quantile(0.8)
    total, alive = torch.zeros(20), torch.ones(20, dtype=torch.bool)
    state = observation
    for action in actions:
        following, reward = predicted(world, state, action, 2)
        reward = known_reward(state, action, following) if known else reward
        total += torch.where(alive, reward, 0.0)
        if ends == "told":
            alive &= following[:, 0].abs() <= 1.0
        elif ends == "learnt":
            alive &= end_logits(world, following, 2) <= 0.0
        state = following
    assert ends is None or (0 < int(alive.sum()) < 20)
    torch.testing.assert_close(world.returns(observation, actions), total)


def test_a_trajectory_keeps_its_member() -> None:
    world = world_model(propagation="trajectory")
    observation, actions = torch.randn(12, 2), torch.rand(5, 12, 1)
    each = []
    for member in range(3):
        state, total = observation, torch.zeros(12)
        for action in actions:
            state, reward = predicted(world, state, action, member)
            total += reward
        each.append(total)
    nearest = (world.returns(observation, actions) - torch.stack(each)).abs()
    assert (nearest.amin(0) < 1e-4).all()
    assert nearest.argmin(0).bincount().tolist() == [4, 4, 4]


def test_choices_enter_as_one_hot() -> None:
    world = world_model(targets_of(NEAR_AND_FAR), elites=[0])
    observation, actions = torch.randn(5, 4), torch.randint(3, (1, 5))
    columns = torch.nn.functional.one_hot(actions[0], 3).float()
    expected = predicted(world, observation, columns, 0)[1]
    torch.testing.assert_close(world.returns(observation, actions), expected)


def test_a_box_has_two_sides() -> None:
    box = OutsideBox([0.0, None], [None, 1.0])
    nothing = torch.zeros(3, 1)
    assert box(nothing, nothing, torch.tensor([[-0.1, 0.0], [9.0, 1.0], [0.0, 1.1]])).tolist() == [True, False, True]
