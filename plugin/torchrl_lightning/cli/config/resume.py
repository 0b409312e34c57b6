"""Read the record of a checkpoint's run, compose a resumed run from it, and check that the checkpoint fits.

A setting of the command overrides the checkpoint's setting, which overrides the presets in ``conf/``.
``changed_settings.py`` applies settings in restored states, such as learning rates. This module has only light imports.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from torchrl_lightning._core.file_limits import OVERRIDES
from torchrl_lightning._core.protocols import LearnerApi
from torchrl_lightning._core.run_metadata import COMMAND
from torchrl_lightning.cli.config.replace_part import is_within, replace_part, targets_in, targets_of
from torchrl_lightning.cli.config.validate import TRUST
from torchrl_lightning.cli.error_messages import UsageError

# Settings that the current run defines, never the checkpoint.
_CURRENT_RUN = {"ckpt_path", "trusted", "paths", "hparams_search", "hydra"}
# Process settings that must not come from a file of another person.
_PROCESS_SETTINGS = {"trainer.profiler", "trainer.detect_anomaly"}
_FOLDER_SETTINGS = {"dirpath", "save_dir", "default_root_dir"}
# These settings contain the paths of output files, so they are restored only from a trusted checkpoint.
_TRUSTED_ONLY = {"callbacks", "logger", "task_name"}
_DEFAULT_TRAINER = {"_target_": "lightning.Trainer", "plugins": [{"_target_": "torchrl_lightning.AtomicCheckpointIO"}]}
# Groups that a resumed run may change, because training does not depend on them.
_FREE_GROUPS = {"hparams_search", "hydra", "logger", "paths"}
_KEY = r"[A-Za-z_][\w-]*(?:[./][\w-]+)*(?:@[\w.]+)?"
# Overrides without interpolations, functions of Hydra's grammar and escapes.
_PLAIN_OVERRIDE = re.compile(rf"(?:~{_KEY}|\+{{0,2}}{_KEY}=[^$()\\\n]{{0,2000}})")
_OPTION_NAME = re.compile(r"[\w/-]+")


@dataclass(frozen=True)
class Record:
    """The complete config, the selected groups and the overrides of a checkpoint's run.

    ``trusted`` is True if the current command sets ``trusted=true``.
    """

    config: dict[str, Any]
    choices: dict[str, str | None]
    overrides: list[str]
    trusted: bool = False

    def is_inherited(self, key: str) -> bool:
        """Return True if a resumed run inherits this setting.

        An equal number of threads makes a resumed run bit-identical, but this machine may have fewer cores.
        """
        if key == "torch_threads":
            threads = self.config.get(key)
            return isinstance(threads, int) and 1 <= threads <= (os.cpu_count() or 1)
        first, last = re.split("[./@]", key)[0], key.rpartition(".")[2]
        if first in _CURRENT_RUN or last in _FOLDER_SETTINGS or key in _PROCESS_SETTINGS:
            return False
        return self.trusted or (first not in _TRUSTED_ONLY and last != "target_agent_demos_dir")


def plain(node: Any) -> Any:
    """Return a config as plain data: mappings, lists, strings, numbers, booleans and None."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    if isinstance(node, Mapping):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [plain(value) for value in node]
    return node if node is None or isinstance(node, bool | int | float | str) else str(node)


def read_record(stored: Mapping[str, Any], path: str | Path, *, trusted: bool = False) -> Record | None:
    """Return the record in the content of a checkpoint, or None if our commands did not write the checkpoint."""
    from torchrl_lightning.deploy.loading import CONFIG

    config, command = stored.get(CONFIG), stored.get(COMMAND)
    if config is None or command is None:
        return None
    if not (
        isinstance(config, dict)
        and isinstance(command, dict)
        and isinstance(choices := command.get("choices"), dict)
        and isinstance(overrides := command.get("overrides"), list)
        and len(overrides) <= OVERRIDES
        and all(isinstance(text, str) for text in (*choices, *overrides))
        and all(
            value is None or (isinstance(value, str) and _OPTION_NAME.fullmatch(value)) for value in choices.values()
        )
    ):
        raise UsageError(f"{path}: the record of its run must be plain data.")
    _check_trust(config, path, trusted=True)
    return Record(config, choices, overrides, trusted)


