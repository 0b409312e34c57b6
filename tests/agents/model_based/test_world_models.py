"""World models: members of rows, rewards, terminations, and returns compared with a plain loop."""

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


def predict_mean(world: WorldModel, observation: Tensor, action: Tensor, member: int) -> tuple[Tensor, Tensor]:
    """Return the next observations and rewards that one member of the ensemble predicts by its mean."""
    targets = world.targets
    inputs = targets.input_scaler(torch.cat([observation, action], -1))
    mean, _ = world.ensemble(inputs.expand(3, *inputs.shape))
    next_observation, reward = targets.inverse(observation, mean[member].detach())
    return next_observation, torch.empty(0) if reward is None else reward[:, 0]


def end_logits(world: WorldModel, next_observation: Tensor, member: int) -> Tensor:
    """Return one member's logits of the termination of the episode."""
    inputs = world.targets.input_scaler
    x = (next_observation - inputs.mean[:2].float()) / inputs.std[:2].float()
    return world.ensemble.ends(x.expand(3, *x.shape))[0][member, :, 0].detach()


@pytest.mark.parametrize("learns_terminated", [False, True])
@pytest.mark.parametrize("elites", [[0, 1, 2], [2, 0], [1]])
def test_rows_are_predicted_by_their_assigned_elite(elites: list[int], learns_terminated: bool) -> None:
    world = world_model(targets_of(terminated=learns_terminated), elites=elites)
    observation, action = torch.randn(7, 2), torch.randn(7, 1)
    members = torch.tensor([0, 0, 1, 0, 0, 1, 0]) % len(elites)  # uneven shares
    next_observation, reward, predicted = world.step(observation, action, members)
    for row, member in enumerate(members.tolist()):
        expected = predict_mean(world, observation, action, elites[member])
        torch.testing.assert_close(next_observation[row], expected[0][row])
        torch.testing.assert_close(reward[row], expected[1][row])
        assert bool(predicted[row]) is (
            learns_terminated and bool(end_logits(world, expected[0], elites[member])[row] > 0)
        )
    assert not learns_terminated or 0 < int(predicted.sum()) < 7


def test_rows_are_assigned_evenly_and_at_random() -> None:
    world = world_model()
    assigned = torch.stack([world.assign_members(9) for _ in range(200)])
    assert all(row.bincount().tolist() == [3, 3, 3] for row in assigned)
    share = (assigned == 0).float().mean(0)
    assert ((share - 1 / 3).abs() < 0.15).all()
    assert world.assign_members(7).bincount(minlength=3).max() <= 3
    observation, action = torch.randn(7, 2), torch.randn(7, 1)
    predictions = torch.stack([predict_mean(world, observation, action, member)[0] for member in range(3)])
    next_observation = world.step(observation, action)[0]
    assert ((next_observation - predictions).abs().amax(-1).amin(0) < 1e-5).all()


def test_changed_weights_are_used() -> None:
    world = world_model()
    observation, action, members = torch.randn(4, 2), torch.randn(4, 1), torch.tensor([0, 1, 2, 0])
    world.step(observation, action, members)
    with torch.no_grad():
        world.ensemble.weights[0].mul_(2.0)
        world.ensemble.target_mean.add_(1.0)
    world.targets.target_scaler.mean.add_(1.0)
    expected = predict_mean(world, observation, action, 1)[0]
    torch.testing.assert_close(world.step(observation, action, members)[0][1], expected[1])
    world.elites.copy_(torch.tensor([2, 2, 2]))
    expected = predict_mean(world, observation, action, 2)[0]
    torch.testing.assert_close(world.step(observation, action, members)[0], expected)


