from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import gymnasium
import pytest
import torch

from cli.commands import TINY, command_line, last_line
from datamodules.test_close import members
from kit.processes import environment

SETTINGS = [*TINY, "data.total_frames=10000000", "trainer.check_val_every_n_epoch=1000000"]


OWN_MODULE = """
import gymnasium
gymnasium.register("Own-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ctrl_c_leaves_a_checkpoint_that_resumes_and_no_process(run, tmp_path):
    # The experiment with worker processes, which find the module in the working directory as well.
    (tmp_path / "own_cartpole.py").write_text(OWN_MODULE)
    settings = ["experiment=vtrace_cartpole", "data.env=own_cartpole:Own-v0", *SETTINGS, "eval_checkpoint=last"]
    process = subprocess.Popen(
        command_line("train", *settings, "hydra.run.dir=first"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where the tests run in the background, Ctrl-C is ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        rows = tmp_path / "first" / "csv" / "metrics.csv"
        deadline = time.monotonic() + 600
        while not (rows.exists() and len(rows.read_text().splitlines()) > 5) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 1, said
        deadline = time.monotonic() + 300  # multiprocessing's own helper outlives its parent by an instant
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert members(process.pid) == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    assert "Traceback" not in said
    match = re.search(r"stopped by KeyboardInterrupt; to resume, run the same command with ckpt_path=(\S+)", said)
    assert match is not None, said
    checkpoint = tmp_path / match[1]
    frames = torch.load(checkpoint, weights_only=True)["OnPolicyDataModule"]["ranks"][0]["frames"]
    assert frames > 0
    total = f"data.total_frames={frames + 256}"
    try:
        done = run("train", *settings, total, f"ckpt_path={checkpoint}", "hydra.run.dir=second")
    finally:
        gymnasium.registry.pop("Own-v0", None)
    assert last_line(done.stdout)[4] == str(frames + 256)
