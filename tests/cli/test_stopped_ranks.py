"""A signal stops all ranks of a run together, and the checkpoint contains the run's last state."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.rank_runs import COMMAND, ON_POLICY, REPLAY, SAC, RankRun, frames_of, weights

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir() or not COMMAND.exists(), reason="reads /proc")


def stopped(folder: Path, number: int, ranks: Sequence[int], *settings: str, num_ranks: int = 2) -> RankRun:
    run = RankRun.of_command(folder, *settings, "data.total_frames=10000000", ranks=num_ranks)
    try:
        run.wait_for_checkpoint()
        run.send(number, ranks)
        run.status()
        assert run.left() == []
    finally:
        run.kill()
    return run


def completed(folder: Path, frames: int, *settings: str, num_ranks: int = 2) -> Path:
    run = RankRun.of_command(folder, *settings, f"data.total_frames={frames}", ranks=num_ranks)
    try:
        assert run.status() == 0, run.lines()
        assert any(f"over {2 * num_ranks} episodes" in line for line in run.lines()), run.lines()
    finally:
        run.kill()
    return run.last


@pytest.mark.parametrize(
    ("number", "ranks", "num_ranks", "settings"),
    [
        (signal.SIGTERM, (1,), 2, REPLAY),
        (signal.SIGINT, (0, 1, 2), 3, ON_POLICY),
    ],
)
def test_stopped_ranks_save_the_same_step_and_resume_bit_for_bit(
    number: int, ranks: Sequence[int], num_ranks: int, settings: list[str], tmp_path: Path
) -> None:
    run = stopped(tmp_path / "stopped", number, ranks, *settings, num_ranks=num_ranks)
    assert run.status() == (143 if number == signal.SIGTERM else 1), run.lines()
    lines = run.lines()
    assert len(lines) <= 10, lines
    assert sum(f"to resume, run the same command with ckpt_path={run.last}" in line for line in lines) == 1, lines
    frames = frames_of(run.last)
    assert len(frames) == 1
    end = num_ranks * (int(frames.pop()) // num_ranks + 192)
    resumed = completed(tmp_path / "resumed", end, *settings, f"ckpt_path={run.last}", num_ranks=num_ranks)
    assert weights(resumed) == weights(completed(tmp_path / "whole", end, *settings, num_ranks=num_ranks))


@pytest.mark.parametrize(("rank", "settings"), [(0, ON_POLICY), (1, SAC)])
def test_death_of_a_rank_is_reported_in_one_line_and_ends_the_others(
    rank: int, settings: list[str], tmp_path: Path
) -> None:
    run = stopped(tmp_path / "stopped", signal.SIGKILL, (rank,), *settings)
    assert run.status() == (137 if rank == 1 else -9)
    lines = [line for line in run.lines() if "socket" not in line.lower()]
    assert len(lines) == 1, lines
    assert f"error: rank {rank} " in lines[0]
    assert f"ckpt_path={run.last}" in lines[0]


@pytest.mark.parametrize("program", ["command", "script"])
def test_rank_ends_if_the_first_rank_dies_before_training(program: str, tmp_path: Path) -> None:
    if program == "command":
        run = RankRun.of_command(tmp_path, *ON_POLICY, "data.total_frames=1000")
    else:
        run = RankRun.of_trainer(tmp_path, "PPO", 1000)
    try:
        run.wait_until(lambda: len(run.pids()) == 2)
        run.send(signal.SIGKILL, (0,))
        assert run.status() == -9
        assert run.left(60) == []
    finally:
        run.kill()
