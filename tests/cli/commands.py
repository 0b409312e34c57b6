"""Run commands with few frames in this process or in a forked one, and read their output."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from kit.forks import Forked
from kit.store import only_our_schemas

# Rollouts of 4 environments x 32 steps, two passes of two mini-batches, an evaluation after every second rollout.
TINY = [
    *("data.num_envs=4", "data.frames_per_batch=128", "data.mini_batch_size=64", "data.num_epochs=2"),
    *("data.total_frames=512", "data.eval_episodes=2", "trainer.check_val_every_n_epoch=2", "eval_episodes=3"),
]
Done = subprocess.CompletedProcess[str]
LAST_LINE = r"mean evaluation return: (-?\d+\.\d+) \+- (\d+\.\d+) over (\d+) episodes, (\d+) frames, (\d+) s"


def call(name: str, *arguments: str, cwd: Path, draws: bool = False) -> Done:
    """Run an entry point in this process like its console script, then restore the state of the process.

    A run draws its learning curve only if ``draws`` is true, because drawing takes a quarter of the time of a tiny run.
    """
    main = importlib.import_module(f"torchrl_lightning.cli.{name}").main
    said, complained = io.StringIO(), io.StringIO()
    status: object = None
    with (
        only_our_schemas(),
        unchanged_process(),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(complained),
        contextlib.nullcontext() if draws or name != "train" else _without_curve(),
        mock.patch.object(sys, "argv", [f"torchrl-lightning-{name}", *arguments]),
    ):
        try:
            status = main()
        except SystemExit as end:
            status = end.code
    if isinstance(status, str):  # sys.exit prints a string and exits with status 1
        complained.write(status + "\n")
    returncode = 1 if isinstance(status, str) else int(status or 0)  # type: ignore[call-overload]
    return Done([name, *arguments], returncode, said.getvalue(), complained.getvalue())


def _without_curve() -> contextlib.AbstractContextManager[Any]:
    return mock.patch("torchrl_lightning.cli.plot.plot_runs", lambda sources, output, **settings: output)


@contextlib.contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore Hydra's and logging's globals, the environment variables, the import path and its finders."""
    known = [logging.getLogger(), *(log for log in logging.Logger.manager.loggerDict.values() if hasattr(log, "level"))]
    before = [(log, log.level, log.handlers[:], log.disabled) for log in known]
    path, finders = sys.path[:], sys.meta_path[:]
    modules = set(sys.modules)
    GlobalHydra.instance().clear()
    try:
        with mock.patch.dict(os.environ, HYDRA_FULL_ERROR="0"):
            yield
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
        for log, level, handlers, disabled in before:
            for handler in set(log.handlers) - set(handlers):
                handler.close()
            if log.level != level:  # each change visits all loggers
                log.setLevel(level)
            log.handlers[:], log.disabled = handlers, disabled
        own = set(sys.path) - set(path)
        for module in set(sys.modules) - modules:
            # The next command runs in another working directory, so it must import these modules again.
            if str(Path(getattr(sys.modules[module], "__file__", None) or ".").parent) in own:
                del sys.modules[module]
        sys.path[:], sys.meta_path[:] = path, finders


def start(name: str, *arguments: str, cwd: Path, **options: Any) -> Forked:
    """Start an entry point in a forked process."""

    def run() -> None:
        GlobalHydra.instance().clear()
        sys.argv = [f"torchrl-lightning-{name}", *arguments]
        with only_our_schemas():
            importlib.import_module(f"torchrl_lightning.cli.{name}").main()

    return Forked(run, cwd, said=cwd.with_name(f"{cwd.name}-said"), **options)


def last_line(stdout: str) -> re.Match[str]:
    """Match the last line: mean, std, episodes, frames and seconds."""
    match = re.fullmatch(LAST_LINE, stdout.strip().splitlines()[-1])
    assert match is not None, stdout
    return match
