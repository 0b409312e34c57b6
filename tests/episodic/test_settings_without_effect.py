"""Arguments of the episodic buffer that another one leaves without effect."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_lightning import EpisodicReplayBuffer, UniformSampler

REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("recent_data_steps", "recent_data_ratio", {"recent_data_steps": 16}),
    ("recent_data_steps", "recent_data_ratio", {"recent_data_steps": 16, "prioritized_sampling": True}),
    ("initial_priority", "prioritized_sampling", {"initial_priority": 2.0}),
    *(
        (name, "sampler", {name: value, "sampler": UniformSampler})
        for name, value in {
            "recent_data_steps": 2,
            "recent_data_ratio": 0.5,
            "prioritized_sampling": True,
            "with_replacement": True,
            "initial_priority": 2.0,
        }.items()
    ),
    *(
        (name, "record_episodic_return", {name: value})
        for name, value in {"reward_clip": (-1.0, 1.0), "default_return": -5.0, "critic": print}.items()
    ),
]


@pytest.mark.parametrize(("name", "needs", "settings"), REFUSED)
def test_an_argument_without_effect_is_refused(name: str, needs: str, settings: dict[str, Any]) -> None:
    settings = {key: value() if key == "sampler" else value for key, value in settings.items()}
    with pytest.raises(ValueError, match=rf"^{name}.*{needs}") as refusal:
        EpisodicReplayBuffer(None, 2, 8, **settings)
    assert "\n" not in str(refusal.value)


TAKEN: list[dict[str, Any]] = [
    {"recent_data_steps": 2, "recent_data_ratio": 0.5},
    {"recent_data_steps": 2, "recent_data_ratio": 0.5, "prioritized_sampling": True, "initial_priority": 2.0},
    {"with_replacement": True},
    {"with_replacement": True, "prioritized_sampling": True},
    {"record_episodic_return": True, "reward_clip": (-1.0, 1.0), "default_return": -5.0, "critic": print},
    {"gamma": 0.9},
    {"sampler": UniformSampler(), "record_episodic_return": True, "default_return": -5.0},
    {"recent_data_steps": 1, "recent_data_ratio": 0.0, "default_return": -1000, "initial_priority": 1},
]


@pytest.mark.parametrize("settings", TAKEN)
def test_an_argument_with_an_effect_is_taken(settings: dict[str, Any]) -> None:
    assert len(EpisodicReplayBuffer(None, 2, 8, **settings)) == 0