def inherited_overrides(record: Record, path: str | Path) -> list[Override]:
    """Return the parsed overrides that a resumed run inherits.

    Overrides without a plain value, such as interpolations, are left out, because the config contains the resulting
    value. Overrides that contradict the config are also left out. Only plain text is passed to Hydra's parser.
    """
    parser = OverridesParser.create()
    overrides: list[Override] = []
    for line in record.overrides:
        key = line.lstrip("+~").partition("=")[0]
        if re.match(r"hydra[./]", key):
            raise UsageError(f"{path}: its overrides must be settings of a run, got {line!r}.")
        if not _PLAIN_OVERRIDE.fullmatch(line) or len(re.findall(r"[\[{]", line)) > 64 or not record.is_inherited(key):
            continue
        try:
            parsed = parser.parse_override(line)
        except HydraException:
            continue
        if parsed.is_delete():
            is_kept = record.choices.get(_key(parsed)) is None and not _lookup(record.config, key)
        else:
            value = parsed.value()
            is_plain = parsed.value_type == ValueType.ELEMENT
            is_kept = value == record.choices.get(_key(parsed), "") or (
                is_plain and _has_value(plain(value), record.config, key)
            )
        if is_kept:
            overrides.append(parsed)
    return overrides


def resume_overrides(
    record: Record, path: str | Path, command_overrides: Iterable[Override], is_group: Callable[[str], bool]
) -> list[Override]:
    """Return the inherited overrides of a resumed run, followed by the overrides of this command.

    Args:
        record: The record of the checkpoint.
        path: The checkpoint.
        command_overrides: The overrides of this command.
        is_group: A function that returns True if a key is a config group.

    Raises:
        UsageError: This command and the run select different options of a config group.
    """
    own_overrides: list[Override] = []
    for override in command_overrides:
        group, inherits_choice = override.key_or_group, False
        if is_group(group) and group.partition("/")[0] not in _FREE_GROUPS and not override.is_sweep_override():
            chosen = record.choices.get(_key(override))
            requested = None if override.is_delete() else override.value()
            if requested != chosen:
                raise UsageError(
                    f"{override.input_line} differs from the run of {path}, which has {group}={chosen or 'null'}. "
                    "A resumed run keeps its groups: remove it, or start a new run without ckpt_path."
                )
            inherits_choice = record.is_inherited(group)
        if not inherits_choice:
            own_overrides.append(override)
    keys, replaced = {_key(override) for override in own_overrides}, _replaced_parts(record, own_overrides)
    inherited_only = (override for override in inherited_overrides(record, path) if _key(override) not in keys)
    return [
        *(override for override in inherited_only if not any(is_within(_key(override), part) for part in replaced)),
        *own_overrides,
    ]


def check_record(record: Record, path: str | Path) -> None:
    """Raise UsageError if resuming the run requires ``trusted=true``."""
    inherited = {key: value for key, value in record.config.items() if record.is_inherited(key)}
    trainer = inherited.get("trainer")
    if isinstance(trainer, dict):
        inherited["trainer"] = {key: value for key, value in trainer.items() if value != _DEFAULT_TRAINER.get(key)}
    _check_trust(inherited, path, trusted=record.trusted)


def needs_trust(config: dict[str, Any]) -> bool:
    """Return True if classes or folders in a run's config require ``trusted=true`` for the run's checkpoints."""
    try:
        check_record(Record(config, {}, []), "")
    except UsageError:
        return True
    targets = (target for key in ("callbacks", "logger") for _, target in targets_in({key: config.get(key)}))
    # Optuna's pruner belongs to the search, which a resumed run has left.
    return any(target.partition(".")[0] not in ("lightning", "optuna", "torchrl_lightning") for target in targets)


def missing_choices(record: Record, choices: Mapping[str, str | None], chosen: Collection[str]) -> list[str]:
    """Return overrides that restore the run's groups if YAML now selects other options; omit lines in ``chosen``."""
    differing = [
        f"{group}={option or 'null'}"
        for group, option in record.choices.items()
        if group.partition("/")[0] not in _FREE_GROUPS
        and record.is_inherited(group)
        and group in choices
        and choices[group] != option
    ]
    # The experiment comes first, because it selects other groups.
    return sorted(
        (line for line in differing if line not in chosen), key=lambda line: not line.startswith("experiment=")
    )


