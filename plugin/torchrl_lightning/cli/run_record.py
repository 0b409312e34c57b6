"""The record of a run in its folder: config, overrides and Hydra's own config, as Hydra writes them.

Hydra writes them before it calls the task, also into the folder of another run that is going on. Imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchrl_lightning.cli.locks import has_lock

FOLDER = ".hydra"


class RunRecord:
    """The three files of a run, as its config was composed.

    Args:
        cfg: The config of the task.
    """

    def __init__(self, cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        self._contents: dict[str, str] = {}
        if HydraConfig.initialized():
            hydra: Any = HydraConfig.instance().cfg
            nodes = {"config": cfg, "hydra": hydra, "overrides": hydra.hydra.overrides.task}
            self._contents = {f"{name}.yaml": OmegaConf.to_yaml(node) for name, node in nodes.items()}

    def write(self, folder: Path, *, replace: bool = True) -> None:
        """Write the files below a folder, each of them whole; a process without Hydra has nothing to write.

        Args:
            folder: The folder of the run.
            replace: Whether the record of another run is replaced.
        """
        if not replace and (folder / FOLDER / "config.yaml").exists():
            return
        for name, content in self._contents.items():
            path = folder / FOLDER / name
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
            temporary.write_text(content, encoding="utf-8")
            temporary.replace(path)


def recorded(task: Callable[[Any], float]) -> Callable[[Any], float]:
    """Return a task that first writes its record, unless its folder belongs to a training run."""

    @wraps(task)
    def recorded_task(cfg: Any) -> float:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            folder = Path(HydraConfig.get().runtime.output_dir)
            if not has_lock(folder):
                RunRecord(cfg).write(folder)
        return task(cfg)

    return recorded_task
