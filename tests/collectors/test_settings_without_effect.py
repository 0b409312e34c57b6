"""Settings of collectors and services that have no effect, or cannot work, are refused when they are built."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gymnasium.wrappers import FlattenObservation
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType

from torchrl_lightning import (
    AsynchronousCollector,
    DemonstrationReplay,
    DemonstrationSampler,
    DemonstrationStorage,
    ExperienceBuffer,
    GymnasiumCollector,
    environment_specs,
    make_vector_env,
)
from torchrl_lightning.collectors import TorchRLCollector
from torchrl_lightning.distributed import RayCollector, ReplayService
from torchrl_lightning.learn import MLPNetwork, PPOModule


def policy() -> Any:
    with_specs = environment_specs(make_vector_env("CartPole-v1", 1))
    return PPOModule(MLPNetwork([4])).build(with_specs).policy


def over_torchrl(acting: Any = None, **settings: Any) -> TorchRLCollector:
    return TorchRLCollector(GymEnv("CartPole-v1", categorical_action_encoding=True), acting, **settings)


def service(**settings: Any) -> ReplayService:
    return ReplayService(ExperienceBuffer(num_envs=4), **settings)


OVER_GYMNASIUM = (
    partial(GymnasiumCollector, "CartPole-v1"),
    partial(AsynchronousCollector, "CartPole-v1"),
    partial(RayCollector, "CartPole-v1"),
)
RANDOM = "init_random_frames"
REPLAY = DemonstrationReplay(DemonstrationStorage(), DemonstrationSampler(), 3)
WRONG: list[tuple[str, Callable[..., Any], bool, dict[str, Any]]] = [
    *(
        (
            f"init_random_frames must be an integer of at least 0, got {value!r}",
            make,
            True,
            {"init_random_frames": value},
        )
        for make in (*OVER_GYMNASIUM, over_torchrl)
        for value in (-1, 1.5, None, math.inf, True)
    ),
    *(
        (message, make, acts, settings)
        for make in (*OVER_GYMNASIUM, over_torchrl)
        for message, acts, settings in (
            ("init_random_frames must be left at its default 0 without a policy", False, {"init_random_frames": 8}),
            ("reset_at_each_batch must be True or False", True, {"reset_at_each_batch": "no"}),
            ("seed must be an integer of at least 0", True, {"seed": 1.5}),
        )
    ),
    *(
        (message, make, acts, settings)
        for make in OVER_GYMNASIUM
        for message, acts, settings in (
            ("exploration_type must be left at .* without a policy", False, {"exploration_type": ExplorationType.MODE}),
            ("exploration_type must be an ExplorationType", True, {"exploration_type": "random"}),
            ("clip_actions must be True or False", True, {"clip_actions": "no"}),
            ("replay= is for 3 environments", True, {"replay": REPLAY}),
            ("env_kwargs must be a mapping", True, {"env_kwargs": [1]}),
            ("wrappers must be a list", True, {"wrappers": FlattenObservation}),
            ("wrappers must be a list", True, {"wrappers": "ab"}),
            (r"wrappers\[1\] must be a callable", True, {"wrappers": [FlattenObservation, 3]}),
        )
    ),
    ("return_same_td must be True or False", OVER_GYMNASIUM[0], True, {"return_same_td": "no"}),
    *(
        ("return_same_td must be left at its default False with batches on", OVER_GYMNASIUM[0], True, {**on})
        for on in ({"return_same_td": True, "storing_device": "cuda"}, {"return_same_td": True, "device": "cuda"})
    ),
    (
        "rollouts_in_flight must be left at its default 1 with sync=True",
        OVER_GYMNASIUM[2],
        True,
        {"sync": True, "rollouts_in_flight": 2},
    ),
    ("sync must be True or False", OVER_GYMNASIUM[2], True, {"sync": "no"}),
    (
        "max_weight_update_interval must be left at its default -1 without a policy",
        OVER_GYMNASIUM[2],
        False,
        {"max_weight_update_interval": 3},
    ),
]


@pytest.mark.parametrize(("message", "make", "acts", "settings"), WRONG)
def test_a_setting_of_a_collector_is_refused(
    message: str, make: Callable[..., Any], acts: bool, settings: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as refusal:
        make(policy() if acts else None, frames_per_batch=4, **settings)
    assert "\n" not in str(refusal.value)


SERVICES: list[tuple[str, dict[str, Any]]] = [
    ("keep must be left at its default False beside join=True", {"name": "it", "keep": True, "join": True}),
    (
        "remote_configs must be left at its default None beside join=True",
        {"name": "it", "join": True, "remote_configs": {"num_cpus": 2}},
    ),
]


@pytest.mark.parametrize(("message", "settings"), SERVICES)
def test_a_setting_of_a_service_is_refused(message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        service(**settings)
    assert "\n" not in str(refusal.value)


TAKEN: list[tuple[Callable[..., Any], bool, dict[str, Any]]] = [
    *((make, False, {"init_random_frames": 0}) for make in (*OVER_GYMNASIUM, over_torchrl)),
    *((make, True, {"init_random_frames": 1e3}) for make in (*OVER_GYMNASIUM, over_torchrl)),
    *((make, False, {"exploration_type": ExplorationType.RANDOM, "seed": 0}) for make in OVER_GYMNASIUM),
    *((make, True, {"exploration_type": ExplorationType.MODE, "wrappers": ()}) for make in OVER_GYMNASIUM),
    *((make, True, {"wrappers": [FlattenObservation], "env_kwargs": {}}) for make in OVER_GYMNASIUM),
    (OVER_GYMNASIUM[0], True, {"return_same_td": True, "storing_device": "cpu"}),
    (OVER_GYMNASIUM[2], True, {"sync": True, "rollouts_in_flight": 1}),
    (OVER_GYMNASIUM[2], False, {"max_weight_update_interval": -1}),
    (OVER_GYMNASIUM[2], True, {"max_weight_update_interval": 3, "rollouts_in_flight": 2}),
]


@pytest.mark.parametrize(("make", "acts", "settings"), TAKEN)
def test_a_setting_with_an_effect_is_taken(make: Callable[..., Any], acts: bool, settings: dict[str, Any]) -> None:
    made = make(policy() if acts else None, frames_per_batch=4, **settings)
    assert made.frames_per_batch == 4
    made.shutdown()
    assert not service(name="it", join=True, samples_per_insert=1.0, error_buffer=9.0).running
