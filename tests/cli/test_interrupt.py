from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import gymnasium
import pytest
import torch

from cli.commands import TINY, last_line, start
from datamodules.test_close import members

SETTINGS = [
    *TINY,
    "data.collector.num_workers=1",
    "data.total_frames=10000000",
    "trainer.check_val_every_n_epoch=1000000",
]


OWN_MODULE = """
import gymnasium
gymnasium.register("Own-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ctrl_c_leaves_a_checkpoint_that_resumes_and_no_process(run, tmp_path):
    # The experiment with worker processes, which find the module in the working directory as well.
    (tmp_path / "own_cartpole.py").write_text(OWN_MODULE)
    settings = ["experiment=vtrace_cartpole", "data.env=own_cartpole:Own-v0", *SETTINGS, "eval_checkpoint=last"]
    process = start("train", *settings, "hydra.run.dir=first", cwd=tmp_path, session=True)
    try:
        rows = tmp_path / "first" / "csv" / "metrics.csv"
        process.waits_for(lambda: rows.exists() and len(rows.read_text().splitlines()) > 5)
        os.killpg(process.pid, signal.SIGINT)
        assert process.ends() == 1, process.said
        deadline = time.monotonic() + 300  # multiprocessing's own helper outlives its parent by an instant
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert members(process.pid) == []
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
    said = process.said
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
