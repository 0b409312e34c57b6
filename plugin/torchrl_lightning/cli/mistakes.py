"""Say in one line what is wrong with a command that Hydra cannot compose or begin, and what was meant."""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, InstantiationException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from torchrl_lightning._conf import CONF_DIR, EXPORT_DIR
from torchrl_lightning._hydra import options_parser
from torchrl_lightning.cli.checks import SWEPT, UsageError, chosen_groups, one_line, plain_errors
from torchrl_lightning.suggestions import did_you_mean, nearest

_KINDS = {"Float": "a number", "Integer": "a whole number", "Boolean": "true or false"}


def reported(step: Callable[[], Any]) -> Any:
    """Take a step, and end the program with one line if Hydra cannot compose or begin a user's config."""
    with one_line():
        try:
            return step()
        except InstantiationException:  # a fault of the task, which names the mistakes in its own config
            raise
        except HydraException as error:
            raise UsageError(f"{_run_of(error)}{explained(error, sys.argv[1:])}") from error
        except YAMLError as error:
            raise UsageError(" ".join(str(error).split())) from error
        except (OSError, ValueError) as error:
            task = plain_errors.__name__.replace("errors", "task")
            frames = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
            if task in frames or error.__cause__ is not None:  # in this process, or in another one of a sweep
                raise
            if isinstance(error, OSError) and error.filename is not None:
                raise UsageError(
                    f"the folder of the run cannot be made: {error.filename}: {error.strerror}; name another one, as "
                    "paths.log_dir=FOLDER or hydra.run.dir=FOLDER."
                ) from error
            is_null = "Config group override must be a string or a list" in str(error)
            said = _null_choice(sys.argv[1:]) if is_null else ""
            raise UsageError(said or " ".join(str(error).split())) from error


def _run_of(error: HydraException) -> str:
    """Return the words that name the run of a sweep in which an error occurred; "" outside of a sweep."""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(SWEPT) and note != SWEPT)
    return next((f"{note}: " for note in notes), "")


def options_first(arguments: Sequence[str]) -> list[str]:
    """Return arguments with Hydra's options before all settings: its parser takes no settings behind a second group.

    Examples:
        >>> options_first(["seed=0,1", "--multirun", "data.num_envs=2", "--config-name", "train"])
        ['--multirun', '--config-name', 'train', 'seed=0,1', 'data.num_envs=2']
    """
    known, behind = options_parser().parse_known_args(list(arguments))
    settings = [*known.overrides, *behind]
    left, options = Counter(settings), []
    for argument in arguments:
        if left[argument]:
            left[argument] -= 1
        else:
            options.append(argument)
    return [*options, *settings]


def check_dashes(arguments: Sequence[str]) -> None:
    """Refuse options that Hydra does not have, such as settings that are written as ``--seed 3``."""
    parser = options_parser()
    parser.error = _refuse  # type: ignore[method-assign, assignment]
    unknown = [each for each in parser.parse_known_args(list(arguments))[1] if each.startswith("-")]
    if not unknown:
        return
    first = unknown[0]
    flag, has_value, value = first.partition("=")
    known = re.findall(r"--[\w-]+", parser.format_usage())
    if (meant := nearest(flag, [*known, "--help"])) is not None:
        raise UsageError(f"{first}: there is no such option; did you mean {meant}?")
    place = list(arguments).index(first) + 1
    if not has_value and place < len(arguments) and "=" not in arguments[place]:
        value, first = arguments[place], f"{first} {arguments[place]}"
    raise UsageError(f"{first}: settings have no dashes; say {flag.lstrip('-')}={value or 'VALUE'}.")


def _refuse(message: str) -> None:
    raise UsageError(f"{message}.")


