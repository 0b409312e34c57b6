"""Hindsight with scalar goals, and with goals that only a given reward function can compare."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kit.goals import Reach
from kit.rings import ring
from torchrl_lightning import (
    EnvironmentRecipe,
    EpisodicReplayBuffer,
    ExperienceBuffer,
    GymnasiumCollector,
    HindsightRelabel,
    MixedReplay,
    ReplayDataModule,
    SequenceSampler,
)
from torchrl_lightning._core.errors import IncompatibleError

WINDOWS = partial(SequenceSampler, 3, episode_ends="inside")
STEPS = 12
UNREACHED = 99


def number(shape: list[int], dtype: torch.dtype) -> Any:
    return lambda position: position.view(-1, *shape).to(dtype)


NUMBERS = {
    f"{str(dtype).removeprefix('torch.')} {shape}": number(shape, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    for shape in ([], [1])
}
OTHERS: dict[str, Any] = {
    "integers": lambda position: position.view(-1, 1).repeat(1, 2).long(),
    "bytes": lambda position: position.view(-1, 1).repeat(1, 3).to(torch.uint8),
    "flags": lambda position: torch.stack([position > 7, position == UNREACHED], -1),
    "images": lambda position: position.view(-1, 1, 1, 1).repeat(1, 1, 6, 6).to(torch.uint8),
    "floating-point images": lambda position: position.view(-1, 1, 1, 1).repeat(1, 1, 6, 6).float(),
    "matrices": lambda position: position.view(-1, 1, 1).repeat(1, 2, 2).float(),
    "nested": lambda position: TensorDict({"x": position.view(-1, 1).float()}, [len(position)]),
    "nested twice": lambda position: TensorDict(
        {"a": {"x": position.view(-1, 1).float()}, "b": position}, [len(position)]
    ),
}


def walk(make: Any, lengths: tuple[int, ...] = (5, STEPS - 5), envs: int = 1) -> TensorDict:
    """Return time-major steps. Their goals are made of places that count up."""
    position = torch.arange(sum(lengths)).double().repeat_interleave(envs)
    goal, end = make(torch.full_like(position, UNREACHED)), torch.zeros(len(position), 1, dtype=torch.bool)
    for last in np.cumsum(lengths):
        end[(last - 1) * envs : last * envs] = True
    after = {"achieved_goal": make(position + 1), "desired_goal": goal.clone(), "reward": -torch.ones(len(position), 1)}
    after |= {"done": end, "terminated": torch.zeros_like(end), "place": position + 1}
    steps = TensorDict(
        {"achieved_goal": make(position), "desired_goal": goal, "place": position, "next": after}, [len(position)]
    )
    if envs == 1:
        return steps
    steps = steps.view(-1, envs)
    steps.names = ["time", None]
    return steps


def buffer_of(make: Any, sampler: Any = None, envs: int = 1, n_steps: int = 1, **options: Any) -> ExperienceBuffer:
    transform = HindsightRelabel(1.0, **options)
    return ring(32, envs, sampler, transform=transform, data=walk(make, envs=envs), n_steps=n_steps)


def places(goals: Any) -> torch.Tensor:
    """Return the place from which each goal was made, ``[n]``."""
    while isinstance(goals, TensorDict):
        goals = next(iter(goals.values()))
    return goals.double().reshape(len(goals), -1)[:, 0]


def first_leaf(goals: Any) -> torch.Tensor:
    leaf = next(iter(goals.values(True, True))) if isinstance(goals, TensorDict) else goals
    return leaf.double()


def same(achieved: Any, desired: Any, info: Any) -> torch.Tensor:
    """Return 0 at the goal and -1 elsewhere, for goals of any kind ``[n, ...]`` or ``[n, T, ...]``."""
    steps = info["place"].shape
    equal = first_leaf(achieved) == first_leaf(desired)
    return equal.reshape(*steps, -1).all(-1).float() - 1


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("sampler", [None, WINDOWS])
@pytest.mark.parametrize(
    ("envs", "n_steps", "skip_reached"), [(1, 1, False), (2, 1, True), (2, 3, False), (1, 3, True)]
)
def test_single_numbers_are_relabelled_by_the_default_reward(kind, sampler, envs, n_steps, skip_reached) -> None:
    make = NUMBERS[kind]
    batch = buffer_of(make, sampler, envs, n_steps, skip_reached=skip_reached).sample(60).flatten()
    goal, cell = places(batch["desired_goal"]), batch["index"] // envs
    relabelled = goal != UNREACHED
    assert relabelled.all() or skip_reached
    assert relabelled.any()
    assert torch.equal(batch["next", "desired_goal"], batch["desired_goal"])
    assert batch["desired_goal"].shape[1:] == make(torch.zeros(1)).shape[1:]
    end = torch.where(cell < 5, 5, STEPS)
    for row in range(len(batch)):
        reached = torch.arange(int(cell[row]) + 1, min(int(cell[row]) + n_steps, int(end[row])) + 1)
        reward = sum(0.99**k * (float(position == goal[row]) - 1) for k, position in enumerate(reached))
        assert float(batch["next", "reward"][row]) == pytest.approx(reward)
        assert goal[row] in (UNREACHED, *range(int(cell[row]) + 1, int(end[row]) + 1))


def test_number_and_vector_of_one_are_compared() -> None:
    data = walk(NUMBERS["float32 []"])
    data["desired_goal"], data["next", "desired_goal"] = (data["desired_goal"].unsqueeze(1) for _ in range(2))
    batch = ring(32, transform=HindsightRelabel(1.0), data=data).sample(60)
    assert batch["desired_goal"].shape == (60, 1)
    reached = batch["desired_goal"].squeeze(1) == batch["next", "achieved_goal"]
    assert torch.equal(batch["next", "reward"].squeeze(1), reached.float() - 1)
    assert reached.any()


@pytest.mark.parametrize("kind", ["float32 []", "float32 [1]", "int64 []"])
@pytest.mark.parametrize("batch_length", [1, 2])
def test_time_steps_with_single_numbers_are_relabelled(kind: str, batch_length: int) -> None:
    make, step_types = NUMBERS[kind], torch.tensor([0, 1, 1, 2, 0, 1, 2, 0, 1])
    position = torch.arange(9.0).double()
    row = {"step_type": step_types, "discount": torch.ones(9), "reward": -torch.ones(9)}
    row["reward"][[0, 4, 7]] = 0.0
    goals = {"achieved_goal": make(position), "desired_goal": make(torch.full_like(position, UNREACHED))}
    steps = TensorDict({**row, **goals}, [9])
    buffer = EpisodicReplayBuffer(steps[0], 1, transform=HindsightRelabel(1.0), max_length=16)
    for step in steps:
        buffer.add_batch(step.unsqueeze(0))
    batch = buffer.sample(300) if batch_length == 1 else buffer.get_batch(300, batch_length)[0]
    is_unchanged = batch["desired_goal"].reshape(300, -1) == UNREACHED
    relabelled = batch[~is_unchanged.any(1)].flatten()
    reached = places(relabelled["achieved_goal"]) == places(relabelled["desired_goal"])
    assert torch.equal(relabelled["reward"] == 0, reached)
    assert reached.any()


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("sampler", "n_steps"), [(None, 1), (WINDOWS, 1), (None, 3)])
def test_unsupported_goals_raise_an_error_and_change_nothing(kind: str, sampler: Any, n_steps: int) -> None:
    buffer = buffer_of(OTHERS[kind], sampler, n_steps=n_steps)
    stored = buffer.storage.get(torch.arange(STEPS)).clone()
    for _ in range(3):
        with pytest.raises(ValueError, match=r"goals.*compute_reward=") as caught:
            buffer.sample(60)
        assert "\n" not in str(caught.value)
    assert (buffer.storage.get(torch.arange(STEPS)) == stored).all()
    batch = buffer.storage.get(torch.arange(4)).set("index", torch.arange(4))
    before = batch.clone()
    with pytest.raises(ValueError, match="compute_reward="):
        buffer.transform[0](batch)
    assert (batch == before).all()


@pytest.mark.parametrize("kind", [*OTHERS, "float32 []", "int64 [1]"])
@pytest.mark.parametrize(("sampler", "n_steps"), [(None, 1), (WINDOWS, 1), (WINDOWS, 3)])
def test_compute_reward_compares_goals_of_any_kind(kind: str, sampler: Any, n_steps: int) -> None:
    make = (OTHERS | NUMBERS)[kind]
    buffer = buffer_of(make, sampler, n_steps=n_steps, compute_reward=same, skip_reached=n_steps == 3)
    stored = buffer.storage.get(torch.arange(STEPS)).clone()
    batch = buffer.sample(60).flatten()
    goal = places(batch["desired_goal"])
    assert kind == "flags" or (goal != UNREACHED).any()
    if n_steps == 1:
        equal = first_leaf(batch["next", "achieved_goal"]) == first_leaf(batch["desired_goal"])
        assert torch.equal(batch["next", "reward"].squeeze(-1), equal.reshape(len(batch), -1).all(-1).float() - 1)
    assert torch.equal(first_leaf(batch["next", "desired_goal"]), first_leaf(batch["desired_goal"]))
    assert (buffer.storage.get(torch.arange(STEPS)) == stored).all()


def test_goal_function_converts_images_to_numbers() -> None:
    def brightness(image: torch.Tensor) -> torch.Tensor:
        return image.double().flatten(-3).mean(-1)

    data = walk(OTHERS["images"])
    data["desired_goal"], data["next", "desired_goal"] = (brightness(data["desired_goal"]) for _ in range(2))
    buffer = ring(32, transform=HindsightRelabel(1.0, goal=brightness), data=data)
    batch = buffer.sample(60)
    reached = batch["desired_goal"] == brightness(batch["next", "achieved_goal"])
    assert torch.equal(batch["next", "reward"].squeeze(1), reached.float() - 1)


@pytest.mark.parametrize(
    "goal", [lambda position: position.long().repeat(1, 2), lambda position: position.view(-1, 1, 1)]
)
def test_goal_function_with_unsupported_result_is_rejected(goal: Any) -> None:
    buffer = buffer_of(NUMBERS["float32 [1]"], goal=goal)
    with pytest.raises(ValueError, match=r"goals.*compute_reward="):
        buffer.sample(60)


def test_her_proportion_zero_accepts_any_goals() -> None:
    buffer = ring(32, transform=HindsightRelabel(0.0), data=walk(OTHERS["images"]))
    assert (buffer.sample(60)["desired_goal"] == UNREACHED).all()


# ---------------------------------------------------------------------- environments

SPACES: dict[str, gym.Space[Any]] = {
    "integers": gym.spaces.MultiDiscrete([9, 9]),
    "images": gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
    "matrices": gym.spaces.Box(-1, 1, (2, 2), np.float32),
    "nested": gym.spaces.Dict({"x": gym.spaces.Box(-1, 1, (2,), np.float32)}),
    "number": gym.spaces.Box(-1, 1, (), np.float64),
    "vector of one": gym.spaces.Box(-1, 1, (1,), np.float32),
    "choice": gym.spaces.Discrete(9),
}
TAKEN = ["number", "vector of one", "choice"]


class Shows(gym.Env[dict[str, Any], Any]):
    """Environment with random goals from a space. Its episodes have 6 steps and miss every goal."""

    def __init__(self, kind: str) -> None:
        space = SPACES[kind]
        goals = {"achieved_goal": space, "desired_goal": space}
        self.observation_space = gym.spaces.Dict({"observation": gym.spaces.Box(-1, 1, (2,), np.float32), **goals})
        self.action_space, self.t = gym.spaces.Discrete(2), 0
        for seed, entry in enumerate(self.observation_space.values()):
            entry.seed(seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        seen = self.observation_space.sample()
        return seen, reward_of(seen["achieved_goal"], seen["desired_goal"], {}), False, self.t == 6, {}


def reward_of(achieved: Any, desired: Any, info: Any) -> float:
    achieved, desired = (goal["x"] if isinstance(goal, dict) else np.asarray(goal) for goal in (achieved, desired))
    return float(np.array_equal(achieved, desired)) - 1


class Rewards(Shows):
    """Environment with its own reward function for all kinds of goals."""

    compute_reward = staticmethod(reward_of)


def module(env: Any, mixes: bool = False, **options: Any) -> ReplayDataModule:
    def hindsight(num_envs: int) -> ExperienceBuffer:
        return ExperienceBuffer(num_envs=num_envs, transform=HindsightRelabel(1.0, **options))

    if not mixes:
        return ReplayDataModule(EnvironmentRecipe(env), buffer=hindsight, num_envs=2)

    def source(buffer: ExperienceBuffer) -> MixedReplay:
        return MixedReplay(buffer, [hindsight(2)], [0.5, 0.5])

    return ReplayDataModule(EnvironmentRecipe(env), buffer=ExperienceBuffer, source=source, num_envs=2)


def source_of(data: ReplayDataModule) -> Any:
    """Return the source of a run's batches."""
    return data._source


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("mixes", [False, True])
def test_run_with_unsupported_goals_is_rejected_before_it_starts(kind: str, mixes: bool) -> None:
    data = module(partial(Shows, kind), mixes)
    if kind in TAKEN:
        list(data.check_fit())
        data.setup("fit")
    else:
        with pytest.raises(IncompatibleError, match=r"goals.*compute_reward="):
            list(data.check_fit())
        with pytest.raises(IncompatibleError, match="compute_reward="):
            data.setup("fit")
    data.close()


