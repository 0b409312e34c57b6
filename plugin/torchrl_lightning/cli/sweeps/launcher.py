"""Start a sweep or search with Hydra, and count its failed jobs."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, Self

from hydra._internal.callbacks import Callbacks
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.processes import handled_signal
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.cli.sweeps.jobs import (
    FailedJob,
    JobError,
    JobTask,
    composition_error,
    is_stop,
    job_error,
    job_label,
    report,
)
from torchrl_lightning.cli.sweeps.search import Search, SearchEnd, open_search


class IgnoredInterrupts:
    """Record each Ctrl-C that does not end a job.

    The interpreter ignores a Ctrl-C within a destructor or a weak reference. A trainer delays a Ctrl-C until its step
    is complete, but the job may fail within the step.
    """

    def __init__(self) -> None:
        self._is_interrupted = False
        self._hook = sys.unraisablehook

    def __enter__(self) -> Self:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._handle
        interrupts.requested = False
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook

    def _handle(self, unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._is_interrupted = True
            interrupts.repeat()
        else:
            self._hook(unraisable)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a Ctrl-C was ignored."""
        if self._is_interrupted or interrupts.requested:
            raise KeyboardInterrupt


class JobLauncher(Launcher):
    """Launch the jobs of a sweeper with a launcher of Hydra; report failed jobs, and launch the others.

    Args:
        launcher: The launcher.
        task: The task of the jobs.
        config: The config of the sweep.
        check: Composes the config of a job from its overrides, and keeps it if this job runs next.
        search: The search that the jobs belong to, or None.
        ignored_interrupts: Records each Ctrl-C that the interpreter has ignored.
        raises: Whether the sweeper accepts results that raise their error.
    """

    def __init__(
        self,
        launcher: Launcher,
        task: JobTask,
        config: DictConfig,
        check: Callable[[list[str], bool], None],
        search: Search | None,
        ignored_interrupts: IgnoredInterrupts,
        raises: bool,
    ) -> None:
        self._launcher, self._task, self._config, self._check = launcher, task, config, check
        self._search, self._raises = search, raises
        self._ignored_interrupts = ignored_interrupts
        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        self._fixed = {_key(str(override.input_line)) for override in overrides if not override.is_sweep_override()}
        self.finished = self.failed = 0

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Do nothing, because the wrapped launcher is set up."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs; return a result for each job, which is a :class:`FailedJob` after an error."""
        jobs = [list(overrides) for overrides in job_overrides]
        trials = [None] * len(jobs) if self._search is None else self._search.last_trials(len(jobs))
        labels = [
            job_label([line for line in job if _key(line) not in self._fixed], trial)
            for job, trial in zip(jobs, trials, strict=True)
        ]
        if self._search is not None:
            jobs = [[*job, *self._search.overrides(trial)] for job, trial in zip(jobs, trials, strict=True)]
        runs_next = len(jobs) == 1 and isinstance(self._launcher, BasicLauncher)
        errors = [self._composition_error(job, label, runs_next) for job, label in zip(jobs, labels, strict=True)]
        if self._search is None and all(errors) and self.finished == 0:  # a mistake of the command
            message = f"{str(errors[0]).removeprefix('error: ')} {self._count(len(jobs), len(jobs))}"
            raise UsageError(message) from errors[0]
        for error in filter(None, errors):
            report(error)
        valid = [index for index, error in enumerate(errors) if error is None]
        results = self._run([jobs[index] for index in valid], [labels[index] for index in valid], initial_job_idx)
        all_results: list[JobReturn] = [FailedJob(error or JobError("")) for error in errors]
        for index, result in zip(valid, results, strict=True):
            all_results[index] = result
        failures = [result for result in all_results if isinstance(result, FailedJob)]
        self.finished, self.failed = self.finished + len(jobs), self.failed + len(failures)
        if self._search is not None:
            self._search.end_if_too_many_failed(self.failed)
        return all_results if self._raises else [_without_error(result) for result in all_results]

    def _composition_error(self, job: list[str], label: str, runs_next: bool) -> JobError | None:
        """Compose the config of a job, and return the error if this is impossible."""
        try:
            self._check(job, runs_next)
        except SystemExit as end:
            if is_stop(end):
                raise
            return job_error(end, label)
        except Exception as error:
            return composition_error(error, label)
        return None

    def _run(self, jobs: list[list[str]], labels: list[str], first: int) -> list[JobReturn]:
        """Run jobs with valid configs; report each failed job."""
        runs_here = isinstance(self._launcher, BasicLauncher)
        if runs_here and len(jobs) > 1:  # one at a time, because an error between two jobs would end all of them
            return [
                result
                for index, (job, label) in enumerate(zip(jobs, labels, strict=True))
                for result in self._run([job], [label], first + index)
            ]
        if not jobs:
            return []
        self._task.labels = {first + index: label for index, label in enumerate(labels)}
        try:
            results = list(self._launcher.launch(jobs, initial_job_idx=first))
        except Exception as error:  # outside of the task, for example because a process was killed
            if len(jobs) > 1 and self._search is None and _ends_together(self._launcher):
                return [
                    result
                    for index, (job, label) in enumerate(zip(jobs, labels, strict=True))
                    for result in self._run([job], [label], first + index)
                ]
            results = [FailedJob(job_error(error, label)) for label in labels]
        self._ignored_interrupts.check()
        checked = [_checked(result, label) for result, label in zip(results, labels, strict=True)]
        for result in checked:
            if isinstance(result, FailedJob):
                report(result.error)
        return checked

    def end(self) -> None:
        """Print the number of failed jobs, and exit with status 1 if the sweep has failed."""
        if self.failed == 0:
            return
        message = self._count(self.failed, self.finished)
        if self._search is None or self.failed == self.finished or self._search.has_ended:
            sys.exit(f"error: {message}")
        print(message, file=sys.stderr)

    def _count(self, failed: int, jobs: int) -> str:
        if self._search is None:
            return f"{failed} of {jobs} runs failed."
        limit = (
            f", more than max_failure_rate={self._search.max_failure_rate:g} allows" if self._search.has_ended else ""
        )
        return f"{failed} of {jobs} trials failed{limit}."


