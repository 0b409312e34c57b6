"""Episodes played at a keyboard that is not there, in environments that reuse their memory."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kit.careless import Careless, pair
from kit.states import differences, plain
from torchrl_lightning import EnvironmentRecipe
from torchrl_lightning.demonstrations import play_demonstrations


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Hold one key after the first step, and pass on the same action in each step, as Gymnasium's play does.

    The list is empty while the game goes on.
    """
    played = ModuleType("gymnasium.utils.play")
    over: list[Any] = []

    def play(env: Any, keys_to_action: Any, noop: Any) -> None:
        env.reset()
        action = noop
        while not over:
            *_, terminated, truncated, _ = env.step(action)
            (action,) = keys_to_action.values()
            if terminated or truncated:
                env.reset()

    played.play, played.MissingKeysToAction = play, KeyError  # type: ignore[attr-defined]
    event = SimpleNamespace(post=over.append, Event=lambda kind: kind)
    pygame: Any = ModuleType("pygame")
    pygame.event, pygame.QUIT = event, "quit"
    monkeypatch.setitem(sys.modules, "gymnasium.utils.play", played)
    monkeypatch.setitem(sys.modules, "pygame", pygame)
    return over


@pytest.mark.parametrize("action", ["box", "multi-discrete", "discrete", "scalar"])
@pytest.mark.parametrize("settings", [{}, {"action_repeat": 2}])
def test_steps_are_recorded_as_they_were_played(action: str, settings: Any, keyboard: list[Any]) -> None:
    key = 1 if action in ("multi-discrete", "discrete") else 0.5
    found = []
    for maker in pair(Careless, observation="dict", action=action, buffers=2):
        recipe = EnvironmentRecipe(maker, **settings)
        found.append(list(play_demonstrations(recipe, 3, keys={"a": key}, noop=0, seed=0)))
        keyboard.clear()
    assert [len(each) for each in found] == [3, 3]
    for careless, tidy in zip(*found, strict=True):
        assert careless.length == tidy.length > 1
        assert (careless.steps["action"][1:] == key).all()
        assert not differences(plain(careless.steps), plain(tidy.steps))
        assert not differences(plain(careless.last_observation), plain(tidy.last_observation))
        assert (careless.ends, careless.metadata["success"]) == (tidy.ends, tidy.metadata["success"])