def restore_settings(
    config: DictConfig, base_config: DictConfig, record: Record, command_overrides: Iterable[Override]
) -> None:
    """Restore the checkpoint's values in a composed config if the YAML files now have other values.

    Args:
        config: The config to run, composed from the groups and overrides of the run and of this command.
        base_config: The config composed only from the groups and overrides of the run.
        record: The record of the checkpoint. Its ``paths`` are not restored, because the current run defines them.
        command_overrides: The overrides of this command, which take precedence.
    """
    base_config = base_config.copy()
    with open_dict(base_config):
        base_config.paths = record.config.get("paths", {})
    command_overrides = list(command_overrides)
    targeted = {part for part, _ in targets_of(command_overrides)}
    command_keys = {_key(override) for override in command_overrides} | _replaced_parts(record, command_overrides)
    for part, target in targets_in(record.config):
        if record.is_inherited(part) and part not in targeted and not any(is_within(part, key) for key in command_keys):
            for target_config in (base_config, config):
                current_targets = dict(targets_in(OmegaConf.to_container(target_config)))
                if current_targets.get(part, target) != target:
                    replace_part(target_config, part, target)
    # Restore plain values first: an interpolation of a restored value often equals the checkpoint's value.
    for interpolated in (False, True):
        for keys, value in [*_changed_values(base_config, record.config, interpolated=interpolated)]:
            name = ".".join(keys)
            if not record.is_inherited(name) or any(
                is_within(name, key) or is_within(key, name) for key in command_keys
            ):
                continue
            _assign(base_config, keys, value)
            _assign(config, keys, value)


def set_process_settings(
    config: DictConfig, compose_own: Callable[[], DictConfig], command_overrides: Iterable[Override]
) -> None:
    """Set the process settings to the values of this command.

    Args:
        config: The config to run.
        compose_own: A function that composes a config only from this command.
        command_overrides: The overrides of this command.
    """
    keys = {_key(override) for override in command_overrides}
    if differing := [name for name in _PROCESS_SETTINGS if name not in keys and OmegaConf.select(config, name)]:
        own_config = compose_own()
        for name in differing:
            OmegaConf.update(config, name, OmegaConf.select(own_config, name))


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Map each setting that differs between two configs to its two values. A missing value is ``"absent"``.

    Examples:
        >>> differences({"model": {"gamma": 0.9, "tau": 1.0}}, {"model": {"gamma": 0.99, "tau": 1.0}})
        {'model.gamma': (0.9, 0.99)}
    """
    stored_values, current_values = (dict(_settings(config)) for config in (stored, current))
    missing = "absent"
    return {
        key: (stored_values.get(key, missing), current_values.get(key, missing))
        for key in dict.fromkeys((*stored_values, *current_values))
        if stored_values.get(key, missing) != current_values.get(key, missing)
    }


def config_diff(stored: Mapping[str, Any], path: str | Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences between a checkpoint's config and the current config, except for the run folder."""
    record = read_record(stored, path)
    if record is None:
        return {}
    return {
        key: values
        for key, values in differences(record.config, config).items()
        if key.partition(".")[0] not in _CURRENT_RUN and key.rpartition(".")[2] not in _FOLDER_SETTINGS
    }


def changes_rates(differing: Iterable[str]) -> bool:
    """Return True if one of these settings is a learning rate, or belongs to an optimizer or a schedule.

    Examples:
        >>> changes_rates(["seed", "model.optimizer.lr"]), changes_rates(["data.buffer.gamma"])
        (True, False)
    """
    return any(re.match(r"model\..*?(lr|rate|schedule|optimizer)", key) for key in differing)


def check_checkpoint(
    path: Path,
    stored: dict[str, Any],
    data: Any,
    model: Any,
    world_size: int | None = None,
    config: DictConfig | None = None,
    *,
    resumes: bool = False,
    plays: bool = False,
) -> None:
    """Validate a checkpoint; raise UsageError for another environment, capacity, network or number of ranks.

    With ``plays``, the check compares only environment and networks, because an evaluation builds nothing else.

    The check builds a copy of the model without allocating its tensors. With ``resumes``, the check also builds an
    allocated copy and compares the optimizer states. A ``world_size`` of None accepts any number of ranks. If
    ``config`` is given, the error names the model settings that differ.
    """
    from torchrl_lightning._core.ranks import state_of_rank
    from torchrl_lightning.agents.base import AgentModule
    from torchrl_lightning.datamodules._run.arguments import check_environment
    from torchrl_lightning.deploy.weights import check_weights

    state = stored.get(type(data).__qualname__)
    try:
        if state is None:
            names = " and ".join(key for key in stored if key.endswith("DataModule")) or "no experience"
            raise ValueError(f"it contains {names}, but this run has data={type(data).__qualname__}.")
        if plays:
            check_environment(data, state)
        else:
            data.check_state(state, model)
        if world_size is not None and "ranks" in state:
            state_of_rank(state["ranks"], 0, world_size)
        if (build_model := module_factory(model, data)) is not None:
            check_weights(build_model, stored, own=True)
            if resumes and isinstance(model, AgentModule) and "optimizer_states" in stored:
                build_model().check_optimizer_states(stored["optimizer_states"])
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{path} does not fit this run: {error}{_describe_changes(path, stored, config)}") from error
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path} contains no state of this package: {type(error).__name__}: {error}.") from error
    finally:
        data.close()


