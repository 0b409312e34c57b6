"""World models: which member predicts which row, rewards, termination, and returns beside a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrl.data import Bounded, Unbounded

from kit.seeds import generator
from kit.specs import specs_of
from kit.world_models import NEAR_AND_FAR, known_reward, pushed, targets_of, world_model
from torchrl_lightning.agents import GaussianEnsemble, OutsideBox, WorldModel


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


def test_trajectory_keeps_its_member() -> None:
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


ORIGINS = [(torch.float64, 1700000037.0), (torch.float64, -1e12), (torch.float32, 65536.0), (torch.float64, 0.0)]


class Watched:
    """A function of steps that keeps what it was called with."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, list[tuple[Tensor, ...]]()

    def __call__(self, *step: Tensor) -> Tensor:
        self.calls.append(step)
        result: Tensor = self.function(*step)
        return result


def world_at(origin: float, dtype: torch.dtype, **settings: Any) -> WorldModel:
    """A world model of the point, whose observations count from an origin; the same weights for each."""
    data = pushed(50, 0)
    for part in (data, data["next"]):
        part["observation"] = (part["observation"] * 128).round().div(128).to(dtype) + origin
    specs = specs_of(Bounded(-1.0, 1.0, (1,)), observation=Unbounded(2, dtype=dtype))
    learnt = settings.pop("learnt", False)
    targets = targets_of(specs, reward=settings.pop("reward", None), terminated=learnt).fit(data)
    torch.manual_seed(0)
    ensemble = GaussianEnsemble(3, 3, len(targets.target_columns), [8], ends_by=2 if learnt else 0)
    for bias in ensemble.biases:
        torch.nn.init.normal_(bias)
    ensemble.standardise(targets.input_scaler, targets.target_scaler)
    world = WorldModel(ensemble, targets, **settings)
    world.elites = torch.tensor([1])
    return world


@pytest.mark.parametrize(("dtype", "origin"), ORIGINS)
@pytest.mark.parametrize("learnt", [False, True])
def test_step_does_not_depend_on_the_origin_of_the_observations(
    dtype: torch.dtype, origin: float, learnt: bool
) -> None:
    near, far = world_at(0.0, torch.float32, learnt=learnt), world_at(origin, dtype, learnt=learnt)
    observation = torch.randn(50, 2, generator=generator()).mul(128).round().div(128)
    action = torch.rand(50, 1, generator=generator())
    expected, found = near.step(observation, action), far.step(observation.to(dtype) + origin, action)
    assert found[0].dtype is dtype
    assert found[1].dtype is torch.float32
    atol = 1e-5 + 2 * torch.finfo(dtype).eps * abs(origin)
    torch.testing.assert_close((found[0] - origin).float(), expected[0], atol=atol, rtol=0.0)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0.0)
    assert torch.equal(found[2], expected[2])
    assert not learnt or 0 < int(found[2].sum()) < 50


@pytest.mark.parametrize(("dtype", "origin"), ORIGINS)
@pytest.mark.parametrize("kind", ["plain", "known", "told", "learnt"])
@pytest.mark.parametrize("propagation", ["step", "trajectory"])
def test_returns_do_not_depend_on_the_origin_of_the_observations(
    dtype: torch.dtype, origin: float, kind: str, propagation: str
) -> None:
    def world(origin: float, dtype: torch.dtype) -> WorldModel:
        def known(observation: Tensor, action: Tensor, following: Tensor) -> Tensor:
            return known_reward(observation - origin, action, following - origin)

        def told(observation: Tensor, action: Tensor, following: Tensor) -> Tensor:
            return (following[:, :1] - origin).abs() > 1.0

        settings: dict[str, Any] = {"learnt": kind == "learnt", "propagation": propagation}
        settings["reward"] = Watched(known) if kind == "known" else None
        settings["terminated"] = Watched(told) if kind == "told" else None
        return world_at(origin, dtype, **settings)

    observation = torch.randn(50, 2, generator=generator()).mul(64).round().div(128)
    actions = torch.rand(5, 50, 1, generator=generator())
    near, far = world(0.0, torch.float32), world(origin, dtype)
    expected, found = near.returns(observation, actions), far.returns(observation.to(dtype) + origin, actions)
    assert found.dtype is torch.float32
    atol = 1e-4 + 200 * torch.finfo(dtype).eps * abs(origin)
    if kind in ("told", "learnt"):  # rounding may move a few ends
        assert ((found - expected).abs() <= atol).float().mean() >= 0.9
    else:
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
    for function in (far.targets.reward, far.terminated):
        for before, action, following in [] if function is None else function.calls:
            assert before.dtype is following.dtype is dtype
            assert action.dtype is torch.float32
            assert bool((actions.flatten()[:, None] == action.flatten()).any(0).all())


def test_box_bounds_what_single_precision_would_round() -> None:
    box = OutsideBox([1700000036.5], [1700000037.5])
    rows = torch.tensor([[1700000036.0], [1700000037.0], [1700000038.0]], dtype=torch.float64)
    assert box(rows, rows, rows).tolist() == [True, False, True]
    edge = torch.tensor([[0.7]])
    assert not OutsideBox([0.7], [0.7])(edge, edge, edge).any()
    assert not OutsideBox([0.7], [0.7])(edge, edge, torch.tensor([[0.7]], dtype=torch.float64)).any()


def test_box_has_two_sides() -> None:
    box = OutsideBox([0.0, None], [None, 1.0])
    nothing = torch.zeros(3, 1)
    assert box(nothing, nothing, torch.tensor([[-0.1, 0.0], [9.0, 1.0], [0.0, 1.1]])).tolist() == [True, False, True]
