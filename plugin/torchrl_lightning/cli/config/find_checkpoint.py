"""Find the checkpoint for ``ckpt_path=auto``: the checkpoint of the same run with the most frames.

This module has only light imports.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from torchrl_lightning._core.plain_yaml import read_config
from torchrl_lightning._core.run_names import final_overrides, folder_name, job_name, recorded_command
from torchrl_lightning.cli.config.validate import read_checkpoint_file
from torchrl_lightning.cli.error_messages import UsageError
from torchrl_lightning.cli.run_folder.folder import check_unlocked, is_follower

AUTO = "auto"  # value of ckpt_path


class _UnusableError(Exception):
    """A folder or checkpoint cannot be used. The message is the reason."""


def furthest_checkpoint(config: DictConfig, *, this_job: bool) -> Path | None:
    """Find the checkpoint with the most frames among the folders of runs with the same experiment, overrides and seed.

    If the numbers of frames are equal, the checkpoint with more steps is used. If the steps are equal too, a last
    checkpoint is preferred to a best checkpoint, and a newer file to an older file. Each unusable folder or file is
    printed to stderr with the reason.

    Args:
        config: The composed config, with Hydra's node.
        this_job: Search only runs of this SLURM job.

    Raises:
        UsageError: Another process is writing to one of these folders.
    """
    choices, overrides = recorded_command(config.hydra)
    name = job_name(choices, overrides) if this_job else folder_name(choices, overrides)
    candidates: list[tuple[tuple[int, int, bool, int], Path]] = []
    for folder in dict.fromkeys(_folders(config, name, this_job=this_job)):
        try:
            if not _is_same_run(folder, choices, overrides):
                continue
            paths = _checkpoints(folder)
        except _UnusableError as reason:
            _warn(folder, reason)
            continue
        if not is_follower():
            check_unlocked(folder)
        for path in paths:
            try:
                candidates.append((_progress(path), path))
            except _UnusableError as reason:
                _warn(path, reason)
    for _, path in sorted(candidates, reverse=True):
        try:
            read_checkpoint_file(path)
        except (UsageError, OSError) as reason:
            _warn(path, reason)
        else:
            return path
    return None


def _warn(path: Path, reason: Exception) -> None:
    if not is_follower():
        text = str(reason)
        # Hydra configures logging only at the start of the run.
        print(f"not resumed: {text if str(path) in text else f'{path}: {text}'}", file=sys.stderr)


def _folders(config: DictConfig, name: str, *, this_job: bool) -> Iterator[Path]:
    """Find the run folders of single runs and sweeps by name, and the folder in ``hydra.run.dir``."""
    root, seed = Path(config.paths.log_dir, config.task_name), config.seed
    prefix = glob.escape(name) + ("" if this_job else "*")
    for pattern in (f"{prefix}/seed_{seed}/*", f"sweep_*/{prefix}/seed_{seed}/*"):
        yield from sorted(root.glob(pattern))
    lines: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    chosen_folders = [line.partition("=")[2] for line in lines if line.startswith("hydra.run.dir=")]
    yield from (folder for folder in map(Path, chosen_folders) if folder.exists())


def _is_same_run(folder: Path, choices: dict[str, str | None], overrides: Iterable[str]) -> bool:
    """Return True if the run of a folder has the same choices and overrides."""
    record = folder / ".hydra" / "hydra.yaml"
    try:
        if not folder.is_dir():
            return False
        if not record.is_file():
            if any(_checkpoint_files(folder)):
                raise _UnusableError("it has checkpoints, but no record of its run in .hydra/hydra.yaml")
            return False
        hydra: Any = read_config(record)
        recorded_choices, recorded_overrides = recorded_command(hydra.hydra)
        recorded_groups = {key: value for key, value in recorded_choices.items() if not key.startswith("hydra")}
        recorded_settings = final_overrides(recorded_overrides)
    except OSError as error:
        raise _UnusableError(f"it cannot be read ({error.strerror or error})") from error
    except (YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _UnusableError(
            f".hydra/hydra.yaml is damaged ({type(error).__name__}); select one of its checkpoints with ckpt_path=FILE"
        ) from error
    return recorded_groups == {key: value for key, value in choices.items() if not key.startswith("hydra")} and (
        recorded_settings == final_overrides(overrides)
    )


def _checkpoint_files(folder: Path) -> Iterator[Path]:
    files = (*folder.glob("*.ckpt"), *folder.glob("checkpoints/*.ckpt"))
    yield from (path for path in files if not path.name.startswith("."))


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of the run in a folder."""
    try:
        paths = list(_checkpoint_files(folder))
    except OSError as error:
        raise _UnusableError(f"it cannot be read ({error.strerror or error})") from error
    if not paths:
        raise _UnusableError("it contains no checkpoint")
    return paths


def _progress(path: Path) -> tuple[int, int, bool, int]:
    """Return the progress of a run at a checkpoint as a sort key. The checkpoint with the largest key is resumed."""
    try:
        stored, modified = read_checkpoint_file(path, mapped=True, verify=False), path.stat().st_mtime_ns
    except (UsageError, OSError) as error:
        raise _UnusableError(str(error)) from error
    states = (value for key, value in stored.items() if str(key).endswith("DataModule") and isinstance(value, dict))
    ranks = next(states, {}).get("ranks")
    first_rank: Any = ranks[0] if isinstance(ranks, list) and ranks and isinstance(ranks[0], dict) else {}
    frames, steps = (
        value if isinstance(value, int) else 0 for value in (first_rank.get("frames"), stored.get("global_step"))
    )
    return frames, steps, not path.name.startswith("best"), modified
