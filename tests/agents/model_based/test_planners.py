"""Planners in a world model, compared with TorchRL's, and the world model as a TorchRL environment."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from torchrl.modules import CEMPlanner

from kit.files import through_file
from kit.seeds import generator
from kit.specs import specs_of
from kit.world_models import NEAR_AND_FAR, known_reward, pushed, targets_of, world_model
from torchrl_lightning.agents import (
    CrossEntropyPlanner,
    GaussianEnsemble,
    OutsideBox,
    RandomShootingPlanner,
    WorldModel,
    WorldModelEnvironment,
)

BOX = OutsideBox([-1.0, None], [1.0, None])
PLANNERS = [partial(CrossEntropyPlanner, candidates=40, elites=4), partial(RandomShootingPlanner, candidates=40)]
DETERMINISTIC = ExplorationType.DETERMINISTIC


def env_of(targets: Any = None, **settings: Any) -> WorldModelEnvironment:
    return WorldModelEnvironment(world_model(targets, **settings))


def observations(*shape: int) -> TensorDict:
    torch.manual_seed(1)
    return TensorDict({"observation": 0.5 * torch.randn(*shape, 2)}, shape)


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("terminated", [None, BOX])
def test_torchrl_accepts_the_environment(propagation: str, terminated: Any) -> None:
    env = env_of(propagation=propagation, terminated=terminated)
    check_env_specs(env, seed=0)
    rollout = env.rollout(4, tensordict=observations(5), auto_reset=False, break_when_any_done=False)
    assert rollout.shape == (5, 4)
    if propagation == "trajectory":
        assert (rollout["member"] == rollout["member"][:, :1]).all()


def test_environment_steps_equal_the_model() -> None:
    env = env_of(targets_of(NEAR_AND_FAR), elites=[1], terminated=OutsideBox([-0.1] * 4, [0.1] * 4))
    step = env.reset(TensorDict({"near": torch.randn(2, 3, 2), "far": torch.randn(2, 3, 1, 2)}, [2, 3]))
    step["action"] = torch.randint(3, (2, 3))
    after = env.step(step.clone())["next"]
    observation = torch.cat([step["near"], step["far"].flatten(-2)], -1).flatten(0, 1)
    action = torch.nn.functional.one_hot(step["action"], 3).float().flatten(0, 1)
    next_observation, reward, ended = env.world_model.step(observation, action)
    torch.testing.assert_close(after["far"], next_observation.view(2, 3, 4)[..., None, 2:])
    torch.testing.assert_close(after["reward"], reward.view(2, 3, 1))
    assert torch.equal(after["done"], ended.view(2, 3, 1))
    assert torch.equal(after["terminated"], after["done"])


def test_reset_keeps_passed_observations() -> None:
    env, start = env_of(), observations(3)
    assert torch.equal(env.reset(start.clone())["observation"], start["observation"])
    assert env.reset()["observation"].shape == (2,)


# -- planners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("terminated", [None, BOX])
@pytest.mark.parametrize("has_reward", [False, True])
def test_cross_entropy_planner_equals_torchrl(shape: tuple[int, ...], terminated: Any, has_reward: bool) -> None:
    env = env_of(targets_of(reward=known_reward if has_reward else None), elites=[2], terminated=terminated)
    planner = CrossEntropyPlanner(env, horizon=3, candidates=20, elites=5, iterations=2)
    reference = CEMPlanner(env, planning_horizon=3, optim_steps=2, num_candidates=20, top_k=5)
    start = observations(*shape)
    torch.manual_seed(int(torch.randint(2**62, (), generator=generator(5))))
    expected = reference(start.clone())["action"]
    planner.generator.manual_seed(5)
    torch.testing.assert_close(planner(start)["action"], expected)


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("planner", [CrossEntropyPlanner, RandomShootingPlanner])
def test_planners_find_the_best_action(propagation: str, particles: int, planner: Any) -> None:
    def reward(observation: Tensor, action: Tensor, next_observation: Tensor) -> Tensor:
        return -(action[:, 0] - 0.3 * observation[:, 0]).square()

    specs = specs_of(Bounded(-2.0, 2.0, (1,)), observation=Unbounded(2))
    env = env_of(targets_of(specs, reward=reward), propagation=propagation)
    policy, start = planner(env, horizon=1, candidates=300, particles=particles), observations(4)
    action = policy(start.clone())["action"]
    torch.testing.assert_close(action, 0.3 * start["observation"][:, :1], atol=0.05, rtol=0.0)
    assert torch.equal(policy.compute_step(start)["action"].isfinite(), torch.ones(4, 1, dtype=torch.bool))
    assert policy(observations())["action"].shape == (1,)


def test_discrete_actions_are_planned_by_random_shooting() -> None:
    specs = specs_of(Categorical(4), observation=Unbounded(2))
    env = env_of(targets_of(specs, reward=lambda observation, action, next_observation: action[:, 2]))
    assert RandomShootingPlanner(env, horizon=2, candidates=80)(observations(5))["action"].tolist() == [2] * 5
    with pytest.raises(TypeError, match=r"Discrete\(4\).*RandomShooting"):
        CrossEntropyPlanner(env)


@pytest.mark.parametrize("planner", [CrossEntropyPlanner, RandomShootingPlanner])
def test_unbounded_actions_raise(planner: Any) -> None:
    env = env_of(targets_of(specs_of(Unbounded(1), observation=Unbounded(2)), reward=lambda *_: torch.zeros(1)))
    with pytest.raises(TypeError, match=r"finite bounds, got Box of shape \(1,\)"):
        planner(env)


class FirstActionReturns(WorldModel):
    """The return of a sequence is its first action; records the evaluated actions."""

    last_actions: Tensor

    def returns(self, observation: Tensor, actions: Tensor) -> Tensor:
        self.last_actions = actions
        return actions[0, :, 0]


def env_with(kind: type[WorldModel]) -> WorldModelEnvironment:
    world = world_model()
    return WorldModelEnvironment(kind(world.ensemble, world.targets))


def first_action_planner(**kwargs: Any) -> CrossEntropyPlanner:
    settings = {"horizon": 3, "candidates": 40, "elites": 4, "iterations": 2, **kwargs}
    return CrossEntropyPlanner(env_with(FirstActionReturns), **settings)


def test_warm_start_continues_the_previous_plan_within_an_episode() -> None:
    planner = first_action_planner(warm_start=True, iterations=1, initial_std=0.5)
    step = observations(2).set("is_init", torch.tensor([[True], [True]]))
    planner.compute_step(step)
    tried = planner.model.last_actions.view(3, 2, 40)
    best = tried[0].topk(4).indices  # returns are the first action
    plan = tried.gather(2, best.expand(3, 2, 4)).mean(-1)
    assert plan[1:, 0].abs().min() > 0.02
    planner.initial_std = 1e-3
    planner.compute_step(step.set("is_init", torch.tensor([[False], [True]])))
    expected = torch.tensor([[plan[1, 0], 0.0], [plan[2, 0], 0.0], [0.0, 0.0]])
    torch.testing.assert_close(planner.model.last_actions.view(3, 2, 40).mean(-1), expected, atol=0.01, rtol=0.0)
    with set_exploration_type(DETERMINISTIC):  # stores a separate plan
        planner.compute_step(step)
    assert planner.model.last_actions.abs().max() < 0.01
    planner.compute_step(step.set("is_init", torch.tensor([[True], [True]])))
    assert planner.model.last_actions.abs().max() < 0.01


def test_noise_applies_only_to_exploration_within_bounds() -> None:
    planner, start = first_action_planner(noise=5.0), observations(50)
    explored = planner(start.clone())["action"]
    assert explored.abs().max() == 1.0
    assert explored.min() < 0.0
    with set_exploration_type(DETERMINISTIC):
        assert planner(start)["action"].min() > 0.5


@pytest.mark.parametrize("nonfinite", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("planner", PLANNERS)
def test_diverging_sequences_are_not_selected(planner: Any, nonfinite: float) -> None:
    class Diverging(WorldModel):
        def returns(self, observation: Tensor, actions: Tensor) -> Tensor:
            first = actions[0, :, 0]
            return torch.where(first > 0.0, nonfinite, first)

    env = env_with(Diverging)
    assert (planner(env)(observations(3))["action"] <= 0.0).all()
    with set_exploration_type(DETERMINISTIC):
        assert (planner(env, particles=2)(observations(3))["action"] <= 0.0).all()


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_are_drawn_by_the_planner_s_own_generator(planner: Any, propagation: str) -> None:
    policy, start = planner(env_of(propagation=propagation, sample=True), horizon=4), observations(3)
    policy.generator.manual_seed(5)
    state, before = policy.generator.get_state(), torch.get_rng_state()
    first, second = (policy(start.clone())["action"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(77)
    policy.generator.set_state(state)
    assert torch.equal(policy(start)["action"], first)


@pytest.mark.parametrize("planner", PLANNERS)
def test_deterministic_plan_is_that_of_the_observation_and_disturbs_none_that_explores(planner: Any) -> None:
    policy, start = planner(env_of(sample=True), horizon=4), observations(3)
    policy.generator.manual_seed(5)
    state = policy.generator.get_state()
    with set_exploration_type(DETERMINISTIC):
        first = policy(start.clone())["action"]
        policy(observations(2))
        assert torch.equal(policy(start.clone())["action"], first)
    assert torch.equal(policy.generator.get_state(), state)
    policy.generator.manual_seed(6)
    with set_exploration_type(DETERMINISTIC):
        assert not torch.equal(policy(start)["action"], first)


def test_different_observations_use_different_random_numbers() -> None:
    policy, start, tried = (
        RandomShootingPlanner(env_with(FirstActionReturns), candidates=5),
        observations(1)["observation"],
        [],
    )
    with set_exploration_type(DETERMINISTIC):
        for observation in (start, start + 1.0, start):
            policy(TensorDict({"observation": observation}, [1]))
            tried.append(policy.model.last_actions)
    assert torch.equal(tried[0], tried[2])
    assert not torch.equal(tried[0], tried[1])


@pytest.mark.parametrize("planner", PLANNERS)
def test_planner_state_contains_model_and_generator(planner: Any) -> None:
    policy, other = (planner(env_of(), horizon=4) for _ in range(2))
    for parameter in other.parameters():
        parameter.data.add_(0.5)
    policy(observations(2))
    assert [id(p) for p in policy.parameters()] == [id(p) for p in policy.model.parameters()]
    other.load_state_dict(through_file(policy.state_dict()))
    assert torch.equal(other(observations(2))["action"], policy(observations(2))["action"])
    with pytest.raises(ValueError, match="planner state"):
        other.set_extra_state({"generator": torch.zeros(3)})
    moved = policy.to("meta")
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert moved.action_spec.device.type == "meta"


@pytest.mark.parametrize(("dtype", "origin"), [(torch.float64, 1700000037.0), (torch.int64, 1_700_000_037)])
@pytest.mark.parametrize("planner", [*PLANNERS, "torchrl"])
def test_plans_do_not_depend_on_the_origin_of_the_observations(dtype: torch.dtype, origin: float, planner: Any) -> None:
    actions = []
    for kind, shift in ((torch.float32, 0.0), (dtype, origin)):
        specs = specs_of(Bounded(-1.0, 1.0, (1,)), observation=Unbounded(2, dtype=kind))
        data = pushed(50, 0)
        for part in (data, data["next"]):
            part["observation"] = (part["observation"].mul(9).round().to(torch.int64) + int(shift)).to(kind)
        torch.manual_seed(0)
        targets = targets_of(specs).fit(data)
        ensemble = GaussianEnsemble(3, 3, 3, [8])
        ensemble.standardise(targets.input_scaler, targets.target_scaler)
        env = WorldModelEnvironment(WorldModel(ensemble, targets))
        check_env_specs(env)
        seen = TensorDict({"observation": data["observation"][:4]}, [4])
        if planner == "torchrl":
            plan: Any = CEMPlanner(env, 3, 2, 20, 4)
        else:
            plan = planner(env, horizon=3)
            plan.generator.manual_seed(0)
        torch.manual_seed(1)
        with set_exploration_type(ExplorationType.RANDOM):
            actions.append(plan(seen)["action"])
    torch.testing.assert_close(actions[1], actions[0], atol=1e-4, rtol=0.0)
