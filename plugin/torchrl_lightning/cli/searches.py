"""What Hydra calls around a search."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from torchrl_lightning.cli.locks import is_abandoned

_log = logging.getLogger(__name__)


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
