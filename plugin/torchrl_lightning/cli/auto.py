"""Find what ``ckpt_path=auto`` resumes: the newest whole checkpoint of the same run. Imports nothing heavy."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from torchrl_lightning.cli.checks import UsageError, read_stored
from torchrl_lightning.cli.locks import check_unlocked, is_follower
from torchrl_lightning.cli.names import folder_name, job_name, recorded_command, told
from torchrl_lightning.cli.ownership import own_run

_log = logging.getLogger(__name__)

AUTO = "auto"  # value of ckpt_path


def newest_checkpoint(config: DictConfig, *, this_job: bool) -> Path | None:
    """Find the newest whole checkpoint among the folders of runs with the experiment, overrides and seed of a config.

    Args:
        config: What is composed, with Hydra's node.
        this_job: Whether only those of this job of SLURM count.

    Raises:
        UsageError: Another process is writing such a folder.
    """
    choices, overrides = recorded_command(config.hydra)
    name = job_name(choices, overrides) if this_job else folder_name(choices, overrides)
    alike = [each for each in _folders(config, name, this_job=this_job) if _is_alike(each, choices, overrides)]
    if not is_follower():
        for folder in alike:
            check_unlocked(folder)
    found = [path for folder in alike for path in (*folder.glob("*.ckpt"), *folder.glob("checkpoints/*.ckpt"))]
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if path.name.startswith(".") or own_run(path) is None:
            continue
        try:
            read_stored(path)
        except UsageError as error:
            _log.warning("%s", error)
            continue
        return path
    return None


def _folders(config: DictConfig, name: str, *, this_job: bool) -> Iterator[Path]:
    """Find the folders of runs that may be alike, by their names, alone and in sweeps, and the one that is given."""
    root, seed = Path(config.paths.log_dir, config.task_name), config.seed
    begin = glob.escape(name) + ("" if this_job else "*")
    for pattern in (f"{begin}/seed_{seed}/*", f"sweep_*/{begin}/seed_{seed}/*"):
        yield from root.glob(pattern)
    lines: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    given = [line.partition("=")[2] for line in lines if line.startswith("hydra.run.dir=")]
    yield from map(Path, given)


def _is_alike(folder: Path, choices: dict[str, str | None], overrides: Iterable[str]) -> bool:
    """Return whether the run of a folder was told the same."""
    record = folder / ".hydra" / "hydra.yaml"
    if not record.is_file():
        return False
    hydra: Any = OmegaConf.load(record)
    there, given = recorded_command(hydra.hydra)
    same = {key: value for key, value in there.items() if not key.startswith("hydra")}
    return same == {key: value for key, value in choices.items() if not key.startswith("hydra")} and told(
        given
    ) == told(overrides)