def same_of_spaces(achieved: Any, desired: Any, info: Any) -> torch.Tensor:
    equal = first_leaf(achieved) == first_leaf(desired)
    return equal.reshape(len(equal), -1).all(-1).float() - 1


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize(("mixes", "given"), [(False, False), (True, False), (False, True)])
def test_run_with_compute_reward_accepts_goals_of_any_kind(kind: str, mixes: bool, given: bool) -> None:
    options = {"compute_reward": same_of_spaces} if given else {}
    data = module(partial(Shows if given else Rewards, kind), mixes, **options)
    list(data.check_fit())
    data.setup("fit")
    for buffer in source_of(data).buffers if mixes else [data.buffer]:
        buffer.extend(played(partial(Shows, kind)))
    batch = source_of(data).draw(40)
    assert batch["next", "reward"].min() == -1
    assert batch["next", "reward"].max() == 0
    data.close()


def played(env: Any) -> TensorDict:
    collector = GymnasiumCollector(env, num_envs=2, frames_per_batch=48, seed=0)
    steps = collector.rollout()
    collector.shutdown()
    return steps


# ---------------------------------------------------------------------- rewards without effect


def hidden(achieved: Any, desired: Any, info: Any) -> torch.Tensor:
    """Return a reward for a goal that relabelling does not replace."""
    return -((info["place"] - UNREACHED).abs() > 0.05).float()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "no reward has changed" in record.getMessage()]


