"""Write folders like finished runs, for the tests of plots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from lightning.pytorch.loggers import CSVLogger


def write_run(folder: Path, *, seed: int = 0, points: int = 20, scale: float = 500.0) -> Path:
    """Write a run's metrics like Lightning: training and evaluation in separate, sparse rows."""
    logger = CSVLogger(folder, name="csv", version="")
    generator = np.random.default_rng(seed)
    for i in range(1, points + 1):
        frames = i * 1024
        logger.log_metrics({"train/loss": 1.0 / i}, step=frames - 512)
        value = scale * (1 - np.exp(-i / 5)) + generator.normal(0, scale / 20)
        logger.log_metrics({"eval/return": float(value)}, step=frames)
    logger.save()
    return folder


def keep(run: Path, *overrides: str, seed: int = 0, ckpt_path: str | None = None, **choices: str) -> Path:
    """Write Hydra's record of a run; return the run's folder."""
    folder = run / ".hydra"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "ckpt_path": ckpt_path}))
    chosen = {"experiment": "ppo_cartpole", **choices}
    runtime = {"choices": chosen, "cwd": str(run.parent)}
    hydra = {"hydra": {"runtime": runtime, "overrides": {"task": [f"seed={seed}", *overrides]}}}
    (folder / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    return run
