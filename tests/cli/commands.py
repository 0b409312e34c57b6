"""Command lines with few frames, and how to read what they say."""

from __future__ import annotations

import re
import sys

# 4 environments x 32 steps, two passes of two mini-batches; an evaluation after each second rollout
TINY = [
    "data.num_envs=4",
    "data.frames_per_batch=128",
    "data.mini_batch_size=64",
    "data.num_epochs=2",
    "data.total_frames=512",
    "data.eval_episodes=2",
    "trainer.check_val_every_n_epoch=2",
    "eval_episodes=3",
]

LAST_LINE = r"mean evaluation return: (-?\d+\.\d) \+- (\d+\.\d) over (\d+) episodes, (\d+) frames, (\d+) s"


def command_line(name: str, *arguments: str) -> list[str]:
    """The command of an entry point, installed or not."""
    return [sys.executable, "-m", f"torchrl_lightning.cli.{name}", *arguments]


def last_line(stdout: str) -> re.Match[str]:
    """Mean, std, episodes, frames and seconds."""
    match = re.fullmatch(LAST_LINE, stdout.strip().splitlines()[-1])
    assert match is not None, stdout
    return match
