"""Fixtures that run the commands in a temporary folder with few frames, in this process to save start-up time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cli.commands import TINY, Done, call

Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run_command(name: str, *arguments: str, expect: int = 0, draws: bool = False) -> Done:
        done = call(name, *arguments, cwd=tmp_path, draws=draws)
        assert done.returncode == expect, done.stdout + done.stderr
        return done

    return run_command


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and stdout of a tiny run. It resets before each batch, so it can be repeated bit for bit."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = ["logger=many", "data.reset_at_each_batch=true", f"hydra.run.dir={folder}", "seed=3"]
    done = call("train", *TINY, *settings, cwd=folder.parent, draws=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the list of saved figures, which grows during the test."""
    saved: list[Figure] = []
    original = Figure.savefig

    def savefig(self: Figure, *args: object, **kwargs: object) -> None:
        saved.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved
