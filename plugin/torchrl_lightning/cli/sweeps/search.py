"""The trials of a search with Optuna, with the process that owns each running trial.

Each search process holds the lock of its own file as long as it lives. The file is in the folder of the search, which
several machines may share. Each trial contains the name of the file from the moment of its creation. A running trial
without a living process is marked as failed at the next start of the search.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf

from torchrl_lightning.cli.run_folder.folder import FOLDER, exclusive, is_locked, locked

_log = logging.getLogger(__name__)
_PROCESSES = Path(FOLDER) / "searches"
_STUDY_LOCK = Path(FOLDER) / "study.lock"
_OWNER = "torchrl_lightning:search:"  # prefix of a trial's system attribute; the id of a search process follows
_ATTEMPTS = 5  # to open a study whose tables another process creates at the same time


class SearchEnd(Exception):
    """The search ends early, because too many trials have failed."""


class Search:
    """The trials of this process in a search.

    Args:
        storage: The storage of the study.
        folder: The folder of the search.
        process: The id of this search process.
        sweeper: The sweeper.
        config: The config of the search.
    """

    def __init__(self, storage: Any, folder: Path, process: str, sweeper: Any, config: DictConfig) -> None:
        self._storage, self._folder, self._sweeper = storage, folder, sweeper
        self._key = f"{_OWNER}{process}"
        self._owner = {**this_machine(), "lock": str(_process_file(folder, process))}
        self._trial_ids: list[int] = []
        # Without our callback, nothing in the config reads the number of the trial.
        self._passes_trials = OmegaConf.select(config, "hydra.callbacks.search.run", default=_MISSING) is not _MISSING
        self.max_failure_rate: float = sweeper.max_failure_rate
        self.has_ended = False
        sweeper.storage = storage
        sweeper.max_failure_rate = 1.0  # the sweeper would count the failed trials of each batch
        self._claim_new_trials()

    def last_trials(self, count: int) -> list[int]:
        """Return the numbers of the latest trials of this process."""
        return [self._storage.get_trial_number_from_id(trial_id) for trial_id in self._trial_ids[-count:]]

    def overrides(self, trial: int | None) -> list[str]:
        """Return overrides with a run's trial, a unique name for its folder, and its logarithmic settings."""
        if not self._passes_trials:
            return []
        # Digits only, because curves are labelled by names that are not serial numbers.
        run = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{trial}_{secrets.randbelow(10**9):09d}"
        overrides = [f"hydra.callbacks.search.trial={trial}", f"hydra.callbacks.search.run={run}"]
        if logarithmic := self._logarithmic(trial):
            overrides.append(f"++hydra.callbacks.search.logarithmic=[{','.join(map(repr, logarithmic))}]")
        return overrides

    def _logarithmic(self, trial: int | None) -> list[str]:
        """Return the settings of a trial that were sampled on a logarithmic scale."""
        from optuna.distributions import distribution_to_json

        for trial_id in reversed(self._trial_ids):  # each look-up may be a query
            if self._storage.get_trial_number_from_id(trial_id) == trial:
                spaces = self._storage.get_trial(trial_id).distributions
                records = {name: json.loads(distribution_to_json(space)) for name, space in spaces.items()}
                # Optuna 2 has classes for logarithmic scales, and later versions have an attribute.
                return [
                    name.lstrip("+")
                    for name, space in records.items()
                    if "Log" in space["name"] or space["attributes"].get("log")
                ]
        return []

    def end_if_too_many_failed(self, failed: int) -> None:
        """End the search before its next trial if too many trials have failed."""
        self.has_ended = failed > self.max_failure_rate * self._sweeper.n_trials

    def _claim_new_trials(self) -> None:
        """Make the storage write the owner of each trial that this process creates or starts, in the same step."""
        import optuna

        storage, running = self._storage, optuna.trial.TrialState.RUNNING
        # Optuna 4 has another name for the method.
        setter = "set_trial_state_values" if hasattr(storage, "set_trial_state_values") else "set_trial_state"
        create, set_state = storage.create_new_trial, getattr(storage, setter)

        def create_trial(study_id: int, template_trial: Any = None) -> int:
            self._check_end()
            if template_trial is None:
                template_trial = optuna.trial.FrozenTrial(
                    number=-1, trial_id=-1, state=running, value=None, datetime_start=datetime.now(),
                    datetime_complete=None, params={}, distributions={}, user_attrs={},
                    system_attrs={self._key: self._owner}, intermediate_values={},
                )  # fmt: skip
            trial_id: int = create(study_id, template_trial)
            self._trial_ids.append(trial_id)
            return trial_id

        def set_trial_state(trial_id: int, state: Any, *values: Any, **options: Any) -> bool:
            if state != running:
                return bool(set_state(trial_id, state, *values, **options))
            self._check_end()
            with exclusive(self._folder / _STUDY_LOCK), suppress(RuntimeError):  # another process has ended the trial
                storage.set_trial_system_attr(trial_id, self._key, self._owner)
                if set_state(trial_id, state, *values, **options):
                    self._trial_ids.append(trial_id)
                    return True
                storage.set_trial_system_attr(trial_id, self._key, None)
            return False

        storage.create_new_trial = create_trial
        setattr(storage, setter, set_trial_state)

    def _check_end(self) -> None:
        if self.has_ended:
            raise SearchEnd

    def fail_running(self) -> None:
        """Mark the remaining running trials of this process as failed."""
        _fail(self._storage, self._sweeper.study_name, lambda attributes: bool(attributes.get(self._key)))


