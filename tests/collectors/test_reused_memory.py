"""Environments that reuse the memory they return and change the actions they get: stored data are as of tidy ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces, wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule

from kit.careless import ACTIONS, OBSERVATIONS, Careless, CarelessVector, assert_alike, pair
from kit.states import differences, plain
from torchrl_lightning import (
    ActionMaskFromInfo,
    AsynchronousCollector,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    EnvironmentRecipe,
    GymnasiumCollector,
    make_vector_env,
    record_demonstrations,
)
from torchrl_lightning.collectors import play_episodes
from torchrl_lightning.environments.backends.next_step import ResetTrackingVectorEnv
from torchrl_lightning.environments.copies import copied
from torchrl_lightning.environments.env_errors import EnvironmentFault

SAME_STEP, DISABLED, NEXT_STEP = AutoresetMode.SAME_STEP, AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP


def collect(env: Any, *, kind: Any = GymnasiumCollector, batches: int = 2, **settings: Any) -> torch.Tensor:
    collector = kind(env, **{"num_envs": 2, "frames_per_batch": 60, "seed": 0, **settings})
    try:
        return torch.cat([collector.rollout().clone() for _ in range(batches)], 1)
    finally:
        collector.shutdown()


def check(make: Callable[[Any], Any], makers: list[Any], **settings: Any) -> None:
    assert_alike(*(collect(make(maker), **settings) for maker in makers))


def same(maker: Any) -> Any:
    return maker


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_observations_of_all_spaces(observation: str, buffers: int) -> None:
    check(same, pair(Careless, buffers=buffers, observation=observation))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_actions_of_all_spaces(action: str, clip: bool) -> None:
    if not clip or isinstance(ACTIONS[action], spaces.Box):
        check(same, pair(Careless, action=action), clip_actions=clip)


def test_actions_beyond_the_bounds_are_clipped_for_the_environment_only() -> None:
    far = TensorDictModule(lambda x: x[..., :2] * 0 + 5, in_keys=["observation"], out_keys=["action"])
    for clip in (False, True):
        rollouts = [collect(maker, policy=far, clip_actions=clip) for maker in pair(Careless, action="box")]
        assert_alike(*rollouts)
        assert (rollouts[0]["action"] == 5).all()


def test_outputs_of_a_policy_that_returns_the_same_tensor_stay() -> None:
    action = torch.full((2, 2), 0.25)
    policy = TensorDictModule(lambda x: action, in_keys=["observation"], out_keys=["action"])
    check(same, pair(Careless, action="box"), policy=policy)
    assert (action == 0.25).all()


RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "time limit": ({"action": "box"}, {"time_limit": 2}),
    "action repeat": ({"action": "box"}, {"action_repeat": 2}),
    "action repeat of choices": ({"action": "multi-discrete"}, {"action_repeat": 2}),
    "seconds": ({"action": "box"}, {"step_timeout": 60}),
    "frame stack": ({"observation": "image"}, {"frame_stack": 3}),
    "frame stack of channels": ({"observation": "color image"}, {"frame_stack": 3}),
    "frame stack of an entry": ({"observation": "dict"}, {"frame_stack": 3}),
    "names": ({"observation": "dict"}, {"rename": {"vector": "numbers"}, "drop": ["inner"]}),
    "some numbers": ({}, {"observe": [1]}),
    "one vector": ({"observation": "image"}, {"flatten": True}),
    "clipped rewards": ({"action": "box"}, {"clip_reward": 1.0}),
    "mask": ({"masked": True}, {"wrappers": [ActionMaskFromInfo]}),
    "mask of a Dict": ({"masked": True, "observation": "dict"}, {"wrappers": [ActionMaskFromInfo], "frame_stack": 2}),
    "Gymnasium's frame stack": ({}, {"wrappers": [partial(wrappers.FrameStackObservation, stack_size=3)]}),
    "Gymnasium's frame stack, padded": (
        {"observation": "image"},
        {"wrappers": [partial(wrappers.FrameStackObservation, stack_size=3, padding_type="zero")]},
    ),
    "a frame stack in a function": ({}, {"wrappers": [lambda env: wrappers.FrameStackObservation(env, 2)]}),
    "delay": ({}, {"wrappers": [partial(wrappers.DelayObservation, delay=1)]}),
    "sticky actions": (
        {"action": "box"},
        {"wrappers": [partial(wrappers.StickyAction, repeat_action_probability=0.5)]},
    ),
    "Gymnasium's action repeat": ({"action": "box"}, {"wrappers": [partial(wrappers.RepeatAction, num_repeats=3)]}),
    "the larger of two frames": ({"action": "box"}, {"wrappers": [partial(wrappers.MaxAndSkipObservation, skip=2)]}),
    "normalised": ({}, {"wrappers": [wrappers.NormalizeObservation, wrappers.NormalizeReward]}),
    "rescaled actions": (
        {"action": "box"},
        {
            "wrappers": [
                partial(wrappers.RescaleAction, min_action=np.float32(-2), max_action=np.float32(2)),
                wrappers.ClipAction,
            ]
        },
    ),
    "statistics": ({}, {"wrappers": [wrappers.RecordEpisodeStatistics]}),
}


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_environments_behind_wrappers(name: str, buffers: int) -> None:
    env, settings = RECIPES[name]
    check(lambda maker: EnvironmentRecipe(maker, **settings), pair(Careless, buffers=buffers, **env))


def test_wrappers_of_make_vector_env() -> None:
    stack = partial(wrappers.FrameStackObservation, stack_size=3)
    check(same, pair(Careless), wrappers=[stack])
    factories = [lambda maker=maker: stack(maker()) for maker in pair(Careless)]
    check(same, factories)


READY: dict[str, Callable[[Any], Any]] = {
    "same step": lambda maker: SyncVectorEnv([maker] * 2, autoreset_mode=SAME_STEP),
    "same step, uncopied": lambda maker: SyncVectorEnv([maker] * 2, copy=False, autoreset_mode=SAME_STEP),
    "resets by the collector": lambda maker: SyncVectorEnv([maker] * 2, copy=False, autoreset_mode=DISABLED),
    "next step": lambda maker: ResetTrackingVectorEnv(SyncVectorEnv([maker] * 2, copy=False, autoreset_mode=NEXT_STEP)),
    "built by us": lambda maker: make_vector_env(maker, 2),
    "behind a vector wrapper": lambda maker: wrappers.vector.RecordEpisodeStatistics(
        wrappers.vector.ClipReward(SyncVectorEnv([maker] * 2, autoreset_mode=SAME_STEP), max_reward=2.0)
    ),
    "behind a wrapper of observations": lambda maker: wrappers.vector.RescaleObservation(
        SyncVectorEnv([maker] * 2, copy=False, autoreset_mode=DISABLED), np.float32(-1), np.float32(1)
    ),
    "frame stacks": lambda maker: SyncVectorEnv(
        [lambda: wrappers.FrameStackObservation(maker(), 2)] * 2, autoreset_mode=SAME_STEP
    ),
}


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("name", READY)
def test_ready_vector_environments(name: str, buffers: int) -> None:
    check(READY[name], pair(Careless, buffers=buffers, action="box"), num_envs=None)


def test_ready_vector_environment_keeps_its_environments_and_takes_several_collectors() -> None:
    env = SyncVectorEnv([Careless] * 2, autoreset_mode=SAME_STEP)
    before = list(env.envs)
    for _ in range(3):
        collector = GymnasiumCollector(env, frames_per_batch=20, seed=0)
        rows = collector.rollout()
        assert all(one is other for one, other in zip(env.envs, before, strict=True))
    twin = collect(SyncVectorEnv([partial(Careless, careless=False)] * 2, autoreset_mode=SAME_STEP), batches=1)
    assert rows["next", "done"].any()
    for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
        assert torch.equal(rows[key], twin[key][:, :10])
    env.close()


@pytest.mark.parametrize("steps", [1, 5])
def test_shared_rows_fit_a_ring(steps: int) -> None:
    found = []
    for maker in pair(Careless, observation="dict", action="box", buffers=2):
        size = {"num_envs": 2, "frames_per_batch": 2 * steps, "total_frames": 120}
        collector = GymnasiumCollector(maker, seed=0, **size)
        found.append(torch.stack([rows.clone() for rows in collector.reused_rows()]))
        collector.shutdown()
    assert_alike(*found)


@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
def test_vector_environments_that_reuse_their_arrays(mode: AutoresetMode) -> None:
    check(lambda maker: maker(), pair(CarelessVector, mode), num_envs=None)


@pytest.mark.parametrize("final", ["shared", "rows"])
def test_last_observations_in_the_memory_of_the_next_are_refused(final: str) -> None:
    with pytest.raises(EnvironmentFault, match=r"final_obs.*[Cc]opy"):
        collect(CarelessVector(final=final), num_envs=None)


def test_suspicious_last_observations_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    env = CarelessVector(final="late")
    for _ in range(2):
        collector = GymnasiumCollector(env, frames_per_batch=80, seed=0)
        collector.rollout()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "final_obs" in record.message
    assert "3 times" in record.message


class Still(CarelessVector):
    """Shows the same at all times."""

    def step(self, actions: Any) -> Any:
        _, *others, info = super().step(actions)
        shown = np.ones((2, 2), np.float32)
        if "final_obs" in info:
            info["final_obs"] = shown.copy()
        return shown, *others, info


class Twice(CarelessVector):
    """Shows its first observation as the last one at two ends in succession, and then a true one."""

    ends = 0

    def step(self, actions: Any) -> Any:
        self.final = "late"
        before = self.state.copy()
        returned = super().step(actions)
        for i in np.flatnonzero(returned[2] | returned[3]):
            self.ends += 1
            if self.ends % 3 == 0:
                returned[-1]["final_obs"][i] = before[i] + 1
        return returned


@pytest.mark.parametrize("kind", [Still, Twice, CarelessVector])
def test_plausible_last_observations_are_not_warned_about(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = GymnasiumCollector(kind(), frames_per_batch=200, seed=0).rollout()
    assert rows["next", "done"].sum() > 9
    assert not caplog.records


class OneArray(Careless):
    """Reuses its observation only."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, float(reward), bool(terminated), bool(truncated), {}


