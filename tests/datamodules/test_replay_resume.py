from __future__ import annotations

import logging
import shutil

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict import TensorDict

from datamodules.replay_parts import dqn, fit, in_files, prioritized, replay_data, stored, trainer
from kit.runs import SaveAt, parameters

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
EXACT = {"reset_at_each_batch": True, "frames_per_batch": 8, "frames_per_update": 0.7}


def learner(buffer, seed=0):
    return dqn(seed=seed, recurrent=buffer == "sequence")


def states_in(folder):
    return sorted(path.name for path in folder.glob("**/after_*"))


@pytest.mark.parametrize("kept", ["inside", "beside"])
@pytest.mark.parametrize(
    ("buffer", "settings"),
    [
        ("uniform", {}),
        ("prioritized", {}),
        ("prioritized, three steps", {}),
        ("sequence", {}),
        ("recent, prioritized", {}),
        ("simple", {}),
        ("files", {}),
        ("prioritized", {"updates_per_step": 5}),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(buffer, settings, kept, tmp_path):
    def data(name):
        make = in_files(tmp_path / name, prioritized) if buffer == "files" else buffer
        return replay_data(make, checkpoint_buffer=kept, **EXACT, **settings)

    whole = data("whole")
    uninterrupted, _ = fit(tmp_path, whole, learner(buffer), max_epochs=4, limit_val_batches=1)

    # Stopped in the midst of the second epoch: the counts have to go on where they were.
    first = data("half")
    saving = SaveAt(tmp_path / "at.ckpt", "on_train_batch_end", 15 // settings.get("updates_per_step", 1))
    fit(tmp_path, first, learner(buffer), max_epochs=2, limit_val_batches=1, callbacks=[saving])
    resumed = data("half")
    module, _ = fit(tmp_path, resumed, learner(buffer, 99), tmp_path / "at.ckpt", max_epochs=4, limit_val_batches=1)
    assert (resumed.updates, resumed.frames) == (whole.updates, whole.frames)
    assert torch.equal(stored(resumed), stored(whole))
    assert torch.equal(parameters(module), parameters(uninterrupted))


class Look(L.Callback):
    """Reads the state time and again, before and behind each update."""

    def look(self, trainer):
        data = trainer.datamodule
        before = data.buffer.state_dict()
        states = [data.state_dict()["ranks"][0] for _ in range(2)]
        assert str(data.buffer.state_dict()) == str(before)
        assert str(states[0]) == str(states[1])
        return states[0]

    def on_train_batch_start(self, trainer, module, *args):
        assert self.look(trainer)["updates"] == module.updates

    def on_train_batch_end(self, trainer, module, *args):
        state = self.look(trainer)
        assert state["updates"] == module.updates
        assert "snapshot" not in state


def test_reading_the_state_changes_nothing_and_writes_nothing(tmp_path):
    data = [replay_data("prioritized", checkpoint_buffer="beside", updates_per_epoch=4) for _ in range(2)]
    module, _ = fit(tmp_path / "left_alone", data[0], max_epochs=1)
    watched, run = fit(tmp_path / "watched", data[1], max_epochs=1, callbacks=[Look()])
    assert states_in(tmp_path) == []
    assert torch.equal(parameters(watched), parameters(module))
    assert str(data[1].buffer.state_dict()) == str(data[0].buffer.state_dict())
    # Writing is a step of its own, which each checkpoint takes.
    run.save_checkpoint(tmp_path / "at.ckpt")
    run.save_checkpoint(tmp_path / "again.ckpt")
    (name,) = states_in(tmp_path)
    state = torch.load(tmp_path / "again.ckpt", weights_only=True)["ReplayDataModule"]
    assert state["ranks"][0]["snapshot"]["name"] == name


def test_without_resets_counters_and_ratio_go_on(tmp_path):
    first = replay_data("three steps", frames_per_update=0.1)
    module, run = fit(tmp_path, first)
    run.save_checkpoint(tmp_path / "last.ckpt")
    data = replay_data("three steps", frames_per_update=0.1)
    fit(tmp_path, data, dqn(), tmp_path / "last.ckpt", max_epochs=4)
    assert data.updates == 40
    assert data.frames == 44  # 40 + 39 / 10, rounded up to steps of two environments
    assert len(data.buffer) == data.frames
    # What the environments had begun before is cut, not joined to what they began after it.
    episodes, env = data.buffer.writer.index, torch.arange(2)
    assert (episodes.begin(env, torch.full((2,), 21)) >= torch.tensor(len(first.buffer) // 2)).all()
    assert module.updates == 20


def test_no_buffer_is_a_warning_and_a_second_warm_up(tmp_path, caplog):
    first = replay_data("sequence", checkpoint_buffer="none")
    _, run = fit(tmp_path, first, learner("sequence"))
    run.save_checkpoint(tmp_path / "last.ckpt")
    data = replay_data("sequence", checkpoint_buffer="none")
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, data, learner("sequence"), tmp_path / "last.ckpt", max_epochs=3)
    assert "holds no replay buffer (checkpoint_buffer='none'): 40 frames are collected anew" in caplog.text
    # Frame 60 was the last one; then 40 anew, and one for each further update.
    assert (data.updates, data.frames, len(data.buffer)) == (30, 110, 50)


def test_a_state_is_written_once_and_two_are_kept(tmp_path):
    data = replay_data(checkpoint_buffer="beside")
    callback = ModelCheckpoint(dirpath=tmp_path, filename="best", save_last=True)
    fit(tmp_path, data, max_epochs=4, enable_checkpointing=True, callbacks=[callback])
    # Several checkpoints of one moment share a state.
    names = states_in(tmp_path)
    assert [name.rpartition("_")[0] for name in names] == ["after_30", "after_40"]
    assert (
        torch.load(tmp_path / "last.ckpt", weights_only=True)["ReplayDataModule"]["ranks"][0]["snapshot"]["name"]
        == names[-1]
    )


def test_runs_that_share_a_folder_leave_each_other_alone(tmp_path):
    checkpoints = []
    for run in range(2):
        data = replay_data(checkpoint_buffer="beside", seed=run)
        _, trainer = fit(tmp_path, data, max_epochs=1)
        trainer.save_checkpoint(tmp_path / f"{run}.ckpt")
        checkpoints.append(stored(data))
    for run in range(2):
        data = replay_data(checkpoint_buffer="beside", seed=run)
        data.buffer_dir = tmp_path / "buffer"
        data.setup("fit")
        data.load_state_dict(torch.load(tmp_path / f"{run}.ckpt", weights_only=True)["ReplayDataModule"])
        assert torch.equal(stored(data), checkpoints[run])
        data.close()


def test_what_was_resumed_from_stays_until_two_states_follow_it(tmp_path):
    def data():
        made = replay_data(checkpoint_buffer="beside", buffer_dir=tmp_path / "states")
        made.setup("fit")
        return made

    def write(made, updates):
        made.updates, made._snapshot = updates, None
        assert made.save_buffer()
        return made.state_dict()

    first = data()
    first.buffer.extend(steps())
    start = write(first, 1)
    # A process that was killed between writing its buffer and writing its checkpoint, time and again.
    for updates in range(2, 5):
        other = data()
        other.load_state_dict(start)
        write(other, updates)
    again = data()
    again.load_state_dict(start)
    write(again, 5)
    write(again, 6)
    assert [name.rpartition("_")[0] for name in states_in(tmp_path)] == ["after_5", "after_6"]


def steps(value=0.0):
    return TensorDict({"observation": torch.full((2, 4), value)}, [2])


@pytest.mark.parametrize("cells", ["cells", "elsewhere"])
def test_a_run_that_crashed_behind_its_checkpoint_resumes_from_it_alone(cells, tmp_path):
    def data(folder):
        made = replay_data(in_files(tmp_path / folder), checkpoint_buffer="beside", buffer_dir=tmp_path / "states")
        made.setup("fit")
        return made

    first = data("cells")
    for number in range(300):  # round the ring
        first.buffer.extend(steps(float(number)))
    first.save_buffer()
    state, expected = first.state_dict(), stored(first)
    for _ in range(4):
        first.buffer.extend(steps(-1.0))
    for _ in range(2):
        resumed = data(cells)
        resumed.load_state_dict(state)
        assert torch.equal(stored(resumed), expected)
        resumed.save_buffer()
        state = resumed.state_dict()


def test_a_moved_folder_is_found_and_a_missing_one_explained(tmp_path):
    first = replay_data(checkpoint_buffer="beside", buffer_dir=tmp_path / "states")
    first.setup("fit")
    first.buffer.extend(steps())
    first.save_buffer()
    state = first.state_dict()
    shutil.move(tmp_path / "states", tmp_path / "moved")
    moved = replay_data(buffer_dir=tmp_path / "moved")
    moved.setup("fit")
    moved.load_state_dict(state)
    assert len(moved.buffer) == 2
    lost = replay_data(buffer_dir=tmp_path / "nowhere")
    lost.setup("fit")
    with pytest.raises(FileNotFoundError, match=r"neither there nor in .*nowhere.*pass the buffer_dir"):
        lost.load_state_dict(state)
    assert lost.frames == lost.updates == len(lost.buffer) == 0
    state["ranks"][0]["snapshot"]["run"] = "../../etc"
    with pytest.raises(ValueError, match="never wrote"):
        lost.load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buffer": "simple"}, "buffer='ExperienceBuffer', but this run has buffer='SimpleReplayBuffer'"),
        ({"buffer": "prioritized"}, "sampler='UniformSampler', but this run has sampler='PrioritizedSampler'"),
        ({"buffer": "three steps"}, "n_steps=1, but this run has n_steps=3"),
        ({"frames_per_update": 2.0}, "frames_per_update='1', but this run has frames_per_update='2'"),
        ({"warmup_frames": 8}, "warmup_frames=40, but this run has warmup_frames=8"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(settings, message):
    written, other = replay_data(), replay_data(**settings)
    for data in (written, other):
        data.setup("fit")
    written.updates = 3
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(written.state_dict())
    assert other.updates == 0


def test_evaluating_a_checkpoint_needs_no_buffer(tmp_path):
    _, run = fit(tmp_path, replay_data(checkpoint_buffer="beside"))
    run.save_checkpoint(tmp_path / "old.ckpt")
    shutil.rmtree(tmp_path / "buffer")
    data, judge = replay_data(checkpoint_buffer="beside"), trainer(tmp_path, limit_val_batches=1)
    (scores,) = judge.validate(dqn(), data, ckpt_path=tmp_path / "old.ckpt")
    assert scores["eval/length"] > 5
    assert data.frames == 60


def test_several_ranks_keep_their_buffers_apart(tmp_path, monkeypatch):
    """What is inside the checkpoint of one process is beside it under several."""
    data = replay_data(checkpoint_buffer="inside", buffer_dir=tmp_path)
    data.setup("fit")
    data.buffer.extend(steps())
    assert not data.save_buffer()
    assert "buffer" in data.state_dict()["ranks"][0]
    monkeypatch.setattr(type(data), "world_size", 2)
    assert data.save_buffer()
    state = data.state_dict()["ranks"][0]
    assert "buffer" not in state
    assert state["snapshot"]["folder"].endswith("rank_0")
