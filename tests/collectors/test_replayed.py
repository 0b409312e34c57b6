"""Recorded steps take the place of those of environments that rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from tensordict import TensorDict

from kit.counting import CountingEnv, WholeResets, still_policy
from torchrl_lightning.collectors import GymnasiumCollector
from torchrl_lightning.environments import ReplayedRows, make_vector_env


class Demonstration:
    """Replays ``length`` recorded steps in one environment, from the ``start``-th episode that begins there."""

    def __init__(self, num_envs: int, env: int, start: int, length: int, stop: int = 100) -> None:
        self.num_envs, self.env, self.start, self.length, self.stop = num_envs, env, start, length, stop
        self.begun, self.t = 0, -1

    @property
    def playing(self) -> Any:
        return (np.arange(self.num_envs) == self.env) & (0 <= self.t < self.length)

    def __call__(self, starts: Any) -> ReplayedRows | None:
        if starts[self.env]:
            self.begun += 1
            self.t = 0 if self.begun == self.start else -1
        if not 0 <= self.t < self.stop:
            return None
        t, self.t = self.t, self.t + 1
        return ReplayedRows(
            mask=np.arange(self.num_envs) == self.env,
            observation={"observation": np.array([[50, 60, t]])},
            action=np.array([2]),
            next_observation={"observation": np.array([[50, 60, t + 1]])},
            reward=np.array([0.5 * t]),
            terminated=np.array([t == self.length - 1]),
            truncated=np.array([False]),
            serial=7,
        )


def collector(source: Any, steps: int = 12, env: Any = None, policy: Any = None, **kwargs: Any) -> GymnasiumCollector:
    env, policy = env or partial(CountingEnv, length=4), policy or still_policy()
    return GymnasiumCollector(env, policy, num_envs=3, frames_per_batch=3 * steps, replay=source, **kwargs)


def run(source: Any, **kwargs: Any) -> TensorDict:
    return collector(source, **kwargs).rollout()


def test_replayed_rows_replace_a_paused_environment() -> None:
    with_replay, without = run(Demonstration(3, env=1, start=2, length=5)), run(None)
    others = torch.tensor([0, 2])
    assert torch.equal(with_replay["observation"][others], without["observation"][others])
    row, plain = with_replay[1], without[1]
    # Four steps of its own, five replayed ones, and then the episode that had begun before them.
    assert torch.equal(row["observation"][:4], plain["observation"][:4])
    assert row["observation"][4:9, 2].tolist() == [0, 1, 2, 3, 4]
    assert (row["observation"][4:9, 0] == 50).all()
    assert torch.equal(row["observation"][9:], plain["observation"][4:7])
    assert row["next", "observation"][4:9, 2].tolist() == [1, 2, 3, 4, 5]
    assert row["action"].tolist() == [0] * 4 + [2] * 5 + [0] * 3
    assert row["next", "reward"][4:9, 0].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert row["next", "reward"][9:, 0].tolist() == [1, 2, 3]
    assert row["next", "done"][:, 0].nonzero()[:, 0].tolist() == [3, 8]
    assert row["is_init"][:, 0].nonzero()[:, 0].tolist() == [0, 4, 9]
    assert row["collector", "traj_ids"].unique().numel() == 3
    assert with_replay["demo", "mask"][..., 0].tolist() == [[False] * 12, [4 <= t < 9 for t in range(12)], [False] * 12]
    assert row["demo", "serial"][:, 0].tolist() == [-1] * 4 + [7] * 5 + [-1] * 3
    assert "demo" not in without


def test_replay_goes_on_over_batches() -> None:
    whole = run(Demonstration(3, env=1, start=2, length=5))
    short = collector(Demonstration(3, env=1, start=2, length=5), steps=3)
    parts = torch.cat([short.rollout() for _ in range(4)], 1)
    assert (parts == whole).all()


def test_restored_collector_goes_on_within_a_replay() -> None:
    source = Demonstration(3, env=1, start=1, length=5)
    first = collector(source, steps=3)
    first.rollout()
    resumed = collector(source, steps=3)
    resumed.load_state_dict(first.state_dict())
    row = resumed.rollout()[1]
    assert row["observation"].tolist() == [[50, 60, 3], [50, 60, 4], [0, 0, 0]]
    assert row["is_init"][:, 0].tolist() == [False, False, True]
    resumed.reset()
    assert resumed.rollout()["is_init"][:, 0].all()


@pytest.mark.parametrize("fresh", [True, False])
def test_marks_are_those_of_this_rollout(fresh: bool) -> None:
    made = collector(Demonstration(3, env=1, start=1, length=3), steps=3, return_same_td=not fresh)
    assert made.rollout()["demo", "mask"].sum() == 3
    batch = made.rollout()
    assert not batch["demo", "mask"].any()
    assert (batch["demo", "serial"] == -1).all()


def test_policy_acts_on_what_is_replayed() -> None:
    seen = []

    def policy(step: TensorDict) -> TensorDict:
        seen.append(step["observation"][1].tolist())
        return step.set("action", torch.zeros(3, dtype=torch.long))

    collector(Demonstration(3, env=1, start=1, length=2), steps=3, policy=policy).rollout()
    assert seen == [[50, 60, 0], [50, 60, 1], [0, 0, 0]]


def late(starts: Any) -> ReplayedRows | None:
    return None if starts.all() else Demonstration(3, 1, 1, 5)(np.array([True, True, True]))


@pytest.mark.parametrize("source", [Demonstration(3, 1, 2, 5, stop=3), late])
def test_replay_within_an_episode_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match=r"environments \[1\] begins or stops within"):
        run(source)


class BlindEnv(CountingEnv):
    """Returns NaN from its second step on in its first two episodes; checks its actions."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        observation, reward, *rest = super().step(action)
        if self.identity == 1 and self.t >= 2 and self.episode < 2:
            observation, reward = observation * np.nan, np.nan
        return observation, reward, *rest


