"""Hydra callbacks that prepare the folders of sweeps and searches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.cli.run_folder.folder import SWEEP, is_follower, locked

_locks = ExitStack()  # not an attribute of the callback, because launchers pickle the callback


class SweepFolder(Callback):
    """Lock the folder of a sweep until it ends, because Hydra writes ``multirun.yaml`` before the first run begins.

    Optuna searches are not locked, because several processes share the folder of one study.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Lock the folder, or raise SystemExit if another process holds the lock. Hydra would catch any other error."""
        if "study_name" not in config.hydra.sweeper and not is_follower():
            with exit_with_one_line():
                _locks.enter_context(locked(Path(config.hydra.sweep.dir), SWEEP))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Unlock the folder."""
        _locks.close()


class SearchFolder(Callback):
    """Create the folder of a search, which contains its study, before the sweeper opens the study.

    Args:
        trial: The number of a run's trial. The search sets it for each run.
        run: The unique name of a run's folder. The search sets it for each run.
        logarithmic: The settings that were sampled on a logarithmic scale; pictures draw them on such an axis.
    """

    def __init__(self, trial: int | None = None, run: str | None = None, logarithmic: Sequence[str] = ()) -> None:
        self.trial, self.run, self.logarithmic = trial, run, tuple(logarithmic)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the folder."""
        Path(config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
