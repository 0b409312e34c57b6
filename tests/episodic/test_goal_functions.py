"""Relabelled steps get the rewards and terminations that the environment computes."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import GymWrapper

from kit.extras import need_extra
from kit.goals import Reach
from kit.rings import ring
from torchrl_lightning import (
    EnvironmentRecipe,
    EpisodicReplayBuffer,
    ExperienceBuffer,
    GymnasiumCollector,
    HindsightRelabel,
    ReplayDataModule,
    SequenceSampler,
)
from torchrl_lightning.environments.goals import EnvironmentGoals
from torchrl_lightning.episodic.goal_functions import EnvironmentFunction
from torchrl_lightning.replay.episode_transform import set_goal_functions

FIRST, MID, LAST = 0, 1, 2


class Dense(Reach):
    """Environment with a distance reward for single steps. It terminates at the goal."""

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> float:
        return -float(np.linalg.norm(achieved - desired))

    def compute_terminated(self, achieved: Any, desired: Any, info: Any) -> bool:
        return bool(np.linalg.norm(achieved - desired) < 0.4)

    def step(self, action: Any) -> Any:
        observation, _, _, truncated, info = super().step(action)
        functions = (self.compute_reward, self.compute_terminated)
        reward, terminated = (function(observation["achieved_goal"], self.goal, info) for function in functions)
        return observation, reward, terminated, truncated, info


class Batched(Dense):
    """The same environment with a reward function for many steps."""

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return -np.linalg.norm(achieved - desired, axis=-1)


class Endless(Reach):
    """Environment without a reward function. Its termination does not depend on the goal."""

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        raise NotImplementedError

    def compute_terminated(self, achieved: Any, desired: Any, info: Any) -> bool:
        return False


class Costly(Batched):
    """Environment with an action cost in its reward. With ``shows``, the cost is also in the observation."""

    def __init__(self, shows: bool = True) -> None:
        super().__init__()
        if shows:
            cost = gym.spaces.Box(0, np.inf, (1,), np.float64)
            self.observation_space = gym.spaces.Dict({**self.observation_space.spaces, "cost": cost})
        self.shows, self.cost = shows, np.zeros(1)

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return super().compute_reward(achieved, desired, info) - np.asarray(info["cost"])[..., 0]

    def step(self, action: Any) -> Any:
        self.cost = np.abs(np.asarray(action, np.float64)).sum(keepdims=True)
        observation, _, _, truncated, info = Reach.step(self, action)
        goals = observation["achieved_goal"], self.goal
        reward = float(self.compute_reward(*goals, info | {"cost": self.cost}))
        return observation, reward, self.compute_terminated(*goals, info), truncated, info

    def seen(self) -> dict[str, Any]:
        return {**super().seen(), **({"cost": self.cost.copy()} if self.shows else {})}


class Heavy(Batched):
    """Simulator that can be neither copied nor pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError

    def __reduce__(self) -> Any:
        raise AssertionError


def random_steps(env: Any, frames: int = 200) -> TensorDict:
    """Return random steps of an environment."""
    collector = GymnasiumCollector(env, num_envs=2, frames_per_batch=frames, seed=0)
    steps = collector.rollout()
    collector.shutdown()
    return steps


def stored(env: Any, sampler: Any = None, *, goal_env: Any = None, **options: Any) -> ExperienceBuffer:
    """Return a buffer that relabels all steps with the goal functions of ``goal_env``."""
    buffer = ring(1000, 2, sampler, transform=HindsightRelabel(1.0, **options))
    buffer.extend(random_steps(env))
    if goal_env is not None:
        set_goal_functions(buffer.transform, EnvironmentGoals(goal_env))
    return buffer


def is_near(achieved: torch.Tensor, desired: torch.Tensor, info: Any) -> torch.Tensor:
    return (achieved - desired).norm(dim=-1) < 0.4


def check_against(env: Any, batch: Any, terminates: bool = False) -> None:
    """Compare the rewards and, on request, the terminations of a batch with the environment's functions."""
    next_data, goal = batch["next"], batch["desired_goal"].numpy()
    for row, achieved in enumerate(next_data["achieved_goal"].numpy()):
        expected = env.get_wrapper_attr("compute_reward")(achieved, goal[row], {})
        assert next_data["reward"][row].item() == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        if terminates:
            assert bool(next_data["terminated"][row]) == env.get_wrapper_attr("compute_terminated")(
                achieved, goal[row], {}
            )


ROBOTS = {
    "PointMaze_UMaze-v3": {},
    "PointMaze_UMazeDense-v3": {"continuing_task": False},
    "AntMaze_UMaze-v5": {},
    "FetchReachDense-v4": {},
    "FetchReach-v4": {},
    "HandReach-v3": {},
    "HandReachDense-v3": {},
}


