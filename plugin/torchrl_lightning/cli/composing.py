"""Compose the config of a run that resumes a checkpoint by what the checkpoint's run was composed of."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from hydra._internal import hydra as _core
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from torchrl_lightning._conf import CONF_DIR, EXPORT_DIR
from torchrl_lightning._schemas import GROUP
from torchrl_lightning.cli.auto import AUTO, furthest_checkpoint
from torchrl_lightning.cli.checks import SWEPT, UsageError, one_line, read_stored
from torchrl_lightning.cli.replacing import Replacements, plain_layer, targets_in, targets_of
from torchrl_lightning.cli.resuming import (
    Record,
    check_record,
    continued,
    keep_process,
    keep_settings,
    missing_choices,
    record_in,
)
from torchrl_lightning.cli.slurm import is_requeued
from torchrl_lightning.plain_yaml import check_file

# A number such as 1e5, which Hydra reads as a float, where a setting is an integer.
_POWER_OF_TEN = re.compile(r"(?<=[=,])\d+(?:\.\d+)?[eE]\+?\d{1,2}(?=,|$)")

_RUN = "hydra.mode=RUN"  # what Hydra adds when it has seen that the config asks for no sweep


class OwnLoader(ConfigLoaderImpl):
    """Hydra's loader of configs, which reads 1e5 as an integer, and replaces a part that gets another class."""

    def __init__(self, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        _limit_files(self.repository)
        self._given: list[Override] = []  # by the command line that is composed
        self._replacements = Replacements()
        self._composed: list[tuple[DictConfig, Replacements]] = []  # for one command line
        self._told = {""}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a config."""
        overrides = [_POWER_OF_TEN.sub(_as_integer, override) for override in overrides]
        self._composed = []
        config = self._load(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        told = next((replaced.told(config) for each, replaced in self._composed if each is config), "")
        if told not in self._told:
            self._told.add(told)
            print(told, file=sys.stderr)
        trials = OmegaConf.select(config, "hydra.sweeper.n_trials")
        if isinstance(trials, int) and trials < 1:
            raise UsageError(f"hydra.sweeper.n_trials={trials}: expected a positive whole number.")
        return config

    def _load(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if run_mode == RunMode.MULTIRUN:
            asked = config_name, run_mode, from_shell, validate_sweep_overrides
            return self._load_sweep(overrides, *asked)
        return self._load_run(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    def _load_sweep(
        self, overrides: list[str], config_name: str | None, run_mode: RunMode, from_shell: bool, validate: bool
    ) -> DictConfig:
        """Compose the config of a sweep.

        Hydra leaves swept groups at their defaults, which may lack a setting that all swept options have, as may a
        part whose class is swept. Then the first swept option of each takes its place. Each run is composed with its
        own groups later.
        """
        try:
            return self._load_run(config_name, overrides, run_mode, from_shell, validate)
        except HydraException:
            first = self._first_options(config_name, overrides)
            if not first:
                raise
        lines = [first.get(line, line) for line in overrides]
        with _noted(first.values()):
            config = self._load_run(config_name, lines, run_mode, from_shell, validate)
        swept = {option: line for line, option in first.items()}
        config.hydra.overrides.task = [swept.get(line, line) for line in config.hydra.overrides.task]
        return config

    def _first_options(self, config_name: str | None, overrides: list[str]) -> dict[str, str]:
        """Map each override that sweeps over options of a group, or a part's classes, to one that chooses the first."""
        _, repository = self._parse_overrides_and_create_caching_repo(config_name, overrides)
        parsed = OverridesParser.create(config_loader=self).parse_overrides(overrides)
        return {
            str(override.input_line): f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
            for override in parsed
            if override.is_discrete_sweep()
            and (repository.group_exists(override.key_or_group) or "_target_" in str(override.input_line))
        }

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose the config of one run of a sweep; an error names its swept settings."""
        known = set(master_config.hydra.overrides.task)
        with _noted(line for line in sweep_overrides if line not in known):
            return super().load_sweep_config(master_config, sweep_overrides)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], Any]:
        """Limit the files of the folders that an override of ``hydra.searchpath`` has added, too."""
        parsed, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        _limit_files(repository)
        return parsed, repository

    def _load_run(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        asked = config_name, overrides, run_mode, from_shell, validate_sweep_overrides
        self._given = _parsed(overrides)
        newer = getattr(super(), "_load_configuration", None)  # Hydra 1.4's, which keeps what it has read
        if newer is None:
            config = super().load_configuration(*asked)
        else:
            config = newer(*asked, skip_missing_defaults=False, activate_config_repository=True)
        self._composed.append((config, self._replacements))
        return config

    def _compose_config_from_defaults_list(self, defaults: list[Any], repo: Any) -> DictConfig:
        """Merge the files of a config as Hydra does, and replace parts that a file or the command line renames."""
        self._replacements = replaced = Replacements()
        config = OmegaConf.create()
        with flag_override(config, "no_deepcopy_set_nodes", True):
            for default in defaults:
                # One file alone, without its defaults list.
                layer = super()._compose_config_from_defaults_list([default], repo)
                said = plain_layer(layer)
                replaced.replace(config, targets_in(said))
                if not str(default.config_path).startswith(GROUP):
                    replaced.note(said)
                try:
                    config.merge_with(layer)
                except OmegaConfBaseException as error:
                    raise ConfigCompositionException(
                        f"In '{default.config_path}': {type(error).__name__} raised while composing config:\n{error}"
                    ) from error
        replaced.replace(config, targets_of(self._given))
        return config

    def _load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool,
        validate_sweep_overrides: bool,
        **read: Any,
    ) -> DictConfig:
        """Compose a config for Hydra 1.4, which calls this with what it has ``read`` already."""
        return self.load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)


class _LimitedFiles:
    """Load the config files of a folder that is not ours, after a check of their size, depth, aliases and tags."""

    def __init__(self, source: ConfigSource) -> None:
        self._load, self._folder = source.load_config, Path(source.path)

    def __call__(self, config_path: str) -> ConfigResult:
        file = self._folder / (config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")
        if file.exists():
            with one_line():
                check_file(file)
        return self._load(config_path)


def _limit_files(repository: Any) -> None:
    """Limit the files in the folders of ``--config-dir`` and ``hydra.searchpath``, which somebody may have sent."""
    ours = {str(CONF_DIR), str(EXPORT_DIR)}
    for source in repository.get_sources():
        if source.scheme() == "file" and source.path not in ours and not isinstance(source.load_config, _LimitedFiles):
            source.load_config = _LimitedFiles(source)


@contextmanager
def _noted(settings: Iterable[str]) -> Iterator[None]:
    """Note on an error of Hydra in which run of a sweep it occurred."""
    try:
        yield
    except HydraException as error:
        if not getattr(error, "__notes__", ()):
            error.add_note(f"{SWEPT}{' '.join(settings)}")
        raise


class ResumingLoader(OwnLoader):
    """A loader for runs; where ``ckpt_path`` names one of our checkpoints, its run's settings come first.

    So its folder, its record in ``.hydra`` and its name are those of what is trained.
    """

    def __init__(self, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        self._records: dict[Path, Record | None] = {}
        self._asked: tuple[list[str], DictConfig] | None = None

    def _load(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        asked, self._asked = self._asked, None
        if asked is not None and [*asked[0], _RUN] == overrides:
            config = asked[1]
            config.hydra.mode = RunMode.RUN
            config.hydra.overrides.hydra.append(_RUN)
            return config
        given = _parsed(overrides)
        # Hydra first asks whether the config says that it is a sweep; where it does not, it composes the same again.
        asks = run_mode == RunMode.MULTIRUN and not validate_sweep_overrides
        if asks and not any(override.is_sweep_override() for override in given):
            try:
                self._asked = overrides, self._resume(config_name, overrides, given, RunMode.RUN, from_shell)
                return self._asked[1]
            except HydraException as error:
                if not str(error).startswith("You must specify"):  # what a group is to be, a sweep may leave open
                    raise
        return self._resume(config_name, overrides, given, run_mode, from_shell, validate_sweep_overrides)

    def _resume(
        self,
        config_name: str | None,
        overrides: list[str],
        given: list[Override],
        run_mode: RunMode,
        from_shell: bool,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        def composed(lines: list[str]) -> DictConfig:
            return super(ResumingLoader, self)._load(config_name, lines, run_mode, from_shell, validate_sweep_overrides)

        paths = [override for override in given if override.key_or_group == "ckpt_path"]
        path = None
        if paths:
            path = None if paths[-1].is_sweep_override() else paths[-1].value()
        else:
            config = composed(overrides)
            with suppress(OmegaConfBaseException):  # told where the run begins
                path = config.get("ckpt_path")
            if path is None and not is_requeued():
                return config
        if path == AUTO or (not paths and path is None):
            if run_mode == RunMode.MULTIRUN:
                return composed(overrides)  # each of its runs looks for its own
            others = [str(override.input_line) for override in given if override not in paths]
            with one_line():
                found = furthest_checkpoint(composed([*others, "ckpt_path=null"]), this_job=path is None)
            path = None if found is None else str(found)
            value = "null" if path is None else QuotedString(path, Quote.single).with_quotes()
            overrides = [*others, f"ckpt_path={value}"]
            given = _parsed(overrides)
        with one_line():
            record = self._record(path, is_told_to_trust(given))
            if record is None:
                return composed(overrides)
            assert isinstance(path, str)
            _, repository = self._parse_overrides_and_create_caching_repo(config_name, overrides)
            return _resumed(record, path, given, composed, repository.group_exists)

    def _record(self, path: Any, trusted: bool) -> Record | None:
        """Read the record of a checkpoint once; None where there is none, which is told where the run begins."""
        if not isinstance(path, str) or not Path(path).is_file():
            return None
        file = Path(path).resolve()
        if file not in self._records:
            self._records[file] = record_in(read_stored(path), path)
        record = self._records[file]
        return record and replace(record, trusted=trusted)


@contextmanager
def composing(loader: type[OwnLoader]) -> Iterator[None]:
    """Have Hydra compose by a loader of ours; it has no other way to be given one."""
    before = vars(_core)["ConfigLoaderImpl"]
    vars(_core)["ConfigLoaderImpl"] = loader
    try:
        yield
    finally:
        vars(_core)["ConfigLoaderImpl"] = before


def _resumed(
    record: Record,
    path: str,
    given: list[Override],
    composed: Callable[[list[str]], DictConfig],
    is_group: Callable[[str], bool],
) -> DictConfig:
    """Compose what the run of a checkpoint was composed of, with the overrides given behind it."""
    check_record(record, path)
    ours = [override for override in given if override.is_hydra_override()]
    mine = [override for override in given if not override.is_hydra_override()]
    lines, theirs = (continued(record, path, some, is_group) for some in (given, ours))
    before = composed(_lines(theirs))
    # An experiment that is chosen as the run did chooses other groups in its turn.
    chosen: list[str] = []
    while missing := missing_choices(record, before.hydra.runtime.choices, chosen):
        chosen.append(missing[0])
        before = composed([*chosen, *_lines(theirs)])
    config = composed([*chosen, *_lines(lines)])
    alone = [override for override in lines if override in mine or is_group(override.key_or_group)]
    keep_settings(config, before, record, mine)
    lines_alone = [*chosen, *_lines(alone)]
    here = [line for line in lines_alone if not line.startswith("debug=") or line in _lines(mine)]
    keep_process(config, lambda: composed(here), given)
    return config


def is_told_to_trust(given: Iterable[Override]) -> bool:
    """Return whether the overrides of a command contain ``trusted=true``."""
    return any(override.key_or_group == "trusted" and override.value() is True for override in given)


def _as_integer(match: re.Match[str]) -> str:
    """Write a number of a command line as an integer if it is one; fields of floats take it as well."""
    number = Decimal(match[0])
    return str(int(number)) if number == int(number) else match[0]


def _parsed(lines: list[str]) -> list[Override]:
    overrides: list[Override] = OverridesParser.create().parse_overrides(lines)
    return overrides


def _lines(overrides: list[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]