@pytest.mark.parametrize("sampler", [None, WINDOWS])
@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_reward_unchanged_by_goals_is_reported_once(sampler, envs, n_steps, caplog) -> None:
    buffer = buffer_of(NUMBERS["float32 [1]"], sampler, envs, n_steps, compute_reward=hidden)
    size = 30 if sampler is None else 10 * 3
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            buffer.sample(size)
        assert not warnings_of(caplog)
        for _ in range(200):
            buffer.sample(size)
    (message,) = warnings_of(caplog)
    assert "compute_reward=" in message
    assert "1000" in message
    assert "desired_goal" in message


def test_warning_is_logged_with_the_thousandth_row(caplog) -> None:
    buffer = buffer_of(NUMBERS["float32 [1]"], compute_reward=hidden)
    with caplog.at_level(logging.WARNING):
        buffer.sample(999)
        assert not warnings_of(caplog)
        buffer.sample(1)
    assert len(warnings_of(caplog)) == 1


def test_rows_with_an_equal_goal_do_not_count(caplog) -> None:
    data = walk(NUMBERS["float32 [1]"], (STEPS,))
    for key in ("desired_goal", ("next", "desired_goal")):
        data[key] = torch.full((STEPS, 1), float(STEPS))
    options = {"strategy": "final", "compute_reward": lambda achieved, desired, info: -torch.ones(len(achieved), 1)}
    buffer = ring(32, transform=HindsightRelabel(1.0, **options), data=data)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            buffer.sample(500)
    assert not warnings_of(caplog)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_reward_that_follows_goals_is_not_reported(scale, n_steps, caplog) -> None:
    def reward(achieved, desired, info):
        return scale * ((achieved - desired).abs() < 0.05).float() - 1

    buffer = buffer_of(NUMBERS["float32 [1]"], n_steps=n_steps, compute_reward=reward)
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            buffer.sample(60)
    assert not warnings_of(caplog)


