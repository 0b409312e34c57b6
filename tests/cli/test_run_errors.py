"""Errors during a run are one line with the remedy; they advise to resume only if that can succeed."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.commands import TINY
from kit.actor_critic import fit, rollouts
from torchrl_lightning import LastCheckpoint
from torchrl_lightning._core.errors import UserError
from torchrl_lightning.callbacks.checkpoint_io import AtomicCheckpointIO
from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.ray.cluster import ClusterFault, connect

FEW = [*TINY, "data.total_frames=256", "eval_episodes=1", "hydra.run.dir=run"]


def errors_in(stderr: str) -> str:
    """Return the only error message in stderr, which has a progress bar but not a traceback."""
    assert "Traceback" not in stderr
    assert stderr.count("error: ") == 1, stderr
    return stderr[stderr.index("error: ") :].strip()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
@pytest.mark.parametrize("where", ["checkpoint", "metrics"])
def test_full_disk_exits_with_one_line(
    number: int, where: str, run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(number, "no more", "run/file")

    if where == "checkpoint":
        monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", full)
    else:
        monkeypatch.setattr("lightning.fabric.loggers.csv_logs._ExperimentWriter.save", full)
    said = errors_in(run("train", *FEW, expect=1).stderr)
    assert "\n" not in said
    assert "no more: 'run/file'" in said
    assert "paths.log_dir=FOLDER" in said
    assert "to resume" not in caplog.text


def test_deleted_folder_exits_with_one_line(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated = LastCheckpoint.on_validation_end

    def delete(*arguments: Any) -> None:
        evaluated(*arguments)
        shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(LastCheckpoint, "on_validation_end", delete)
    said = errors_in(run("train", *FEW, expect=1).stderr)
    assert "\n" not in said
    assert f"the run folder {tmp_path / 'run'} was deleted or moved" in said
    assert "to resume" not in caplog.text


@pytest.mark.parametrize("entry", ["collector", "episodes", "rng"])
def test_incompatible_state_exits_with_one_line(entry: str, run: Any, tmp_path: Path) -> None:
    run("train", *FEW)
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    stored = torch.load(path, weights_only=True)
    stored.pop("checksums")
    stored["OnPolicyDataModule"]["ranks"][0][entry] = {"of": "another rank"}
    torch.save(stored, path)
    said = errors_in(run("train", f"ckpt_path={path}", "data.total_frames=512", "hydra.run.dir=rest", expect=1).stderr)
    assert "\n" not in said
    assert f"{path} cannot be resumed: " in said
    assert f"init_from={path}" in said


@pytest.mark.parametrize(
    ("error", "is_advised"),
    [
        (KeyboardInterrupt(), True),
        (RuntimeError("once"), True),
        (EnvironmentFault("once"), True),
        (OSError(errno.EFBIG, "File too large", "x"), False),
        (FileNotFoundError(errno.ENOENT, "gone", "x"), False),
        (UserError("a mistake of the command"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_resuming_is_advised_if_it_can_succeed(
    error: BaseException, is_advised: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stops(LastCheckpoint):
        def on_train_epoch_end(self, *_: Any) -> None:
            raise error

    save = Stops(tmp_path)
    with pytest.raises((type(error), SystemExit)):
        fit(tmp_path, rollouts(), callbacks=[save])
    assert ("to resume" in caplog.text) == is_advised
    assert str(save.path) in caplog.text
    assert save.path.is_file()


@pytest.mark.parametrize(
    "error",
    [
        Exception("The current node timed out during startup. This could happen because some of the raylet failed."),
        RuntimeError("Failed to start GCS.\nLast lines of its log:\n..."),
        OSError("Failed to write the session"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failed_start_of_ray_exits_with_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterFault, match=r"Ray could not be started .*ray stop --force") as raised:
        connect({"address": "local"})
    assert "\n" not in str(raised.value)
    with pytest.raises(SystemExit, match=r"^error"), exit_with_one_line():
        raise raised.value
