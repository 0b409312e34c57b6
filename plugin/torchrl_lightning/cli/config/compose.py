"""Compose configs with Hydra; a resumed run reuses the groups, overrides and settings of its checkpoint's run."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, Quote, QuotedString
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_lightning._core.plain_yaml import check_yaml_file
from torchrl_lightning._core.slurm import is_requeued
from torchrl_lightning._hydra.compat import hydra_main, initialized
from torchrl_lightning._hydra.paths import CONF_DIR, EXPORT_DIR
from torchrl_lightning._hydra.schemas import open_schemas
from torchrl_lightning.cli.config.find_checkpoint import AUTO, furthest_checkpoint
from torchrl_lightning.cli.config.replace_part import (
    close_schemas,
    command_layer,
    file_layers,
    is_within,
    renamed_parts,
    replace_parts,
    targets_in,
    targets_of,
)
from torchrl_lightning.cli.config.resume import (
    Record,
    check_record,
    missing_choices,
    read_record,
    restore_settings,
    resume_overrides,
    set_process_settings,
)
from torchrl_lightning.cli.config.validate import read_checkpoint_file
from torchrl_lightning.cli.error_messages import (
    GLOBAL_HINT,
    SWEEP_NOTE,
    UsageError,
    exit_with_one_line,
    one_line_errors,
    read_options,
    run_hydra,
)

# A number such as 1e5. Hydra reads it as a float, but the setting may be an integer.
_POWER_OF_TEN = re.compile(r"(?<=[=,])\d+(?:\.\d+)?[eE]\+?\d{1,2}(?=,|$)")

_LOADED_FILES: dict[tuple[Path, str], ConfigResult] = {}  # of this package and of Hydra

_GLOBAL_GROUPS = ("experiment", "debug", "hparams_search")  # their files set settings of the whole run

_PROVIDERS = {"hydra", "main", "torchrl-lightning", "schema"}  # providers of configs that are not from a user


class _Request(NamedTuple):
    """The arguments of a request for a config, except its overrides."""

    loader: ConfigLoader
    config_name: str | None
    run_mode: RunMode
    from_shell: bool = True
    validate_sweep_overrides: bool = True

    def load(self, lines: list[str]) -> DictConfig:
        """Compose a config with Hydra."""
        return self.loader.load_configuration(
            self.config_name, lines, self.run_mode, self.from_shell, self.validate_sweep_overrides
        )

    def is_group(self, key: str, lines: list[str]) -> bool:
        """Return True if a key is a config group."""
        return bool(self.loader.get_group_options(key, config_name=self.config_name, overrides=lines))


def _load_limited(load: Callable[[str], ConfigResult], folder: Path, config_path: str) -> ConfigResult:
    """Check size, depth, aliases and tags of a config file from outside this package, and load the file."""
    file = folder / f"{config_path.removesuffix('.yaml')}.yaml"
    if file.exists():
        with exit_with_one_line():
            check_yaml_file(file)
    return load(config_path)


def _load_once(load: Callable[[str], ConfigResult], folder: Path, config_path: str) -> ConfigResult:
    """Load a config file of this package or of Hydra once, because each job of a sweep needs it."""
    if (folder, config_path) not in _LOADED_FILES:
        _LOADED_FILES[folder, config_path] = load(config_path)
    return deepcopy(_LOADED_FILES[folder, config_path])  # Hydra changes the config


def cache_sources(sources: list[ConfigSource]) -> None:
    """Load our own files and Hydra's once, and do not copy the sources for each config.

    Files of other folders are checked before each loading, because ``--config-dir`` may be untrusted.
    """
    packaged = {str(CONF_DIR), str(EXPORT_DIR), "hydra.conf"}
    for source in sources:
        # Hydra copies its sources with the whole ConfigStore for each config, but does not change them.
        source.__deepcopy__ = lambda _, source=source: source  # type: ignore[attr-defined]
        if source.path in packaged or source.scheme() == "file":
            load = _load_once if source.path in packaged else _load_limited
            source.load_config = partial(load, source.load_config, Path(source.path))  # type: ignore[method-assign]


def _check_search_path(overrides: list[Override]) -> None:
    """Check all files in the folders of a command's ``hydra.searchpath``, because Hydra reads the files immediately."""
    for override in overrides:
        if override.key_or_group == "hydra.searchpath" and isinstance(folders := override.value(), list):
            for folder in folders:
                for file in sorted(Path(str(folder).removeprefix("file://")).rglob("*.yaml")):
                    with exit_with_one_line():
                        check_yaml_file(file, is_mapping=file.parent.name != ".hydra")  # there, Hydra writes lists


