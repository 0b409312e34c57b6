"""A recipe makes the same environment wherever it is needed, and says which of its settings does not fit."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import RescaleObservation, TimeAwareObservation

from kit.images import ImageAlone, Mission
from torchrl_lightning import EnvironmentRecipe, GoalReward, make_vector_env
from torchrl_lightning.environments import make_environment
from torchrl_lightning.environments.recipe import differences, to_plain
from torchrl_lightning.environments.wrappers.frame_stack import FrameStack


def play(env: Any, steps: int = 3) -> list[Any]:
    observation, _ = env.reset(seed=3)
    return [observation, *(env.step(1)[0] for _ in range(steps))]


def test_id_a_factory_and_a_target_make_the_same_environment() -> None:
    name = "gymnasium.envs.classic_control.CartPoleEnv"
    given: list[Any] = ["CartPole-v1", CartPoleEnv, {"_target_": name}]
    for one in given:
        recipe = EnvironmentRecipe(one, time_limit=3)
        env = recipe()
        assert np.allclose(play(env), play(gym.make("CartPole-v1")))
        assert env.step(1)[3]  # the fourth step is beyond the limit
        assert repr(pickle.loads(pickle.dumps(recipe))) == repr(recipe)
    assert "CartPoleEnv" in repr(recipe)


def test_arguments_reach_the_environment_and_later_ones_override_them() -> None:
    recipe = EnvironmentRecipe(Mission, {"shape": (4, 4, 1)})
    assert recipe().reset()[0]["image"].shape == (4, 4, 1)
    assert recipe(shape=(7, 7, 1)).reset()[0]["image"].shape == (7, 7, 1)


def test_wrappers_are_partials_or_targets() -> None:
    as_targets = EnvironmentRecipe(
        "CartPole-v1",
        wrappers=[
            {"_target_": "gymnasium.wrappers.TimeAwareObservation"},
            {"_target_": "gymnasium.wrappers.RescaleObservation", "min_obs": 0.0, "max_obs": 1.0},
        ],
        flatten=True,
    )
    partials = [TimeAwareObservation, partial(RescaleObservation, min_obs=0.0, max_obs=1.0)]
    as_partials = EnvironmentRecipe("CartPole-v1", wrappers=partials, flatten=True)
    with pytest.raises(ValueError, match=r"wrappers\[1\]=.*RescaleObservation"):
        as_targets()  # velocities have no bounds
    del as_targets.wrappers[1], as_partials.wrappers[1]
    assert np.array_equal(play(as_targets()), play(as_partials()))
    assert as_targets().observation_space.shape == (5,)


def test_entries_are_kept_and_dropped() -> None:
    assert set(EnvironmentRecipe(Mission, drop=["mission"])().observation_space.spaces) == {"image", "step"}
    env = EnvironmentRecipe(Mission, keep=["step", "image"], flatten=True)()
    assert env.observation_space.shape == (51,)
    assert env.observation_space.contains(env.reset()[0])


def test_actions_are_repeated_and_rewards_clipped() -> None:
    env = EnvironmentRecipe(Mission, action_repeat=3)()
    env.reset()
    assert env.step(0)[1] == 1 + 2 + 3
    env = EnvironmentRecipe(Mission, clip_reward=1.5)()
    env.reset()
    assert [env.step(0)[1] for _ in range(2)] == [1.0, 1.5]


@pytest.mark.parametrize(("layout", "shape"), [("hw", (3, 5, 5)), ("chw", (6, 5, 5)), ("hwc", (5, 5, 6))])
def test_images_are_stacked_along_their_channels(layout: str, shape: tuple[int, ...]) -> None:
    env = EnvironmentRecipe(Mission, wrappers=[partial(ImageAlone, layout=layout)], frame_stack=3)()
    assert env.observation_space.shape == shape
    seen = play(env, 4)
    axis = -1 if layout == "hwc" else 0
    for step, stacked in enumerate(seen):
        assert env.observation_space.contains(stacked)
        frames = np.array_split(stacked, 3, axis)
        assert [frame.reshape(-1)[0] for frame in frames] == [max(0, step - 2), max(0, step - 1), step]
    assert not play(env, 0)[0].any()  # a new episode shows nothing of the last one


def test_stacked_images_of_a_dict_leave_the_rest_as_it_is() -> None:
    env = EnvironmentRecipe(Mission, drop=["mission"], frame_stack=2)()
    first, second = play(env, 1)
    assert env.observation_space.contains(second)
    assert first["image"].shape == (5, 5, 4)
    assert second["image"][0, 0].tolist() == [0, 0, 1, 1]
    assert second["step"].tolist() == [1]


def test_vector_environment_steps_as_single_ones() -> None:
    recipe = EnvironmentRecipe("CartPole-v1", observe=[0, 2], time_limit=10)
    vector = make_vector_env(recipe, 2)
    observations, _ = vector.reset(seed=[5, 6])
    for env, seed, shown in zip((recipe(), recipe()), (5, 6), observations, strict=True):
        assert np.array_equal(env.reset(seed=seed)[0], shown)


def test_module_registers_the_ids_that_do_not_name_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "registering.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('OwnPole-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = EnvironmentRecipe("OwnPole-v0", module="registering", vectorization="async")
    vector = make_vector_env(recipe)  # steps in a process that has imported nothing yet
    assert vector.reset(seed=0)[0].shape == (1, 4)
    vector.close()
    assert repr(recipe) == "EnvironmentRecipe('registering:OwnPole-v0', vectorization='async')"
    assert repr(recipe) == repr(EnvironmentRecipe("registering:OwnPole-v0", vectorization="async"))
    assert recipe.with_settings(id="Other-v0").id == "registering:Other-v0"
    assert recipe.with_settings(id="ale_py:ALE/Pong-v5").id == "ale_py:ALE/Pong-v5"
    assert EnvironmentRecipe(CartPoleEnv, module="registering")().spec is None


def make_env(env: Any = Mission, /, **settings: Any) -> Any:
    return EnvironmentRecipe(env, **settings)()


CART_POLE = partial(make_env, "CartPole-v1")
NOTHING = {"_target_": "gymnasium.wrappers.Nothing"}
MISFITS = {
    "frame_stack must be a positive integer": (make_env, {"frame_stack": 0}),
    "keep and drop must not both": (make_env, {"keep": ["a"], "drop": ["b"]}),
    r"wrappers\[0\] has the unknown _target_ 'gymnasium.wrappers.Nothing'": (make_env, {"wrappers": [NOTHING]}),
    r"'masked.Own': No module named 'masked'. Run in the folder of masked.py, or add this folder to PYTHONPATH\.$": (
        make_env,
        {"wrappers": [{"_target_": "masked.Own"}]},
    ),
    r"^drop must .*\['image'.*\['misson'\] are missing": (make_env, {"drop": ["misson"]}),
    r"^keep must .*\['sight'\] are missing": (make_env, {"keep": ["sight"]}),
    r"^drop must .* no entry remains": (make_env, {"drop": ["image", "step", "mission"]}),
    r"keep=.*needs a Dict": (CART_POLE, {"keep": ["image"]}),
    "^frame_stack=2 needs an image in the observation, got Box": (CART_POLE, {"frame_stack": 2}),
    r"observe must be indices from 0 to 3 of .*, got \[4\]": (CART_POLE, {"observe": [4]}),
    "^frame_stack=2 needs an image": (FrameStack, {"env": gym.make("CartPole-v1"), "count": 2}),
}


@pytest.mark.parametrize("message", MISFITS)
def test_setting_that_does_not_fit_is_named(message: str) -> None:
    make, settings = MISFITS[message]
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_wrapper_of_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(ValueError, match=r"'minigrid.wrappers.NoDeath'.*-lightning\[minigrid\]'\.$"):
        make_env(wrappers=[{"_target_": "minigrid.wrappers.NoDeath"}])


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (3, {}, r"id must be a callable.*got 3"),
        ("A-v0", {"wrappers": [3]}, r"wrappers\[0\] must be a callable.*got 3"),
        ("CartPole-v1", {"wrappers": [lambda env: 3]}, r"wrappers\[0\]=.*gymnasium.Env, got int"),
    ],
)
def test_setting_of_the_wrong_type_is_named(given: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make_env(given, **settings)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (GoalReward, "torchrl_lightning.GoalReward"),
        (partial(FrameStack, count=2), {"_target_": "torchrl_lightning.FrameStack", "count": 2}),
        (TimeAwareObservation, "gymnasium.wrappers.stateful_observation.TimeAwareObservation"),
        (Mission, "kit.images.Mission"),
    ],
)
def test_exports_are_saved_by_their_public_names(part, name):
    assert to_plain(part) == name


def test_value_that_one_of_two_recipes_lacks_is_a_difference() -> None:
    assert list(differences({"a": {"b": 1}}, {"a": None})) == [("a", {"b": 1}, None)]
    assert list(differences({"a": {"b": 1}}, {})) == [("a", {"b": 1}, None)]


def test_limit_beyond_that_of_a_factory_is_refused() -> None:
    def pole(**kwargs: Any) -> Any:
        return gym.make("CartPole-v1", **kwargs)

    for limit in (499, 500):
        make_environment(EnvironmentRecipe(pole, time_limit=limit), 2).close()
    with pytest.raises(ValueError, match=r"^time_limit.*500.*501"):
        make_environment(EnvironmentRecipe(pole, time_limit=501), 2)
    EnvironmentRecipe(pole, {"max_episode_steps": 900}, time_limit=501)().close()
    EnvironmentRecipe("CartPole-v1", time_limit=900)().close()


@pytest.mark.parametrize("settings", [{}, {"observe": (0, 0), "flatten": True}, {"time_limit": 7, "clip_reward": 1.0}])
def test_recipe_is_the_same_with_no_other_settings(settings: dict[str, Any]) -> None:
    recipe = EnvironmentRecipe("CartPole-v1", **settings)
    recipe().close()
    assert repr(recipe) == repr(recipe.with_settings())