def vectors(kind: str, env: Any = CountingEnv, second: int = 4) -> Any:
    factories = [partial(env, i, length) for i, length in enumerate((4, second, 4))]
    if kind == "async":
        return AsyncVectorEnv(factories, context="fork", autoreset_mode="SameStep")
    return SyncVectorEnv(factories, autoreset_mode=kind)


@pytest.mark.parametrize("kind", ["SameStep", "Disabled", "async"])
def test_environments_that_cannot_pause_are_stepped_without_storing(kind: str) -> None:
    made = collector(Demonstration(3, env=1, start=1, length=5), 6, vectors(kind, BlindEnv, 3))
    try:
        batches = torch.cat([made.rollout(), made.rollout()], 1)
    finally:
        made.shutdown()
    row = batches[1]
    assert row["demo", "mask"].flatten().tolist() == [True] * 5 + [False] * 7
    assert row["observation"][:5].tolist() == [[50, 60, t] for t in range(5)]
    assert row["next", "observation"][:5].tolist() == [[50, 60, t + 1] for t in range(5)]
    assert row["next", "reward"][:5].flatten().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert row["next", "done"].flatten().nonzero().flatten().tolist() == [4, 7, 10]
    # Unseen, an episode of three steps has ended and another has begun; the reset begins the third one.
    assert row["observation"][5:8].tolist() == [[1, 2, t] for t in range(3)]
    others = torch.tensor([0, 2])
    expected = collector(None, env=vectors("SameStep")).rollout()[others]
    for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done"), "is_init"):
        assert torch.equal(batches[key][others], expected[key]), key


def test_environment_without_partial_resets_is_rejected_at_the_first_one() -> None:
    env = WholeResets([partial(CountingEnv, i) for i in range(3)], autoreset_mode="SameStep")
    with pytest.raises(RuntimeError, match="make_vector_env"):
        collector(Demonstration(3, 1, 1, 5), 6, env).rollout()


def test_environments_of_make_vector_env_pause_during_replays() -> None:
    built = make_vector_env(partial(CountingEnv, length=4), 3)
    batch = collector(Demonstration(3, 1, 1, 2), 1, built).rollout()
    assert batch["observation"][:, 0, 0].tolist() == [0, 50, 0]
    assert [env.t for env in built.envs] == [1, 0, 1]


def test_rows_of_another_shape_are_refused() -> None:
    class Narrow(Demonstration):
        def __call__(self, starts: Any) -> ReplayedRows | None:
            rows = super().__call__(starts)
            assert rows is not None
            return rows._replace(observation={"observation": np.zeros((1, 1))})

    with pytest.raises(ValueError, match="reshape"):
        run(Narrow(3, 1, 1, 2))
