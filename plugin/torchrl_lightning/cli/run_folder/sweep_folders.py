"""Hydra callbacks that prepare the folders of sweeps and searches."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from torchrl_lightning.cli.error_messages import exit_with_one_line
from torchrl_lightning.cli.run_folder.folder import SWEEP, is_abandoned, is_follower, locked

_log = logging.getLogger(__name__)
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

    In an existing study, this callback marks a trial as failed if its run was killed during training and the run's
    folder is on this machine. No other component marks these trials.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the folder, and mark the killed trials of an existing study as failed."""
        Path(config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        end_killed_trials(config.hydra.sweeper.study_name, config.hydra.sweeper.storage)


def end_killed_trials(study_name: str, storage: Any) -> None:
    """Mark running trials of a study as failed if their runs were killed during training."""
    import optuna

    try:
        study = optuna.load_study(study_name=study_name, storage=storage)
    except KeyError:  # the sweeper creates the study with the first trial
        return
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        folder = trial.user_attrs.get("folder")
        if folder is not None and "trained" not in trial.user_attrs and is_abandoned(Path(folder)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            _log.warning("trial %d has failed: its run, in %s, was killed.", trial.number, folder)