def module_factory(model: Any, data: Any) -> Callable[[], Any] | None:
    """Return a function that builds copies of a model with networks, or None if the model cannot build networks."""
    if LearnerApi.of(model).build is None:
        return None
    specs, options = data.specs, data.build_options
    return lambda: copy.deepcopy(model).build(specs, **copy.deepcopy(options))


def _describe_changes(checkpoint: Path, stored: Mapping[str, Any], config: DictConfig | None) -> str:
    """Return a message with the changed model settings and the overrides of a checkpoint's run."""
    record = read_record(stored, checkpoint)
    if record is None:
        return ""
    current = record.config if config is None else plain(config)
    models = ({"model": settings.get("model", {})} for settings in (record.config, current))
    changed = "".join(f" {key} was {old} and is {now} now." for key, (old, now) in differences(*models).items())
    return f"{changed}\nThe overrides of the checkpoint's run: {' '.join(record.overrides) or 'no overrides'}"


def _check_trust(config: Mapping[str, Any], path: str | Path, *, trusted: bool) -> None:
    from torchrl_lightning._core.trust import check_config

    try:
        check_config(config, where=f"the config in {path}", trusted=trusted)
    except ValueError as error:
        raise UsageError(f"{error}; {TRUST}.") from error


def _replaced_parts(record: Record, command_overrides: Iterable[Override]) -> set[str]:
    """Return the parts of a run that get another class from the command line."""
    stored = dict(targets_in(record.config))
    return {part for part, target in targets_of(command_overrides) if stored.get(part, target) != target}


def _lookup(config: Any, key: str) -> list[Any]:
    """Return a list with the value of a setting in a config; an empty list if the setting is missing."""
    for part in key.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return []
        config = config[part]
    return [config]


def _has_value(value: Any, config: Any, key: str) -> bool:
    """Return True if a setting of a config equals ``value``. A mapping may have additional entries in the config."""
    values = _lookup(config, key)
    if values and isinstance(value, Mapping):
        return all(_has_value(entry, values[0], part) for part, entry in value.items())
    return value in values or str(value) in map(str, values)


def _key(override: Override) -> str:
    return override.get_key_element().lstrip("+~")


def _settings(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changed_values(
    node: DictConfig, stored: Mapping[str, Any], keys: tuple[str, ...] = (), *, interpolated: bool
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the changed settings and their old values: interpolations if ``interpolated``, otherwise plain values."""
    for key, value in stored.items():
        path = (*keys, key)
        child = node._get_node(key, validate_access=False)
        inner = child if isinstance(child, DictConfig) and not child._is_none() and not child._is_missing() else None
        if inner is not None and isinstance(value, Mapping) and not inner._is_interpolation():
            yield from _changed_values(inner, value, path, interpolated=interpolated)
            continue
        text = str(OmegaConf.to_container(child) if OmegaConf.is_config(child) else child)
        if ("${" in text) != interpolated:
            continue
        try:
            is_missing = child is None or OmegaConf.is_missing(node, key)
            if is_missing or plain(OmegaConf.create({"value": node[key]}))["value"] != value:
                yield path, value
        except OmegaConfBaseException:
            continue  # values such as the job's folder exist only in a running job


def _assign(config: DictConfig, keys: Collection[str], value: Any) -> None:
    """Set a value, unless this command has removed the parent, or the parent's class no longer has the setting."""
    *path, last = keys
    with suppress(OmegaConfBaseException, TypeError):
        holder: Any = reduce(getitem, path, config)
        if isinstance(holder, DictConfig):
            with open_dict(holder):
                holder[last] = value
