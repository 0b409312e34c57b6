"""Runs resume with a replay buffer inside or beside the checkpoint, or without a buffer."""

from __future__ import annotations

import logging
import shutil

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tensordict import TensorDict

from kit.replay import dqn, experience, fit, replay_data, stored
from kit.runs import parameters, trainer
from kit.states import differences


def states_in(folder):
    return sorted(path.name for path in folder.glob("**/after_*"))


def referred(checkpoint):
    """Return the name of the buffer state in a checkpoint."""
    return torch.load(checkpoint, weights_only=True)["ReplayDataModule"]["ranks"][0]["snapshot"]["name"]


def ready(folder, *buffer, **settings):
    data = replay_data(*buffer, **{"checkpoint_buffer": "beside", "buffer_dir": folder, **settings})
    data.setup("fit")
    return data


def steps(value=0.0):
    return TensorDict({"observation": torch.full((2, 4), value)}, [2])


class Look(L.Callback):
    """Read the state twice, before and after each update."""

    def on_train_batch_start(self, trainer, module, *args):
        data = trainer.datamodule
        before = data.buffer.state_dict()
        states = [data.state_dict()["ranks"][0] for _ in range(2)]
        assert not differences(data.buffer.state_dict(), before)
        assert not differences(*states)
        assert states[0]["updates"] == module.updates
        assert "snapshot" not in states[0]

    on_train_batch_end = on_train_batch_start


def test_reading_the_state_changes_nothing_and_writes_nothing(tmp_path):
    left_alone, data = (replay_data("prioritized", checkpoint_buffer="beside") for _ in range(2))
    module, _ = fit(tmp_path, left_alone, max_epochs=1)
    watched, run = fit(tmp_path, data, max_epochs=1, callbacks=[Look()])
    assert states_in(tmp_path) == []
    assert torch.equal(parameters(watched), parameters(module))
    assert not differences(data.buffer.state_dict(), left_alone.buffer.state_dict())
    # Only checkpoints write the state.
    run.save_checkpoint(tmp_path / "at.ckpt")
    run.save_checkpoint(tmp_path / "again.ckpt")
    (name,) = states_in(tmp_path)
    assert referred(tmp_path / "again.ckpt") == name