@pytest.mark.parametrize("learns_terminated", [False, True])
def test_samples_have_mean_and_deviation_of_the_member(learns_terminated: bool) -> None:
    world = world_model(targets_of(terminated=learns_terminated), elites=[1], sample=True)
    observation, action = torch.randn(1, 2), torch.randn(1, 1)
    inputs = world.targets.input_scaler(torch.cat([observation, action], -1))
    mean, log_variance = (output[1, 0].detach() for output in world.ensemble(inputs.expand(3, 1, 3)))
    next_observation, reward, predicted = world.step(observation.expand(20_000, 2), action.expand(20_000, 1))
    change = torch.cat([next_observation - observation, reward[:, None]], 1)
    drawn = world.targets.target_scaler(change)
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.04, rtol=0.0)
    torch.testing.assert_close(drawn.std(0), (0.5 * log_variance).exp(), atol=0.0, rtol=0.03)
    assert torch.equal(
        predicted, end_logits(world, next_observation, 1) > 0 if learns_terminated else torch.zeros_like(predicted)
    )


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("has_reward", [False, True])
@pytest.mark.parametrize("ends", [None, "function", "learnt"])
def test_returns_are_summed_until_termination(propagation: str, has_reward: bool, ends: str | None) -> None:
    targets = targets_of(reward=known_reward if has_reward else None, terminated=ends == "learnt")
    terminated = OutsideBox([-1.0, None], [1.0, None]) if ends == "function" else None
    world = world_model(targets, elites=[2], propagation=propagation, terminated=terminated)
    observation, actions = 0.5 * torch.randn(20, 2), torch.rand(6, 20, 1) * 2.0 - 1.0
    if ends == "learnt":  # some first steps terminate
        world.ensemble.ends.biases[-1].data -= end_logits(world, observation, 2).quantile(0.8)
    total, alive = torch.zeros(20), torch.ones(20, dtype=torch.bool)
    state = observation
    for action in actions:
        next_observation, reward = predict_mean(world, state, action, 2)
        reward = known_reward(state, action, next_observation) if has_reward else reward
        total += torch.where(alive, reward, 0.0)
        if ends == "function":
            alive &= next_observation[:, 0].abs() <= 1.0
        elif ends == "learnt":
            alive &= end_logits(world, next_observation, 2) <= 0.0
        state = next_observation
    assert ends is None or (0 < int(alive.sum()) < 20)
    torch.testing.assert_close(world.returns(observation, actions), total)


def test_trajectory_keeps_its_member() -> None:
    world = world_model(propagation="trajectory")
    observation, actions = torch.randn(12, 2), torch.rand(5, 12, 1)
    totals = []
    for member in range(3):
        state, total = observation, torch.zeros(12)
        for action in actions:
            state, reward = predict_mean(world, state, action, member)
            total += reward
        totals.append(total)
    differences = (world.returns(observation, actions) - torch.stack(totals)).abs()
    assert (differences.amin(0) < 1e-4).all()
    assert differences.argmin(0).bincount().tolist() == [4, 4, 4]


def test_discrete_actions_are_one_hot_inputs() -> None:
    world = world_model(targets_of(NEAR_AND_FAR), elites=[0])
    observation, actions = torch.randn(5, 4), torch.randint(3, (1, 5))
    columns = torch.nn.functional.one_hot(actions[0], 3).float()
    expected = predict_mean(world, observation, columns, 0)[1]
    torch.testing.assert_close(world.returns(observation, actions), expected)


ORIGINS = [(torch.float64, 1700000037.0), (torch.float64, -1e12), (torch.float32, 65536.0), (torch.float64, 0.0)]


