"""What Hydra calls around a sweep and a search."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from torchrl_lightning.cli.checks import one_line
from torchrl_lightning.cli.run_folder import SWEEP, is_abandoned, is_follower, locked

_log = logging.getLogger(__name__)
_held = ExitStack()  # not in the callback, which launchers send to other processes


class SweepFolder(Callback):
    """Lock the folder of a sweep until it ends, because Hydra writes ``multirun.yaml`` before the first run begins.

    Searches by Optuna are not locked: several processes share the folder of one study.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Lock it; end the program with one line if another process holds it, which Hydra does not catch."""
        if "study_name" not in config.hydra.sweeper and not is_follower():
            with one_line():
                _held.enter_context(locked(Path(config.hydra.sweep.dir), SWEEP))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Unlock it."""
        _held.close()


class SearchFolder(Callback):
    """Make the folder of a search, where its study is kept, before the sweeper opens the study.

    Where a search goes on, the trials whose runs were killed while they trained have failed, as far as their folders
    lie here: nobody else would say so.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make it; where it is there, end what was killed."""
        Path(config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        end_killed_trials(config.hydra.sweeper.study_name, config.hydra.sweeper.storage)


def end_killed_trials(study_name: str, storage: Any) -> None:
    """Mark the running trials of a study as failed whose runs were killed while they trained."""
    import optuna

    try:
        study = optuna.load_study(study_name=study_name, storage=storage)
    except KeyError:  # it is made with its first trial
        return
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        folder = trial.user_attrs.get("folder")
        if folder is not None and "trained" not in trial.user_attrs and is_abandoned(Path(folder)):
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            _log.warning("trial %d has failed: its run, in %s, was killed.", trial.number, folder)
