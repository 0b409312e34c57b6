"""Build the names of runs for folders below ``paths.log_dir`` and for legends. This module imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from torchrl_lightning._core.slurm import job_id
from torchrl_lightning._hydra.compat import register_resolver

# Settings that end a run. A resumed run may end later than the original run.
ENDS = {"data.total_frames", "trainer.max_epochs", "trainer.max_steps", "trainer.max_time"}
_MAX_LENGTH = 120  # characters of a folder's name
# Groups that form the name of a run without an experiment.
_NAME_GROUPS = ("model", "env", "data")
# Choices that do not affect learning, and therefore do not distinguish runs.
_IGNORED_GROUPS = {
    *("seed", "experiment", "ckpt_path", "trusted", "task_name", "eval_episodes", "eval_checkpoint"),
    *("hparams_search", "hydra", "logger", "paths"),
}


def base_name(choices: Mapping[str, str | None]) -> str:
    """Return the chosen experiment; without an experiment, join model, environment and data by underscores.

    Examples:
        >>> base_name({"experiment": "ppo_cartpole", "model": "ppo", "env": "cartpole", "data": "gae"})
        'ppo_cartpole'
        >>> base_name({"model": "dqn", "env": "cartpole", "data": "uniform"})
        'dqn_cartpole_uniform'
    """
    parts = [choices.get("experiment")] if _has_experiment(choices) else [choices.get(group) for group in _NAME_GROUPS]
    return "_".join(part for part in parts if part)


def changed_settings(overrides: Iterable[str], choices: Mapping[str, str | None]) -> dict[str, str]:
    """Map each changed setting that affects learning to its override, groups first, without the seed.

    Examples:
        >>> changed_settings(["seed=3", "model.gamma=0.9", "env=acrobot"], {"experiment": "ppo_cartpole"})
        {'env': 'env=acrobot', 'model.gamma': 'model.gamma=0.9'}
        >>> changed_settings(["~experiment", "env=acrobot", "logger=none"], {"env": "acrobot"})
        {}
    """
    base_groups = set() if _has_experiment(choices) else set(_NAME_GROUPS)
    changed: dict[str, str] = {}
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if re.split("[./@]", key)[0] not in _IGNORED_GROUPS and key not in base_groups:
            changed[key] = override.lstrip("+")
    return in_order(changed)


def in_order(settings: Mapping[str, str]) -> dict[str, str]:
    """Sort settings by their keys, groups first."""
    return dict(sorted(settings.items(), key=lambda item: ("." in item[0], item)))


def folder_name(choices: Mapping[str, str | None], overrides: Iterable[str]) -> str:
    """Join a run's base name and changed settings except ``ENDS``; replace characters that need quotes in a shell.

    A name that is too long for a folder is cut and ends in a hash of all parts.

    Examples:
        >>> folder_name({"experiment": "ppo_cartpole"}, ["env=acrobot", "model.network.hidden_sizes=[32,32]"])
        'ppo_cartpole-env_acrobot-model.network.hidden_sizes_32_32'
    """
    settings = changed_settings(overrides, choices)
    parts = [base_name(choices), *(settings[key] for key in settings if key not in ENDS)]
    slugs = (re.sub(r"[^a-zA-Z0-9.-]+", "_", part).strip("_.") for part in parts)
    name = "-".join(slug for slug in slugs if slug) or "run"
    return name if len(name) <= _MAX_LENGTH else f"{name[: _MAX_LENGTH - 9].rstrip('-_.')}-{_hash(parts)}"


def job_name(choices: Mapping[str, str | None], overrides: Iterable[str]) -> str:
    """Return the folder name of a run; a SLURM batch job appends a hash of all overrides and the job id."""
    job, name = job_id(), folder_name(choices, overrides := list(overrides))
    if job is None:
        return name
    return f"{name}-{_hash(final_overrides(overrides))}-job_{job}"


def _hash(parts: Iterable[str]) -> str:
    return sha256("\n".join(parts).encode()).hexdigest()[:8]


def final_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the last override of each setting, sorted, without ``ckpt_path`` and ``trusted``.

    Examples:
        >>> final_overrides(["seed=3", "ckpt_path=auto", "env=acrobot", "seed=4"])
        ['env=acrobot', 'seed=4']
    """
    last_override = {override.lstrip("+~").partition("=")[0]: override for override in overrides}
    return sorted(override for key, override in last_override.items() if key not in ("ckpt_path", "trusted"))


def run_folder(path: Path) -> Path | None:
    """Return the run folder of a file: the closest parent with Hydra's config; None without one."""
    parents = path.resolve().parents
    return next((folder for folder in parents if (folder / ".hydra" / "config.yaml").is_file()), None)


def recorded_command(hydra: Any) -> tuple[dict[str, str | None], list[str]]:
    """Return the selected groups and the unresolved overrides from Hydra's record of a run."""
    from omegaconf import OmegaConf

    choices, overrides = (
        OmegaConf.to_container(node, resolve=False) for node in (hydra.runtime.choices, hydra.overrides.task)
    )
    return choices, overrides  # type: ignore[return-value]


def register_run_name() -> None:
    """Register ``${run_name:}``, the folder name of the current run, for use in Hydra's folder settings."""
    from hydra.core.hydra_config import HydraConfig

    def run_name() -> str:
        return job_name(*recorded_command(HydraConfig.get()))

    register_resolver("run_name", run_name)


def _has_experiment(choices: Mapping[str, str | None]) -> bool:
    return choices.get("experiment") not in (None, "", "null")
