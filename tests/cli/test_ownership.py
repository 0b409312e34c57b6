"""Whose a run's folder is: what signs it, and what becomes of it elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchrl_lightning.cli.ownership import is_signed, sign


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / ".hydra" / "config.yaml").write_text("model: {}")
    return tmp_path / "run"


def test_a_run_is_signed_with_one_key_that_only_its_user_reads(folder, tmp_path):
    assert not is_signed(folder)
    assert not (tmp_path / "state").exists()
    sign(folder)
    assert is_signed(folder)
    (key,) = (tmp_path / "state" / "torchrl-lightning").iterdir()
    assert key.name == "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert len(key.read_bytes()) == 32
    shutil.copytree(folder, tmp_path / "copy")
    sign(tmp_path / "copy")
    assert is_signed(tmp_path / "copy")
    assert is_signed(folder)


def test_a_signature_is_of_one_config(folder):
    sign(folder)
    (folder / ".hydra" / "config.yaml").write_text("model: {_target_: os.system}")
    assert not is_signed(folder)


def test_a_signature_of_another_user_is_none(folder, tmp_path, monkeypatch):
    sign(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert not is_signed(folder)


@pytest.mark.parametrize("signature", [b"", b"\xff\xfe", b"0" * 64])
def test_anything_else_is_no_signature(folder, signature):
    (folder / ".hydra" / "signature").write_bytes(signature)
    assert not is_signed(folder)


def test_without_a_place_for_the_key_runs_stay_unsigned(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    sign(folder)
    assert not is_signed(folder)
    assert not (folder / ".hydra" / "signature").exists()


def test_a_damaged_key_signs_nothing(folder, tmp_path):
    sign(folder)
    (tmp_path / "state" / "torchrl-lightning" / "key").write_bytes(b"short")
    sign(folder)
    assert not is_signed(folder)


def test_by_default_the_key_lies_below_the_home_folder(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    sign(folder)
    assert (tmp_path / "home" / ".local" / "state" / "torchrl-lightning" / "key").is_file()
    assert is_signed(folder)