class CommandLoader(ConfigLoader):
    """Wrap Hydra's config loader. The wrapper reads 1e5 as an integer, replaces parts, and resumes runs.

    If ``ckpt_path`` names a checkpoint of our commands, the config inherits the settings of the checkpoint's run. Run
    folder, record and name then match the resumed run.

    Args:
        hydra: Hydra's loader.
        resumes: True if the command can resume runs.
    """

    def __init__(self, hydra: ConfigLoader, *, resumes: bool) -> None:
        self._hydra, self._resumes = hydra, resumes
        cache_sources(hydra.get_sources())
        self._records: dict[Path, Record | None] = {}
        self._next_config: tuple[list[str], DictConfig] | None = None  # overrides of the next load and their config
        self._dropped_settings: list[tuple[DictConfig, list[str]]] = []  # configs and their dropped settings
        self._printed_notes: set[str] = set()

    def get_search_path(self) -> ConfigSearchPath:
        """Return Hydra's search path."""
        return self._hydra.get_search_path()

    def get_sources(self) -> list[ConfigSource]:
        """Return Hydra's sources of configs."""
        return self._hydra.get_sources()

    def list_groups(self, parent_name: str) -> list[str]:
        """Return the groups below a group."""
        return self._hydra.list_groups(parent_name)

    def get_group_options(self, group_name: str, *args: Any, **kwargs: Any) -> list[str]:
        """Return the options of a group."""
        return self._hydra.get_group_options(group_name, *args, **kwargs)

    def compute_defaults_list(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> Any:
        """Return Hydra's defaults list: the files of a config."""
        return self._hydra.compute_defaults_list(config_name, overrides, run_mode)

    def mode(self, config_name: str, overrides: list[str]) -> RunMode:
        """Return the run mode of a command's config. Store the config of a single run for the next load."""
        try:
            if not any(override.is_sweep_override() for override in _parse(overrides)):
                config = self.load_configuration(config_name, overrides, RunMode.RUN)
                if config.hydra.mode is None:  # set the mode, as Hydra does
                    config.hydra.mode = RunMode.RUN
                    config.hydra.overrides.hydra.append("hydra.mode=RUN")
                if config.hydra.mode == RunMode.RUN:
                    self._next_config = overrides, config
                return config.hydra.mode
        except HydraException as error:
            if not str(error).startswith("You must specify"):  # a sweep may leave a group unselected
                raise
        with suppress(HydraException):
            request = _Request(self._hydra, config_name, RunMode.MULTIRUN, validate_sweep_overrides=False)
            config = self._compose(overrides, request)
            return config.hydra.mode or RunMode.RUN
        return RunMode.RUN

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a config, unless the last check has composed the same one."""
        checked, self._next_config = self._next_config, None
        if checked is not None and checked[0] == overrides:
            return checked[1]
        overrides = [_POWER_OF_TEN.sub(_as_integer, override) for override in overrides]
        if run_mode == RunMode.RUN and (values := self._values(overrides, Override.is_sweep_override)):
            # Hydra rejects several values in a single run. Report a misspelt name first, as it is likelier.
            first = {line: options[0] for line, options in values.items()}
            self.load_configuration(config_name, [first.get(line, line) for line in overrides], run_mode)
        self._dropped_settings = []
        _check_search_path(_parse(overrides))
        request = _Request(self._hydra, config_name, run_mode, from_shell, validate_sweep_overrides)
        config = self._resume(overrides, request) if self._resumes else self._compose(overrides, request)
        dropped_settings = next((dropped for composed, dropped in self._dropped_settings if composed is config), [])
        note = f"note: ignored settings of replaced parts: {', '.join(dropped_settings)}."
        if dropped_settings and note not in self._printed_notes:
            self._printed_notes.add(note)
            print(note, file=sys.stderr)
        for group in _GLOBAL_GROUPS:
            if isinstance(config.get(group), DictConfig) and self._fills(group, config_name, overrides, run_mode):
                raise UsageError(f"{group}={config.hydra.runtime.choices.get(group)}: {GLOBAL_HINT}.")
        for name in ("n_trials", "n_jobs"):
            number = OmegaConf.select(config, f"hydra.sweeper.{name}")
            if isinstance(number, int) and number < 1:
                raise UsageError(f"hydra.sweeper.{name}={number}: expected a positive whole number.")
        rate = OmegaConf.select(config, "hydra.sweeper.max_failure_rate")
        if isinstance(rate, float) and not 0 <= rate <= 1:
            raise UsageError(f"hydra.sweeper.max_failure_rate={rate}: expected a number from 0 to 1.")
        return config

    def _fills(self, group: str, config_name: str | None, overrides: list[str], run_mode: RunMode) -> bool:
        """Return True if a file of a group sets ``group.NAME``; the mapping may also be a setting of the user."""
        defaults = self.compute_defaults_list(config_name, overrides, run_mode).defaults
        return any(f"{entry.config_path}".startswith(f"{group}/") and entry.package == group for entry in defaults)

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """Compose the config of one run of a sweep. Errors contain a note with the run's swept settings."""
        recorded_overrides = _recorded_overrides(master_config)
        with _with_sweep_note(line for line in sweep_overrides if line not in recorded_overrides["task"]):
            config = self.load_configuration(
                master_config.hydra.job.config_name, [*recorded_overrides["hydra"], *sweep_overrides], RunMode.RUN
            )
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config

    def check_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str], is_next: bool) -> None:
        """Compose the config of one run of a sweep to find its errors, and keep it if this run is loaded next."""
        config = self.load_sweep_config(master_config, sweep_overrides)
        if is_next:
            self._next_config = [*_recorded_overrides(master_config)["hydra"], *sweep_overrides], config

    def _compose(self, lines: list[str], request: _Request) -> DictConfig:
        """Compose a config. If this fails in a sweep, use the first valid options of the swept groups and classes.

        Hydra composes a sweep's config with the default option of each swept group and class. The default option may
        lack a setting that a swept option has. Each run of the sweep is later composed with its own options.
        """

        def is_option(override: Override) -> bool:
            names_part = "_target_" in str(override.input_line)
            return override.is_discrete_sweep() and (names_part or request.is_group(override.key_or_group, lines))

        try:
            return self._compose_parts(lines, request)
        except HydraException:
            options = self._values(lines, is_option) if request.run_mode == RunMode.MULTIRUN else {}
            if not options:
                raise
        first_error: HydraException | None = None
        for index in range(max(map(len, options.values()))):
            first = {line: values[index % len(values)] for line, values in options.items()}
            try:
                with _with_sweep_note(first.values()):
                    config = self._compose_parts([first.get(line, line) for line in lines], request)
                break
            except HydraException as error:
                first_error = first_error or error
        else:
            assert first_error is not None
            raise first_error
        sweep_lines = {option: line for line, option in first.items()}
        config.hydra.overrides.task = [sweep_lines.get(line, line) for line in config.hydra.overrides.task]
        return config

    def _values(self, lines: list[str], is_wanted: Callable[[Override], bool]) -> dict[str, list[str]]:
        """Map each sweep override that ``is_wanted`` accepts to overrides with one of its values."""
        return {
            str(override.input_line): [f"{override.get_key_element()}={value}" for value in _swept_values(override)]
            for override in OverridesParser.create(config_loader=self._hydra).parse_overrides(lines)
            if is_wanted(override)
        }

    def _compose_parts(self, lines: list[str], request: _Request) -> DictConfig:
        """Compose a config, and replace the parts that get another class from a file or the command line."""
        try:
            config = request.load(lines)
            dropped = self._replace_parts(config, request.config_name, lines)
        except ConfigCompositionException as error:
            # The new class of a part may have settings that the schema of the old class lacks.
            cause = error.__cause__ or error.__context__
            key = str(cause.full_key) if isinstance(cause, OmegaConfBaseException) else ""
            try:
                with open_schemas():
                    config = request.load(lines)
            except HydraException:
                raise error from cause
            dropped = self._replace_parts(config, request.config_name, lines)
            if not any(is_within(key, path) for path in dropped) or not close_schemas(config):
                raise error from cause
        self._dropped_settings.append((config, [f"{path}.{key}" for path, keys in dropped.items() for key in keys]))
        return config

    def _replace_parts(self, config: DictConfig, config_name: str | None, lines: list[str]) -> dict[str, list[str]]:
        overrides = _parse(lines)
        paths = [*renamed_parts(config), *(path for path, _ in targets_of(overrides))]
        has_files = any(source.provider not in _PROVIDERS for source in self.get_sources())
        if not paths and not has_files:
            return {}
        layers = [*file_layers(self._hydra, config_name, lines), command_layer(overrides)]
        if has_files:
            paths += [path for layer in layers for path, _ in targets_in(OmegaConf.to_container(layer))]
        return replace_parts(config, sorted(paths), layers)

    def _resume(self, overrides: list[str], request: _Request) -> DictConfig:
        """Compose the config of a run, which may resume another run."""

        def compose(lines: list[str]) -> DictConfig:
            return self._compose(lines, request)

        parsed = _parse(overrides)
        paths = [override for override in parsed if override.key_or_group == "ckpt_path"]
        path = None
        if paths:
            path = None if paths[-1].is_sweep_override() else paths[-1].value()
        else:
            config = compose(overrides)
            with suppress(OmegaConfBaseException):  # the run itself reports this error
                path = config.get("ckpt_path")
            if path is None and not is_requeued():
                return config
        if path == AUTO or (not paths and path is None):
            if request.run_mode == RunMode.MULTIRUN:
                return compose(overrides)  # each run of the sweep finds its own checkpoint
            others = [str(override.input_line) for override in parsed if override not in paths]
            with exit_with_one_line():
                checkpoint = furthest_checkpoint(compose([*others, "ckpt_path=null"]), this_job=path is None)
            path = None if checkpoint is None else str(checkpoint)
            value = "null" if path is None else QuotedString(path, Quote.single).with_quotes()
            overrides = [*others, f"ckpt_path={value}"]
            parsed = _parse(overrides)
        with exit_with_one_line():
            record = self._record(path, sets_trusted(parsed))
            if record is None:
                return compose(overrides)
            assert isinstance(path, str)
            return _compose_resumed(record, path, parsed, compose, lambda key: request.is_group(key, overrides))

    def _record(self, path: Any, trusted: bool) -> Record | None:
        """Read the record of a checkpoint once; return None if it is missing. The run itself reports a missing file."""
        if not isinstance(path, str) or not Path(path).is_file():
            return None
        file = Path(path).resolve()
        if file not in self._records:
            self._records[file] = read_record(read_checkpoint_file(path), path)
        record = self._records[file]
        return record and replace(record, trusted=trusted)


