"""The checkpoint to go on from: the end of a run, however it ends."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from datamodules.replay_parts import fit as fit_replay
from datamodules.replay_parts import replay_data
from torchrl_lightning import BestCheckpoint, LastCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


def judged(base, scores):
    """Give a module whose evaluations have these scores, as long as they last."""

    class Judged(base):
        left, judged_after = list(scores), ()

        def validation_step(self, batch, batch_idx):
            self.judged_after = (*self.judged_after, self.updates)
            self.log("eval/return", self.left.pop(0), batch_size=1)

    return Judged


class StopAt(L.Callback):
    """Ends a run as a limit of time does: in the midst of an epoch."""

    def __init__(self, updates):
        self.updates = updates

    def on_train_batch_end(self, trainer, module, *args):
        trainer.should_stop = trainer.should_stop or module.updates == self.updates


def run(tmp_path, make_data, make_trainer, module, every=3, total_frames=-1, callbacks=(), **kwargs):
    """Fit with the callbacks of our own runs: an epoch has 4 updates of 64 frames."""
    best = BestCheckpoint(
        tmp_path,
        "best",
        monitor="eval/return",
        mode="max",
        enable_version_counter=False,
        save_on_train_epoch_end=False,
    )
    settings = {"max_epochs": -1, "check_val_every_n_epoch": every, "limit_val_batches": 1}
    trainer = make_trainer(
        **{**settings, **kwargs}, enable_checkpointing=True, callbacks=[*callbacks, best, LastCheckpoint(tmp_path)]
    )
    trainer.fit(module, datamodule=make_data(total_frames=total_frames))
    return trainer


def frames_of(path):
    return torch.load(path, weights_only=True)["OnPolicyDataModule"]["ranks"][0]["frames"]


@pytest.mark.parametrize(
    ("ending", "updates", "judged_after"),
    [
        ({"total_frames": 7 * 64}, 28, (12, 24, 28)),
        ({"total_frames": 6 * 64}, 24, (12, 24)),  # a multiple of the epochs between two evaluations
        ({"total_frames": 64}, 4, (4,)),
        ({"max_epochs": 4}, 16, (12, 16)),
        ({"max_steps": 14}, 14, (12, 14)),
        ({"max_steps": 14, "every": 1}, 14, (4, 8, 12, 14)),
        ({"callbacks": [StopAt(14)]}, 14, (12, 14)),
    ],
)
@pytest.mark.parametrize("end_is_best", [True, False])
def test_the_end_of_a_run_is_judged_once_and_kept(
    ending, updates, judged_after, end_is_best, tmp_path, make_data, make_trainer, make_module, tiny_actor_critic
):
    scores = list(range(len(judged_after), 0, -1))
    if end_is_best:
        scores[-1] = 100
    module = make_module(judged(tiny_actor_critic, scores))
    run(tmp_path, make_data, make_trainer, module, **ending)
    assert (module.updates, module.judged_after) == (updates, judged_after)
    last, best = tmp_path / "last.ckpt", tmp_path / "best.ckpt"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]
    assert frames_of(last) == -(-updates // 4) * 64
    weights = torch.load(last, weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    assert frames_of(best) == -(-(updates if end_is_best else judged_after[0]) // 4) * 64


def test_a_run_between_two_evaluations_that_is_killed_leaves_the_last_evaluated_state(
    tmp_path, make_data, make_trainer, make_module, tiny_actor_critic
):
    class Killed(L.Callback):
        def on_train_batch_start(self, trainer, module, *args):
            if module.updates == 20:
                assert frames_of(tmp_path / "last.ckpt") == 4 * 64
                assert frames_of(tmp_path / "best.ckpt") == 2 * 64
                trainer.should_stop = True

    module = make_module(judged(tiny_actor_critic, [3.0, 2.0, 1.0]))
    run(tmp_path, make_data, make_trainer, module, every=2, callbacks=[Killed()])
    assert module.updates == 21


def test_going_on_from_the_end_repeats_nothing(tmp_path, make_data, make_trainer, make_module, tiny_actor_critic):
    """Evaluating the end changes nothing in what is learned after it."""
    settings = {"reset_at_each_batch": True}
    whole = make_module()
    make_trainer(max_epochs=4).fit(whole, datamodule=make_data(**settings))
    last = LastCheckpoint(tmp_path)
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": 3, "enable_checkpointing": True}
    make_trainer(max_epochs=2, callbacks=[last], **options).fit(make_module(), datamodule=make_data(**settings))
    second = make_module(judged(tiny_actor_critic, [1.0, 1.0]))
    make_trainer(max_epochs=4, callbacks=[LastCheckpoint(tmp_path)], **options).fit(
        second, datamodule=make_data(**settings), ckpt_path=last.path
    )
    assert (second.updates, second.judged_after) == (8, (4, 8))
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)


def test_the_end_of_a_replay_run_is_kept(tmp_path):
    last = LastCheckpoint(tmp_path)
    data = replay_data(total_frames=53, checkpoint_buffer="beside")
    module, _ = fit_replay(
        tmp_path,
        data,
        max_epochs=-1,
        limit_val_batches=1,
        check_val_every_n_epoch=2,
        enable_checkpointing=True,
        callbacks=[last],
    )
    state = torch.load(last.path, weights_only=True)["ReplayDataModule"]["ranks"][0]
    assert (state["frames"], state["updates"]) == (data.frames, module.updates) == (54, 15)
    assert state["snapshot"]["name"].startswith("after_15_")


def test_without_evaluation_the_end_is_kept_all_the_same(tmp_path, make_data, make_trainer, make_module):
    last = LastCheckpoint(tmp_path)
    make_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[last]).fit(make_module(), datamodule=make_data())
    assert frames_of(last.path) == 2 * 64


def test_a_fit_that_learns_nothing_writes_nothing(tmp_path, make_data, make_trainer, make_module):
    data, module, last = make_data(total_frames=64), make_module(), LastCheckpoint(tmp_path)
    make_trainer(max_epochs=-1).fit(module, datamodule=data)
    make_trainer(max_epochs=-1, enable_checkpointing=True, callbacks=[last]).fit(module, datamodule=data)
    assert not last.path.exists()


def failing(base, when):
    class Failing(base):
        def training_step(self, batch, batch_idx):
            if self.updates == when:
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    return Failing


@pytest.mark.parametrize("when", [0, 5, 7])
def test_an_exception_leaves_a_checkpoint_that_resumes(
    when, tmp_path, make_data, make_trainer, make_module, tiny_actor_critic
):
    save = LastCheckpoint(tmp_path / "checkpoints")
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer(callbacks=[save], enable_checkpointing=True, max_epochs=-1).fit(
            make_module(failing(tiny_actor_critic, when)), datamodule=make_data(total_frames=256)
        )
    assert save.path.exists()
    data, module = make_data(total_frames=256), make_module(seed=9)
    make_trainer(max_epochs=-1).fit(module, datamodule=data, ckpt_path=save.path)
    # Four rollouts of four updates each: none is lost, and none is made twice.
    assert data.frames == 256
    assert module.updates == 16 - when


def test_what_fails_before_training_begins_leaves_nothing(tmp_path, make_data, make_trainer, make_module):
    save = LastCheckpoint(tmp_path / "checkpoints")
    data = make_data()
    data.setup = lambda stage: (_ for _ in ()).throw(RuntimeError("no environment"))
    with pytest.raises(RuntimeError, match="no environment"):
        make_trainer(callbacks=[save], enable_checkpointing=True).fit(make_module(), datamodule=data)
    assert not save.path.exists()


def test_an_exception_during_an_evaluation_is_saved_too(
    tmp_path, make_data, make_trainer, make_module, tiny_actor_critic
):
    class Failing(tiny_actor_critic):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("cannot judge")

    save = LastCheckpoint(tmp_path / "checkpoints")
    with pytest.raises(RuntimeError, match="cannot judge"):
        make_trainer(callbacks=[save], enable_checkpointing=True, limit_val_batches=1).fit(
            make_module(Failing), datamodule=make_data()
        )
    state = torch.load(save.path, weights_only=True)["OnPolicyDataModule"]
    assert state["ranks"][0]["frames"] == 64
