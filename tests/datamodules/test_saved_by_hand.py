"""Checkpoints that a user writes: behind a fit, and amid an epoch before an update; and states that are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.streams import on_policy
from kit.replay import dqn, replay_data
from kit.runs import parameters, trainer
from kit.states import differences


def replayed(**settings: Any) -> Any:
    seeded = {"frames_per_batch": 8, "warmup_frames": 40, "reset_at_each_batch": True, "frames_per_update": 2}
    return dqn(), replay_data("prioritized", normalize_observation=True, **{**seeded, **settings})


def rolled(**settings: Any) -> Any:
    torch.manual_seed(0)
    return on_policy(normalize_observation=True, reset_at_each_batch=True, **settings)


MAKE = {"rollouts": rolled, "replay": replayed}


def run_of(make: Any, epochs: int, path: Path | None = None, **settings: Any) -> tuple[Any, Any, Any]:
    module, data = make()
    run = trainer(max_epochs=epochs, limit_val_batches=0, **settings)
    run.fit(module, datamodule=data, ckpt_path=path)
    return module, data, run


@pytest.mark.parametrize("kind", MAKE)
def test_a_checkpoint_that_is_saved_behind_a_fit_goes_on_as_if_it_had_not_ended(kind: str, tmp_path: Path) -> None:
    whole, data, _ = run_of(MAKE[kind], 4)
    *_, first = run_of(MAKE[kind], 2)
    first.save_checkpoint(tmp_path / "at.ckpt")
    resumed, other, _ = run_of(MAKE[kind], 4, tmp_path / "at.ckpt")
    assert data.frames == other.frames
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("kind", MAKE)
def test_a_state_of_other_ranks_is_refused_before_anything_changes(kind: str) -> None:
    _, data, _ = run_of(MAKE[kind], 1)
    state = data.state_dict()
    other = MAKE[kind]()[1]
    other.setup("fit")
    before = copy.deepcopy(other.state_dict())
    for wrong in (
        {**state, "ranks": state["ranks"] * 2},
        {**state, "ranks": [{**state["ranks"][0], "episodes": {}}]},
        {**state, "ranks": [{**state["ranks"][0], "buffer": {}}]},
    ):
        with pytest.raises(ValueError, match=r"rank|episodes|foreign|version"):
            other.load_state_dict(wrong)
        assert not differences(other.state_dict(), before)
    other.close()