def test_reused_arrays_behind_processes_that_are_not_ours_are_told(caplog: pytest.LogCaptureFixture, forked) -> None:
    env = AsyncVectorEnv([OneArray] * 2, autoreset_mode=SAME_STEP)
    try:
        GymnasiumCollector(env, frames_per_batch=60, seed=0).rollout()
    finally:
        env.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("observation", "action", "buffers"),
    [
        ("box", "box", 1),
        ("dict", "shifted multi-discrete", 1),
        ("scalar", "float64", 2),
        ("discrete", "scalar", 1),
        ("image", "discrete", 2),
    ],
)
def test_environments_in_processes(observation: str, action: str, buffers: int, forked) -> None:
    makers = pair(Careless, observation=observation, action=action, buffers=buffers)
    check(same, makers, vectorization="async")
    check(same, makers[:1] + makers[:1], vectorization="async")
    assert_alike(collect(makers[0], vectorization="async"), collect(makers[1], vectorization="sync"))


def test_frame_stack_with_a_time_limit_in_processes(forked) -> None:
    settings = {"frame_stack": 2, "time_limit": 3, "vectorization": "async", "action_repeat": 2}
    check(
        lambda maker: EnvironmentRecipe(maker, **settings), pair(Careless, observation="image", action="multi-binary")
    )


