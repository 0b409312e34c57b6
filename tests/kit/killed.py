"""A process that writes on and on, and is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from torchrl_lightning.collectors.threads import kept_threads


def killed_after(seconds: float, write: Callable[..., None], *arguments: Any, first: int = 1) -> list[int]:
    """Fork a process that says each number that it has written, and kill it.

    Args:
        seconds: how long it lives after its first ones.
        write: what it does; its last argument is the file descriptor where it says a number a line.
        arguments: the others.
        first: how many numbers are waited for.

    Returns:
        All that it said.
    """
    readable, writable = os.pipe()
    with kept_threads():
        torch.set_num_threads(1)  # the child has no others
        child = os.fork()
        if not child:
            try:
                write(*arguments, writable)
            finally:
                os._exit(1)
    os.close(writable)
    with os.fdopen(readable) as said:
        numbers = [int(said.readline()) for _ in range(first)]
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return numbers + [int(line) for line in said if line.endswith("\n")]
