"""The jobs of a sweep: an error in one job becomes one line, whatever process runs the job."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.processes import resource_error
from torchrl_lightning._core.untrusted import MESSAGE_LIMIT, printable
from torchrl_lightning.cli.error_messages import (
    SWEEP_NOTE,
    exit_with_one_line,
    format_hydra_error,
    shows_tracebacks,
    storage_error,
)

_STOP_STATUSES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_STOP_MESSAGES = "torchrl_lightning.callbacks.checkpoints"  # logs where a stopped run has saved its state


class JobError(Exception):
    """A job has failed. The class has only plain arguments, because launchers pickle it.

    Args:
        message: The error in one line.
        details: The traceback.
        process: The id of the process that has printed the message, or None.
    """

    def __init__(self, message: str, details: str = "", process: int | None = None) -> None:
        super().__init__(message, details, process)
        self.message, self.details, self.process = message, details, process

    def __str__(self) -> str:
        return self.message


class FailedJob(JobReturn):
    """The result of a failed job. Hydra's class prints a second line when the error is raised."""

    def __init__(self, error: JobError) -> None:
        super().__init__(status=JobStatus.FAILED)
        self.error = error

    @property
    def return_value(self) -> Any:
        """Raise the error."""
        raise self.error

    @return_value.setter
    def return_value(self, value: Any) -> None:
        raise AttributeError("A failed job has no return value.")


class JobTask:
    """The task of each job: it raises :class:`JobError` for every error, and ends the sweep only on Ctrl-C or SIGTERM.

    Args:
        task: The task of the command.
    """

    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._task = task
        self._process = os.getpid()
        self.labels: dict[int, str] = {}
        """The name of each job in error messages, by its number."""
        self.objectives = 0
        """The number of scores that a search expects from each job; 0 for a sweep."""

    def __call__(self, config: Any) -> Any:
        """Run the task for one job."""
        from hydra.core.hydra_config import HydraConfig

        number = HydraConfig.get().job.num
        with exit_with_one_line(), _postponed_messages() as postponed:
            try:
                value = self._task(config)
                _check_scores(value, self.objectives)
                return value
            except BaseException as error:
                if is_stop(error):
                    raise
                postponed.clear()  # the message of the error replaces them
                failure = job_error(error, self.labels[number])
            if os.getpid() == self._process:
                report(failure)
            raise failure


def is_stop(error: BaseException) -> bool:
    """Return True if Ctrl-C or SIGTERM has caused an exception. Lightning turns Ctrl-C into ``SystemExit(1)``."""
    if isinstance(error, Exception):
        return False
    cause: BaseException | None = error
    while cause is not None:
        # Compare by name to avoid importing Lightning.
        if isinstance(cause, KeyboardInterrupt) or type(cause).__name__ == "SIGTERMException":
            return True
        cause = cause.__cause__ or cause.__context__
    return not isinstance(error, SystemExit) or error.code in _STOP_STATUSES


def job_error(error: BaseException, label: str) -> JobError:
    """Return the error of a job, in one line."""
    if isinstance(error, SystemExit):
        text = error.code if isinstance(error.code, str) else f"the run has exited with status {error.code}."
        message = text.removeprefix("error: ")
    elif isinstance(error, UserError):
        message = str(error)
    else:
        message = resource_error(error) or storage_error(error) or _describe(error)
    details = "".join(traceback.format_exception(error))
    return JobError(f"error: in {label}: {printable(' '.join(message.split()), MESSAGE_LIMIT)}", details)


def composition_error(error: Exception, label: str) -> JobError:
    """Return the error of a job that has no valid config, in one line."""
    vars(error).pop("__notes__", None)  # the label replaces the note with the settings of the run
    failure = job_error(error, label)
    if not isinstance(error, UserError) and isinstance(
        error, HydraException | OmegaConfBaseException | YAMLError | OSError | ValueError
    ):
        failure = JobError(f"error: in {label}: {format_hydra_error(error, sys.argv[1:])}", failure.details)
    failure.__cause__ = error
    return failure


def report(error: JobError) -> None:
    """Print the error of a job, unless this process has printed it. With HYDRA_FULL_ERROR=1, print the traceback."""
    if error.process == os.getpid():
        return
    error.process = os.getpid()
    if shows_tracebacks() and error.details:
        print(error.details, file=sys.stderr)
    print(error, file=sys.stderr, flush=True)


def job_label(settings: list[str], trial: int | None) -> str:
    """Return the name of a job in messages.

    Examples:
        >>> job_label(["seed=1"], None), job_label(["model.gamma=0.9"], 3)
        ('the run seed=1', 'trial 3 (model.gamma=0.9)')
    """
    text = " ".join(settings)
    if trial is not None:
        return f"trial {trial} ({text})" if text else f"trial {trial}"
    return f"{SWEEP_NOTE.removeprefix('in ')}{text}" if text else "a run"


def _describe(error: BaseException) -> str:
    """Return type and message of an unexpected error."""
    hint = "" if shows_tracebacks() else " HYDRA_FULL_ERROR=1 shows the traceback."
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}{f': {text}' if text else ''}.{hint}"


def _check_scores(value: Any, objectives: int) -> None:
    """Raise UserError if a search cannot use the scores of a run, or if a score is NaN."""
    scores = value if isinstance(value, list | tuple) and objectives != 1 else [value]
    try:
        numbers = [float(score) for score in scores]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        numbers = []
    if objectives and len(numbers) != objectives:
        raise UserError(
            f"the run must return {objectives} score{'s' * (objectives > 1)}, got {value!r}. Give "
            "hydra.sweeper.direction one direction for each score."
        )
    if any(map(math.isnan, numbers)):
        raise UserError(
            "the score of the run must be a number, got nan. Choose settings with which it does not diverge."
        )


@contextmanager
def _postponed_messages() -> Iterator[list[logging.LogRecord]]:
    """Log the messages of a stopped run at the end of the block, and only those that are still in the list."""
    messages: list[logging.LogRecord] = []

    def postpone(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        messages.append(record)
        return False

    log = logging.getLogger(_STOP_MESSAGES)
    log.addFilter(postpone)
    try:
        yield messages
    finally:
        log.removeFilter(postpone)
        for record in messages:
            log.handle(record)
