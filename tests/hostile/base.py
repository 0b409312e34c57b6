"""The training run that hostile files are made from, and a first reading of it, which imports all modules."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from cli.commands import call
from hostile.readers import READERS
from hostile.running import Base
from kit.store import composed, composed_run
from torchrl_lightning import save_pretrained
from torchrl_lightning._core.checksums import CHECKSUMS_KEY

TINY = ["data.num_envs=2", "data.frames_per_batch=64", "data.mini_batch_size=32", "data.num_epochs=1"]


def make_base(folder: Path) -> Base:
    """Train for a few frames; return the checkpoint, a published policy and the config of each command."""
    torch.set_num_threads(1)  # a fork does not copy threads
    with contextlib.suppress(ImportError):
        import h5py  # noqa: F401  # imported here, because these imports run a command
        import minari  # noqa: F401
    run = folder / "run"
    settings = [*TINY, "data.total_frames=128", "data.eval_episodes=1", "eval_episodes=1"]
    done = call("train", *settings, f"hydra.run.dir={run}", cwd=folder)
    assert done.returncode == 0, done.stderr
    checkpoint = run / "checkpoints" / "last.ckpt"
    stored = torch.load(checkpoint, weights_only=True)
    stored.pop(CHECKSUMS_KEY)  # an attacker who changes the checkpoint would remove them
    save_pretrained(run, folder / "published")
    configs = {
        "evaluate": composed("evaluate", "ckpt_path=a.ckpt", "histogram=null", "episodes=1"),
        "record": composed("record", "ckpt_path=a.ckpt", "episodes=1", "directory=demos", "min_return=0"),
        "table": composed("record", "table=demos", "env=cartpole"),
        "train": composed_run(*settings, "init_from=a.ckpt", "logger=none", "~callbacks", "+callbacks={}", into="run"),
    }
    return Base(run, stored, folder / "published", configs)


def warm_up(base: Base, folder: Path) -> list[str]:
    """Read the unchanged run, checkpoint and policy with all functions for their kind; return the problems."""
    from hostile.running import Case, readings_of

    whole = {
        "checkpoint": base.run / "checkpoints" / "last.ckpt",
        "run": base.run,
        "policy": base.pretrained,
    }
    found = []
    for kind, path in whole.items():
        case = Case(kind, "a whole one", lambda sent, base, canary, path=path: path)
        for _, reading in readings_of(case, READERS[kind], base, folder / kind):
            found += reading.problems
    return found