class RecordedFunction:
    """A function of steps that records its arguments."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, list[tuple[Tensor, ...]]()

    def __call__(self, *step: Tensor) -> Tensor:
        self.calls.append(step)
        result: Tensor = self.function(*step)
        return result


def world_at(origin: float, dtype: torch.dtype, **settings: Any) -> WorldModel:
    """Return a world model of the point environment with shifted observations and equal weights."""
    data = pushed(50, 0)
    for part in (data, data["next"]):
        part["observation"] = (part["observation"] * 128).round().div(128).to(dtype) + origin
    specs = specs_of(Bounded(-1.0, 1.0, (1,)), observation=Unbounded(2, dtype=dtype))
    learns_terminated = settings.pop("learns_terminated", False)
    targets = targets_of(specs, reward=settings.pop("reward", None), terminated=learns_terminated).fit(data)
    torch.manual_seed(0)
    ensemble = GaussianEnsemble(3, 3, len(targets.target_columns), [8], ends_by=2 if learns_terminated else 0)
    for bias in ensemble.biases:
        torch.nn.init.normal_(bias)
    ensemble.standardise(targets.input_scaler, targets.target_scaler)
    world = WorldModel(ensemble, targets, **settings)
    world.elites = torch.tensor([1])
    return world


@pytest.mark.parametrize(("dtype", "origin"), ORIGINS)
@pytest.mark.parametrize("learns_terminated", [False, True])
def test_step_does_not_depend_on_the_origin_of_the_observations(
    dtype: torch.dtype, origin: float, learns_terminated: bool
) -> None:
    near, far = (
        world_at(0.0, torch.float32, learns_terminated=learns_terminated),
        world_at(origin, dtype, learns_terminated=learns_terminated),
    )
    observation = torch.randn(50, 2, generator=generator()).mul(128).round().div(128)
    action = torch.rand(50, 1, generator=generator())
    expected, shifted = near.step(observation, action), far.step(observation.to(dtype) + origin, action)
    assert shifted[0].dtype is dtype
    assert shifted[1].dtype is torch.float32
    atol = 1e-5 + 2 * torch.finfo(dtype).eps * abs(origin)
    torch.testing.assert_close((shifted[0] - origin).float(), expected[0], atol=atol, rtol=0.0)
    torch.testing.assert_close(shifted[1], expected[1], atol=1e-5, rtol=0.0)
    assert torch.equal(shifted[2], expected[2])
    assert not learns_terminated or 0 < int(shifted[2].sum()) < 50


@pytest.mark.parametrize(("dtype", "origin"), ORIGINS)
@pytest.mark.parametrize("kind", ["plain", "reward function", "termination function", "learnt terminations"])
@pytest.mark.parametrize("propagation", ["step", "trajectory"])
def test_returns_do_not_depend_on_the_origin_of_the_observations(
    dtype: torch.dtype, origin: float, kind: str, propagation: str
) -> None:
    def world(origin: float, dtype: torch.dtype) -> WorldModel:
        def reward(observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
            return known_reward(observation - origin, action, next_observation - origin)

        def terminated(observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
            return (next_observation[:, :1] - origin).abs() > 1.0

        settings: dict[str, Any] = {"learns_terminated": kind == "learnt terminations", "propagation": propagation}
        settings["reward"] = RecordedFunction(reward) if kind == "reward function" else None
        settings["terminated"] = RecordedFunction(terminated) if kind == "termination function" else None
        return world_at(origin, dtype, **settings)

    observation = torch.randn(50, 2, generator=generator()).mul(64).round().div(128)
    actions = torch.rand(5, 50, 1, generator=generator())
    near, far = world(0.0, torch.float32), world(origin, dtype)
    expected, shifted = near.returns(observation, actions), far.returns(observation.to(dtype) + origin, actions)
    assert shifted.dtype is torch.float32
    atol = 1e-4 + 200 * torch.finfo(dtype).eps * abs(origin)
    if kind in ("termination function", "learnt terminations"):  # rounding may move a few ends
        assert ((shifted - expected).abs() <= atol).float().mean() >= 0.9
    else:
        torch.testing.assert_close(shifted, expected, atol=atol, rtol=1e-4)
    for function in (far.targets.reward, far.terminated):
        for before, action, next_observation in [] if function is None else function.calls:
            assert before.dtype is next_observation.dtype is dtype
            assert action.dtype is torch.float32
            assert bool((actions.flatten()[:, None] == action.flatten()).any(0).all())


def test_outside_box_compares_in_double_precision() -> None:
    box = OutsideBox([1700000036.5], [1700000037.5])
    rows = torch.tensor([[1700000036.0], [1700000037.0], [1700000038.0]], dtype=torch.float64)
    assert box(rows, rows, rows).tolist() == [True, False, True]
    edge = torch.tensor([[0.7]])
    assert not OutsideBox([0.7], [0.7])(edge, edge, edge).any()
    assert not OutsideBox([0.7], [0.7])(edge, edge, torch.tensor([[0.7]], dtype=torch.float64)).any()


def test_outside_box_has_lower_and_upper_bounds() -> None:
    box = OutsideBox([0.0, None], [None, 1.0])
    zeros = torch.zeros(3, 1)
    assert box(zeros, zeros, torch.tensor([[-0.1, 0.0], [9.0, 1.0], [0.0, 1.1]])).tolist() == [True, False, True]
