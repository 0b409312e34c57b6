"""Runs on two ranks that a signal stops: all ranks end together, and the checkpoint is the end of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kit.processes import environment, members

COMMAND = Path(sys.executable).parent / "torchrl-lightning-train"
SETTINGS = [
    *("trainer.strategy=ddp", "trainer.devices=2", "seed=0", "data.reset_at_each_batch=true"),
    *("data.eval_episodes=2", "trainer.check_val_every_n_epoch=2", "eval_episodes=2", "model.schedule=constant"),
    *("trainer.enable_progress_bar=false", "logger=many", "callbacks=checkpoint", "eval_checkpoint=last"),
]
ON_POLICY = [
    *("experiment=ppo_cartpole", "data.num_envs=2", "data.frames_per_batch=32", "data.num_epochs=1"),
    *("data.num_mini_batch=2", "data.mini_batch_size=null", "data.updates_per_step=1"),
]
REPLAY = [
    *("experiment=dqn_cartpole", "data.num_envs=1", "data.frames_per_batch=8", "data.frames_per_update=1"),
    *("data.warmup_frames=32", "data.updates_per_epoch=16", "data.updates_per_step=4", "data.batch_size=8"),
    *("data.buffer.storage.max_size=512", "data.checkpoint_buffer=inside"),
]
pytestmark = pytest.mark.skipif(not Path("/proc").is_dir() or not COMMAND.exists(), reason="reads /proc")


class Ranks:
    """A run of two ranks in a session of its own."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self._file = (folder / "said").open("w")
        self.folder = folder
        self._process = subprocess.Popen(
            [COMMAND, *SETTINGS, *settings, f"hydra.run.dir={folder / 'run'}"],
            cwd=folder,
            env=environment(),
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.last = folder / "run" / "checkpoints" / "last.ckpt"

    def wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + 300
        while not self.last.exists():
            assert self._process.poll() is None, self.lines()
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.05)

    def send(self, number: int, ranks: Sequence[int]) -> None:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        (child,) = (pid for pid in children if b"ddp_process_1" in Path(f"/proc/{pid}/cmdline").read_bytes())
        for rank in ranks:
            os.kill((self._process.pid, int(child))[rank], number)

    def status(self) -> int:
        return self._process.wait(300)

    def lines(self) -> list[str]:
        said = (self.folder / "said").read_text().splitlines()
        return [line for line in said if line.strip() and "[INFO]" not in line and "warn(" not in line]

    def left(self) -> list[int]:
        deadline = time.monotonic() + 30  # multiprocessing's own helper outlives its parent by an instant
        while members(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        return members(self._process.pid)

    def kill(self) -> None:
        for pid in members(self._process.pid):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()


def weights(checkpoint: Path) -> list[float]:
    values = torch.load(checkpoint, weights_only=True)["state_dict"].values()
    return torch.cat([value.flatten().double() for value in values]).tolist()


def stopped(folder: Path, number: int, ranks: Sequence[int], *settings: str) -> Ranks:
    folder.mkdir()
    run = Ranks(folder, *settings, "data.total_frames=10000000")
    try:
        run.wait_for_checkpoint()
        run.send(number, ranks)
        run.status()
        assert run.left() == []
    finally:
        run.kill()
    return run


def completed(folder: Path, frames: int, *settings: str) -> Path:
    folder.mkdir()
    run = Ranks(folder, *settings, f"data.total_frames={frames}")
    try:
        assert run.status() == 0, run.lines()
    finally:
        run.kill()
    return run.last


@pytest.mark.parametrize(
    ("number", "ranks", "settings"),
    [
        (signal.SIGTERM, (1,), REPLAY),
        (signal.SIGINT, (0, 1), ON_POLICY),
    ],
)
def test_stopped_ranks_save_the_same_step_and_resume_bit_for_bit(
    number: int, ranks: Sequence[int], settings: list[str], tmp_path: Path
) -> None:
    run = stopped(tmp_path / "stopped", number, ranks, *settings)
    assert run.status() == (143 if number == signal.SIGTERM else 1), run.lines()
    lines = run.lines()
    assert len(lines) <= 10, lines
    assert sum(f"to resume, run the same command with ckpt_path={run.last}" in line for line in lines) == 1, lines
    stored = torch.load(run.last, weights_only=True)
    data = next(value for name, value in stored.items() if name.endswith("DataModule"))
    frames = {rank["frames"] for rank in data["ranks"]}
    assert len(frames) == 1
    end = 2 * (int(frames.pop()) // 2 + 192)
    resumed = completed(tmp_path / "resumed", end, *settings, f"ckpt_path={run.last}")
    assert weights(resumed) == weights(completed(tmp_path / "whole", end, *settings))


@pytest.mark.parametrize("rank", [0, 1])
def test_death_of_a_rank_is_reported_in_one_line_and_ends_the_others(rank: int, tmp_path: Path) -> None:
    run = stopped(tmp_path / "stopped", signal.SIGKILL, (rank,), *ON_POLICY)
    assert run.status() == (137 if rank == 1 else -9)
    lines = [line for line in run.lines() if "socket" not in line.lower()]
    assert len(lines) <= 2, lines
    assert f"error: rank {rank} " in lines[-1]
    assert f"ckpt_path={run.last}" in lines[-1]
