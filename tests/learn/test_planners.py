"""Planners over a world model, beside TorchRL's, and the world model as a TorchRL environment."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type
from torchrl.modules import CEMPlanner

from learn.dynamics_fakes import SPECS
from learn.test_world_models import model, reward_of
from torchrl_lightning.dynamics import DynamicsTargets
from torchrl_lightning.learn import (
    CrossEntropyPlanner,
    OutsideBox,
    RandomShootingPlanner,
    WorldModel,
    WorldModelEnvironment,
)

BOX = OutsideBox([-1.0, None], [1.0, None])
PLANNERS = [partial(CrossEntropyPlanner, candidates=40, elites=4), partial(RandomShootingPlanner, candidates=40)]


def observed(*shape: int) -> TensorDict:
    torch.manual_seed(1)
    return TensorDict({"observation": 0.5 * torch.randn(*shape, 2)}, shape)


# -- the environment ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("terminated", [None, BOX])
def test_torchrl_accepts_the_environment(propagation: str, terminated: Any) -> None:
    env = WorldModelEnvironment(model(propagation=propagation, terminated=terminated))
    check_env_specs(env, seed=0)
    rollout = env.rollout(4, tensordict=observed(5), auto_reset=False, break_when_any_done=False)
    assert rollout.shape == (5, 4)
    if propagation == "trajectory":
        assert (rollout["member"] == rollout["member"][:, :1]).all()


def test_environment_steps_as_the_model_does() -> None:
    specs = Composite(near=Unbounded(2), far=Unbounded((1, 2)))
    world = model(DynamicsTargets(specs, Categorical(3)), elites=[1], terminated=OutsideBox([-0.1] * 4, [0.1] * 4))
    env = WorldModelEnvironment(world)
    step = env.reset(TensorDict({"near": torch.randn(2, 3, 2), "far": torch.randn(2, 3, 1, 2)}, [2, 3]))
    step["action"] = torch.randint(3, (2, 3))
    after = env.step(step.clone())["next"]
    observation = torch.cat([step["near"], step["far"].flatten(-2)], -1).flatten(0, 1)
    action = torch.nn.functional.one_hot(step["action"], 3).float().flatten(0, 1)
    following, reward, ended = world.step(observation, action)
    torch.testing.assert_close(after["far"], following.view(2, 3, 4)[..., None, 2:])
    torch.testing.assert_close(after["reward"], reward.view(2, 3, 1))
    assert torch.equal(after["done"], ended.view(2, 3, 1))
    assert torch.equal(after["terminated"], after["done"])


def test_reset_keeps_observations_that_are_given() -> None:
    env, start = WorldModelEnvironment(model()), observed(3)
    assert torch.equal(env.reset(start.clone())["observation"], start["observation"])
    assert env.reset()["observation"].shape == (2,)


# -- planners ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("terminated", [None, BOX])
@pytest.mark.parametrize("known", [False, True])
def test_cross_entropy_takes_the_actions_of_torchrl_s_planner(
    shape: tuple[int, ...], terminated: Any, known: bool
) -> None:
    targets = DynamicsTargets(SPECS.observation, SPECS.action, reward=reward_of if known else None)
    env = WorldModelEnvironment(model(targets, elites=[2], terminated=terminated))
    ours = CrossEntropyPlanner(env, horizon=4, candidates=20, elites=5, iterations=3)
    theirs = CEMPlanner(env, planning_horizon=4, optim_steps=3, num_candidates=20, top_k=5)
    for seed in range(3):
        start = observed(*shape)
        torch.manual_seed(int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed))))
        expected = theirs(start.clone())["action"]
        ours.generator.manual_seed(seed)
        torch.testing.assert_close(ours(start.clone())["action"], expected)


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("planner", [CrossEntropyPlanner, RandomShootingPlanner])
def test_planners_find_the_best_action(propagation: str, particles: int, planner: Any) -> None:
    targets = DynamicsTargets(
        SPECS.observation,
        Bounded(-2.0, 2.0, (1,)),
        reward=lambda observation, action, following: -(action[:, 0] - 0.3 * observation[:, 0]).square(),
    )
    env = WorldModelEnvironment(model(targets, propagation=propagation))
    policy = planner(env, horizon=1, candidates=300, particles=particles)
    start = observed(4)
    action = policy(start.clone())["action"]
    torch.testing.assert_close(action, 0.3 * start["observation"][:, :1], atol=0.05, rtol=0.0)
    assert torch.equal(policy.act_on(start)["action"].isfinite(), torch.ones(4, 1, dtype=torch.bool))
    assert policy(observed())["action"].shape == (1,)


def test_choices_are_planned_by_random_shooting() -> None:
    targets = DynamicsTargets(
        SPECS.observation, Categorical(4), reward=lambda observation, action, following: action[:, 2]
    )
    env = WorldModelEnvironment(model(targets))
    assert RandomShootingPlanner(env, horizon=2, candidates=80)(observed(5))["action"].tolist() == [2] * 5
    with pytest.raises(TypeError, match=r"got Discrete\(4\); use RandomShootingPlanner"):
        CrossEntropyPlanner(env)


class Counting(WorldModel):
    """Returns of a sequence are the first action; keeps what was tried."""

    tried: Tensor

    def returns(self, observation: Tensor, actions: Tensor) -> Tensor:
        self.tried = actions
        return actions[0, :, 0]


def counting(**kwargs: Any) -> CrossEntropyPlanner:
    world = model()
    fake = Counting(world.ensemble, world.targets)
    settings = {"horizon": 3, "candidates": 40, "elites": 4, "iterations": 2}
    return CrossEntropyPlanner(WorldModelEnvironment(fake), **(settings | kwargs))


def test_warm_start_goes_on_from_the_plan_before_where_an_episode_goes_on() -> None:
    planner = counting(warm_start=True, iterations=1, initial_std=0.5)
    step = observed(2).set("is_init", torch.tensor([[True], [True]]))
    planner.act_on(step)
    tried = planner.model.tried.view(3, 2, 40)
    best = tried[0].topk(4).indices  # returns are the first action
    plan = tried.gather(2, best.expand(3, 2, 4)).mean(-1)
    assert plan[1:, 0].abs().min() > 0.02
    planner.initial_std = 1e-3
    planner.act_on(step.set("is_init", torch.tensor([[False], [True]])))
    expected = torch.tensor([[plan[1, 0], 0.0], [plan[2, 0], 0.0], [0.0, 0.0]])
    torch.testing.assert_close(planner.model.tried.view(3, 2, 40).mean(-1), expected, atol=0.01, rtol=0.0)
    with set_exploration_type(ExplorationType.DETERMINISTIC):  # has plans of its own
        planner.act_on(step)
    assert planner.model.tried.abs().max() < 0.01
    planner.act_on(step.set("is_init", torch.tensor([[True], [True]])))
    assert planner.model.tried.abs().max() < 0.01


def test_noise_is_for_exploring_alone_and_stays_within_the_bounds() -> None:
    planner = counting(noise=5.0)
    start = observed(50)
    explored = planner(start.clone())["action"]
    assert explored.abs().max() == 1.0
    assert explored.min() < 0.0
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert planner(start.clone())["action"].min() > 0.5


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("planner", PLANNERS)
def test_sequences_that_diverge_are_not_chosen(planner: Any, wrong: float) -> None:
    class Diverging(Counting):
        def returns(self, observation: Tensor, actions: Tensor) -> Tensor:
            first = actions[0, :, 0]
            return torch.where(first > 0.0, wrong, first)

    world = model()
    env = WorldModelEnvironment(Diverging(world.ensemble, world.targets))
    assert (planner(env)(observed(3))["action"] <= 0.0).all()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert (planner(env, particles=2)(observed(3))["action"] <= 0.0).all()


@pytest.mark.parametrize("propagation", ["step", "trajectory"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_are_drawn_by_the_planner_s_own_generator(planner: Any, propagation: str) -> None:
    policy, start = planner(WorldModelEnvironment(model(propagation=propagation, sample=True))), observed(3)
    policy.generator.manual_seed(5)
    state, before = policy.generator.get_state(), torch.get_rng_state()
    first, second = (policy(start.clone())["action"] for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(77)
    policy.generator.set_state(state)
    assert torch.equal(policy(start.clone())["action"], first)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_deterministic_plan_is_that_of_the_observation_and_disturbs_none_that_explores(planner: Any) -> None:
    policy, start = planner(WorldModelEnvironment(model(sample=True))), observed(3)
    policy.generator.manual_seed(5)
    state = policy.generator.get_state()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        first = policy(start.clone())["action"]
        policy(observed(2))
        assert torch.equal(policy(start.clone())["action"], first)
    assert torch.equal(policy.generator.get_state(), state)
    policy.generator.manual_seed(6)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert not torch.equal(policy(start.clone())["action"], first)


def test_no_two_observations_are_planned_for_by_the_same_draws() -> None:
    tried = []
    env = WorldModelEnvironment(model())
    returns = env.world_model.returns

    def noting(observation: Tensor, actions: Tensor) -> Tensor:
        tried.append(actions)
        return returns(observation, actions)

    env.world_model.returns = noting  # type: ignore[method-assign]
    policy, start = RandomShootingPlanner(env, candidates=5), observed(1)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        for observation in (start["observation"], start["observation"] + 1.0, start["observation"]):
            policy(TensorDict({"observation": observation}, [1]))
    assert torch.equal(tried[0], tried[2])
    assert not torch.equal(tried[0], tried[1])


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_planner_owns_its_model_and_is_restored_from_its_state(planner: Any) -> None:
    policy, other = (planner(WorldModelEnvironment(model())) for _ in range(2))
    for parameter in other.parameters():
        parameter.data.add_(0.5)
    policy(observed(2))
    assert [id(each) for each in policy.parameters()] == [id(each) for each in policy.model.parameters()]
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(observed(2))["action"], policy(observed(2))["action"])
    with pytest.raises(ValueError, match="planner state"):
        other.set_extra_state({"generator": torch.zeros(3)})
    moved = policy.to("meta")
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"meta"}
    assert moved.action_spec.device.type == "meta"


@pytest.mark.parametrize(
    "wrong",
    [
        *({name: 0} for name in ("horizon", "candidates", "particles", "iterations", "initial_std")),
        *({name: value} for name, value in (("elites", 41), ("elites", 1), ("noise", -1.0))),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        counting(**wrong)
