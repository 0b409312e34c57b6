"""Checkpoints that a user writes after a fit or by steps, and states that raise an error."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium.wrappers import ClipReward

from contracts.streams import on_policy
from kit.actor_critic import fit, rollouts
from kit.files import through_file
from kit.replay import dqn, replay_data
from kit.runs import SaveAt, parameters, trainer
from kit.states import differences
from torchrl_lightning import EnvironmentRecipe


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
def test_checkpoint_saved_after_a_fit_resumes_as_an_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    whole, data, _ = run_of(MAKE[kind], 4)
    *_, first = run_of(MAKE[kind], 2)
    first.save_checkpoint(tmp_path / "at.ckpt")
    resumed, other, _ = run_of(MAKE[kind], 4, tmp_path / "at.ckpt")
    assert data.frames == other.frames
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("kind", MAKE)
def test_state_of_other_ranks_is_refused_before_anything_changes(kind: str) -> None:
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


def test_remaining_updates_of_the_last_rollout_are_made_after_all_frames(tmp_path: Path) -> None:
    failing, data = SaveAt(tmp_path / "at.ckpt", "on_train_batch_start", 6, then="fail"), rollouts(total_frames=128)
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path, rollouts(total_frames=128), max_epochs=-1, callbacks=[failing])
    _, run = fit(tmp_path, data, None, failing.path, max_epochs=-1)
    assert (data.frames, run.global_step) == (128, 8)


@pytest.mark.parametrize("steps", [4, 6])
def test_run_with_max_steps_resumes_without_an_extra_rollout(steps: int, tmp_path: Path) -> None:
    _, first = fit(tmp_path, max_epochs=-1, max_steps=steps)
    first.save_checkpoint(tmp_path / "at.ckpt")
    data = rollouts()
    _, run = fit(tmp_path, data, None, tmp_path / "at.ckpt", max_epochs=-1, max_steps=12)
    assert (data.frames, run.global_step) == (3 * 64, 12)


def test_another_recipe_is_refused_field_by_field() -> None:
    wide, shifted = ("gymnasium.wrappers.ClipReward", {"min_reward": -1, "max_reward": 2}), lambda env: env
    written = rollouts(
        env=EnvironmentRecipe("CartPole-v1", wrappers=[{"_target_": wide[0], **wide[1]}, shifted], time_limit=9)
    )
    state = through_file(written.state_dict())
    same = partial(ClipReward, **wide[1])  # a partial is equal, and stepping is not compared
    recipe = EnvironmentRecipe("CartPole-v1", wrappers=[same, shifted], time_limit=9, vectorization="async")
    rollouts(env=recipe).check_state(state)
    other = partial(ClipReward, **{**wide[1], "max_reward": 3})
    with pytest.raises(ValueError, match="environment differs") as error:
        rollouts(env=EnvironmentRecipe("Acrobot-v1", wrappers=[other], action_repeat=2)).check_state(state)
    name = f"{__name__}.{shifted.__qualname__}"
    assert str(error.value) == (
        "environment differs: id: CartPole-v1 in the checkpoint, Acrobot-v1 here; "
        "time_limit: 9 in the checkpoint, not set here; wrappers[0].max_reward: 2 in the checkpoint, 3 here; "
        f"wrappers[1]: {{'_target_': '{name}'}} in the checkpoint, not set here; "
        "action_repeat: not set in the checkpoint, 2 here. Resume with the environment that the checkpoint was "
        "written with."
    )
    rollouts(env=EnvironmentRecipe("CartPole-v1")).check_state(rollouts().state_dict())