def test_workers_of_the_asynchronous_collector(forked) -> None:
    makers = pair(Careless, observation="dict", action="box", buffers=2)
    rollouts = [collect(maker, kind=AsynchronousCollector, num_workers=1) for maker in makers]
    assert_alike(*rollouts)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("action", ["box", "multi-discrete"])
def test_environments_pause_while_demonstrations_are_replayed(action: str, vectorization: str, forked) -> None:
    makers = pair(Careless, action=action, observation="box")
    demonstrations = list(record_demonstrations(makers[1], _policy(action), 3, seed=0))

    def rows(maker: Any) -> Any:
        storage = DemonstrationStorage()
        storage.replace(demonstrations, [])
        sampler = DemonstrationSampler(rho=0.5, phi=0.0, generator=torch.Generator().manual_seed(0))
        replay = DemonstrationReplay(storage, sampler, num_envs=2)
        found = collect(maker, replay=replay, vectorization=vectorization)
        kept = storage.reward_demonstrations
        for one, other in zip(kept, demonstrations, strict=True):
            assert not differences(plain(one.steps), plain(other.steps))
        return found

    careless, tidy = rows(makers[0]), rows(makers[1])
    assert_alike(careless, tidy)
    assert tidy["demo", "mask"].any()
    assert not tidy["demo", "mask"].all()


