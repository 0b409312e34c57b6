"""What Hydra calls around a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class SearchFolder(Callback):
    """Make the folder of a search, where its study is kept, before the sweeper opens the study."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make it; it is there where a search goes on."""
        Path(config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
