"""Runs the commands as a user does: in a process of their own, from another folder, with few frames."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import TINY, command_line
from configs.processes import environment

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run_command(name: str, *arguments: str, expect: int = 0, **kwargs: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command_line(name, *arguments),
            cwd=tmp_path,
            env={**environment(), "HYDRA_FULL_ERROR": "0"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    return run_command


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and stdout of one tiny run that started with resets, so that it can be repeated bit for bit."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    done = subprocess.run(
        command_line(
            "train", *TINY, "logger=many", "data.reset_at_each_batch=true", f"hydra.run.dir={folder}", "seed=3"
        ),
        cwd=folder.parent,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout
