"""``ckpt_path=auto`` resumes the run's checkpoint with the most frames and prints why it skips others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from cli.commands import TINY, call, last_line
from kit.forks import held_by_another

GIVEN = [*TINY, "data.total_frames=256", "eval_episodes=1", "logger=none", "seed=3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a working directory that contains one run."""
    folder = tmp_path_factory.mktemp("trained")
    assert call("train", *GIVEN, cwd=folder).returncode == 0
    return folder


@pytest.fixture
def home(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "home")
    return tmp_path / "home"


def run_folder(home: Path) -> Path:
    (path,) = home.glob("logs/train/ppo_cartpole*/seed_3/*")
    return path


def chosen(home: Path) -> tuple[Path | None, str]:
    done = call("train", *GIVEN, "ckpt_path=auto", "--cfg", "job", cwd=home)
    assert done.returncode == 0, done.stderr
    path = OmegaConf.create(done.stdout).ckpt_path
    return None if path is None else home / path, done.stderr


def with_frames(path: Path, frames: int, into: Path, age: int = 0) -> None:
    """Write a checkpoint with this number of frames and a modification time ``age`` seconds in the past."""
    stored = torch.load(path, weights_only=True)
    stored.pop("checksums")
    stored["OnPolicyDataModule"]["ranks"][0]["frames"] = frames
    torch.save(stored, into)
    os.utime(into, (10**9 - age, 10**9 - age))


@pytest.mark.parametrize(
    ("frames", "ages", "expected"),
    [
        ({"last": 256, "best": 128}, {"last": 9, "best": 0}, "last"),
        ({"last": 128, "best": 256}, {"last": 0, "best": 9}, "best"),
        ({"last": 256, "best": 256}, {"last": 9, "best": 0}, "last"),
        ({"last": 256, "other": 512, "best": 128}, {"last": 0, "other": 9, "best": 1}, "other"),
        ({"best": 128, "best-v1": 256}, {"best": 0, "best-v1": 9}, "best-v1"),
    ],
)
def test_checkpoint_with_the_most_frames_wins_over_the_newest(
    frames: dict[str, int], ages: dict[str, int], expected: str, home: Path
) -> None:
    folder = run_folder(home) / "checkpoints"
    source = home / "source.ckpt"
    shutil.move(folder / "last.ckpt", source)
    (folder / "best.ckpt").unlink()
    for name, count in frames.items():
        with_frames(source, count, folder / f"{name}.ckpt", ages[name])
    assert chosen(home) == (folder / f"{expected}.ckpt", "")


def test_run_with_the_most_frames_wins(home: Path) -> None:
    first = run_folder(home)
    second = first.with_name("2000-01-01_00-00-00")
    shutil.copytree(first, second)
    with_frames(first / "checkpoints" / "last.ckpt", 512, second / "checkpoints" / "last.ckpt", age=100)
    assert chosen(home)[0] == second / "checkpoints" / "last.ckpt"


def test_damaged_checkpoint_is_skipped(home: Path) -> None:
    last, best = (run_folder(home) / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 255
    last.write_bytes(content)
    path, said = chosen(home)
    assert path == best
    assert len(said.splitlines()) == 1
    assert str(last.relative_to(home)) in said


def empty(folder: Path) -> None:
    (folder / ".hydra" / "hydra.yaml").write_text("")


def torn(folder: Path) -> None:
    (folder / ".hydra" / "hydra.yaml").write_text("hydra:\n  run: {dir: [")


def binary(folder: Path) -> None:
    (folder / ".hydra" / "hydra.yaml").write_bytes(b"\xff\xfe\x00hydra")


def foreign(folder: Path) -> None:
    (folder / ".hydra" / "hydra.yaml").write_text("hydra: {runtime: {choices: 3}, overrides: {task: [[1]]}}")


def a_list(folder: Path) -> None:
    (folder / ".hydra" / "hydra.yaml").write_text("- hydra\n")


def tagged(folder: Path) -> None:
    (folder / ".hydra" / "hydra.yaml").write_text("!!python/object/apply:os.system [touch ran]")


def without_record(folder: Path) -> None:
    shutil.rmtree(folder / ".hydra")


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def own_files(folder: Path) -> None:
    for name in ("last", "best"):
        (folder / "checkpoints" / f"{name}.ckpt").write_bytes(b"PK\x03\x04 no checkpoint")


DAMAGE: dict[Callable[[Path], None], str] = {
    **dict.fromkeys((empty, torn, binary, foreign, a_list, tagged), "hydra.yaml is damaged"),
    without_record: "no record of its run",
    without_checkpoints: "contains no checkpoint",
    own_files: "is not a complete checkpoint",
}


def check_unused(home: Path, damage: Callable[[Path], None], reason: str) -> None:
    """Check that the command names a damaged run with the reason, and still finds another run."""
    folder = run_folder(home)
    other = folder.with_name("1999-01-01_00-00-00")
    shutil.copytree(folder, other)
    damage(folder)
    path, said = chosen(home)
    assert path == other / "checkpoints" / "last.ckpt"
    assert {bool(re.search(reason, line)) for line in said.splitlines()} == {True}
    assert len(said.splitlines()) == (2 if damage is own_files else 1)
    assert str(folder.relative_to(home)) in said
    shutil.rmtree(other)
    assert chosen(home) == (None, said)
    assert not (home / "ran").exists()


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.items(), ids=[each.__name__ for each in DAMAGE])
def test_folder_that_is_not_used_is_named_with_the_reason(
    damage: Callable[[Path], None], reason: str, home: Path
) -> None:
    check_unused(home, damage, reason)


