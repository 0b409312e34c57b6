"""What is refused before anything is trained or played, with a message that says how to mend it."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

_GROUPS = ("callbacks", "data", "env", "logger", "model", "paths", "trainer")


class UsageError(ValueError):
    """A mistake in the command, its config or its checkpoint; its message is all that the user needs to see."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Ends the program on a mistake of its user or on Ctrl-C with one line on stderr instead of a traceback."""
    try:
        yield
    except UsageError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # as the shell counts it


def check_config(cfg: DictConfig) -> None:
    """Refuses what no run could be made of.

    Raises:
        UsageError: for groups that are no configs, missing values, a run without an end, no checkpoint at
            ``ckpt_path``, or an ``eval_checkpoint`` that is neither best nor last.
    """
    for group in ("data", "model", "trainer"):
        node = cfg.get(group)
        if not isinstance(node, DictConfig):
            # `+data=gae` becomes the string 'gae' when our configs are not on Hydra's search path.
            raise UsageError(
                f"{group} is {node!r}, expected a config. Is torchrl-lightning installed (pip install -e .)? "
                f"Select a group as {group}=NAME, without a plus sign."
            )
    missing = sorted(OmegaConf.missing_keys(cfg))
    if missing:
        raise UsageError(f"the config has no value for {', '.join(missing)}; give each one, as {missing[0]}=VALUE.")
    network = cfg.model.get("network")
    if isinstance(network, str):
        raise UsageError(f"model.network is {network!r}, expected a config; select it as model/network={network}.")
    if cfg.ckpt_path is not None:
        check_is_file(cfg.ckpt_path)
    if cfg.eval_checkpoint not in ("best", "last"):
        raise UsageError(f"eval_checkpoint is {cfg.eval_checkpoint!r}; expected 'best' or 'last'.")
    # Values of the trainer that end a run; Lightning reads -1 as never.
    ends = [cfg.trainer.get("max_epochs", -1), cfg.trainer.get("max_steps", -1), cfg.data.get("total_frames", -1)]
    if not cfg.trainer.get("max_time") and not cfg.trainer.get("fast_dev_run") and all(end == -1 for end in ends):
        raise UsageError("nothing would end this run; give data.total_frames=N (or trainer.max_epochs, max_time).")


def check_is_file(checkpoint: str | Path) -> None:
    """Refuses a checkpoint that is not there.

    Raises:
        UsageError: saying where checkpoints lie.
    """
    if not Path(checkpoint).is_file():
        raise UsageError(f"ckpt_path={checkpoint} is not a file; checkpoints lie in RUN/checkpoints/.")


def check_command(cfg: DictConfig) -> None:
    """Refuses what the command line asks of Hydra that would not give what was meant.

    Raises:
        UsageError: for a group selected with a plus sign, or a sweep over a strategy that starts processes by running
            the command again.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized():
        return
    hydra = HydraConfig.get()
    for override in hydra.overrides.task:
        added = re.match(rf"\+({'|'.join(_GROUPS)})=(.*)", override)
        if added is not None:
            # Hydra would merge it over the group's first choice, and over what the experiment says.
            raise UsageError(f"{override} would add to what is there; select a group as {added[1]}={added[2]}.")
    strategy = str(cfg.trainer.get("strategy", "auto")) if isinstance(cfg.get("trainer"), DictConfig) else "auto"
    if hydra.mode == RunMode.MULTIRUN and strategy.startswith("ddp") and not re.search("spawn|fork", strategy):
        raise UsageError(
            f"--multirun with trainer.strategy={strategy} would start the whole sweep again in each process; "
            "take trainer.strategy=ddp_spawn, or one run at a time."
        )


def check_data(data: Any) -> None:
    """Builds the environment once and lets go of it, so that a mistake in it is found before anything is written.

    Raises:
        UsageError: with the environment's own message.
    """
    if not hasattr(type(data), "specs"):
        return
    try:
        data.specs  # noqa: B018  # a property that builds the environment
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from error
    finally:
        data.close()


def check_checkpoint(path: Path, stored: dict[str, Any], data: Any, model: Any) -> None:
    """Refuses a checkpoint of another environment, capacity or network.

    Args:
        path: where the checkpoint lies, for the message.
        stored: its content.
        data: the DataModule of this run.
        model: the LightningModule of this run; only a copy of it is built.

    Raises:
        UsageError: naming the first difference, and the overrides of the run that wrote it.
    """
    import torch

    state = stored.get(type(data).__qualname__)
    try:
        if state is None:
            raise ValueError(f"it holds no state of a {type(data).__qualname__}.")
        if hasattr(data, "check_state"):
            data.check_state(state)
        if hasattr(model, "build"):
            with torch.random.fork_rng(devices=[]):
                copy.deepcopy(model).build(data.specs).load_state_dict(stored["state_dict"])
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{path} does not fit this run: {error}{_overrides_of(path)}") from error
    finally:
        data.close()


def _overrides_of(checkpoint: Path) -> str:
    folder = run_folder(checkpoint)
    overrides = folder / ".hydra" / "overrides.yaml" if folder is not None else None
    if overrides is None or not overrides.is_file():
        return ""
    given = " ".join(OmegaConf.load(overrides))
    return f"\nThe run of that checkpoint was given: {given or 'no overrides'}"


def run_folder(checkpoint: Path) -> Path | None:
    """Finds the folder of the run that wrote a checkpoint: the next one above that holds Hydra's config."""
    parents = checkpoint.resolve().parents
    return next((folder for folder in parents if (folder / ".hydra" / "config.yaml").is_file()), None)