def _recorded_overrides(config: DictConfig) -> Any:
    """Return the overrides in a config without resolving them, because they may refer to settings of a single run."""
    return OmegaConf.to_container(config.hydra.overrides, resolve=False)


@contextmanager
def _with_sweep_note(settings: Iterable[str]) -> Iterator[None]:
    """Add a note with the settings of a run in a sweep to Hydra's errors."""
    try:
        yield
    except HydraException as error:
        if not getattr(error, "__notes__", ()):
            error.add_note(f"{SWEEP_NOTE}{' '.join(settings)}")
        raise


def run_command_line(name: str, task: Callable[[Any], Any], arguments: list[str], *, resumes: bool) -> None:
    """Compose the config of a command line, and run the task once or in a sweep, or print the config."""
    options = read_options(arguments)
    if options.hydra_help or options.version or options.experimental_rerun:
        # Hydra's parser expects all settings after the options.
        sys.argv[1:] = [argument for argument in arguments if argument not in options.overrides] + options.overrides
        hydra_main(str(CONF_DIR), name)(one_line_errors(task))()
        return
    selected = (options.run, options.multirun, options.cfg, options.info, options.shell_completion)
    if sum(map(bool, selected)) > 1:
        raise UsageError("only one of --run, --multirun, --cfg, --info and --shell-completion can be given.")
    if options.resolve and not options.cfg:
        raise UsageError("--resolve has no effect without --cfg; remove it.")
    if options.config_dir and not Path(options.config_dir).is_dir():
        raise UsageError(f"--config-dir={options.config_dir} must be a folder. Create it, or remove the option.")
    with initialized(options.config_path or str(CONF_DIR), name, options.config_dir) as hydra:
        hydra.config_loader = CommandLoader(hydra.config_loader, resumes=resumes)
        run_hydra(partial(_run, hydra, options.config_name or name, options, task))