class Secret(Reach):
    """Environment with rewards for a goal that only info contains. It reuses the memory of its rewards."""

    def __init__(self) -> None:
        super().__init__()
        position = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.observation_space = gym.spaces.Dict({**self.observation_space.spaces, "secret": position})
        self.rewards = np.zeros(4096)

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        if getattr(achieved, "ndim", 1) == 1:
            return -float(np.linalg.norm(achieved - info["secret"]))
        rewards = self.rewards[: len(achieved)]
        rewards[:] = -np.linalg.norm(achieved - info["secret"], axis=-1)
        return rewards

    def seen(self) -> dict[str, Any]:
        return {**super().seen(), "secret": self.goal.copy()}

    def step(self, action: Any) -> Any:
        seen, _, terminated, truncated, info = super().step(action)
        return seen, self.compute_reward(self.place, None, {"secret": self.goal}), terminated, truncated, info


class Open(Secret):
    """Environment with rewards for the replaced goal."""

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        return super().compute_reward(achieved, None, {"secret": info["secret"] if desired is None else desired})


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("env", [Secret, Open])
def test_run_reports_a_reward_that_ignores_relabelled_goals(env: Any, mixes: bool, caplog: Any) -> None:
    data = module(env, mixes)
    data.setup("fit")
    for buffer in source_of(data).buffers if mixes else [data.buffer]:
        buffer.extend(played(env))
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            source_of(data).draw(500)
    data.close()
    assert len(warnings_of(caplog)) == (env is Secret)


