"""A recipe makes the same environment wherever it is needed, and says which of its settings does not fit."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import RescaleObservation, TimeAwareObservation

from torchrl_lightning import EnvironmentRecipe, make_vector_env
from torchrl_lightning.collectors.frame_stack import FrameStack


class Counter(gym.Env[Any, Any]):
    """Shows how many steps were made as each image's value, and rewards with that number."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (5, 5, 2), np.uint8),
            "place": spaces.Box(-1.0, 1.0, (2,)),
            "mission": spaces.Text(10),
        }
    )
    action_space = spaces.Discrete(2)

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = self.first
        return self._shown(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._shown(), float(self.steps), False, False, {}

    def _shown(self) -> Any:
        image = np.full((5, 5, 2), self.steps, np.uint8)
        return {"image": image, "place": np.zeros(2, np.float32), "mission": "go"}


class Image(gym.ObservationWrapper[Any, Any, Any]):
    """The image alone, in a layout."""

    def __init__(self, env: Any, layout: str) -> None:
        super().__init__(env)
        self.layout = layout
        shape = {"hw": (5, 5), "chw": (2, 5, 5), "hwc": (5, 5, 2)}[layout]
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def observation(self, observation: Any) -> Any:
        image = observation["image"]
        return {"hw": image[..., 0], "chw": image.transpose(2, 0, 1), "hwc": image}[self.layout]


def play(env: Any, steps: int = 3) -> list[Any]:
    observation, _ = env.reset(seed=3)
    return [observation, *(env.step(1)[0] for _ in range(steps))]


def test_an_id_a_factory_and_a_target_make_the_same_environment() -> None:
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
    recipe = EnvironmentRecipe(Counter, {"first": 4})
    assert recipe().reset()[0]["image"][0, 0, 0] == 4
    assert recipe(first=7).reset()[0]["image"][0, 0, 0] == 7


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
    with pytest.raises(ValueError, match=r"wrappers\[1\]=.*RescaleObservation.* does not fit"):
        as_targets()  # velocities have no bounds
    del as_targets.wrappers[1], as_partials.wrappers[1]
    assert np.array_equal(play(as_targets()), play(as_partials()))
    assert as_targets().observation_space.shape == (5,)


def test_entries_are_kept_and_dropped() -> None:
    assert set(EnvironmentRecipe(Counter, drop=["mission"])().observation_space.spaces) == {"image", "place"}
    env = EnvironmentRecipe(Counter, keep=["place", "image"], flatten=True)()
    assert env.observation_space.shape == (52,)
    assert env.observation_space.contains(env.reset()[0])


def test_actions_are_repeated_and_rewards_clipped() -> None:
    env = EnvironmentRecipe(Counter, action_repeat=3)()
    env.reset()
    assert env.step(0)[1] == 1 + 2 + 3
    env = EnvironmentRecipe(Counter, clip_reward=1.5)()
    env.reset()
    assert [env.step(0)[1] for _ in range(2)] == [1.0, 1.5]


@pytest.mark.parametrize(("layout", "shape"), [("hw", (3, 5, 5)), ("chw", (6, 5, 5)), ("hwc", (5, 5, 6))])
def test_images_are_stacked_along_their_channels(layout: str, shape: tuple[int, ...]) -> None:
    env = EnvironmentRecipe(Counter, wrappers=[partial(Image, layout=layout)], frame_stack=3)()
    assert env.observation_space.shape == shape
    seen = play(env, 4)
    axis = -1 if layout == "hwc" else 0
    for step, stacked in enumerate(seen):
        assert env.observation_space.contains(stacked)
        frames = np.array_split(stacked, 3, axis)
        assert [frame.reshape(-1)[0] for frame in frames] == [max(0, step - 2), max(0, step - 1), step]
    assert not play(env, 0)[0].any()  # a new episode shows nothing of the last one


def test_stacked_images_of_a_dict_leave_the_rest_as_it_is() -> None:
    env = EnvironmentRecipe(Counter, drop=["mission"], frame_stack=2)()
    first, second = play(env, 1)
    assert env.observation_space.contains(second)
    assert first["image"].shape == (5, 5, 4)
    assert second["image"][0, 0].tolist() == [0, 0, 1, 1]
    assert second["place"].shape == (2,)


def test_a_vector_environment_steps_as_single_ones() -> None:
    recipe = EnvironmentRecipe("CartPole-v1", observe=[0, 2], time_limit=10)
    vector = make_vector_env(recipe, 2)
    observations, _ = vector.reset(seed=[5, 6])
    for env, seed, shown in zip((recipe(), recipe()), (5, 6), observations, strict=True):
        assert np.array_equal(env.reset(seed=seed)[0], shown)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: EnvironmentRecipe(3), TypeError, r"id is 3; expected a callable"),
        (lambda: EnvironmentRecipe("A-v0", wrappers=[3]), TypeError, r"wrappers\[0\] is 3"),
        (
            lambda: EnvironmentRecipe("A-v0", wrappers=[{"_target_": "gymnasium.wrappers.Nothing"}]),
            ValueError,
            r"wrappers\[0\] has the unknown _target_ 'gymnasium.wrappers.Nothing'",
        ),
        (lambda: EnvironmentRecipe("A-v0", frame_stack=0), ValueError, "frame_stack must be a positive integer"),
        (lambda: EnvironmentRecipe("A-v0", keep=["a"], drop=["b"]), ValueError, "give one of them"),
        (lambda: EnvironmentRecipe(Counter, drop=["misson"])(), ValueError, r"drop=\['misson'\].*observes \['image'"),
        (lambda: EnvironmentRecipe(Counter, keep=["sight"])(), ValueError, r"keep=\['sight'\].*not there"),
        (
            lambda: EnvironmentRecipe(Counter, drop=["image", "place", "mission"])(),
            ValueError,
            "leaves nothing",
        ),
        (lambda: EnvironmentRecipe("CartPole-v1", keep=["image"])(), ValueError, "entries of a Dict"),
        (lambda: EnvironmentRecipe("CartPole-v1", frame_stack=2)(), ValueError, "frame_stack=2 stacks images"),
        (
            lambda: EnvironmentRecipe("CartPole-v1", observe=[4])(),
            ValueError,
            r"observe=\[4\] must name entries 0 to 3",
        ),
        (lambda: EnvironmentRecipe("CartPole-v1", wrappers=[lambda env: 3])(), TypeError, "made a int"),
        (lambda: FrameStack(gym.make("CartPole-v1"), 2), ValueError, "stacks images"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()