def test_counters_and_ratio_continue_without_resets(tmp_path):
    first = replay_data("three steps", frames_per_update=0.1)
    module, run = fit(tmp_path, first)
    run.save_checkpoint(tmp_path / "last.ckpt")
    data = replay_data("three steps", frames_per_update=0.1)
    fit(tmp_path, data, None, tmp_path / "last.ckpt", max_epochs=4)
    assert data.updates == 40
    assert data.frames == 44  # 40 + 39 / 10, rounded up to steps of two environments
    assert len(data.buffer) == data.frames
    # Episodes that had not ended at the checkpoint are cut, not joined to later episodes.
    episodes, env = data.buffer.writer.index, torch.arange(2)
    assert (episodes.begin(env, torch.full((2,), 21)) >= torch.tensor(len(first.buffer) // 2)).all()
    assert module.updates == 20


def test_missing_buffer_gives_a_warning_and_a_second_warm_up(tmp_path, caplog):
    first, data = (replay_data("sequence", checkpoint_buffer="none") for _ in range(2))
    _, run = fit(tmp_path, first, dqn(recurrent=True))
    run.save_checkpoint(tmp_path / "last.ckpt")
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, data, dqn(recurrent=True), tmp_path / "last.ckpt", max_epochs=3)
    assert "(checkpoint_buffer='none'): 40 frames are collected" in caplog.text
    # The first run ends at frame 60. The second run collects 40 frames of warm-up and one for each update.
    assert (data.updates, data.frames, len(data.buffer)) == (30, 110, 50)


def test_state_is_written_once_and_two_are_kept(tmp_path):
    data = replay_data(checkpoint_buffer="beside")
    callback = ModelCheckpoint(dirpath=tmp_path, filename="best", save_last=True)
    fit(tmp_path, data, max_epochs=4, enable_checkpointing=True, callbacks=[callback])
    # Checkpoints of the same moment share a state.
    names = states_in(tmp_path)
    assert [name.rpartition("_")[0] for name in names] == ["after_30", "after_40"]
    assert referred(tmp_path / "last.ckpt") == names[-1]


def test_runs_that_share_a_folder_leave_each_other_alone(tmp_path):
    written = []
    for seed in range(2):
        data = replay_data(checkpoint_buffer="beside", seed=seed)
        _, run = fit(tmp_path, data, max_epochs=1)
        run.save_checkpoint(tmp_path / f"{seed}.ckpt")
        written.append(stored(data))
    for seed in range(2):
        data = ready(tmp_path / "buffer", seed=seed)
        data.load_state_dict(torch.load(tmp_path / f"{seed}.ckpt", weights_only=True)["ReplayDataModule"])
        assert torch.equal(stored(data), written[seed])
        data.close()


@pytest.mark.parametrize("cells", ["cells", "elsewhere"])
def test_run_that_crashed_after_its_checkpoint_resumes_from_it(cells, tmp_path):
    first = ready(tmp_path / "states", experience(folder=tmp_path / "cells"))
    for number in range(300):  # wraps the ring
        first.buffer.extend(steps(float(number)))
    first.save_buffer()
    state, expected = first.state_dict(), stored(first)
    for _ in range(4):
        first.buffer.extend(steps(-1.0))
    for _ in range(2):
        resumed = ready(tmp_path / "states", experience(folder=tmp_path / cells))
        resumed.load_state_dict(state)
        assert torch.equal(stored(resumed), expected)
        resumed.save_buffer()
        state = resumed.state_dict()


def test_moved_folder_is_found_and_a_missing_one_explained(tmp_path):
    first = ready(tmp_path / "states")
    first.buffer.extend(steps())
    first.save_buffer()
    state = first.state_dict()
    shutil.move(tmp_path / "states", tmp_path / "moved")
    moved, lost = ready(tmp_path / "moved"), ready(tmp_path / "nowhere")
    moved.load_state_dict(state)
    assert len(moved.buffer) == 2
    with pytest.raises(FileNotFoundError, match="buffer_dir"):
        lost.load_state_dict(state)
    assert lost.frames == lost.updates == len(lost.buffer) == 0
    state["ranks"][0]["snapshot"]["run"] = "../../etc"
    with pytest.raises(ValueError, match=r"reference .* is invalid"):
        lost.load_state_dict(state)


def test_evaluating_a_checkpoint_needs_no_buffer(tmp_path):
    _, run = fit(tmp_path, replay_data(checkpoint_buffer="beside"))
    run.save_checkpoint(tmp_path / "old.ckpt")
    shutil.rmtree(tmp_path / "buffer")
    data, judge = replay_data(checkpoint_buffer="beside"), trainer(tmp_path, limit_val_batches=1)
    (scores,) = judge.validate(dqn(), data, ckpt_path=tmp_path / "old.ckpt")
    assert scores["eval/length"] > 5
    assert data.frames == 60


def test_resume_without_a_buffer_collects_the_warm_up_again(tmp_path):
    frames = []
    for epochs in (2, 3, 4):
        data, resume = replay_data(checkpoint_buffer="none"), tmp_path / "last.ckpt"
        _, run = fit(tmp_path, data, None, resume if frames else None, max_epochs=epochs)
        run.save_checkpoint(resume)
        frames.append(data.frames)
        assert data.updates == 10 * epochs
    assert frames == [60, 110, 160]


def test_one_rank_keeps_its_buffer_inside_the_checkpoint(tmp_path):
    data = ready(None, checkpoint_buffer="inside")
    data.buffer.extend(steps())
    assert not data.save_buffer()
    (state,) = data.state_dict()["ranks"]
    assert "buffer" in state
    assert "snapshot" not in state
    assert states_in(tmp_path) == []


def test_one_collector_serves_all_epochs(tmp_path):
    class Noting(L.Callback):
        collectors = []

        def on_train_epoch_end(self, trainer, module):
            self.collectors.append(trainer.datamodule.collector)

    noting = Noting()
    fit(tmp_path, replay_data(), max_epochs=3, callbacks=[noting])
    assert len(noting.collectors) == 3
    assert len({id(collector) for collector in noting.collectors}) == 1


@pytest.mark.parametrize(("ratio", "other"), [(1e-7, 2e-7), (0.1234567, 0.12345671)])
def test_state_of_another_ratio_of_frames_is_refused_however_close(ratio, other):
    first, second = (ready(None, checkpoint_buffer="inside", frames_per_update=each) for each in (ratio, other))
    state = first.state_dict()
    first.check_state(state)
    with pytest.raises(ValueError, match="frames_per_update"):
        second.check_state(state)
