"""Report the evaluations of a run to an Optuna search."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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

    The callback selects a running trial that has this run's settings and that no other run has claimed. It reports
    scores over environment frames, so that the pruner compares trials at equal numbers of frames. A pruned run logs its
    number of frames, runs the evaluation after training, and returns the score. Its trial counts as complete, because
    Hydra's sweeper does not support pruned trials.

    Args:
        study_name: The name of an existing study.
        storage: The storage of the study: a URL or an Optuna storage.
        overrides: The overrides of this run, such as ``model.gamma=0.9``. They identify its trial.
        folder: The folder of the run, stored in the trial as ``folder``.
        monitor: The name of the reported metric.
        pruner: An Optuna pruner, which decides at each report whether to end the run. With None, the run is never
            pruned.

    Source:
        Golovin et al., 2017: Google Vizier, section 3.2.2, for the median rule.

    Examples:
        >>> report = TrialReport("search", "sqlite:///study.db", ["model.gamma=0.9"], "run")
        >>> report.monitor
        'eval/return'
    """

    resume_advice = "to continue the search, run its command again"

    def __init__(
        self,
        study_name: str,
        storage: Any,
        overrides: Sequence[str],
        folder: str | Path,
        monitor: str = "eval/return",
        pruner: Any = None,
    ) -> None:
        super().__init__()
        self.study_name, self.storage, self.monitor, self.pruner = study_name, storage, monitor, pruner
        self.overrides, self.folder = list(overrides), str(Path(folder).absolute())
        self._trial: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before training, validate the name of the metric and find the trial."""
        check_monitor(self.monitor, trainer, pl_module)
        if stage == "fit" and trainer.is_global_zero:
            self._trial = self._find_trial()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """During a fit, report the metric, and end the fit if the pruner rejects the trial."""
        value = trainer.callback_metrics.get(self.monitor)
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or value is None:
            return
        count, unit = DataApi.of_run(trainer).clock or (trainer.global_step, "updates")
        should_prune = False
        if self._trial is not None:
            self._trial.report(float(value), count)
            should_prune = self.pruner is not None and not trainer.should_stop and self._trial.should_prune()
        if not trainer.strategy.reduce_boolean_decision(should_prune, all=False):
            return
        trainer.should_stop = True
        for experiment_logger in trainer.loggers:
            experiment_logger.log_metrics({ENDED_EARLY: float(count)}, step=count)
        logger.info("ended early after %d %s: %s=%.4g is worse than in other trials.", count, unit, self.monitor, value)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Mark the trial as trained, because a finished run without a score must differ from a killed run."""
        if stage == "fit" and self._trial is not None:
            self._trial.set_user_attr("trained", True)

    def _find_trial(self) -> Any:
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
        for frozen_trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            if frozen_trial.user_attrs.get("folder", self.folder) == self.folder and _has_settings(
                frozen_trial.params, self.overrides
            ):
                study_id = storage.get_study_id_from_name(self.study_name)
                trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, frozen_trial.number)
                trial = optuna.trial.Trial(study, trial_id)
                trial.set_user_attr("folder", self.folder)
                return trial
        raise UserError(f"No running trial of study_name={self.study_name} has the settings of this run.")


def _has_settings(params: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Return True if a run's overrides include all settings of a trial."""
    settings = dict(override.split("=", 1) for override in overrides if "=" in override)
    return all(name in settings and _is_same_value(settings[name], str(value)) for name, value in params.items())


def _is_same_value(value: str, expected: str) -> bool:
    if value == expected:
        return True
    try:  # numbers such as 1e+16 may be formatted differently
        return float(value) == float(expected)
    except ValueError:
        return False