def _policy(action: str) -> TensorDictModule:
    """Act by what is observed, in the same tensor each time."""
    space = ACTIONS[action]

    def act(shown: torch.Tensor) -> torch.Tensor:
        first = shown.float().flatten(1)[:, :1] if shown.ndim > 1 else shown.float()[:, None]
        numbers = first.expand(-1, max(1, int(np.prod(space.shape)))).reshape(len(shown), *space.shape)
        if isinstance(space, spaces.Box) and space.dtype.kind == "f":
            return torch.sin(numbers)
        return numbers.long() % 2

    return TensorDictModule(act, in_keys=["observation"], out_keys=["action"])


@pytest.mark.parametrize("action", ["box", "multi-discrete", "discrete"])
@pytest.mark.parametrize("observation", ["box", "image", "scalar"])
def test_evaluation(observation: str, action: str) -> None:
    makers = pair(Careless, observation=observation, action=action, buffers=2)
    played = [play_episodes(maker, _policy(action), 7, num_envs=3, seed=0) for maker in makers]
    assert not differences(plain(played[0]), plain(played[1]))
    assert played[0]["success"].any()
    assert not played[0]["success"].all()


@pytest.mark.parametrize("name", ["same step", "resets by the collector", "behind a vector wrapper"])
def test_evaluation_in_ready_vector_environments(name: str) -> None:
    played = [play_episodes(READY[name](maker), _policy("box"), 7, seed=0) for maker in pair(Careless, action="box")]
    assert not differences(plain(played[0]), plain(played[1]))
    assert played[0]["success"].any()
    assert not played[0]["success"].all()


@pytest.mark.parametrize("mode", [SAME_STEP, DISABLED])
def test_evaluation_where_the_info_of_a_vector_environment_is_reused(mode: AutoresetMode) -> None:
    played = [play_episodes(maker(), _policy("box"), 9, seed=0) for maker in pair(CarelessVector, mode)]
    assert not differences(plain(played[0]), plain(played[1]))
    if mode is DISABLED:
        episodes = [1, 2, 3, 4, 5, 1, 2, 3, 4]  # of both environments
        assert played[0]["success"].tolist() == [episode % 3 == 0 for episode in episodes]


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("action", ["box", "shifted"])
def test_recorded_demonstrations(action: str, stack: int) -> None:
    observation = "box" if stack == 1 else "image"
    found = [
        list(record_demonstrations(EnvironmentRecipe(maker, frame_stack=stack), _policy(action), 4, seed=0))
        for maker in pair(Careless, observation=observation, action=action, buffers=2)
    ]
    for careless, tidy in zip(*found, strict=True):
        assert not differences(plain(careless.steps), plain(tidy.steps))
        assert not differences(plain(careless.last_observation), plain(tidy.last_observation))
        assert careless.metadata["success"] == tidy.metadata["success"]
        assert careless.ends == tidy.ends


def test_infos_of_ended_episodes_stay_as_they_were() -> None:
    envs = [make_vector_env(maker, 2) for maker in pair(Careless)]
    for env in envs:
        env.reset(seed=[0, 1])
    infos: list[list[Any]] = [[], []]
    for _ in range(20):
        for env, found in zip(envs, infos, strict=True):
            *_, info = env.step(np.array([1, 0]))
            if "final_info" in info:
                found.append((info, copied({"is_success": info["final_info"]["is_success"]})))
    assert len(infos[0]) == len(infos[1]) > 5
    for (careless, _), (tidy, _) in zip(*infos, strict=True):
        ended = tidy["_final_info"]
        for name in ("is_success", "seen"):
            assert list(careless["final_info"][name][ended]) == list(tidy["final_info"][name][ended])
        assert careless["final_info"]["deep"]["t"].tolist() == tidy["final_info"]["deep"]["t"].tolist()
        for one, other in zip(careless["final_obs"], tidy["final_obs"], strict=True):
            np.testing.assert_array_equal(one, other)