def explained(error: HydraException, arguments: Sequence[str]) -> str:
    """Say in one line what is wrong with a config, for a user who gave these arguments."""
    said, cause = str(error), error.__cause__ or error.__context__
    if not isinstance(cause, OmegaConfBaseException):
        cause = None
    where = re.match(r"In '([\w/]+)': ", said)
    place = "" if where is None or where[1] in ("train", "evaluate", "record") else f"in {where[1]}: "
    if cause is not None and (other := _misplaced_experiment(where, arguments)):
        return other
    if isinstance(error, OverrideParseException):
        return _unparsed(error, arguments)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        place = "" if any(each.startswith((f"{group}=", f"{group}@")) for each in arguments) else place
        return f"{place}{group}={option}: there is no such option{did_you_mean(option, error.options or ())}"
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return place + _unknown(cause, re.search(r"override '([^']+)'", said))
    if (group_there := re.search(r"Could not (override|delete)[^']*'([^']+)'", said)) is not None:
        key = group_there[2]
        sign = "~" if group_there[1] == "delete" else ""
        return f"{place}{sign}{key}: there is no such group or setting{did_you_mean(key, _groups(), sign)}"
    if (several := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", said)) is not None:
        usual = f"{several[1]}: several values are a sweep; say --multirun, or put a list in [...], a text in quotes."
        return _mistake_of_one_run(arguments) or usual
    if cause is not None:
        return place + _wrong_value(cause)
    return " ".join(said.split())


def _mistake_of_one_run(arguments: Sequence[str]) -> str:
    """Say what is wrong with the first run of a sweep; "" where it can be composed."""
    known = options_parser().parse_known_args(list(arguments))[0]
    overrides = OverridesParser.create().parse_overrides(known.overrides)
    first = [f"{each.get_key_element()}={_first_value(each)}" for each in overrides if each.is_sweep_override()]
    first += [str(each.input_line) for each in overrides if not each.is_sweep_override()]
    try:
        compose(known.config_name or "train", first)
    except HydraException as error:
        return explained(error, first)
    return ""


def _first_value(sweep: Override) -> Any:
    value: Any = sweep.value()
    return value.start if sweep.is_interval_sweep() else next(sweep.sweep_string_iterator())


def _null_choice(arguments: Sequence[str]) -> str:
    """Say how the group that arguments set to null, also in a sweep, is left without an option; "" if there is none."""
    groups = _groups()
    values = (argument.lstrip("+").partition("=") for argument in arguments)
    found = (key for key, _, value in values if key in groups and "null" in re.split(r"[,()\s]+", value))
    group = next(found, "")
    return group and f"{group}=null: {_without_option(group)}"


def _without_option(group: str) -> str:
    """Say how a group is left without an option, if it can be."""
    optional = re.findall(r"^  - (\S+): null", (CONF_DIR / "train.yaml").read_text(), re.MULTILINE)
    if group not in optional:
        return "this group needs an option."
    option = next(path.stem for path in sorted((CONF_DIR / group).glob("*.yaml")))
    return f"a group without an option is {group}=[], also in a sweep: '{group}={option},[]'."


def _misplaced_experiment(where: re.Match[str] | None, arguments: Sequence[str]) -> str:
    """Say how to mend it where the default experiment does not fit the chosen groups."""
    failed = None if where is None else re.fullmatch(r"experiment/(\w+)", where[1])
    chosen = chosen_groups(arguments)
    if failed is None or not chosen or "experiment" in chosen:
        return ""
    asked = " ".join(f"{group}={option}" for group, option in chosen.items())
    return (
        f"the default experiment={failed[1]} is still composed in, and sets what {asked} does not have. "
        f"Leave it out: '~experiment' data.total_frames=N{_fitting_experiments(chosen)}."
    )


def _fitting_experiments(chosen: Mapping[str, str]) -> str:
    wanted = {f"  - override /{group}: {option}" for group, option in chosen.items()}
    paths = sorted(CONF_DIR.glob("experiment/*.yaml"))
    fitting = [f"experiment={path.stem}" for path in paths if wanted <= set(path.read_text().splitlines())]
    return f"; or take one that fits: {', '.join(fitting)}" if fitting else ""


def _unparsed(error: OverrideParseException, arguments: Sequence[str]) -> str:
    word = error.override
    if "=" in arguments or word.endswith("="):
        return f"{' '.join(arguments)}: a setting is one word, without spaces, as {arguments[0].rstrip('=')}=VALUE."
    if "=" not in word:
        setting = f"ckpt_path={word}" if word.endswith(".ckpt") or Path(word).is_file() else f"{word}=VALUE"
        return f"{word}: a setting has a name and a value; say {setting}."
    return f"{word}: {error.message.splitlines()[0]}; put the value in quotes, as '{word.partition('=')[0]}=\"VALUE\"'."


def _unknown(cause: OmegaConfBaseException, asked: re.Match[str] | None) -> str:
    """Say of a setting that is not there which one was meant: one beside it, or one of its name elsewhere."""
    path: str = cause.full_key if asked is None else asked[1]  # type: ignore[assignment]
    if "/" in path:
        return f"{path}: there is no such group{did_you_mean(path, _groups())}"
    node: Any = cause.parent_node
    key = str(cause.key)
    before, _, behind = path.partition(key)
    fields: Any = OmegaConf.to_container(node) if isinstance(node, DictConfig) else {}
    names = [str(name) for name in fields if not str(name).startswith("_")] + ([] if before else _groups())
    owner = str(fields.get("_target_") or before.rstrip(".")).rpartition(".")[2]
    lacks = f"{owner} has no such setting" if owner else "there is no such setting"
    if node is not None and (key in names or nearest(key, names) is None):
        every = list(_paths(node._get_root()))
        last = path.rpartition(".")[2]
        elsewhere = [found for found in every if found.endswith(f".{path}")]
        if elsewhere := elsewhere or [found for found in every if found.rpartition(".")[2] == last]:
            return f"{path}: {lacks}; did you mean {' or '.join(elsewhere[:3])}?"
    meant = did_you_mean(key, names, before)
    return f"{path}: {lacks}{meant.replace('?', f'{behind}?') if behind else meant}"


def _wrong_value(cause: OmegaConfBaseException) -> str:
    text = str(cause).splitlines()[0]
    key = str(cause.full_key)
    value = re.search(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text)
    if value is not None:
        return f"{key}={value[1]}: expected {_KINDS.get(value[2], value[2])}, got {value[1]!r}."
    over_recipe = re.search(r"not a subclass of EnvironmentRecipeSchema\. value: (\S+)", text)
    if over_recipe is not None:
        return (
            f"data.env is a recipe here, as env=recipe has it, not {over_recipe[1]}. Say "
            f"`data: {{env: {{id: {over_recipe[1]}}}}}`, or choose a group without a recipe, such as env=cartpole."
        )
    if (value := re.match(r"Value '(.*)' is not a valid bool", text)) is not None:
        return f"{key}={value[1]}: expected true or false, got {value[1]!r}."
    if "does not support deletion" in text:
        return f"~{key}: a part cannot be removed; take {key}=null for the default, or {key}={{_target_: CLASS}}."
    if "is not a ListConfig" in text:
        return f"{key}: expected a list, as {key}=[VALUE]."
    if "Cannot merge DictConfig" in text:
        return f"{key}: expected settings with names, not a list; choose them as {key.replace('.', '/')}=NAME."
    if "is not Optional" in text:
        return f"{key}=null: it needs a value."
    return f"{key}: {text}"


def _groups() -> list[str]:
    """Return the groups of configs that a command line may choose from."""
    folders = {path.parent for path in CONF_DIR.glob("**/*.yaml")}
    return sorted(str(each.relative_to(CONF_DIR)) for each in folders - {CONF_DIR} if EXPORT_DIR not in each.parents)


def _paths(node: Any, before: str = "") -> Iterator[str]:
    """Yield the settings of a config but Hydra's own, each with its path."""
    items: Any = node.items_ex(resolve=False) if isinstance(node, DictConfig) else ()
    for name, child in items:
        if isinstance(child, DictConfig) and name != "hydra":
            yield from _paths(child, f"{before}{name}.")
        elif name != "hydra":
            yield f"{before}{name}"
