"""Run a command over Hydra, and quietly. Imports nothing heavy, so that ``--help`` answers at once."""

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


class _Behind(ExitStack, ContextDecorator):
    """What a task gives back to the process when it is over."""


behind = _Behind()


def run_command(name: str, task: Callable[[Any], float], *, resumes: bool = False) -> None:
    """Print the help of a command, or let Hydra compose the config of its name and run the task, once or in a sweep.

    If the command ``resumes``, a checkpoint brings the settings of its run, and the task writes the record of its run.
    """
    leave_out_working_directory()
    if {"--help", "-h"} & set(sys.argv[1:]):
        from torchrl_lightning.cli.help import help_text

        with whole_output():
            print(help_text(name))
        return
    append_working_directory()
    from torchrl_lightning.cli.composing import run_command_line
    from torchrl_lightning.cli.mistakes import one_line, plain_errors
    from torchrl_lightning.cli.names import register_run_name
    from torchrl_lightning.cli.run_folder import recorded

    register_run_name()
    with one_line():
        run_command_line(name, plain_errors(task if resumes else recorded(task)), sys.argv[1:], resumes=resumes)


@contextmanager
def whole_output() -> Iterator[None]:
    """Print to the end of a pipe, and end in silence where nobody reads on, as behind ``| head``."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more when it ends
        sys.exit(128 + signal.SIGPIPE)


def use_threads(number: int) -> None:
    """Compute in so many of torch's threads, and of numpy's, until the task is over."""
    import numpy  # noqa: F401  # whose library must be there when it is limited
    import torch
    from threadpoolctl import threadpool_limits

    from torchrl_lightning.environments.threads import kept_threads

    behind.enter_context(kept_threads())
    torch.set_num_threads(number)
    behind.enter_context(threadpool_limits(number, user_api="blas"))


def quiet() -> None:
    """Hide TorchRL's messages about storages, Lightning's tips, and warnings about what is done on purpose."""
    # A log file on a full disk is no reason for a traceback for each line.
    behind.callback(setattr, logging, "raiseExceptions", logging.raiseExceptions)
    logging.raiseExceptions = False
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        # Hydra's own handler writes each message to the terminal and to the log file already. Lightning keeps them from
        # it where it was imported first.
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
        # Environments are stepped in this process: data loader workers would act with stale weights.
        ".*does not have many workers.*",
        # Lightning reads a name that torch has deprecated.
        ".*LeafSpec.*",
        # The folder of a resumed run is not empty, as it should be, and one run's best is not another's.
        ".*directory .* exists and is not empty.*",
        ".*The dirpath has changed from.*",
        # The compiled extension of TorchRL is not needed.
        ".*Failed to import.*torchrl.*",
        # Small networks are faster on the CPU.
        ".*GPU available but not used.*",
    ):
        warnings.filterwarnings("ignore", message=message)
