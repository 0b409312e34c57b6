"""Run sweeps and searches with a task that does not train."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from joblib.externals.loky import get_reusable_executor

from cli.commands import unchanged_process
from kit.store import only_our_schemas
from torchrl_lightning.cli.command import run_command


def sweep(folder: Path, task: Any, *arguments: str, full: bool = False) -> tuple[int, list[str]]:
    """Run a sweep of a task in a folder; return the status and the lines of stderr."""
    with (
        only_our_schemas(),
        unchanged_process(),
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1" if full else "0"),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as complained,
        mock.patch.object(sys, "argv", ["torchrl-lightning-train", *arguments]),
    ):
        status: Any = 0
        try:
            run_command("train", task, resumes=True)
        except SystemExit as end:
            status = end.code
        finally:
            if "hydra/launcher=joblib" in arguments:
                get_reusable_executor().shutdown(wait=True)  # workers keep their first environment variables
    lines = complained.getvalue().splitlines()
    return (1, [*lines, status]) if isinstance(status, str) else (status, lines)
