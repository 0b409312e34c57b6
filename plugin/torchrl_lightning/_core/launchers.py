"""Lightning's launchers: refuse copies of a run, watch the first rank, and find out if a run restarts its command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher, _XLALauncher

from torchrl_lightning._core.errors import IncompatibleError
from torchrl_lightning._core.first_rank import are_ranks_connected, become_first_rank, end_with_first_rank


class MainProcessState:
    """Base of the parts that a trainer changes: a copy in another process would change, and this object would not."""


def check_launcher(trainer: Any) -> None:
    """Validate that a trainer runs in this process; raise IncompatibleError if it runs in copies of this process."""
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _MultiProcessingLauncher):
        raise IncompatibleError(
            "strategy must run the trainer in this process ('auto') or as a script ('ddp'), got "
            f"{type(trainer.strategy).__name__} with start method {launcher._start_method!r}, which would lose the "
            "trained networks and the counters of the run in copies of this process. Use strategy='ddp' in a script, "
            "or strategy='auto' and devices=1 in a notebook or a sweep."
        )


def restarts_script(trainer: Any) -> bool:
    """Return whether a trainer starts the script of this process again, once for each other rank of the machine."""
    launcher = trainer.strategy.launcher
    return (
        isinstance(launcher, _SubprocessScriptLauncher)
        and launcher.num_processes > 1
        and not launcher.cluster_environment.creates_processes_externally
    )


def _checked(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def checked_launch(self: Any, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        if trainer is not None and _has_part((*args, *kwargs.values())):
            check_launcher(trainer)
        return launch(self, function, *args, trainer=trainer, **kwargs)

    return checked_launch


def _watched(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def watched_launch(self: Any, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        if isinstance(environment, LightningEnvironment) and _has_part((*args, *kwargs.values())):
            if not environment.creates_processes_externally:
                become_first_rank()
            elif environment.local_rank():
                end_with_first_rank(until=are_ranks_connected)
        return launch(self, function, *args, trainer=trainer, **kwargs)

    return watched_launch


def _has_part(arguments: Iterable[Any]) -> bool:
    """Return whether a trainer has a module or DataModule of this package."""
    return any(isinstance(argument, MainProcessState) for argument in arguments)


# Lightning calls no hook of a module, DataModule or callback in this process before it starts the others.
_MultiProcessingLauncher.launch = _checked(_MultiProcessingLauncher.launch)  # type: ignore[method-assign]
_XLALauncher.launch = _checked(_XLALauncher.launch)  # type: ignore[method-assign]
_SubprocessScriptLauncher.launch = _watched(_SubprocessScriptLauncher.launch)  # type: ignore[method-assign]