def test_first_time_step_reward_does_not_count_as_changed(caplog) -> None:
    kinds = torch.tensor([0, 1, 1, 2, 0, 1, 2])
    position = torch.arange(7.0)
    row = {"step_type": kinds, "discount": torch.ones(7), "reward": -(kinds != 0).float(), "place": position}
    steps = TensorDict({**row, "achieved_goal": position, "desired_goal": torch.full((7,), float(UNREACHED))}, [7])
    transform = HindsightRelabel(1.0, compute_reward=hidden)
    buffer = EpisodicReplayBuffer(steps[0], 1, transform=transform, max_length=16)
    for step in steps:
        buffer.add_batch(step.unsqueeze(0))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            buffer.sample(300)
    assert len(warnings_of(caplog)) == 1


def test_count_does_not_change_the_draws() -> None:
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    batches = []
    for reward, generator in zip((None, hidden), generators, strict=True):
        transform = HindsightRelabel(0.6, compute_reward=reward)
        buffer = ring(32, transform=transform, data=walk(NUMBERS["float32 [1]"]), generator=generator)
        batches.append([buffer.sample(60) for _ in range(5)])
    for default, counted in zip(*batches, strict=True):
        assert torch.equal(default["index"], counted["index"])
        assert torch.equal(default["desired_goal"], counted["desired_goal"])


def test_environment_functions_reach_all_buffers() -> None:
    data = module(Open, mixes=True)
    data.setup("fit")
    _, other = source_of(data).buffers
    other.extend(played(Open))
    batch = other.sample(30)
    expected = -torch.linalg.vector_norm(batch["next", "achieved_goal"] - batch["desired_goal"], dim=-1)
    torch.testing.assert_close(batch["next", "reward"].squeeze(-1), expected.float(), rtol=1e-4, atol=1e-5)
    data.close()
