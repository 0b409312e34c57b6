"""A run that Ctrl-C, SIGTERM or SLURM ends stores its state, and ``ckpt_path=auto`` resumes it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import gymnasium
import pytest
import torch
from omegaconf import OmegaConf

from cli.commands import TINY, Done, last_line, start
from kit.processes import members, survivors

ENDLESS = [*TINY, "data.total_frames=10000000", "trainer.check_val_every_n_epoch=1000000", "eval_checkpoint=last"]
JOB = {
    **{f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID", "NODEID")},
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NAME": "mine",
    "SLURM_NTASKS": "1",
}


def has_learnt(folder: Path) -> bool:
    return any(len(path.read_text().splitlines()) > 3 for path in folder.glob("logs/train/**/metrics.csv"))


def ended_by(number: int, arguments: list[str], folder: Path, **variables: str) -> Done:
    """Start training, send a signal after the first logged metrics, and wait for the end."""
    process = start("train", *arguments, cwd=folder, variables=variables)
    try:
        process.waits_for(lambda: has_learnt(folder))
        process.send(number)
        return Done(arguments, process.ends(), process.said)
    finally:
        process.kill()


def frames_in(checkpoint: Path) -> int:
    return int(torch.load(checkpoint, weights_only=True)["OnPolicyDataModule"]["ranks"][0]["frames"])


OWN_MODULE = """
import gymnasium
gymnasium.register("Own-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ctrl_c_leaves_a_checkpoint_that_resumes_and_no_process(run, tmp_path):
    # Worker processes must also import the module in the working directory.
    (tmp_path / "own_cartpole.py").write_text(OWN_MODULE)
    settings = ["experiment=vtrace_cartpole", "data.env=own_cartpole:Own-v0", "data.collector.num_workers=1", *ENDLESS]
    process = start("train", *settings, cwd=tmp_path, session=True)
    try:
        process.waits_for(lambda: has_learnt(tmp_path))
        os.killpg(process.pid, signal.SIGINT)
        assert process.ends() == 1, process.said
        assert survivors(process.pid) == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    said = process.said
    assert "Traceback" not in said
    match = re.search(r"stopped by KeyboardInterrupt; to resume, run the same command with ckpt_path=(\S+)", said)
    assert match is not None, said
    frames = frames_in(tmp_path / match[1])
    assert frames > 0
    # The run has reached its total frames, so resuming it restores the state and does not start a worker.
    try:
        done = run("train", f"data.total_frames={frames}", f"ckpt_path={match[1]}", "trusted=true")
    finally:
        gymnasium.registry.pop("Own-v0", None)
    assert last_line(done.stdout)[4] == str(frames)


def test_sigterm_saves_and_ends_a_sweep_with_its_status(tmp_path):
    done = ended_by(signal.SIGTERM, ["--multirun", "seed=3,4", *ENDLESS], tmp_path)
    assert done.returncode == 143, done.stdout
    assert "Traceback" not in done.stdout
    (checkpoint,) = tmp_path.glob("logs/train/sweep_*/*/seed_3/0/checkpoints/last.ckpt")
    assert frames_in(checkpoint) > 0


@pytest.mark.parametrize(("which", "path"), [("best", "run"), ("last", "run/checkpoints/last.ckpt")])
def test_sigterm_during_the_final_evaluation_is_one_line(which, path, tmp_path, monkeypatch):
    def evaluates(*_: object) -> None:
        (tmp_path / "evaluates").touch()
        time.sleep(60)

    monkeypatch.setattr("torchrl_lightning.cli.train.load_weights", evaluates)
    process = start("train", *TINY, "hydra.run.dir=run", f"eval_checkpoint={which}", cwd=tmp_path)
    try:
        process.waits_for((tmp_path / "evaluates").exists)
        process.send(signal.SIGTERM)
        assert process.ends() == 128 + signal.SIGTERM
    finally:
        process.kill()
    advice = f"evaluate it with torchrl-lightning-evaluate ckpt_path={tmp_path / path}"
    assert process.said.splitlines()[-1].endswith(f"stopped by a signal after the training; {advice}")


def test_requeued_job_goes_on_where_the_signal_of_slurm_ended_it(run, tmp_path, monkeypatch):
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


@pytest.mark.parametrize(("name", "job"), [("mine", "4242"), ("bash", None)])
def test_interactive_session_is_no_job(name, job, monkeypatch):
    from torchrl_lightning._core.slurm import is_requeued, job_id

    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    monkeypatch.setenv("SLURM_JOB_NAME", name)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert (job_id(), is_requeued()) == (job, job is not None)


HANGING = """
import pathlib
import time

from gymnasium.envs.classic_control import CartPoleEnv


class Hanging(CartPoleEnv):
    def step(self, action):
        if pathlib.Path("hang").exists():
            while True:
                try:
                    time.sleep(60)
                except Exception:
                    pass
        if pathlib.Path("raise").exists():
            raise KeyError("pole")
        return super().step(action)
"""


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_run_whose_environment_fails_keeps_what_was_saved(fault, tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    env = [
        "env=recipe",
        "data.env.id={_target_:hanging.Hanging}",
        "data.env.time_limit=20",
        "data.env.step_timeout=0.5",
    ]
    process = start("train", *ENDLESS, *env, "trainer.check_val_every_n_epoch=1", cwd=tmp_path)
    try:
        process.waits_for(lambda: any(tmp_path.glob("logs/**/best.ckpt")), 100)
        (tmp_path / fault).touch()
        assert process.ends(60) == 1
    finally:
        process.kill()
    assert process.said.count("error: ") == 1, process.said
    told = {
        "raise": r"KeyError in step \(hanging.py, line 17\): 'pole'",
        "hang": r"did not return within step_timeout=0.5",
    }
    (line,) = [line for line in process.said.splitlines() if line.startswith("error: ")]
    assert re.match(rf"error: (At step \d+ of the rollout, )?environment \d .*{told[fault]}", line)
    assert "Traceback" not in process.said
    saved = list(tmp_path.glob("logs/**/*.ckpt"))
    assert {path.name for path in saved} >= ({"best.ckpt", "last.ckpt"} if fault == "raise" else {"best.ckpt"})
    assert all(frames_in(path) > 0 for path in saved)
