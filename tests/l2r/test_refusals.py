"""Steps that are no dicts or hold no numbers, and buffers that hold nothing to store."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from torchrl_lightning import PPOBuffer, SimpleReplayBuffer


def test_steps_that_hold_no_numbers_are_refused_by_name() -> None:
    act = SimpleNamespace(action=[0.0], value=0.0, logp=0.0)
    simple, ppo = SimpleReplayBuffer(1, 1, 8, 2), PPOBuffer(1, 1, 8, 2)
    good = {"obs": [0.0], "next_obs": [0.0], "act": act, "rew": 1.0, "done": False}
    for ours in (simple, ppo):
        for step in (None, [good], "step"):
            with pytest.raises(TypeError, match="A step is a dict of documented entries, got a"):
                ours.store(step)
        with pytest.raises(TypeError, match="obs must be numbers, got a str"):
            ours.store({**good, "obs": "text"})
        ours.store(good)
    assert len(simple) == ppo.step == 1


def test_storing_an_empty_buffer_stores_nothing() -> None:
    ours = SimpleReplayBuffer(1, 1, 8, 2)
    ours.store(SimpleReplayBuffer(1, 1, 8, 2))
    assert len(ours) == 0