@pytest.mark.parametrize("name", ROBOTS)
def test_robotics_rewards_equal_the_environment(name: str) -> None:
    need_extra("robotics")
    recipe = EnvironmentRecipe(f"gymnasium_robotics:{name}", ROBOTS[name], time_limit=20)
    check_against(
        recipe(), stored(recipe, goal_env=recipe).sample(100), terminates=not ROBOTS[name].get("continuing_task", True)
    )


@pytest.mark.parametrize("env", [Dense, Batched])
@pytest.mark.parametrize("source", ["by the DataModule", "by a method", "by TorchRL's"])
def test_environment_functions_are_used(env: type[Dense], source: str) -> None:
    instance = env()
    if source == "by a method":
        buffer = stored(env, compute_reward=instance.compute_reward, compute_terminated=instance.compute_terminated)
    else:
        buffer = stored(env, goal_env=env if source == "by the DataModule" else partial(GymWrapper, instance))
    batch = buffer.sample(300)
    check_against(instance, batch, terminates=True)
    assert 0 < batch["next", "terminated"].sum() < 300
    truncated = batch["next", "truncated"]
    assert torch.equal(batch["next", "done"], batch["next", "terminated"] | truncated)


@pytest.mark.parametrize("env", [Dense, Costly])
@pytest.mark.parametrize("sampler", [None, partial(SequenceSampler, 3, episode_ends="inside")])
def test_windows_pass_observation_entries_as_info(sampler: Any, env: type[Dense]) -> None:
    batch = stored(env, sampler and sampler(), goal_env=env).sample(20)
    assert batch.shape == ((20, 3) if sampler else (20,))
    distance = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True)
    cost = batch["next", "cost"] if env is Costly else 0.0
    assert torch.allclose(batch["next", "reward"], -(distance + cost).float())


def test_missing_info_entry_is_rejected() -> None:
    hidden = partial(Costly, shows=False)
    with pytest.raises(ValueError, match=r"info\['cost'\]"):
        stored(hidden, goal_env=hidden).sample(10)


def test_wrapper_functions_replace_the_environment() -> None:
    class Doubled(gym.Wrapper[Any, Any, Any, Any]):
        def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
            return 2 * self.env.unwrapped.compute_reward(achieved, desired, info)

        def step(self, action: Any) -> Any:
            seen, reward, *rest = self.env.step(action)
            return seen, 2 * reward, *rest

    recipe = EnvironmentRecipe(Batched, wrappers=[Doubled])
    check_against(recipe(), stored(recipe, goal_env=recipe).sample(50))


def test_vectorised_method_is_called_once() -> None:
    calls = []

    class Counted(Batched):
        def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
            if isinstance(achieved, np.ndarray):
                calls.append(achieved.shape)
            return super().compute_reward(achieved, desired, info)

    buffer = stored(Counted, goal_env=Counted, compute_terminated=is_near)
    calls.clear()
    for _ in range(20):
        buffer.sample(64)
    assert calls.count((64, 2)) == 20 + 5  # batches 1, 2, 4, 8 and 16 also compare their stored steps
    assert len(calls) == 25 + 17  # single steps, and the small batches that prove that the function accepts many steps


def test_entries_independent_of_goals_stay_unchanged() -> None:
    buffer = stored(Endless, goal_env=Endless)
    batch = buffer.sample(50)
    assert torch.equal(batch["next", "done"], buffer.storage.get(batch["index"])["next", "done"])
    near = (batch["next", "achieved_goal"] - batch["desired_goal"]).norm(dim=-1, keepdim=True) < 0.05
    assert torch.equal(batch["next", "reward"], near.float() - 1)


@pytest.mark.parametrize("env", [Dense, Batched])
def test_reward_that_differs_from_the_stored_one_is_rejected(env: type[Dense]) -> None:
    with pytest.raises(ValueError, match=r"compute_reward.*-0\.\d+.*-1\."):
        stored(env).sample(10)
    buffer = stored(Batched, goal_env=Batched, compute_terminated=lambda achieved, *_: torch.ones(len(achieved)))
    with pytest.raises(ValueError, match=r"compute_terminated.*0.*1"):
        buffer.sample(10)


def test_simulator_is_not_copied_or_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        gym.registry, "Heavy-v0", gym.envs.registration.EnvSpec("Heavy-v0", Heavy, disable_env_checker=True)
    )
    env = gym.make("Heavy-v0")
    with_function = stored(Heavy, compute_reward=env.unwrapped.compute_reward)
    with_environment = stored(Heavy, goal_env="Heavy-v0", compute_terminated=is_near)
    for buffer in (with_function, with_environment):
        buffer.sample(10)
        copy.deepcopy(buffer.transform)
        assert b"Heavy" not in pickle.dumps(buffer.state_dict())
    again = pickle.loads(pickle.dumps(with_function.transform[0]))
    restored = ring(1000, 2, transform=again.clone())
    restored.load_state_dict(with_function.state_dict())
    check_against(Batched(), restored.sample(50))


