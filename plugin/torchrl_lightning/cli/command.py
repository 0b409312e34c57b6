"""Run a command with Hydra and little output. This module has only light imports, so that ``--help`` is fast."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from typing import Any

from torchrl_lightning.cli.working_directory import append_working_directory, leave_out_working_directory


class _Cleanup(ExitStack, ContextDecorator):
    """Cleanup callbacks that restore the state of the process at the end of a task."""


cleanup = _Cleanup()


def run_command(name: str, task: Callable[[Any], float], *, resumes: bool = False) -> None:
    """Print the help of a command, or compose its config with Hydra and run the task, once or in a sweep.

    If ``resumes`` is True, the config inherits the settings of a checkpoint's run, and the task itself writes the
    record of its run.
    """
    leave_out_working_directory()
    if {"--help", "-h"} & set(sys.argv[1:]):
        from torchrl_lightning.cli.config.help import help_text

        with flushed_output():
            print(help_text(name))
        return
    append_working_directory()
    from torchrl_lightning._core.run_names import register_run_name
    from torchrl_lightning.cli.config.compose import run_command_line
    from torchrl_lightning.cli.error_messages import exit_with_one_line
    from torchrl_lightning.cli.run_folder.folder import with_run_record

    register_run_name()
    with exit_with_one_line():
        run_command_line(name, task if resumes else with_run_record(task), sys.argv[1:], resumes=resumes)


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush the output, and exit silently if it is a pipe that the reader (such as ``head``) has closed."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        sys.exit(128 + signal.SIGPIPE)


def limit_threads(number: int) -> None:
    """Limit torch and NumPy to a number of threads until the task ends."""
    import numpy  # noqa: F401  # import first, because threadpoolctl limits only loaded libraries
    import torch
    from threadpoolctl import threadpool_limits

    from torchrl_lightning.environments.workers.threads import preserve_num_threads

    cleanup.enter_context(preserve_num_threads())
    torch.set_num_threads(number)
    cleanup.enter_context(threadpool_limits(number, user_api="blas"))


def silence_libraries() -> None:
    """Hide TorchRL's storage messages, Lightning's tips, and warnings about deliberate choices."""
    # Without this, a log file on a full disk causes a traceback for each line.
    cleanup.callback(setattr, logging, "raiseExceptions", logging.raiseExceptions)
    logging.raiseExceptions = False
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        # Hydra's handler already writes each message to the terminal and the log file. Lightning's messages do not
        # reach Hydra's handler if Lightning was imported first.
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    for name in (
        "torchrl",
        "lightning.pytorch.utilities.rank_zero",
        "lightning.pytorch.trainer.connectors",
        "lightning.fabric.utilities",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        # This process steps the environments, because data loader workers would use stale weights.
        ".*does not have many workers.*",
        # Lightning uses a name that torch has deprecated.
        ".*LeafSpec.*",
        # The folder of a resumed run is not empty, and each run tracks its own best checkpoint.
        ".*directory .* exists and is not empty.*",
        ".*The dirpath has changed from.*",
        # The compiled extension of TorchRL is not needed.
        ".*Failed to import.*torchrl.*",
        # On several ranks, torch also compares the strides of dimensions of size 1, which change nothing.
        ".*Grad strides do not match bucket view strides.*",
        # Small networks are faster on the CPU.
        ".*GPU available but not used.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    # A diverged run ends with an error.
    warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning, r"torchrl_lightning\.agents\.analytic")
