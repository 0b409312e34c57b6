from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
from gymnasium.wrappers import ClipReward
from lightning.pytorch.callbacks import ModelCheckpoint

from kit.runs import parameters
from torchrl_lightning import EnvironmentRecipe, GAEBuffer, VanillaOnPolicyBuffer, VTraceBuffer

# A resumed run writes beside the checkpoint that it came from.
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


@pytest.mark.parametrize("buffer", [VanillaOnPolicyBuffer, GAEBuffer, VTraceBuffer])
@pytest.mark.parametrize("stopped_after", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    buffer, stopped_after, tmp_path, make_data, make_trainer, make_module
):
    settings = {"buffer": buffer, "reset_at_each_batch": True}
    uninterrupted = make_module()
    make_trainer(max_epochs=4, limit_val_batches=1).fit(uninterrupted, datamodule=make_data(**settings))

    first = make_module()
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True, filename="at")
    trainer = make_trainer(
        max_epochs=stopped_after, limit_val_batches=1, enable_checkpointing=True, callbacks=[checkpoint]
    )
    trainer.fit(first, datamodule=make_data(**settings))
    assert not torch.equal(parameters(first), parameters(uninterrupted))

    # Another seed: everything must come from the checkpoint. It is read with weights_only, Lightning's default.
    resumed = make_module(seed=99)
    data = make_data(**settings)
    make_trainer(max_epochs=4, limit_val_batches=1, enable_checkpointing=True, callbacks=[checkpoint]).fit(
        resumed, datamodule=data, ckpt_path=checkpoint.last_model_path
    )
    assert data.frames == 4 * 64
    assert torch.equal(parameters(resumed), parameters(uninterrupted))


class Stop(L.Callback):
    """Ends a run like Ctrl-C, in the midst of an update or behind it, and keeps a checkpoint."""

    def __init__(self, path, after, behind):
        self.path, self.after, self.behind, self.done = path, after, behind, 0

    def on_train_batch_start(self, *args):
        if self.done == self.after and not self.behind:
            raise RuntimeError("stopped")

    def on_train_batch_end(self, *args):
        self.done += 1
        if self.done == self.after and self.behind:
            raise RuntimeError("stopped")

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


def noisy(base):
    class Noisy(base):
        """Draws from torch's own generator in each update, and notes its batches."""

        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append(batch["observation"].clone())
            return super().training_step(batch, batch_idx) * torch.rand(())

    return Noisy


@pytest.mark.parametrize(
    ("buffer", "after", "behind"),
    [
        (GAEBuffer, 0, False),  # in the first update of the first rollout
        (GAEBuffer, 4, False),  # ... of the second one
        (GAEBuffer, 5, False),
        (GAEBuffer, 6, False),  # in the first update of a pass
        (GAEBuffer, 6, True),  # behind the last update of a pass
        (GAEBuffer, 7, True),
        (GAEBuffer, 8, True),  # behind the last update of a rollout
        (VTraceBuffer, 6, False),
        (VTraceBuffer, 7, False),
    ],
)
def test_a_run_that_was_stopped_in_the_midst_of_a_rollout_goes_on_bit_for_bit(
    buffer, after, behind, tmp_path, make_data, make_trainer, make_module, tiny_actor_critic
):
    settings = {"buffer": buffer, "reset_at_each_batch": True, "total_frames": 4 * 64}
    whole, expected = make_module(noisy(tiny_actor_critic)), make_data(**settings)
    make_trainer(max_epochs=-1).fit(whole, datamodule=expected)

    stopped, stop = make_module(noisy(tiny_actor_critic)), Stop(tmp_path / "at.ckpt", after, behind)
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(max_epochs=-1, callbacks=[stop]).fit(stopped, datamodule=make_data(**settings))

    resumed, data = make_module(noisy(tiny_actor_critic), seed=99), make_data(**settings)
    make_trainer(max_epochs=-1).fit(resumed, datamodule=data, ckpt_path=stop.path)
    assert len(whole.seen) == 16
    assert torch.equal(torch.stack(stopped.seen[:after] + resumed.seen), torch.stack(whole.seen))
    assert torch.equal(parameters(resumed), parameters(whole))
    figures = ("frames", "train/return", "train/length", "train/episodes")
    assert [data.metrics().get(name) for name in figures] == [expected.metrics().get(name) for name in figures]


def test_what_is_left_of_the_last_rollout_is_learned_though_all_frames_are_collected(
    tmp_path, make_data, make_trainer, make_module
):
    stop = Stop(tmp_path / "at.ckpt", 5, False)
    with pytest.raises(RuntimeError, match="stopped"):
        make_trainer(max_epochs=-1, callbacks=[stop]).fit(make_module(), datamodule=make_data(total_frames=128))
    data, trainer = make_data(total_frames=128), make_trainer(max_epochs=-1)
    trainer.fit(make_module(), datamodule=data, ckpt_path=stop.path)
    assert (data.frames, trainer.global_step) == (128, 8)


@pytest.mark.parametrize("steps", [4, 6])
def test_a_run_by_steps_goes_on_without_a_rollout_too_many(steps, tmp_path, make_data, make_trainer, make_module):
    first = make_trainer(max_epochs=-1, max_steps=steps)
    first.fit(make_module(), datamodule=make_data())
    first.save_checkpoint(tmp_path / "at.ckpt")
    data, trainer = make_data(), make_trainer(max_epochs=-1, max_steps=12)
    trainer.fit(make_module(), datamodule=data, ckpt_path=tmp_path / "at.ckpt")
    assert (data.frames, trainer.global_step) == (3 * 64, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "Acrobot-v1"}, "environment differs: id: CartPole-v1 in the checkpoint, Acrobot-v1 here"),
        ({"num_envs": 8}, "num_envs=4, but this run has num_envs=8"),
        ({"frames_per_batch": 128}, "frames_per_batch=64, but this run has frames_per_batch=128"),
        ({"buffer": VTraceBuffer}, "buffer='GAEBuffer', but this run has buffer='VTraceBuffer'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(settings, message, make_data):
    written = make_data()
    written.setup("fit")
    other = make_data(**settings)
    other.setup("fit")
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(written.state_dict())
    assert other.frames == 0


def test_another_recipe_is_refused_field_by_field(tmp_path, make_data):
    wide, shifted = ("gymnasium.wrappers.ClipReward", {"min_reward": -1, "max_reward": 2}), lambda env: env
    written = make_data(
        env=EnvironmentRecipe("CartPole-v1", wrappers=[{"_target_": wide[0], **wide[1]}, shifted], time_limit=9)
    )
    torch.save(written.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
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


def test_a_state_of_another_version_is_refused(make_data):
    data = make_data()
    data.setup("fit")
    with pytest.raises(ValueError, match="version 0, this release reads version 2"):
        data.load_state_dict({**data.state_dict(), "schema_version": 0})


def test_a_state_of_other_ranks_is_refused(make_data):
    data = make_data()
    data.setup("fit")
    state = data.state_dict()
    with pytest.raises(ValueError, match=r"of 2 rank\(s\), but this run has 1"):
        data.load_state_dict({**state, "ranks": state["ranks"] * 2})
