"""Report the evaluations of a run to an Optuna search."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.run_metadata import ENDED_EARLY
from torchrl_lightning.callbacks.monitors import check_monitor
from torchrl_lightning.callbacks.sparse import SparseCallback

logger = logging.getLogger(__name__)


class TrialReport(SparseCallback):
    """Report each evaluation to this run's trial in an Optuna study, and end the run if the pruner rejects it.

    The callback reports scores over environment frames, so that the pruner compares trials at equal numbers of frames.
    A pruned run logs its number of frames, runs the evaluation after training, and returns the score. Its trial counts
    as complete, because Hydra's sweeper does not support pruned trials. A score of NaN is not reported.

    Args:
        study_name: The name of an existing study.
        storage: The storage of the study: a URL or an Optuna storage.
        trial: The number of this run's trial in the study. The trial must be running.
        folder: The folder of the run, stored in the trial as ``folder``.
        monitor: The name of the reported metric.
        pruner: An Optuna pruner, which decides at each report whether to end the run. With None, the run is never
            pruned.

    Source:
        Golovin et al., 2017: Google Vizier, section 3.2.2, for the median rule.

    Examples:
        >>> report = TrialReport("search", "sqlite:///study.db", 3, "run")
        >>> report.monitor
        'eval/return'
    """

    resume_advice = "to continue the search, run its command again"

    def __init__(
        self,
        study_name: str,
        storage: Any,
        trial: int,
        folder: str | Path,
        monitor: str = "eval/return",
        pruner: Any = None,
    ) -> None:
        super().__init__()
        self.study_name, self.storage, self.monitor, self.pruner = study_name, storage, monitor, pruner
        self.trial, self.folder = trial, str(Path(folder).absolute())
        self._trial: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before training, validate the name of the metric and load the trial."""
        check_monitor(self.monitor, trainer, pl_module)
        if stage == "fit" and trainer.is_global_zero:
            self._trial = self._load_trial()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """During a fit, report the metric, and end the fit if the pruner rejects the trial."""
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        count, unit = DataApi.of_run(trainer).clock or (trainer.global_step, "updates")
        should_prune = False
        if self._trial is not None and value is not None and not math.isnan(value):
            try:
                self._trial.report(float(value), count)
            except RuntimeError as error:
                self._check_running(error)
                raise
            should_prune = self.pruner is not None and not trainer.should_stop and self._trial.should_prune()
        # A rank without the metric must also reduce, because the other ranks wait for it.
        if not trainer.strategy.reduce_boolean_decision(should_prune, all=False):
            return
        trainer.should_stop = True
        for experiment_logger in trainer.loggers:
            experiment_logger.log_metrics({ENDED_EARLY: float(count)}, step=count)
        if value is not None:
            text = "ended early after %d %s: %s=%.4g is worse than in other trials."
            logger.info(text, count, unit, self.monitor, value)

    def _load_trial(self) -> Any:
        try:
            import optuna
        except ImportError as error:
            raise UserError(
                "A search with Optuna needs the extra sweep: pip install 'torchrl-lightning[sweep]'."
            ) from error

        storage = optuna.storages.get_storage(self.storage)
        try:
            study = optuna.load_study(study_name=self.study_name, storage=storage, pruner=self.pruner)
        except KeyError as error:
            raise UserError(
                f"study_name={self.study_name} must be a study in {self.storage}. A search creates it."
            ) from error
        if self.trial not in (frozen_trial.number for frozen_trial in study.get_trials(deepcopy=False)):
            raise UserError(
                f"trial must be the number of a trial of study_name={self.study_name}, got {self.trial}. Pass the "
                "number of a trial that the study has created."
            )
        study_id = storage.get_study_id_from_name(self.study_name)
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, self.trial)
        self._trial = optuna.trial.Trial(study, trial_id)
        self._check_running(None)
        self._trial.set_user_attr("folder", self.folder)
        return self._trial

    def _check_running(self, error: Exception | None) -> None:
        """Raise UserError if the trial has ended. Another process ends the trial if this run's search was killed."""
        state = self._trial.storage.get_trial(self._trial._trial_id).state
        if state.is_finished():
            raise UserError(
                f"trial={self.trial} of study_name={self.study_name} must be running, got the state {state.name}. "
                "The process of its search has ended; run the search again to try other settings."
            ) from error
