"""Commands print tracebacks only if the user sets HYDRA_FULL_ERROR=1; they do not change the variable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from joblib.externals.loky import get_reusable_executor

from cli.commands import unchanged_process
from kit.store import only_our_schemas
from torchrl_lightning.cli.command import run_command

READ = "import os; print(os.environ.get('HYDRA_FULL_ERROR'))"


def run(folder: Path, task: Any, value: str | None, *arguments: str) -> None:
    """Run a task as the job of a command, with the user's value of HYDRA_FULL_ERROR."""
    with (
        only_our_schemas(),
        unchanged_process(),
        pytest.MonkeyPatch.context() as patch,
        mock.patch.object(sys, "argv", ["torchrl-lightning-train", *arguments]),
    ):
        patch.chdir(folder)
        if value is None:
            patch.delenv("HYDRA_FULL_ERROR")
        else:
            patch.setenv("HYDRA_FULL_ERROR", value)
        try:
            run_command("train", task, resumes=True)
        finally:
            get_reusable_executor().shutdown(wait=True)  # joblib's workers keep their first environment variables
            assert os.environ.get("HYDRA_FULL_ERROR") == value


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize(
    "arguments", [[], ["--multirun", "seed=0,1"], ["--multirun", "seed=0", "hydra/launcher=joblib"]]
)
def test_job_and_its_processes_see_only_the_users_value(value, arguments, tmp_path):
    def task(cfg: Any) -> float:
        child = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
        seen = f"{os.environ.get('HYDRA_FULL_ERROR')} {child.stdout.strip()}"
        (tmp_path / f"seen-{cfg.seed}").write_text(seen)
        return 0.0

    run(tmp_path, task, value, *arguments)
    seen = [path.read_text() for path in tmp_path.glob("seen-*")]
    assert seen == [f"{value} {value}"] * (2 if "seed=0,1" in arguments else 1)


@pytest.mark.parametrize("arguments", [["sed=3"], ["data=gea"], ["--multirun", "sed=0,1"]])
def test_traceback_stays_for_a_user_who_asks_for_it(arguments, tmp_path):
    with pytest.raises(ValueError, match="did you mean") as error:
        run(tmp_path, float, "1", *arguments)
    assert error.value.__cause__ is not None
    with pytest.raises(SystemExit, match=r"^error"):
        run(tmp_path, float, None, *arguments)
