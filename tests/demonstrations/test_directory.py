from __future__ import annotations

import json
import logging
import os
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch

from kit.demonstrations import CARTPOLE, episode
from torchrl_lightning.demonstrations import DemonstrationDirectory, read_demonstration, write_demonstration


def names(demonstrations):
    return [demonstration.name.rpartition("/")[2] for demonstration in demonstrations]


def warnings_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_all_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b.npz", "c.safetensors", "a.safetensors", ".hidden.npz"):
        write_demonstration(tmp_path / name, episode())
    (tmp_path / "notes.txt").write_text("no demonstration")
    (tmp_path / "folder.npz").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    directory = DemonstrationDirectory(tmp_path, CARTPOLE, most=3)
    assert names(directory.initial) == ["a.safetensors", "b.npz", "c.safetensors"]
    assert not any(demonstration.is_human for demonstration in directory.initial)
    assert directory.poll() == []


def test_a_directory_of_humans_marks_all_and_another_none(tmp_path):
    write_demonstration(tmp_path / "a.npz", episode())
    write_demonstration(tmp_path / "b.safetensors", episode(is_human=True))
    assert [each.is_human for each in DemonstrationDirectory(tmp_path, CARTPOLE).initial] == [False, True]
    assert [each.is_human for each in DemonstrationDirectory(tmp_path, CARTPOLE, human=True).initial] == [True, True]


def test_a_bad_file_is_named_and_the_rest_is_taken(tmp_path, caplog):
    write_demonstration(tmp_path / "a.npz", episode(frame_skip=4))
    write_demonstration(tmp_path / "b.npz", episode())
    (tmp_path / "c.npz").write_bytes(b"PK")
    np.savez(tmp_path / "d.npz", Observation=np.zeros((1, 3)), Action=[[0]], Reward=[[0.0]], FrameSkip=1)
    (tmp_path / "gone.npz").symlink_to(tmp_path / "nowhere")
    for depth in (500, 800, 3000):
        nested = {"steps/" + "/".join("x" * depth): torch.zeros(2, 4), "steps/action": torch.zeros(2)}
        header = {"schema_version": 2, "frame_skip": 1, "is_human": False, "value": None, "metadata": {}}
        header |= {"terminated": None, "truncated": None}
        nested["steps/next/reward"] = torch.zeros(2, 1)
        text = {"demonstration": json.dumps(header)}
        safetensors.torch.save_file(nested, tmp_path / f"nested_{depth}.safetensors", text)
    directory = DemonstrationDirectory(tmp_path, CARTPOLE)
    assert names(directory.initial) == ["b.npz"]
    skipped, torn, other, *deep = warnings_of(caplog)
    assert len(deep) == 3
    assert all("nested_" in said and "levels, more than 16" in said for said in deep)
    assert "a.npz" in skipped
    assert "frame_skip=4" in skipped
    assert "c.npz was refused" in torn
    assert "d.npz" in other
    assert directory.poll() == []
    assert warnings_of(caplog) == []  # said once


def test_a_link_out_of_the_directory_is_refused_and_one_inside_is_followed(tmp_path, caplog):
    folder = tmp_path / "demos"
    folder.mkdir()
    for path in (tmp_path / "secret.npz", folder / "a.npz"):
        write_demonstration(path, episode())
    (folder / "b.npz").symlink_to("a.npz")
    (folder / "c.npz").symlink_to(tmp_path / "secret.npz")
    (tmp_path / "link").symlink_to(folder)
    assert names(DemonstrationDirectory(tmp_path / "link", CARTPOLE).initial) == ["a.npz", "b.npz"]
    assert "a link out of the directory" in warnings_of(caplog)[0]


def test_none_or_too_many_are_errors_at_start(tmp_path, caplog):
    with pytest.raises(FileNotFoundError, match="is no directory"):
        DemonstrationDirectory(tmp_path / "none", CARTPOLE)
    assert DemonstrationDirectory(tmp_path / "none", CARTPOLE, may_be_empty=True).initial == ()
    (tmp_path / "bad.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds no demonstration that can be used \(1 refused\)"):
        DemonstrationDirectory(tmp_path, CARTPOLE)
    for name in ("a.npz", "b.npz"):
        write_demonstration(tmp_path / name, episode())
    with pytest.raises(ValueError, match="holds 2 demonstrations, more than the capacity of 1"):
        DemonstrationDirectory(tmp_path, CARTPOLE, most=1)


