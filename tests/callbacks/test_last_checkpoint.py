"""LastCheckpoint saves the end of a run, however the run ends."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from kit.actor_critic import TinyActorCritic, Unlucky, fit, rollouts
from kit.replay import fit as fit_replay
from kit.replay import replay_data
from kit.states import differences
from torchrl_lightning import BestCheckpoint, LastCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


class Judged(TinyActorCritic):
    """A module that logs a worse score at each evaluation."""

    judged_after = ()

    def validation_step(self, batch, batch_idx):
        self.log("eval/return", -1.0 * len(self.judged_after), batch_size=1)
        self.judged_after = (*self.judged_after, self.updates)


class At(L.Callback):
    """Call a function after some updates, then stop the run in the middle of an epoch, as a time limit does."""

    def __init__(self, updates, do=lambda: None):
        self.updates, self.do = updates, do

    def on_train_batch_end(self, trainer, module, *args):
        if module.updates == self.updates:
            self.do()
            trainer.should_stop = True


def run(folder, every=3, total_frames=-1, callbacks=(), **kwargs):
    """Fit with our commands' callbacks and one for the worst checkpoint; an epoch has 4 updates and 64 frames."""
    options = {"monitor": "eval/return", "enable_version_counter": False, "save_on_train_epoch_end": False}
    checkpoints = [
        BestCheckpoint(folder, name, mode=mode, **options) for name, mode in (("best", "max"), ("worst", "min"))
    ]
    settings = {"max_epochs": -1, "check_val_every_n_epoch": every, "limit_val_batches": 1, **kwargs}
    data = rollouts(total_frames=total_frames)
    return fit(folder, data, Judged(), callbacks=[*callbacks, *checkpoints, LastCheckpoint(folder)], **settings)[0]


def stored(path):
    return torch.load(path, weights_only=True)


def frames_of(path):
    return stored(path)["OnPolicyDataModule"]["ranks"][0]["frames"]


@pytest.mark.parametrize(
    ("ending", "updates", "judged_after"),
    [
        ({"total_frames": 7 * 64}, 28, (12, 24, 28)),
        ({"total_frames": 6 * 64}, 24, (12, 24)),  # the sixth epoch has a regular evaluation
        ({"total_frames": 64}, 4, (4,)),
        ({"max_epochs": 4}, 16, (12, 16)),
        ({"max_steps": 14}, 14, (12, 14)),
        ({"max_steps": 14, "every": 1}, 14, (4, 8, 12, 14)),
        ({"callbacks": [At(14)]}, 14, (12, 14)),
    ],
)
def test_end_of_a_run_is_evaluated_once_and_saved(ending, updates, judged_after, tmp_path):
    module = run(tmp_path, **ending)
    assert (module.updates, module.judged_after) == (updates, judged_after)
    for name, at in {"last": updates, "best": judged_after[0], "worst": updates}.items():
        assert frames_of(tmp_path / f"{name}.ckpt") == -(-at // 4) * 64
    assert not differences(dict(stored(tmp_path / "last.ckpt")["state_dict"]), dict(module.state_dict()))
    assert len(list(tmp_path.iterdir())) == 3


def test_killed_run_leaves_the_last_evaluated_state(tmp_path):
    def look():
        assert frames_of(tmp_path / "last.ckpt") == 4 * 64
        assert frames_of(tmp_path / "best.ckpt") == 2 * 64

    assert run(tmp_path, every=2, callbacks=[At(21, look)]).updates == 21


def test_resume_from_the_end_repeats_nothing(tmp_path):
    """The evaluation at the end of the first run does not change later updates."""

    def ends(epochs, module=None, resume=None, **options):
        data = rollouts(reset_at_each_batch=True)
        return fit(tmp_path, data, module, resume, seed=0 if resume is None else 9, max_epochs=epochs, **options)[0]

    last = LastCheckpoint(tmp_path)
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": 3}
    uninterrupted = ends(4)
    ends(2, callbacks=[last], **options)
    second = ends(4, Judged(), last.path, callbacks=[LastCheckpoint(tmp_path)], **options)
    assert (second.updates, second.judged_after) == (8, (4, 8))
    assert not differences(dict(second.state_dict()), dict(uninterrupted.state_dict()))


def test_end_of_a_replay_run_is_saved(tmp_path):
    data, last = replay_data(total_frames=53, checkpoint_buffer="beside"), LastCheckpoint(tmp_path)
    evaluated = {"limit_val_batches": 1, "check_val_every_n_epoch": 2}
    module, _ = fit_replay(tmp_path, data, max_epochs=-1, callbacks=[last], **evaluated)
    state = stored(last.path)["ReplayDataModule"]["ranks"][0]
    assert (state["frames"], state["updates"]) == (data.frames, module.updates) == (54, 15)
    assert state["snapshot"]["name"].startswith("after_15_")


def test_fit_without_evaluation_is_saved_and_fit_without_updates_is_not(tmp_path):
    data, last = rollouts(total_frames=64), LastCheckpoint(tmp_path)
    module, _ = fit(tmp_path, data, max_epochs=-1, callbacks=[last])
    assert frames_of(last.path) == 64
    last.path.unlink()
    fit(tmp_path, data, module, max_epochs=-1, callbacks=[last])
    assert not last.path.exists()


@pytest.mark.parametrize("when", [0, 5, 7])
def test_exception_leaves_a_checkpoint_that_resumes(when, tmp_path):
    save, data = LastCheckpoint(tmp_path / "checkpoints"), rollouts(total_frames=256)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, rollouts(total_frames=256), Unlucky(when), callbacks=[save], max_epochs=-1)
    module, _ = fit(tmp_path, data, None, save.path, seed=9, max_epochs=-1)
    # No update of the four rollouts is lost or repeated.
    assert (data.frames, module.updates) == (256, 16 - when)


@pytest.mark.parametrize("where", ["setup", "_build_default_collector"])
def test_exception_before_the_first_rollout_saves_nothing(where, tmp_path, caplog):
    save, data = LastCheckpoint(tmp_path / "checkpoints"), rollouts()
    setattr(data, where, lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no environment")))
    with pytest.raises(RuntimeError, match="no environment"):
        fit(tmp_path, data, callbacks=[save])
    assert not save.path.exists()
    assert "to resume" not in caplog.text


def test_exception_during_an_evaluation_is_saved_too(tmp_path):
    class Failing(TinyActorCritic):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("cannot judge")

    save = LastCheckpoint(tmp_path / "checkpoints")
    with pytest.raises(RuntimeError, match="cannot judge"):
        fit(tmp_path, None, Failing(), callbacks=[save], limit_val_batches=1)
    assert frames_of(save.path) == 64


class Trial(L.Callback):
    resume_advice = "the search goes on"


class Trusted(L.Callback):
    resume_settings = ["trusted=true"]


@pytest.mark.parametrize(
    ("callbacks", "advice"),
    [
        ([], "to resume, run the same command with ckpt_path={path}\n"),
        ([Trusted()], "to resume, run the same command with ckpt_path={path} trusted=true\n"),
        ([Trial()], "the search goes on; the final checkpoint of this run is {path}\n"),
    ],
    ids=["a run of its own", "own classes", "part of a search"],
)
def test_stopped_run_logs_how_to_resume(tmp_path, caplog, callbacks, advice):
    def stop():
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path, callbacks=[*callbacks, At(6, stop)])
    assert f"stopped by RuntimeError; {advice.format(path=tmp_path / 'last.ckpt')}" in caplog.text
