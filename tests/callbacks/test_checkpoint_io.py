"""A killed process or a full disk leaves a complete checkpoint: the old one or the new one."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import tempfile
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from kit.actor_critic import fit
from kit.forks import killed_after
from torchrl_lightning import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint
from torchrl_lightning._core import files

SHARED = Path("/dev/shm")


@pytest.fixture
def elsewhere(tmp_path):
    """Yield a folder on another filesystem than the temporary files, if the machine has one."""
    if not SHARED.is_dir() or SHARED.stat().st_dev == os.stat(tempfile.gettempdir()).st_dev:
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir=SHARED) as folder:
            yield Path(folder)


def save_forever(plugin, path, first):
    for number in range(first, 10_000):
        plugin.save_checkpoint({"number": number, "weights": torch.full((1 << 19,), float(number))}, path)
        yield number


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_killed_process_leaves_a_complete_checkpoint(elsewhere):
    plugin, path, moments, number = AtomicCheckpointIO(), elsewhere / "last.ckpt", random.Random(0), 0
    for _ in range(20):
        saved = killed_after(moments.uniform(0.0, 0.03), save_forever, plugin, path, number)
        checkpoint = plugin.load_checkpoint(path, weights_only=True)
        assert checkpoint["number"] in (saved[-1], saved[-1] + 1)
        assert (checkpoint["weights"] == checkpoint["number"]).all()
        assert len(list(elsewhere.iterdir())) <= 2  # the next save removes the temporary file
        number = checkpoint["number"] + 1
    (elsewhere / ".epoch=1.ckpt.0123456789abcdef.tmp").touch()
    plugin.save_checkpoint({}, path)
    assert list(elsewhere.iterdir()) == [path]


class Full(io.FileIO):
    """A file on a disk with 20 kB of free space."""

    room = 20_000

    def write(self, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.fixture
def full_disk(monkeypatch):
    """Return a function that makes later writes fail as on a full disk."""
    return lambda: monkeypatch.setattr(files.Path, "open", lambda path, mode: Full(path, mode.replace("b", "")))


def test_full_disk_leaves_the_old_checkpoint(tmp_path, full_disk):
    plugin, path = AtomicCheckpointIO(), tmp_path / "run" / "last.ckpt"
    plugin.save_checkpoint({"number": 1}, path)
    full_disk()
    with pytest.raises(OSError, match=r"No space left on device; no checkpoint was written.*last\.ckpt") as error:
        plugin.save_checkpoint({"number": 2, "weights": torch.zeros(1 << 16)}, path)
    assert error.value.errno == errno.ENOSPC
    assert list(path.parent.iterdir()) == [path]
    assert torch.load(path, weights_only=True) == {"number": 1}


def test_run_on_a_full_disk_ends_by_its_error_and_keeps_both_checkpoints(tmp_path, full_disk, caplog):
    class Fill(L.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 2:
                Full.room = 1000
                full_disk()

    best = BestCheckpoint(tmp_path, "best", monitor="eval/return", mode="max", save_on_train_epoch_end=False)
    callbacks = [Fill(), best, LastCheckpoint(tmp_path)]
    with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="No space left"):
        fit(tmp_path, max_epochs=4, limit_val_batches=1, callbacks=callbacks)
    assert "stopped by OSError; the final checkpoint was not written" in caplog.text
    for name in ("best.ckpt", "last.ckpt"):
        assert torch.load(tmp_path / name, weights_only=True)["epoch"] <= 2
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_file()) == [".ckpt", ".ckpt"]


class Own(AtomicCheckpointIO):
    """A plugin of a user."""


@pytest.mark.parametrize("kind", [AtomicCheckpointIO, Own, AsyncCheckpointIO])
def test_callbacks_replace_only_the_default_plugin(kind, tmp_path):
    plugins = None if kind is AtomicCheckpointIO else [kind()]
    _, run = fit(tmp_path, max_epochs=1, callbacks=[LastCheckpoint(tmp_path)], plugins=plugins)
    assert type(run.strategy.checkpoint_io) is kind


def test_remote_checkpoint_is_written_by_lightning():
    path = "memory://run/last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"number": 3}, path)
    assert AtomicCheckpointIO().load_checkpoint(path, weights_only=True) == {"number": 3}
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, path, storage_options={})
