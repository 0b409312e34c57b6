from __future__ import annotations

import json
import logging
import os
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kit.demonstrations import CARTPOLE, episode
from torchrl_lightning.demonstrations import DemonstrationDirectory, read_demonstration, write_demonstration

reading = partial(DemonstrationDirectory, specs=CARTPOLE)
waiting = partial(reading, may_be_empty=True)


def put(folder, *names, length=3, **options):
    """Write demonstrations under these names."""
    folder.mkdir(exist_ok=True)
    for name in names:
        write_demonstration(folder / name, episode(length, **options))


def names(demonstrations):
    return [Path(each.name).name for each in demonstrations]


def files(folder):
    """The names of all files that are not hidden."""
    return sorted(path.name for path in folder.glob("[a-z]*"))


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_all_files_are_read_in_the_order_of_their_names(tmp_path):
    put(tmp_path, "b.npz", "c.safetensors", "a.safetensors", ".hidden.npz")
    (tmp_path / "notes.txt").write_text("no demonstration")
    (tmp_path / "folder.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    directory = reading(tmp_path, most=3)
    assert names(directory.initial) == ["a.safetensors", "b.npz", "c.safetensors"]
    assert not any(demonstration.is_human for demonstration in directory.initial)
    assert directory.poll() == []


def test_human_option_sets_is_human_of_all_demonstrations(tmp_path):
    put(tmp_path, "a.npz")
    put(tmp_path, "b.safetensors", is_human=True)
    assert [each.is_human for each in reading(tmp_path).initial] == [False, True]
    assert [each.is_human for each in reading(tmp_path, human=True).initial] == [True, True]


def test_bad_file_is_named_once_and_skipped(tmp_path, caplog):
    put(tmp_path, "a.npz", frame_skip=4)
    put(tmp_path, "b.npz")
    (tmp_path / "c.npz").write_bytes(b"PK")
    np.savez(tmp_path / "d.npz", Observation=np.zeros((1, 3)), Action=[[0]], Reward=[[0.0]], FrameSkip=1)
    (tmp_path / "gone.npz").symlink_to(tmp_path / "nowhere")
    directory = reading(tmp_path)
    assert names(directory.initial) == ["b.npz"]
    skipped, torn, other = warnings_of(caplog)
    assert "a.npz" in skipped
    assert "frame_skip=4" in skipped
    assert "c.npz was refused" in torn
    assert "d.npz" in other
    assert directory.poll() == []
    assert warnings_of(caplog) == []


def test_link_out_of_the_directory_is_refused_and_one_inside_is_followed(tmp_path, caplog):
    folder = tmp_path / "demos"
    put(tmp_path, "secret.npz")
    put(folder, "a.npz")
    (folder / "b.npz").symlink_to("a.npz")
    (folder / "c.npz").symlink_to(tmp_path / "secret.npz")
    (tmp_path / "link").symlink_to(folder)
    assert names(reading(tmp_path / "link").initial) == ["a.npz", "b.npz"]
    assert "outside the directory" in warnings_of(caplog)[0]


def test_zero_or_too_many_demonstrations_are_errors_at_start(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        reading(tmp_path / "none")
    assert waiting(tmp_path / "none").initial == ()
    (tmp_path / "bad.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"contains no usable demonstration \(1 refused\)"):
        reading(tmp_path)
    put(tmp_path, "a.npz", "b.npz")
    with pytest.raises(ValueError, match="at most 1 demonstrations \\(the capacity\\), got 2"):
        reading(tmp_path, most=1)


def test_poll_returns_new_files_once(tmp_path):
    directory = waiting(tmp_path / "late")
    assert directory.poll() == []
    put(directory.path, "b.npz", "a.npz")
    assert names(directory.poll()) == ["a.npz", "b.npz"]
    put(directory.path, "a.npz", length=7)
    assert directory.poll() == []


def test_half_written_file_is_read_once_complete_and_logged_only_if_it_stays_damaged(tmp_path, caplog):
    directory = waiting(tmp_path)
    put(tmp_path, ".whole.npz")
    whole, path = (tmp_path / ".whole.npz").read_bytes(), tmp_path / "a.npz"
    for end in (0, 50, 300):
        path.write_bytes(whole[:end])
        assert directory.poll() == []
    for said in (0, 1, 0):
        assert len(warnings_of(caplog)) == said
        assert directory.poll() == []
    path.write_bytes(whole)
    assert names(directory.poll()) == ["a.npz"]


def test_save_replaces_only_files_of_earlier_saves(tmp_path):
    put(tmp_path, "given.safetensors")
    directory = reading(tmp_path)
    directory.save([episode(2), episode(3)], ["best_1", "best_2"])
    assert directory.poll() == []
    reading(tmp_path).save([episode(4, value=2.0)], ["best_1"])  # another process goes on
    assert files(tmp_path) == ["best_1.safetensors", "given.safetensors"]
    found = read_demonstration(tmp_path / "best_1.safetensors")
    assert (found.length, found.value) == (4, 2.0)
    directory.save([], [])
    assert files(tmp_path) == ["given.safetensors"]


def test_crash_while_saving_leaves_the_earlier_files_whole_and_known(tmp_path):
    directory = waiting(tmp_path)
    directory.save([episode(2), episode(3)], ["best_1", "best_2"])
    failing = mock.patch("safetensors.torch.save", side_effect=[b"new", OSError("disk full")])
    with failing, pytest.raises(OSError, match="disk full"):
        directory.save([episode(5), episode(6)], ["best_1", "best_3"])
    again = reading(tmp_path)
    assert [each.length for each in again.initial] == [2, 3]
    again.save([episode(7)], ["best_3"])
    assert [each.length for each in reading(tmp_path).initial] == [7]


@pytest.mark.parametrize("listed", ['["../a.safetensors", "b.npz", 3]', "{}", "[", '"a.safetensors"'])
def test_foreign_list_of_saved_files_removes_nothing(tmp_path, listed):
    folder = tmp_path / "demos"
    put(tmp_path, "a.safetensors")
    put(folder, "a.safetensors", "b.npz")
    (folder / ".saved.json").write_text(listed)
    reading(folder).save([episode()], ["c"])
    assert files(tmp_path) == ["a.safetensors", "demos"]
    assert files(folder) == ["a.safetensors", "b.npz", "c.safetensors"]
    assert json.loads((folder / ".saved.json").read_text()) == ["c.safetensors"]


@pytest.mark.parametrize("given", [["a"], ["a", "a"], ["a", "../b"], ["a", "b/c"], ["a", ".b"], ["a", "b\0"]])
def test_invalid_file_names_are_refused_before_writing(tmp_path, given):
    with pytest.raises(ValueError, match="must be 2 distinct file names"):
        waiting(tmp_path).save([episode(), episode()], given)
    assert list(tmp_path.iterdir()) == []
