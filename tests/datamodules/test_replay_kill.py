from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.processes import environment

HERE = Path(__file__).parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_killed_while_it_saves_leaves_a_whole_state(tmp_path):
    """Four random moments here; fifty by `python tests/datamodules/kill_run.py FOLDER`."""
    command = [sys.executable, str(HERE / "kill_run.py"), str(tmp_path), "--kills", "4"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills survived" in done.stdout