def _run(hydra: Any, config_name: str, options: Namespace, task: Callable[[Any], Any]) -> None:
    overrides = options.overrides
    if options.cfg:
        hydra.show_cfg(config_name, overrides, options.cfg, options.package, options.resolve)
    elif options.info:
        hydra.show_info(options.info, config_name, overrides)
    elif options.shell_completion:
        hydra.shell_completion(config_name, overrides)
    elif options.multirun or hydra.config_loader.mode(config_name, overrides) == RunMode.MULTIRUN:
        from torchrl_lightning.cli.sweeps.launcher import run_sweep

        run_sweep(hydra, config_name, task, [*overrides, "hydra.mode=MULTIRUN"])
    else:
        hydra.run(config_name, one_line_errors(task), overrides)


def _compose_resumed(
    record: Record,
    path: str,
    parsed: list[Override],
    compose: Callable[[list[str]], DictConfig],
    is_group: Callable[[str], bool],
) -> DictConfig:
    """Compose the config of a checkpoint's run, then apply the overrides of this command."""
    check_record(record, path)
    hydra_overrides = [override for override in parsed if override.is_hydra_override()]
    run_overrides = [override for override in parsed if not override.is_hydra_override()]
    lines, base_overrides = (resume_overrides(record, path, subset, is_group) for subset in (parsed, hydra_overrides))
    run_config = compose(_to_lines(base_overrides))
    # The experiment of the run may select other groups, so compare the groups again after each choice.
    restored_choices: list[str] = []
    while missing := missing_choices(record, run_config.hydra.runtime.choices, restored_choices):
        restored_choices.append(missing[0])
        run_config = compose([*restored_choices, *_to_lines(base_overrides)])
    config = compose([*restored_choices, *_to_lines(lines)])
    own_overrides = [override for override in lines if override in run_overrides or is_group(override.key_or_group)]
    restore_settings(config, run_config, record, run_overrides)
    own_lines = [*restored_choices, *_to_lines(own_overrides)]
    own_lines_without_debug = [
        line for line in own_lines if not line.startswith("debug=") or line in _to_lines(run_overrides)
    ]
    set_process_settings(config, lambda: compose(own_lines_without_debug), parsed)
    return config


def sets_trusted(overrides: Iterable[Override]) -> bool:
    """Return True if the overrides of a command contain ``trusted=true``."""
    return any(override.key_or_group == "trusted" and override.value() is True for override in overrides)


def _as_integer(match: re.Match[str]) -> str:
    """Write a number without a fraction as an integer, which float settings also accept."""
    number = Decimal(match[0])
    return str(int(number)) if number == int(number) else match[0]


def _parse(lines: list[str]) -> list[Override]:
    overrides: list[Override] = OverridesParser.create().parse_overrides(lines)
    return overrides


def _swept_values(sweep: Override) -> list[str]:
    """Return the values of a sweep; of an interval, only the start."""
    value = sweep.value()
    return [str(value.start)] if isinstance(value, IntervalSweep) else list(sweep.sweep_string_iterator())


def _to_lines(overrides: list[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]