_MISSING = object()


@contextmanager
def open_search(sweeper: Any, config: DictConfig) -> Iterator[Search]:
    """Mark the trials of dead processes as failed, and mark new trials as trials of this process.

    Args:
        sweeper: The sweeper, whose storage and launcher are replaced.
        config: The config of the search.
    """
    folder, process = Path(config.hydra.sweep.dir).absolute(), uuid4().hex
    with ExitStack() as stack:
        # One process after another, because a file without a lock may belong to a process that is just starting, and
        # because Optuna's processes would create the same tables.
        with exclusive(folder / _STUDY_LOCK):
            stack.enter_context(locked(folder, _process_file(Path(), process)))
            storage = _open_storage(sweeper.storage)
            for trial, owners in _fail(storage, sweeper.study_name, lambda attributes: _is_dead(attributes, folder)):
                _log.warning("trial %d has failed: its process on %s has ended.", trial, owners[0]["host"])
            _remove_files(folder, process)
        search = Search(storage, folder, process, sweeper, config)
        try:
            yield search
        finally:
            with suppress(Exception):  # the next start of the search marks the trials
                search.fail_running()
                _process_file(folder, process).unlink()


def _process_file(folder: Path, process: str) -> Path:
    return folder / _PROCESSES / f"{process}.lock"


def _open_storage(storage: Any) -> Any:
    """Open a storage; try again if another machine creates the tables at the same time."""
    import optuna

    for attempt in range(_ATTEMPTS):
        try:
            return optuna.storages.get_storage(storage)
        except Exception as error:  # the class depends on the database
            if attempt + 1 == _ATTEMPTS or type(error).__name__ not in ("OperationalError", "IntegrityError"):
                raise
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError


def _owners(attributes: dict[str, Any]) -> list[dict[str, str]]:
    """Return the processes that have created or started a trial."""
    return [value for key, value in attributes.items() if key.startswith(_OWNER) and value]


def _is_dead(attributes: dict[str, Any], folder: Path) -> bool:
    """Return True if a trial has owners, and all of them have ended."""
    owners = _owners(attributes)
    return bool(owners) and not any(_is_alive(owner, folder) for owner in owners)


def _is_alive(owner: dict[str, str], folder: Path) -> bool:
    """Return False if a search process has ended. Its folder may have another path on its machine."""
    file = Path(owner["lock"])
    for path in (file, folder / _PROCESSES / file.name):
        try:
            return is_locked(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # not readable
            return True
    # A folder of another machine may not be visible here.
    return any(owner.get(key) != value for key, value in this_machine().items())


def this_machine() -> dict[str, str]:
    """Return the name of this machine and the id of its last boot, because two machines can have the same name."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot}


def _fail(
    storage: Any, study_name: str | None, is_failed: Callable[[dict[str, Any]], bool]
) -> list[tuple[int, list[dict[str, str]]]]:
    """Mark running trials as failed; return their numbers and owners."""
    import optuna

    if study_name is None:  # each start of the search creates another study
        return []
    try:
        study = optuna.load_study(study_name=study_name, storage=storage)
    except KeyError:  # the sweeper creates the study
        return []
    failed = []
    for trial in study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
        if is_failed(trial.system_attrs):
            with suppress(RuntimeError, ValueError):  # another process has ended the trial
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                failed.append((trial.number, _owners(trial.system_attrs)))
    return failed


def _remove_files(folder: Path, process: str) -> None:
    """Remove the files of ended processes, which have no running trials any more."""
    for path in (folder / _PROCESSES).glob("*.lock"):
        if path.stem != process:
            with suppress(OSError):
                if not is_locked(path):
                    path.unlink()
