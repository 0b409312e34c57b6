"""Settings of an environment recipe that can have no effect, or cannot work, are refused in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation

from torchrl_lightning import AsynchronousCollector, EnvironmentRecipe, GymnasiumCollector, make_vector_env
from torchrl_lightning.environments import make_environment


def pole(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1", **kwargs)


def ready() -> SyncVectorEnv:
    return SyncVectorEnv([pole], autoreset_mode=AutoresetMode.SAME_STEP)


named = partial(EnvironmentRecipe, "CartPole-v1")
asynchronous = EnvironmentRecipe("CartPole-v1", vectorization="async")
WRONG: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    *(
        (f"{name} must be a list of names, got {value!r}", named, {name: value})
        for name in ("keep", "drop", "demonstrations_of")
        for value in ("Other-v0", 3, {"a": 1})
    ),
    ("keep must name at least one entry", named, {"keep": []}),
    ("observe must be a list of at least one number", named, {"observe": []}),
    ("observe must be a list of at least one number", named, {"observe": "01"}),
    ("observe must be a list of at least one number", named, {"observe": 1}),
    (r"observe\[1\] must be an integer of at least 0, got 1.5", named, {"observe": [0, 1.5]}),
    (r"observe\[0\] must be an integer of at least 0, got True", named, {"observe": [True]}),
    (r"observe\[0\] must be an integer of at least 0, got -1", named, {"observe": [-1]}),
    ("clip_reward must be a finite number, got inf", named, {"clip_reward": math.inf}),
    ("flatten must be True or False, got 'no'", named, {"flatten": "no"}),
    ("wrappers must be a list", named, {"wrappers": FlattenObservation}),
    ("wrappers must be a list", named, {"wrappers": {"_target_": "gymnasium.wrappers.FlattenObservation"}}),
    ("env_kwargs must be a mapping", named, {"env_kwargs": [1]}),
    ("time_limit must be left out beside", named, {"time_limit": 3, "env_kwargs": {"max_episode_steps": 7}}),
    (
        "time_limit must be left out beside",
        named,
        {"time_limit": 3, "env_kwargs": {"max_episode_steps": 7}, "vectorization": "envpool"},
    ),
    ("vectorization must be 'sync'", partial(AsynchronousCollector, asynchronous, frames_per_batch=2), {}),
    (
        "vectorization must be 'sync'",
        partial(AsynchronousCollector, EnvironmentRecipe("CartPole-v1", vectorization="envpool"), frames_per_batch=2),
        {},
    ),
    *(
        ("vectorization must be 'sync' or None", make, {"vectorization": value})
        for make in (lambda **kwargs: make_vector_env(ready(), **kwargs), lambda **kwargs: collector(ready, **kwargs))
        for value in ("async", "envpool")
    ),
]


def collector(make: Callable[[], Any], **settings: Any) -> GymnasiumCollector:
    return GymnasiumCollector(make(), frames_per_batch=2, **settings)


@pytest.mark.parametrize(("message", "make", "settings"), WRONG)
def test_a_setting_that_cannot_work_is_refused(
    message: str, make: Callable[..., Any], settings: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as refusal:
        make(**settings)
    assert "\n" not in str(refusal.value)


def test_a_limit_beyond_that_of_a_factory_is_refused() -> None:
    for limit, fails in ((499, False), (500, False), (501, True)):
        recipe = EnvironmentRecipe(pole, time_limit=limit)
        if fails:
            with pytest.raises(ValueError, match=r"^time_limit.*500.*501") as refusal:
                make_environment(recipe, 2)
            assert "\n" not in str(refusal.value)
        else:
            make_environment(recipe, 2).close()
    EnvironmentRecipe(pole, {"max_episode_steps": 900}, time_limit=501)().close()
    EnvironmentRecipe("CartPole-v1", time_limit=900)().close()


TAKEN: list[dict[str, Any]] = [
    {},
    {"env_kwargs": None, "wrappers": (), "drop": (), "keep": None, "demonstrations_of": (), "flatten": False},
    {"demonstrations_of": ["Other-v0"], "observe": (0, 0), "flatten": True},
    {"env_kwargs": {"max_episode_steps": 7}},
    {"time_limit": 7, "clip_reward": 1.0, "step_timeout": math.inf},
]


@pytest.mark.parametrize("settings", TAKEN)
def test_a_setting_with_an_effect_is_taken(settings: dict[str, Any]) -> None:
    recipe = named(**settings)
    recipe().close()
    assert repr(recipe) == repr(recipe.with_settings())


def test_ready_environments_are_stepped_as_they_are() -> None:
    for vectorization in (None, "sync"):
        env = ready()
        assert make_vector_env(env, vectorization=vectorization) is env
        env.close()