def test_each_new_file_is_polled_once(tmp_path):
    directory = DemonstrationDirectory(tmp_path / "late", CARTPOLE, may_be_empty=True)
    assert directory.poll() == []
    directory.path.mkdir()
    write_demonstration(directory.path / "b.npz", episode())
    write_demonstration(directory.path / "a.npz", episode())
    assert names(directory.poll()) == ["a.npz", "b.npz"]
    write_demonstration(directory.path / "a.npz", episode(7))
    assert directory.poll() == []


def test_a_half_written_file_is_read_when_it_is_whole_and_said_only_when_it_stays_torn(tmp_path, caplog):
    directory = DemonstrationDirectory(tmp_path, CARTPOLE, may_be_empty=True)
    write_demonstration(tmp_path / ".whole.npz", episode())
    whole = (tmp_path / ".whole.npz").read_bytes()
    path = tmp_path / "a.npz"
    for end in (0, 50, 300):
        path.write_bytes(whole[:end])
        assert directory.poll() == []
    assert warnings_of(caplog) == []
    assert directory.poll() == []
    assert len(warnings_of(caplog)) == 1
    assert directory.poll() == []
    assert warnings_of(caplog) == []
    path.write_bytes(whole)
    assert names(directory.poll()) == ["a.npz"]


def test_saved_files_replace_those_of_earlier_saves_alone(tmp_path):
    write_demonstration(tmp_path / "given.safetensors", episode(9))
    directory = DemonstrationDirectory(tmp_path, CARTPOLE)
    directory.save([episode(2), episode(3)], ["best_1", "best_2"])
    assert directory.poll() == []
    # Another process goes on.
    DemonstrationDirectory(tmp_path, CARTPOLE).save([episode(4, value=2.0)], ["best_1"])
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["best_1.safetensors", "given.safetensors"]
    found = read_demonstration(tmp_path / "best_1.safetensors")
    assert (found.length, found.value) == (4, 2.0)
    directory.save([], [])
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["given.safetensors"]


def test_a_crash_while_saving_leaves_the_earlier_files_whole_and_known(tmp_path):
    directory = DemonstrationDirectory(tmp_path, CARTPOLE, may_be_empty=True)
    directory.save([episode(2), episode(3)], ["best_1", "best_2"])
    module = "torchrl_lightning.demonstrations.files._own_bytes"
    with mock.patch(module, side_effect=[b"new", OSError("disk full")]), pytest.raises(OSError, match="disk full"):
        directory.save([episode(5), episode(6)], ["best_1", "best_3"])
    again = DemonstrationDirectory(tmp_path, CARTPOLE)
    assert [each.length for each in again.initial] == [2, 3]
    again.save([episode(7)], ["best_3"])
    assert [each.length for each in DemonstrationDirectory(tmp_path, CARTPOLE).initial] == [7]


@pytest.mark.parametrize("listed", ['["../a.safetensors", "b.npz", 3]', "{}", "[", '"a.safetensors"'])
def test_a_foreign_list_of_saved_files_removes_nothing(tmp_path, listed):
    folder = tmp_path / "demos"
    folder.mkdir()
    write_demonstration(tmp_path / "a.safetensors", episode())
    write_demonstration(folder / "a.safetensors", episode())
    write_demonstration(folder / "b.npz", episode())
    (folder / ".saved.json").write_text(listed)
    DemonstrationDirectory(folder, CARTPOLE).save([episode()], ["c"])
    assert (tmp_path / "a.safetensors").is_file()
    assert sorted(path.name for path in folder.glob("[a-z]*")) == ["a.safetensors", "b.npz", "c.safetensors"]
    assert json.loads((folder / ".saved.json").read_text()) == ["c.safetensors"]


@pytest.mark.parametrize("given", [["a"], ["a", "a"], ["a", "../b"], ["a", "b/c"], ["a", ".b"], ["a", "b\0"]])
def test_names_that_are_no_names_of_files_are_refused_before_anything_is_written(tmp_path, given):
    directory = DemonstrationDirectory(tmp_path, CARTPOLE, may_be_empty=True)
    with pytest.raises(ValueError, match="must be 2 distinct names of files"):
        directory.save([episode(), episode()], given)
    assert list(tmp_path.iterdir()) == []
