"""Checkpoints of runs that learn from rollouts: in the midst of one, by steps, and of another recipe."""

from __future__ import annotations

from functools import partial

import pytest
from gymnasium.wrappers import ClipReward

from kit.files import through_file
from kit.runs import SaveAt
from torchrl_lightning import EnvironmentRecipe


def test_what_is_left_of_the_last_rollout_is_learned_though_all_frames_are_collected(
    tmp_path, make_data, make_trainer, make_module
):
    failing = SaveAt(tmp_path / "at.ckpt", "on_train_batch_start", 6, then="fail")
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(max_epochs=-1, callbacks=[failing]).fit(make_module(), datamodule=make_data(total_frames=128))
    data, trainer = make_data(total_frames=128), make_trainer(max_epochs=-1)
    trainer.fit(make_module(), datamodule=data, ckpt_path=failing.path)
    assert (data.frames, trainer.global_step) == (128, 8)


@pytest.mark.parametrize("steps", [4, 6])
def test_a_run_by_steps_goes_on_without_a_rollout_too_many(steps, tmp_path, make_data, make_trainer, make_module):
    first = make_trainer(max_epochs=-1, max_steps=steps)
    first.fit(make_module(), datamodule=make_data())
    first.save_checkpoint(tmp_path / "at.ckpt")
    data, trainer = make_data(), make_trainer(max_epochs=-1, max_steps=12)
    trainer.fit(make_module(), datamodule=data, ckpt_path=tmp_path / "at.ckpt")
    assert (data.frames, trainer.global_step) == (3 * 64, 12)


def test_another_recipe_is_refused_field_by_field(make_data):
    wide, shifted = ("gymnasium.wrappers.ClipReward", {"min_reward": -1, "max_reward": 2}), lambda env: env
    written = make_data(
        env=EnvironmentRecipe("CartPole-v1", wrappers=[{"_target_": wide[0], **wide[1]}, shifted], time_limit=9)
    )
    state = through_file(written.state_dict())
    same = partial(ClipReward, **wide[1])  # as a partial; and stepping is not part of an environment
    recipe = EnvironmentRecipe("CartPole-v1", wrappers=[same, shifted], time_limit=9, vectorization="async")
    make_data(env=recipe).check_state(state)
    other = partial(ClipReward, **{**wide[1], "max_reward": 3})
    with pytest.raises(ValueError, match="environment differs") as error:
        make_data(env=EnvironmentRecipe("Acrobot-v1", wrappers=[other], action_repeat=2)).check_state(state)
    name = f"{__name__}.{shifted.__qualname__}"
    assert str(error.value) == (
        "environment differs: id: CartPole-v1 in the checkpoint, Acrobot-v1 here; "
        "time_limit: 9 in the checkpoint, not set here; wrappers[0].max_reward: 2 in the checkpoint, 3 here; "
        f"wrappers[1]: {{'_target_': '{name}'}} in the checkpoint, not set here; "
        "action_repeat: not set in the checkpoint, 2 here. Resume with the environment that the checkpoint was "
        "written with."
    )
    make_data(env=EnvironmentRecipe("CartPole-v1")).check_state(make_data().state_dict())