def test_run_uses_its_environment_functions() -> None:
    data = ReplayDataModule(
        EnvironmentRecipe(Batched), buffer=partial(ExperienceBuffer, transform=HindsightRelabel(1.0)), num_envs=2
    )
    data.setup("fit")
    data.buffer.extend(random_steps(Batched))
    for _ in range(2):
        check_against(Batched(), data.buffer.sample(40), terminates=True)
        data.close()


def test_return_of_a_relabelled_step_is_the_default() -> None:
    buffer = EpisodicReplayBuffer(
        None, 2, transform=HindsightRelabel(0.5), record_episodic_return=True, default_return=-77.0, max_length=32
    )
    buffer.extend(random_steps(Reach, 40))
    batch = buffer.sample(200)
    relabelled = (batch["desired_goal"] != buffer.storage.get(batch["index"])["desired_goal"]).any(-1)
    returns = batch["discounted_return"].squeeze(-1)
    assert (returns[relabelled] == -77).all()
    stored_returns = buffer.storage.get(batch["index"])["discounted_return"].squeeze(-1)
    assert torch.equal(returns[~relabelled], stored_returns[~relabelled])


@pytest.mark.parametrize("batch_length", [1, 2])
def test_time_steps_terminate_at_their_goals(batch_length: int) -> None:
    step_types = torch.tensor([FIRST, MID, MID, LAST, FIRST, MID, LAST, FIRST, MID])
    position = torch.arange(9.0).unsqueeze(-1)
    row = {"step_type": step_types, "discount": torch.ones(9), "reward": -torch.ones(9)}
    row["discount"][3] = 0.0  # terminated at its own goal; the next episode is cut
    row["reward"][3] = row["reward"][[0, 4, 7]] = 0.0
    goal = torch.full_like(position, -5.0)
    goal[:4] = 3.0
    steps = TensorDict({**row, "achieved_goal": position, "desired_goal": goal}, [9])
    transform = HindsightRelabel(1.0, compute_terminated=lambda achieved, desired, info: achieved == desired)
    buffer = EpisodicReplayBuffer(steps[0], 1, transform=transform, max_length=16)
    for step in steps:
        buffer.add_batch(step.unsqueeze(0))
    if batch_length == 1:
        batch = buffer.sample(300)
        cells = batch["index"]
    else:
        batch, _ = buffer.get_batch(300, batch_length)
        is_one_episode = batch["step_type"][:, 0] != LAST
        batch, cells = batch[is_one_episode][:, -1], batch["index"][is_one_episode][:, -1]
    step_type, discount = batch["step_type"], batch["discount"]
    is_at_goal, is_first = (batch["achieved_goal"] == batch["desired_goal"]).squeeze(-1), step_types[cells] == FIRST
    assert torch.equal(step_type == FIRST, is_first)
    assert torch.equal(discount == 0, is_at_goal & ~is_first)
    cut = cells == 6
    assert torch.equal(step_type == LAST, (is_at_goal & ~is_first) | cut)
    assert torch.equal(batch["reward"] == 0, is_at_goal)
    assert (is_at_goal & ~is_first).any()
    assert not is_at_goal.all()


class CarelessGoals:
    """Goal functions that overwrite their arguments and return the same memory each time."""

    def __init__(self, takes_many: bool) -> None:
        self.takes_many, self.rewards = takes_many, np.zeros(100)

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        if not self.takes_many and achieved.ndim > 1:
            raise TypeError("one step at a time")
        reward = np.abs(achieved - desired).sum(-1) + info["speed"].sum(-1)
        achieved[...], desired[...], info["speed"][...] = 77, -77, 7
        if achieved.ndim == 1:
            return reward
        self.rewards[...] = np.nan
        self.rewards[: len(reward)] = reward
        return self.rewards[: len(reward)]


@pytest.mark.parametrize("takes_many", [True, False])
@pytest.mark.parametrize("shape", [(40,), (8, 5), (1,)])
def test_environment_that_overwrites_goals_does_not_change_stored_steps(shape, takes_many) -> None:
    draw = torch.Generator().manual_seed(0)
    achieved, desired, speed = (torch.rand(*shape, 2, generator=draw, dtype=torch.float64) for _ in range(3))
    originals = achieved.clone(), desired.clone(), speed.clone()
    function = EnvironmentFunction(CarelessGoals(takes_many).compute_reward)
    for _ in range(3):
        rewards = function(achieved, desired, {"speed": speed}.get, len(shape)).clone()
        torch.testing.assert_close(rewards, (originals[0] - originals[1]).abs().sum(-1) + originals[2].sum(-1))
    for value, original in zip((achieved, desired, speed), originals, strict=True):
        assert torch.equal(value, original)