def test_folder_that_cannot_be_read_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, is_dir = run_folder(home), Path.is_dir

    def refused(self: Path) -> bool:
        if self.absolute() == folder:
            raise PermissionError(13, "Permission denied", str(self))
        return is_dir(self)

    monkeypatch.setattr(Path, "is_dir", refused)
    check_unused(home, lambda folder: None, "cannot be read .Permission denied")


@pytest.mark.parametrize("other", ["model.learning_rate=0.5", "experiment=ppo_pendulum", "ckpt_path=null"])
def test_runs_with_other_settings_are_skipped_silently(other: str, home: Path) -> None:
    done = call("train", "ckpt_path=auto", *GIVEN, other, "--cfg", "job", cwd=home)
    assert (OmegaConf.create(done.stdout).ckpt_path, done.stderr) == (None, "")


def test_runs_of_a_sweep_find_their_checkpoints_in_any_order_of_settings(home: Path) -> None:
    last = run_folder(home) / "checkpoints" / "last.ckpt"
    done = call("train", "--multirun", "ckpt_path=auto", GIVEN[-2], *GIVEN[:-2], "seed=3,4", cwd=home)
    assert done.returncode == 0, done.stderr
    records = home.glob("logs/train/sweep_*/*/*/*/.hydra/config.yaml")
    kept = {path.parts[-4]: OmegaConf.load(path).ckpt_path for path in records}
    assert kept == {"seed_3": str(last.relative_to(home)), "seed_4": None}


def test_run_that_another_process_writes_is_refused(home: Path, tmp_path: Path) -> None:
    folder = run_folder(home)
    with held_by_another(folder, tmp_path / "holder") as holder:
        for arguments in (["ckpt_path=auto"], [f"hydra.run.dir={folder}"]):
            done = call("train", *GIVEN, *arguments, cwd=home)
            assert done.returncode == 1
            assert f"is being written by process {holder} on " in done.stderr


def test_unused_checkpoint_is_named_and_a_new_run_starts(home: Path) -> None:
    empty(run_folder(home))
    done = call("train", *GIVEN, "ckpt_path=auto", cwd=home)
    assert done.returncode == 0
    assert last_line(done.stdout)[4] == "256"
    assert "hydra.yaml is damaged" in done.stderr


OWN = "import gymnasium\ndef make(**options):\n    return gymnasium.make('CartPole-v1', **options)\n"


def test_auto_resumes_a_run_with_own_classes_only_with_trusted(tmp_path: Path) -> None:
    (tmp_path / "own_cart.py").write_text(OWN)
    given = [*GIVEN, "data.env={_target_:hydra.utils.get_method,path:own_cart.make}", "ckpt_path=auto"]
    first = call("train", *given, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("to resume or evaluate it, set trusted=true") == 1
    refused = call("train", *given, cwd=tmp_path)
    assert refused.returncode == 1
    assert re.fullmatch("error: .*hydra.utils.get_method.*set trusted=true.\n", refused.stderr)
    done = call("train", *given, "trusted=true", "--cfg", "job", cwd=tmp_path)
    assert str(OmegaConf.create(done.stdout).ckpt_path).endswith("last.ckpt"), done.stderr


def test_new_run_accepts_trusted(tmp_path: Path) -> None:
    done = call("train", *GIVEN, "ckpt_path=auto", "trusted=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "set trusted=true" not in done.stdout
