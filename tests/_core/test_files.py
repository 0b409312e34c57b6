"""Files are written completely or not at all, and a stored state loads unchanged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.states import equal
from torchrl_lightning._core import files
from torchrl_lightning._core.files import NoCheckpointerMixin, read_state_folder, replaced_files, write_state_folder


def test_several_files_are_replaced_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"old")
    with replaced_files(one, two) as (first, second):
        first.write(b"new")
        second.write(b"also new")
        assert one.read_bytes() == b"old"
        assert not two.exists()
    assert (one.read_bytes(), two.read_bytes()) == (b"new", b"also new")
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("broken", ["body", "fsync"])
def test_error_leaves_the_old_file_and_nothing_else(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "note").write_bytes(b"old")
    if broken == "fsync":
        monkeypatch.setattr(files.os, "fsync", full)

    def write() -> None:
        with replaced_files(tmp_path / "note") as (file,):
            file.write(b"new")
            if broken == "body":
                full()

    with pytest.raises(OSError, match="No space"):
        write()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_files_reach_the_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(files.os, "fsync", lambda handle: (did.append("fsync"), fsync(handle)))
    monkeypatch.setattr(files.os, "replace", lambda *paths: (did.append(Path(paths[1]).name), replace(*paths)))
    with replaced_files(tmp_path / "data", tmp_path / "manifest"):
        pass
    assert did == ["fsync", "fsync", "data", "manifest", "fsync"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    write_state_folder(tmp_path / "state", {"a": 1})
    for name in ("state-0123456789abcdef.bin", ".state-0123456789abcdef.bin.fedcba9876543210.tmp"):
        (tmp_path / "state" / name).touch()
    (tmp_path / "state" / ".state.json.fedcba9876543210.tmp").touch()
    (tmp_path / "state" / "notes.txt").touch()  # a file of a user
    write_state_folder(tmp_path / "state", {"a": 2})
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names[0] == "notes.txt"
    assert names[2] == "state.json"
    assert len(names) == 3
    assert read_state_folder(tmp_path / "state") == {"a": 2}


def test_state_folder_round_trip(tmp_path: Path) -> None:
    # A slice with one number of a column is contiguous, but has the stride of the column.
    number = torch.arange(8).reshape(4, 2)[1:2, 1]
    state = {"rows": torch.arange(3), "number": number, "nested": {"number": 0.5, "pair": (1, None)}}
    write_state_folder(tmp_path / "state", state)
    assert equal(read_state_folder(tmp_path / "state"), state)


LEFT = ".other.bin.fedcba9876543210.tmp"


def test_leftovers_are_removed_at_the_next_save_but_files_in_use_stay(tmp_path: Path) -> None:
    (tmp_path / ".run.fedcba9876543210.tmp").mkdir()
    (tmp_path / ".run.fedcba9876543210.tmp" / "state.json").touch()
    for name in (LEFT, ".hidden.tmp", "other.bin"):
        (tmp_path / name).touch()
    with replaced_files(tmp_path / "one") as (one,):
        one.write(b"1")
        write_state_folder(tmp_path / "state", {"a": 1})  # another process may save at the same time
        (tmp_path / LEFT).touch()
        with replaced_files(tmp_path / "two"):
            pass
    (tmp_path / LEFT).symlink_to(tmp_path / "other.bin")
    write_state_folder(tmp_path / "again", {"a": 1})
    expected = [".hidden.tmp", LEFT, "again", "one", "other.bin", "state", "two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


@pytest.mark.parametrize("hook", ["register_save_hook", "register_load_hook"])
def test_ignored_checkpoint_hooks_raise(hook: str) -> None:
    with pytest.raises(TypeError, match="NoCheckpointerMixin"):
        getattr(NoCheckpointerMixin(), hook)(print)


@pytest.mark.parametrize("linked", ["state.json", "state-*.bin"])
def test_link_in_the_folder_is_not_followed(linked: str, tmp_path: Path) -> None:
    write_state_folder(tmp_path / "state", {"rows": torch.arange(3)})
    (path,) = (tmp_path / "state").glob(linked)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{path.name}"):
        read_state_folder(tmp_path / "state")