def run_sweep(hydra: Any, config_name: str, task: Callable[[Any], Any], overrides: list[str]) -> None:
    """Run a command for each job of a sweep or search. Exit with status 1 if it has failed.

    A search fails if all its trials failed, or more than ``max_failure_rate`` allows. A sweep fails if any run failed.
    """
    config = hydra.compose_config(
        config_name=config_name, overrides=overrides, run_mode=RunMode.MULTIRUN, with_log_configuration=True
    )
    callbacks = Callbacks(config)
    callbacks.on_multirun_start(config=config, config_name=config_name)
    context = HydraContext(config_loader=hydra.config_loader, callbacks=callbacks)
    job_task = JobTask(task)
    sweeper: Any = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=job_task)
    implementation = vars(sweeper).get("sweeper", sweeper)  # some sweepers wrap another object
    is_basic = isinstance(sweeper, BasicSweeper)
    if is_basic:
        sweeper.validate_batch_is_legal = _accept  # the launcher composes each job
    with ExitStack() as stack:
        search = None
        if "study_name" in config.hydra.sweeper:
            stack.enter_context(_search_errors(config.hydra.sweeper.study_name))
            search = stack.enter_context(open_search(implementation, config))
            direction = config.hydra.sweeper.direction
            job_task.objectives = len(direction) if isinstance(direction, ListConfig) else 1
        ignored_interrupts = stack.enter_context(IgnoredInterrupts())
        check = partial(hydra.config_loader.check_sweep_config, config)
        launcher = JobLauncher(
            implementation.launcher, job_task, config, check, search, ignored_interrupts, raises=not is_basic
        )
        if not isinstance(implementation.launcher, BasicLauncher):
            # A launcher ends its processes if the signal raises an exception. A trainer here handles SIGTERM itself.
            stack.enter_context(handled_signal(signal.SIGTERM, _exit))
        implementation.launcher = launcher
        stack.enter_context(_readable_log(config, implementation))
        arguments = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
        try:
            sweeper.sweep(arguments=arguments)
        except SearchEnd:
            pass
        except ValueError:
            if search is None or launcher.failed < launcher.finished or launcher.failed == 0:
                raise  # else, the study has no best trial
    callbacks.on_multirun_end(config=config, config_name=config_name)
    launcher.end()


@contextmanager
def _search_errors(study_name: str | None) -> Iterator[None]:
    """Raise UserError with a remedy for an error of Optuna or of its database."""
    try:
        yield
    except (UserError, HydraException, OSError):
        raise
    except Exception as error:  # the class depends on the database
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"
        raise UserError(
            f"the search {study_name} cannot continue: {reason}. Correct its settings, or set another "
            "hydra.sweeper.study_name or hydra.sweeper.storage."
        ) from error


def _key(line: str) -> str:
    """Return the setting or group of an override."""
    return line.lstrip("+~").partition("=")[0]


def _accept(batch: Sequence[Sequence[str]]) -> None:
    """Accept a batch of jobs."""


def _without_error(result: JobReturn) -> JobReturn:
    """Return a result that does not raise its error, because Hydra's basic sweeper would end at the first error."""
    return JobReturn(status=JobStatus.COMPLETED) if isinstance(result, FailedJob) else result


def _checked(result: JobReturn, label: str) -> JobReturn:
    """Return a result; if its job has failed, return a :class:`FailedJob`."""
    if isinstance(result, FailedJob) or result.status == JobStatus.COMPLETED:
        return result
    error = result._return_value  # the property would print a second line
    return FailedJob(error if isinstance(error, JobError) else job_error(error, label))


def _ends_together(launcher: Launcher) -> bool:
    """Return True if an error in one process of a launcher ends its other processes."""
    return type(launcher).__module__.startswith("hydra_plugins.hydra_joblib_launcher")


@contextmanager
def _readable_log(config: DictConfig, sweeper: Any) -> Iterator[None]:
    """Omit the second line for each error from the log of the sweeper, and log the storage as configured."""

    def is_new(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Storage: "):
            record.msg = f"Storage: {config.hydra.sweeper.storage}"
        return not str(record.msg).startswith("Failed experiment")

    log = logging.getLogger(type(sweeper).__module__)
    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


def _exit(number: int, frame: FrameType | None) -> None:
    print("terminated", file=sys.stderr)
    sys.exit(128 + number)
