from __future__ import annotations

import warnings

import gymnasium
import pytest

from torchrl_lightning import EnvironmentRecipe, environment_specs, make_vector_env
from torchrl_lightning.demonstrations import play_demonstrations
from torchrl_lightning.demonstrations.task_check import recipe_metadata

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pygame = pytest.importorskip("pygame")


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    """A window that nobody sees, without a clock, in which D is held from the first frame on."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr("pygame.time.Clock", lambda: type("Clock", (), {"tick": lambda self, fps: None})())
    pygame.init()
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_d))


class Fallen(gymnasium.Wrapper):
    """Calls it a success where the pole falls."""

    def step(self, action):
        *step, info = super().step(action)
        return *step, {**info, "is_success": step[2]}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_finished_episodes_are_human_demonstrations():
    recipe = EnvironmentRecipe("CartPole-v1", wrappers=[Fallen])
    found = list(play_demonstrations(recipe, 2, keys={"a": 0, "d": 1}, seed=0))
    assert len(found) == 2
    starts = []
    for each in found:
        each.fits(environment_specs(make_vector_env("CartPole-v1", 1)))
        assert each.is_human
        assert each.metadata == {**recipe_metadata(recipe), "success": True}
        assert (each.terminated, each.truncated) == (True, False)
        assert each.steps["action"][1:].all()  # the key was seen after the first step
        assert each.total_reward == each.length
        assert abs(each.last_observation["observation"][2]) > 0.2
        starts.append(each.steps["observation"][0].tolist())
    assert starts[0] != starts[1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_environment_without_keys_is_refused():
    with pytest.raises(ValueError, match="does not define keys"):
        list(play_demonstrations("CartPole-v1", 1))


class FromOne(gymnasium.wrappers.TransformAction):
    """Counts actions from 1 on."""

    def __init__(self, env):
        super().__init__(env, lambda action: action - 1, gymnasium.spaces.Discrete(2, start=1))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_keys_map_to_environment_actions_that_are_stored_from_0_on():
    recipe = EnvironmentRecipe("CartPole-v1", wrappers=[FromOne])
    (found,) = play_demonstrations(recipe, 1, keys={"a": 1, "d": 2}, noop=1, seed=0)
    assert found.steps["action"][1:].all()
    assert found.steps["action"].max() == 1
