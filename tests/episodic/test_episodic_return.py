"""Returns written at the ends of episodes equal ALF's recorded returns and a brute-force twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from kit.golden import arrays
from torchrl_lightning.episodic import EpisodicReturn
from torchrl_lightning.episodic.time_steps import FIRST, LAST, TIME_STEPS, TRANSITIONS, StepLayout
from torchrl_lightning.replay import ExperienceBuffer, RingStorage, RingWriter

DEFAULT = -1000.0


def build(num_envs: int, length: int, layout: StepLayout = TRANSITIONS) -> ExperienceBuffer:
    return ExperienceBuffer(storage=RingStorage(num_envs * length), writer=layout.writer(num_envs, track_episodes=True))


def time_steps(step_type: np.ndarray, reward: np.ndarray, discount: np.ndarray) -> TensorDict:
    columns = {"step_type": step_type, "reward": reward, "discount": discount}
    return TensorDict({name: torch.from_numpy(column) for name, column in columns.items()}, [len(step_type)])


def stored(buffer: ExperienceBuffer, env: int) -> list[float]:
    writer = buffer.writer
    position = torch.arange(int(writer.oldest[env]), int(writer.positions[env]))
    returns: list[float] = buffer.storage.get(writer.cell(env, position))["discounted_return"].flatten().tolist()
    return returns


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("at_once", [1, 7])
def test_returns_equal_golden_values(case: int, at_once: int) -> None:
    data = arrays("alf_episodic_returns", f"c{case}_")
    clip = None if np.isnan(data["clip"]).any() else tuple(data["clip"].tolist())
    num_envs = data["step_type"].shape[1]
    buffer = build(num_envs, int(data["max_length"]), TIME_STEPS)
    returns = EpisodicReturn(
        buffer.storage, gamma=float(data["gamma"]), reward_clip=clip, default_return=DEFAULT, layout=TIME_STEPS
    )
    columns = [data[name] for name in ("step_type", "reward", "discount")]
    for last in range(at_once - 1, len(columns[0]), at_once):
        rows = time_steps(*(column[last + 1 - at_once : last + 1].reshape(-1) for column in columns))
        buffer.extend(returns.with_default(rows).view(at_once, num_envs), time_dim=0)
        for env in range(num_envs):
            stored_returns = stored(buffer, env)
            np.testing.assert_allclose(
                stored_returns, data["returns"][last, env, : len(stored_returns)], rtol=1e-5, atol=1e-5
            )


class Twin:
    """All written steps as lists, and their returns from the definition, with the values of last successors."""

    def __init__(
        self, num_envs: int, length: int, gamma: float, clip: tuple[float, float] | None, bootstraps: bool
    ) -> None:
        self.length, self.gamma, self.clip, self.bootstraps = length, gamma, clip, bootstraps
        # reward, done, terminated, init and value of the successor of each step
        self.steps: list[list[tuple[float, bool, bool, bool, float]]] = [[] for _ in range(num_envs)]

    def of(self, env: int) -> list[float]:
        steps = self.steps[env]
        return [self._of(steps, t) for t in range(max(0, len(steps) - self.length), len(steps))]

    def _of(self, steps: list[tuple[float, bool, bool, bool, float]], start: int) -> float:
        end = start
        while not steps[end][1]:  # find the step with the done flag
            end += 1
            if end == len(steps) or steps[end][3]:
                return DEFAULT
        total, factor = 0.0, 1.0
        for t in range(start, end + 1):
            reward, _, terminated, _, value = steps[t]
            total += factor * (reward if self.clip is None else min(max(reward, self.clip[0]), self.clip[1]))
            factor *= self.gamma
            if terminated:
                return total
        return total + factor * value if self.bootstraps else DEFAULT


class Critic:
    """Critic that returns the observation as the value."""

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        return data.set("state_value", data["observation"])


rows_of = st.tuples(
    st.floats(-2, 2, width=32), st.sampled_from([False, False, True]), st.booleans(),
    st.sampled_from([False] * 4 + [True]), st.floats(-2, 2, width=32),
)  # fmt: skip


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, int, list[tuple[list[int] | None, list[list[tuple]]]]]:
    num_envs, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    ids = st.none() | st.lists(st.integers(0, num_envs - 1), min_size=1, max_size=num_envs, unique=True)
    plan = []
    for env_ids in draw(st.lists(ids, min_size=1, max_size=10)):
        width = num_envs if env_ids is None else len(env_ids)
        step = st.lists(rows_of, min_size=width, max_size=width)
        plan.append((env_ids, draw(st.lists(step, min_size=1, max_size=8))))
    return num_envs, length, plan


def transitions(steps: list[tuple]) -> TensorDict:
    reward, done, terminated, init, value = (torch.tensor(column).unsqueeze(-1) for column in zip(*steps, strict=True))
    following = {"reward": reward, "done": done, "terminated": terminated, "observation": value}
    return TensorDict({"is_init": init, "next": following}, [len(steps)])


@settings(max_examples=60, deadline=None)
@given(
    plan=writes(),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    clip=st.sampled_from([None, (-0.5, 1.0)]),
    bootstraps=st.booleans(),
)
def test_returns_equal_plain_loops(
    plan: tuple, gamma: float, clip: tuple[float, float] | None, bootstraps: bool
) -> None:
    num_envs, length, calls = plan
    twin = Twin(num_envs, length, gamma, clip, bootstraps)
    buffer = build(num_envs, length)
    critic = Critic() if bootstraps else None  # without a critic, compiled code computes the returns
    returns = EpisodicReturn(buffer.storage, gamma=gamma, reward_clip=clip, critic=critic)
    for env_ids, steps in calls:
        rows = transitions([row for step in steps for row in step])
        for step in steps:
            for env, row in zip(range(num_envs) if env_ids is None else env_ids, step, strict=True):
                twin.steps[env].append(row)
        width = num_envs if env_ids is None else len(env_ids)
        ids = None if env_ids is None else torch.tensor(env_ids)
        buffer.extend(returns.with_default(rows).view(-1, width), ids, time_dim=0)
        for env in range(num_envs):
            np.testing.assert_allclose(stored(buffer, env), twin.of(env), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_termination_within_an_episode_starts_the_next_life(dtype: torch.dtype) -> None:
    # In ALF, the zero discount of this step also multiplies the rewards of the next life.
    kind, discount = np.array([FIRST, 1, 1, 1, LAST]), np.array([1, 1, 0, 1, 0], np.float32)
    buffer = build(1, 8, TIME_STEPS)
    returns = EpisodicReturn(buffer.storage, gamma=0.5, layout=TIME_STEPS)
    steps = time_steps(kind, np.array([9, 1, 2, 4, 8], np.float32), discount)
    buffer.extend(returns.with_default(steps.set("discount", steps["discount"].to(dtype))))
    assert stored(buffer, 0) == [1 + 0.5 * 2, 2, 4 + 0.5 * 8, 8, DEFAULT]


def test_returns_of_vector_and_integer_rewards() -> None:
    buffer = build(1, 8)
    returns = EpisodicReturn(buffer.storage, gamma=0.5)
    end = torch.tensor([[False], [True]])
    rows = TensorDict({"next": {"reward": torch.tensor([[1, 10], [2, 20]]), "done": end, "terminated": end}}, [2])
    buffer.extend(returns.with_default(rows))
    assert buffer[:]["discounted_return"].tolist() == [[2, 20], [2, 20]]
    assert "discounted_return" not in rows.keys()  # noqa: SIM118  # of a TensorDict


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ValueError, match="keep_episodic_info"):
        EpisodicReturn(RingStorage(4))
    for track in (None, False):
        buffer = ExperienceBuffer(storage=RingStorage(4), writer=RingWriter(track_episodes=track))
        with pytest.raises(ValueError, match="track_episodes=True"):
            EpisodicReturn(buffer.storage)
    buffer = build(1, 4)
    for options, says in (
        ({"gamma": 1.1}, "gamma must be between 0 and 1, got 1.1"),
        ({"reward_clip": (1, -1)}, r"reward_clip must be \(lowest, highest\)"),
        ({"reward_clip": (1,)}, r"got \(1,\)"),
    ):
        with pytest.raises(ValueError, match=says):
            EpisodicReturn(buffer.storage, **options)
    returns = EpisodicReturn(buffer.storage)
    rows = transitions([(1.0, True, True, False, 0.0)])
    for key in (("next", "reward"), ("next", "terminated")):
        with pytest.raises(KeyError, match=key[1]):
            returns.with_default(rows.exclude(key))


def test_returns_of_an_ended_episode_are_not_written_into_removed_steps() -> None:
    buffer = build(2, 8)
    returns = EpisodicReturn(buffer.storage, gamma=0.5)
    for end in (False, False, False, True):
        if end:
            buffer.writer.drop(1, torch.tensor([1]))
        rows = transitions([(1.0, end, end, False, 0.0)] * 2)
        buffer.extend(returns.with_default(rows).view(1, 2), time_dim=0)
    assert stored(buffer, 0) == [1.875, 1.75, 1.5, 1.0]
    assert stored(buffer, 1) == [1.75, 1.5, 1.0]
    (_, cells), *_ = buffer.storage.leaves("discounted_return")
    assert float(cells[1]) == DEFAULT


def test_returns_of_an_overwritten_beginning_are_not_written_into_later_steps() -> None:
    buffer = build(1, 3)
    returns = EpisodicReturn(buffer.storage, gamma=0.5)
    ends = [False, False, False, True, False, False]
    rows = transitions([(1.0, end, end, False, 0.0) for end in ends])
    buffer.extend(returns.with_default(rows[:2]))
    buffer.extend(returns.with_default(rows[2:]))
    assert stored(buffer, 0) == [1.0, DEFAULT, DEFAULT]
