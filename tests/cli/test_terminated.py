"""A run that SIGTERM or SLURM ends keeps its state, and ``ckpt_path=auto`` goes on with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from cli.commands import TINY, Done, last_line, start
from kit.forks import Forked
from torchrl_lightning.cli.locks import locked

ENDLESS = [*TINY, "data.total_frames=10000000", "trainer.check_val_every_n_epoch=1000000", "eval_checkpoint=last"]
JOB = {
    **{f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")},
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NAME": "mine",
    "SLURM_NTASKS": "1",
}


def ended_by(number: int, arguments: list[str], folder: Path, **variables: str) -> Done:
    """Start training, send a signal when it has learnt, and wait."""
    process = start("train", *arguments, cwd=folder, variables=variables)
    try:
        rows = "logs/train/**/metrics.csv"
        process.waits_for(lambda: any(len(path.read_text().splitlines()) > 3 for path in folder.glob(rows)))
        process.send(number)
        return Done(process.ends(), process.said, "")
    finally:
        process.kill()


def frames_in(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["OnPolicyDataModule"]["ranks"][0]["frames"])


def test_sigterm_saves_and_ends_a_sweep_with_its_status(tmp_path):
    done = ended_by(signal.SIGTERM, ["--multirun", "seed=3,4", *ENDLESS], tmp_path)
    assert done.returncode == 143, done.stdout
    assert "Traceback" not in done.stdout
    (checkpoint,) = tmp_path.glob("logs/train/sweep_*/*/seed_3/0/checkpoints/last.ckpt")
    assert frames_in(checkpoint) > 0


def test_a_requeued_job_goes_on_where_the_signal_of_slurm_ended_it(run, tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    done = ended_by(
        signal.SIGUSR1, ["seed=3", *ENDLESS], tmp_path, **JOB, PATH=f"{scontrol.parent}:{os.environ['PATH']}"
    )
    assert done.returncode == 143, done.stdout
    assert asked.read_text() == "requeue 4242\n"
    (checkpoint,) = tmp_path.glob("logs/train/ppo_cartpole-*-job_4242/seed_3/*/checkpoints/last.ckpt")
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    again = ["seed=3", *ENDLESS, "--cfg", "job"]
    assert OmegaConf.create(run("train", *again).stdout).ckpt_path is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert OmegaConf.create(run("train", *again).stdout).ckpt_path == str(checkpoint.relative_to(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "4243")
    assert OmegaConf.create(run("train", *again).stdout).ckpt_path is None
    assert OmegaConf.create(run("train", "ckpt_path=auto", *again).stdout).ckpt_path is not None


def test_auto_takes_the_newest_whole_checkpoint_of_the_same_run_or_starts(run, tmp_path):
    given = [*TINY, "seed=3", "ckpt_path=auto"]
    first = run("train", *given)
    assert last_line(first.stdout)[4] == "512"
    (folder,) = (path.parents[1] for path in tmp_path.glob("logs/train/*/seed_3/*/.hydra/config.yaml"))

    def chosen(*arguments: str) -> str | None:
        return OmegaConf.create(run("train", *arguments, "--cfg", "job").stdout).ckpt_path

    best, last = (folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    assert chosen(*given) == str(last.relative_to(tmp_path))
    assert chosen(*given[::-1]) == str(last.relative_to(tmp_path))
    assert chosen(*TINY, "seed=3") is None
    assert chosen(*TINY, "seed=4", "ckpt_path=auto") is None
    assert chosen(*given, "model.clip_epsilon=0.3") is None
    assert chosen(*given, "experiment=ppo_pendulum") is None
    whole = last.read_bytes()
    last.write_bytes(whole[: len(whole) // 2])
    assert chosen(*given) == str(best.relative_to(tmp_path))

    def hold() -> None:
        with locked(folder):
            sys.stdout.write("held\n")
            time.sleep(600)

    holder = Forked(hold, tmp_path / "holder")
    try:
        holder.waits_for(lambda: holder.said == "held\n")
        for arguments in (given, [*TINY, "seed=3", f"hydra.run.dir={folder}"]):
            done = run("train", *arguments, expect=1)
            assert f"is being written by process {holder.pid} on " in done.stderr
    finally:
        holder.kill()
    assert chosen(*given) == str(best.relative_to(tmp_path))


def test_auto_of_a_sweep_looks_for_each_run_alone(run, tmp_path):
    few = [*TINY, "data.total_frames=128", "eval_episodes=1"]
    run("train", *few, "seed=1")
    run("train", "--multirun", "seed=0,1", *few, "ckpt_path=auto")
    resumed = {
        path.parts[-4]: OmegaConf.load(path).ckpt_path is not None
        for path in tmp_path.glob("logs/train/sweep_*/*/seed_*/*/.hydra/config.yaml")
    }
    assert resumed == {"seed_0": False, "seed_1": True}


@pytest.mark.parametrize(("name", "job"), [("mine", "4242"), ("bash", None)])
def test_an_interactive_session_is_no_job(name, job, monkeypatch):
    from torchrl_lightning.cli.slurm import is_requeued, job_id

    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    monkeypatch.setenv("SLURM_JOB_NAME", name)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert (job_id(), is_requeued()) == (job, job is not None)
