"""Each run stores its record in ``.hydra``, and a second run in the same folder does not change the first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cli.commands import TINY, last_line
from kit.forks import held_by_another
from torchrl_lightning.cli.run_folder.folder import SWEEP
from torchrl_lightning.cli.run_folder.sweep_folders import SweepFolder

FEW = [*TINY, "data.total_frames=128", "eval_episodes=1", "logger=none"]
NAMES = ["config.yaml", "hydra.yaml", "overrides.yaml"]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, except for the lock, which names its holder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock" and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_run_records_what_hydra_would(run, tmp_path):
    run("train", *FEW, "seed=4", "hydra.run.dir=ours")
    run("train", *FEW, "seed=4", "hydra.run.dir=ours", "hydra.output_subdir=theirs")
    ours, theirs = tmp_path / "ours" / ".hydra", tmp_path / "ours" / "theirs"
    assert sorted(path.name for path in ours.iterdir()) == sorted([*NAMES, "lock"])
    for name in NAMES:
        assert (ours / name).read_text() == (theirs / name).read_text()
    assert "seed=4" in OmegaConf.load(ours / "overrides.yaml")


@pytest.mark.parametrize("command", ["train", "evaluate", "record"])
def test_second_command_in_the_folder_of_a_run_changes_nothing(command, run, tmp_path):
    run("train", *FEW, "seed=1", "hydra.run.dir=shared")
    folder = tmp_path / "shared"
    arguments = {
        "train": ["seed=2", *FEW],
        "evaluate": ["ckpt_path=shared", "episodes=1", "histogram=null"],
        "record": ["ckpt_path=shared", "episodes=1"],
    }[command]
    before = contents(folder)
    with held_by_another(folder, tmp_path / "holder") as holder:
        done = run(command, *arguments, "hydra.run.dir=shared", expect=int(command == "train"))
    if command == "train":
        assert f"is being written by process {holder} on " in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert contents(folder) == before


@pytest.mark.parametrize("command", ["train", "evaluate", "record"])
def test_runs_of_a_sweep_keep_their_records(command, run, tmp_path):
    run("train", *FEW, "hydra.run.dir=shared")
    arguments = {
        "train": FEW,
        "evaluate": ["ckpt_path=shared", "episodes=1", "histogram=null"],
        "record": ["ckpt_path=shared", "episodes=1"],
    }[command]
    run(command, "--multirun", "seed=5,6", *arguments, "hydra.sweep.dir=sweep", "hydra.sweep.subdir=${hydra:job.num}")
    for number, seed in enumerate((5, 6)):
        folder = tmp_path / "sweep" / str(number) / ".hydra"
        assert OmegaConf.load(folder / "config.yaml").seed == seed
        assert {*NAMES} <= {path.name for path in folder.iterdir()}


def test_run_that_resumes_in_its_folder_records_itself(run, tmp_path):
    run("train", *FEW, "hydra.run.dir=shared")
    resumed = run("train", "ckpt_path=shared/checkpoints/last.ckpt", "data.total_frames=256", "hydra.run.dir=shared")
    assert last_line(resumed.stdout)[4] == "256"
    config = OmegaConf.load(tmp_path / "shared" / ".hydra" / "config.yaml")
    assert config.data.total_frames == 256
    assert config.ckpt_path == "shared/checkpoints/last.ckpt"


def test_run_that_is_refused_leaves_the_record_of_the_one_before(run, tmp_path):
    run("train", *FEW, "hydra.run.dir=shared")
    before = contents(tmp_path / "shared")
    run("train", *FEW, "model.gamma=7", "hydra.run.dir=shared", expect=1)
    run("train", *FEW, "env=acrobot", "ckpt_path=missing.ckpt", "hydra.run.dir=shared", expect=1)
    assert contents(tmp_path / "shared") == before


def test_file_instead_of_the_record_folder_exits_with_one_line(run, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / ".hydra").write_text("mine")
    done = run("train", *FEW, "hydra.run.dir=shared", expect=1)
    assert "hydra.run.dir=FOLDER" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["train", "evaluate", "record"])
def test_second_sweep_in_the_folder_of_a_sweep_changes_nothing(command, run, tmp_path):
    run("train", *FEW, "--multirun", "seed=1", "hydra.sweep.dir=shared", "hydra.sweep.subdir=${hydra:job.num}")
    folder = tmp_path / "shared"
    arguments = {
        "train": ["seed=2,3", *FEW],
        "evaluate": ["ckpt_path=shared/0", "seed=2,3", "histogram=null"],
        "record": ["ckpt_path=shared/0", "seed=2,3"],
    }[command]
    before = contents(folder)
    assert "multirun.yaml" in before
    with held_by_another(folder, tmp_path / "holder", SWEEP) as holder:
        done = run(command, "--multirun", *arguments, "hydra.sweep.dir=shared", expect=1)
    assert re.fullmatch(f"error: .*shared is being written by process {holder} on .*; wait.*\n", done.stderr)
    assert contents(folder) == before


def test_sweep_may_be_run_again_in_its_folder_when_it_has_ended(run, tmp_path):
    sweep = [*FEW, "--multirun", "hydra.sweep.dir=shared", "hydra.sweep.subdir=${hydra:job.num}"]
    run("train", "seed=1", *sweep)
    with held_by_another(tmp_path / "shared", tmp_path / "holder", SWEEP):
        pass
    run("train", "seed=2", *sweep)
    assert "seed=2" in OmegaConf.load(tmp_path / "shared" / "multirun.yaml").hydra.overrides.task


def test_processes_share_the_folder_of_a_search(tmp_path):
    sweeper = {"study_name": "mine", "storage": "sqlite:///study.db"}
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}, "sweeper": sweeper}})
    with held_by_another(tmp_path, tmp_path / "holder", SWEEP):
        SweepFolder().on_multirun_start(config)
    SweepFolder().on_multirun_end(config)


@pytest.mark.parametrize("target", ["missing", "kept"])
def test_link_in_the_place_of_the_lock_is_not_followed(target, run, tmp_path):
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "sent" / ".hydra").mkdir(parents=True)
    (tmp_path / "sent" / ".hydra" / "lock").symlink_to(tmp_path / target)
    done = run("train", *FEW, "hydra.run.dir=sent", expect=1)
    assert done.stderr.startswith("error: the run folder cannot be written to")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "kept").read_text() == "kept"
    assert not (tmp_path / "missing").exists()
