"""Check a command before it trains or plays; error messages name the remedy."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_lightning._core.run_names import recorded_command
from torchrl_lightning._core.suggestions import did_you_mean
from torchrl_lightning._hydra.paths import CONF_DIR
from torchrl_lightning.cli.error_messages import UsageError

_GROUPS = ("callbacks", "data", "env", "logger", "model", "paths", "trainer")
TRUST = "if you trust its author, set trusted=true"
_FLUSH_INTERVAL = "logger.csv.flush_logs_every_n_steps"  # Lightning divides by this setting


def check_config(cfg: DictConfig) -> None:
    """Validate a config; raise :class:`UsageError` if it cannot run."""
    for group in ("data", "model", "trainer"):
        node = cfg.get(group)
        if not isinstance(node, DictConfig):
            # `+data=gae` becomes the string 'gae' when our configs are not on Hydra's search path.
            raise UsageError(
                f"{group} is {node!r}, expected a config. Is torchrl-lightning installed (pip install -e .)? "
                f"Select a group as {group}=NAME, without a plus sign."
            )
        if "_target_" not in node:
            raise UsageError(
                f"{group} must have a class (_target_); select one with {group}=NAME, --help lists the names."
            )
    for name, minimum in (("seed", 0), ("torch_threads", 1), ("eval_episodes", 1), (_FLUSH_INTERVAL, 1)):
        value = OmegaConf.select(cfg, name, default=1)
        if not isinstance(value, int):
            raise UsageError(f"{name}={value!s}: expected a whole number.")
        if value < minimum:
            raise UsageError(f"{name}={value}: expected a whole number of at least {minimum}.")
    if not isinstance(cfg.get("freeze_statistics", False), bool):
        raise UsageError(f"freeze_statistics={cfg.freeze_statistics!s}: expected true or false.")
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
    except OmegaConfBaseException as error:
        raise UsageError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    if missing:
        raise UsageError(f"the config has no value for {', '.join(missing)}; set each one, such as {missing[0]}=VALUE.")
    network = cfg.model.get("network")
    if isinstance(network, str):
        networks = [path.stem for path in CONF_DIR.glob("model/network/*.yaml")]
        suggestion = f"{network}." if network in networks else f"NAME{did_you_mean(network, networks)}"
        raise UsageError(f"model.network is {network!r}, expected a config; select it as model/network={suggestion}")
    if cfg.eval_checkpoint not in ("best", "last"):
        raise UsageError(f"eval_checkpoint is {cfg.eval_checkpoint!r}; expected 'best' or 'last'.")
    # Settings that end a run. With -1, Lightning never ends it.
    ends = [cfg.trainer.get("max_epochs", -1), cfg.trainer.get("max_steps", -1), cfg.data.get("total_frames", -1)]
    if not cfg.trainer.get("max_time") and not cfg.trainer.get("fast_dev_run") and all(end == -1 for end in ends):
        end = "trainer.max_epochs=N (or max_steps, max_time)"
        if cfg.data.get("frames_per_update") != 0:
            end = "data.total_frames=N (or trainer.max_epochs, max_time)"
        raise UsageError(f"the run would never end; set {end}.")


def check_command(cfg: DictConfig) -> None:
    """Validate overrides: raise UsageError for a wrong one, such as ``+data=gae``; print a note for an unclear one."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return
    choices, overrides = recorded_command(HydraConfig.get())
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    experiment = choices.get("experiment")
    for override in overrides:
        group_override = re.match(rf"\+({'|'.join(_GROUPS)})=(.*)", override)
        if group_override is not None:
            # Hydra would merge this option over the selected option of the group and over the experiment's settings.
            raise UsageError(
                f"{override} would be merged into the selected option; select another one with "
                f"{group_override[1]}={group_override[2]}."
            )
        added_setting = re.match(r"\+(\w+)=", override)
        if added_setting is not None and f"${{{added_setting[1]}" not in OmegaConf.to_yaml(cfg):
            others = [str(name) for name in cfg if name != added_setting[1]]
            raise UsageError(
                f"{override}: no config reads the setting {added_setting[1]}{did_you_mean(added_setting[1], others)}"
            )
    if experiment and keys & {"data", "model"} and "experiment" not in keys:
        print(f"note: experiment={experiment} is also selected; '~experiment' removes it.", file=sys.stderr)


def is_trusted(cfg: DictConfig) -> bool:
    """Return True if the command line sets ``trusted=true``; raise UsageError if a file sets it."""
    from hydra.core.hydra_config import HydraConfig

    trusted = cfg.get("trusted", False)
    if not isinstance(trusted, bool):
        raise UsageError(f"trusted must be true or false, got {trusted}.")
    if trusted and HydraConfig.initialized():
        hydra: Any = HydraConfig.get()
        swept = OmegaConf.select(hydra, "sweeper.params") or {}
        if "trusted" in swept or not any(line.lstrip("+").startswith("trusted=") for line in hydra.overrides.task):
            raise UsageError("trusted must be set on the command line, got trusted=true from a file. Remove it there.")
    return trusted


def read_checkpoint_file(path: str | Path, **options: bool) -> dict[str, Any]:
    """Read a checkpoint with :func:`read_checkpoint`; raise UsageError if the file is missing or damaged."""
    from torchrl_lightning.deploy.loading import read_checkpoint

    if not Path(path).is_file():
        raise UsageError(f"ckpt_path={path} is not a file; checkpoints are in RUN/checkpoints/.")
    try:
        return read_checkpoint(path, **options)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_resumed_checkpoint(cfg: DictConfig) -> dict[str, Any]:
    """Read the checkpoint to resume; raise UsageError if its config needs ``trusted=true``."""
    from torchrl_lightning.deploy.loading import CONFIG, extract_config

    path, trusted = Path(cfg.ckpt_path), is_trusted(cfg)
    stored = read_checkpoint_file(path)
    if CONFIG not in stored:  # the checkpoint is from a user's own Trainer
        return stored
    try:
        # Skip other groups, such as paths: the current config defines the folders of this run.
        extract_config(stored, path, "data", "model", trusted=trusted)
    except ValueError as error:
        raise UsageError(f"{error}; {TRUST}.") from error
    return stored
