"""Report user errors in one line.

For an error of Hydra or OmegaConf, the line contains the relevant line of the message, the nearest name, and a hint.

:func:`run_hydra` wraps the composition of a config and the start of Hydra. :func:`exit_with_one_line` wraps each task
and all other commands. During a run, :func:`run_errors` reports a full disk, a deleted folder, and a checkpoint that
cannot be restored.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.processes import resource_error
from torchrl_lightning._core.suggestions import closest_name, did_you_mean
from torchrl_lightning._core.untrusted import MESSAGE_LIMIT, printable
from torchrl_lightning._hydra.compat import options_parser
from torchrl_lightning._hydra.paths import BASE_DIR, CONF_DIR, EXPORT_DIR

SWEEP_NOTE = "in the run "  # prefix of the note that is added to an error in one run of a sweep
# Hints for patterns in messages of Hydra or OmegaConf. KEY is replaced by the setting.
GLOBAL_HINT = "write '# @package _global_' in the first line of the file, so that its settings are those of the run"
_HINTS = {
    r"@(experiment|debug|hparams_search)\.": GLOBAL_HINT,
    "value for argument|Sweep parameters": "several values need --multirun; write a list as [...], and a string in "
    "quotes",
    "^(data|model|paths|trainer): .*group override must be": "a run needs it; select an option of the group",
    "group override must be": "select an option of the group, or use KEY=[] to select none",
    "subclass of EnvironmentRecipeSchema": "set data.env: {id: NAME}, or select another group, such as env=cartpole",
    "is not a ListConfig": "use KEY=[VALUE]",
    "Cannot merge DictConfig": "expected named settings; select them by their group with GROUP=NAME",
    "does not support deletion": "use KEY=null for the default, or KEY={_target_: CLASS}",
    "converted to Integer": "give a whole number",
    "converted to Float": "give a number",
    "not a valid bool": "use true or false",
    "is not Optional": "KEY needs a value",
    "The value of": "use ~KEY, without a value, to remove it",
}
_SYNTAX_HINT = (
    "write a setting as one word, such as ckpt_path=FILE, and special characters in quotes, as in 'NAME=\"VALUE\"'"
)
_NULL_CHOICE = re.compile(
    r"while evaluating '(choice|shuffle|sort)\((.*)\)': mismatch type argument args\[\d+\]: NoneType", re.DOTALL
)
_DEFAULT_HINT = "is the default: remove it with '~experiment' data.total_frames=N, or select another one"


class UsageError(UserError):
    """A mistake in the command, its config or its checkpoint."""


def one_line_errors(task: Callable[[Any], float]) -> Callable[[Any], float]:
    """Wrap a task so that user errors end the program with one line."""

    @wraps(task)
    def one_line_task(cfg: Any) -> float:
        with exit_with_one_line():
            return task(cfg)

    return one_line_task


def run_hydra(function: Callable[[], Any]) -> Any:
    """Call a function, and end the program with one line if Hydra cannot compose or start a user's config."""
    from hydra.errors import HydraException, InstantiationException
    from yaml import YAMLError

    with exit_with_one_line():
        try:
            return function()
        except (UserError, InstantiationException):  # the task reports these errors
            raise
        except HydraException as error:
            raise UsageError(format_hydra_error(error, sys.argv[1:])) from error
        except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            frames = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
            if "one_line_task" in frames or error.__cause__ is not None:  # an error of the task
                raise
            raise UsageError(format_hydra_error(error, sys.argv[1:])) from error


def _launched_rank() -> str:
    """Return a prefix for the errors of a rank that another rank of its machine has started; empty for others."""
    rank, node = (os.environ.get(name) or "0" for name in ("LOCAL_RANK", "NODE_RANK"))
    return "" if rank == "0" else f"rank {rank}: " if node == "0" else f"rank {rank} of node {node}: "


@contextmanager
def exit_with_one_line() -> Iterator[None]:
    """End the program with one line on stderr, without a traceback, on a user error or Ctrl-C."""
    try:
        yield
    except (UserError, OSError, RuntimeError) as error:
        message = str(error) if isinstance(error, UserError) else resource_error(error) or storage_error(error)
        if message is None or shows_tracebacks():
            raise
        sys.exit(f"error: {_launched_rank()}{plain_message(message)}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)  # the shell's exit status for SIGINT
    except SystemExit as end:
        if type(end).__name__ != "SIGTERMException":  # compare by name to avoid importing Lightning
            raise
        print("terminated", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)


def shows_tracebacks() -> bool:
    """Return True if the user has set HYDRA_FULL_ERROR=1."""
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


def plain_message(text: str) -> str:
    """Shorten an error message to at most two lines, and remove control characters, which may come from files."""
    first, _, others = text.partition("\n")
    lines = [printable(first, MESSAGE_LIMIT), printable(" ".join(others.split()), MESSAGE_LIMIT)]
    return "\n".join(line for line in lines if line)


def read_options(arguments: Sequence[str]) -> Namespace:
    """Return Hydra's options of a command line, and its settings as ``overrides``. Options and settings can be mixed.

    Examples:
        >>> read_options(["seed=0,1", "--multirun", "data.num_envs=2", "--config-name", "train"]).overrides
        ['seed=0,1', 'data.num_envs=2']
    """

    def raise_usage_error(message: str) -> None:
        raise UsageError(f"{message}.")

    parser = options_parser()
    parser.error = raise_usage_error  # type: ignore[method-assign, assignment]
    options, others = parser.parse_known_intermixed_args(arguments)
    for unknown in (argument for argument in others if argument.startswith("-")):
        flag, _, value = unknown.partition("=")
        suggestion = closest_name(flag, re.findall(r"--[\w-]+", parser.format_usage()))
        hint = f"settings have no dashes: {flag.lstrip('-')}={value or 'VALUE'}."
        if suggestion:
            hint = f"did you mean {suggestion}?"
        raise UsageError(f"{unknown}: unknown option; {hint}")
    return options


def format_hydra_error(error: Exception, arguments: Sequence[str]) -> str:
    """Return the line that identifies an error, with a hint.

    Args:
        error: The error of Hydra, OmegaConf or the system.
        arguments: The arguments of the command.
    """
    from hydra.errors import MissingConfigException

    location = re.match(r"In '([\w/]+)':\s*", str(error))
    file = location[1] if location is not None and "/" in location[1] else ""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, option = error.missing_cfg_file.rpartition("/")
        line = f"{group or '--config-name'}={option}: unknown option"
        hint = did_you_mean(option, error.options or ())
        if hint == "." and group:
            hint = f"; --config-dir=FOLDER adds your own FOLDER/{group}/{option}.yaml."
        file = "" if any(re.match(rf"{group}[=@]", argument) for argument in arguments) else file
    elif isinstance(error, OSError) and error.filename is not None:
        line = f"the run folder cannot be created: {error.filename}: {error.strerror}"
        hint = "; set another one with paths.log_dir=FOLDER or hydra.run.dir=FOLDER."
    else:
        line, hint = _line_and_hint(error, str(error)[location.end() if location is not None else 0 :], arguments)
        if file.startswith("experiment/") and not any("experiment" in argument for argument in arguments):
            hint = f"; {file.replace('/', '=')} {_DEFAULT_HINT}."
    run_notes = [
        f"{note}: " for note in vars(error).get("__notes__", ()) if note.startswith(SWEEP_NOTE) and note != SWEEP_NOTE
    ]
    return f"{''.join(run_notes)}{f'in {file}: ' if file else ''}{line.rstrip('.')}{hint}"


def _line_and_hint(error: Exception, text: str, arguments: Sequence[str]) -> tuple[str, str]:
    """Return the line of an error that names the setting, and a hint."""
    from hydra.errors import OverrideParseException
    from yaml import YAMLError

    if (choice := _NULL_CHOICE.search(text)) is not None:
        function, values = choice.groups()
        key = str(getattr(error, "override", None) or "NAME").partition("=")[0]
        values = values if re.search("[\"']", values) else re.sub(r"\s*,\s*", ",", values)
        return f"{key}: {function}() does not accept null", f"; write the values without it: {key}={values}."
    if isinstance(error, OverrideParseException | YAMLError):
        line = " ".join(text.split()).partition(" See https://")[0]
        if isinstance(error, YAMLError):
            return line, "."
        is_call = "while evaluating" in line and "Unknown function" not in line  # quotes would not help
        remedy = "correct the arguments of the function" if is_call else _SYNTAX_HINT
        return line if error.override in line else f"{error.override}: {line}", f"; {remedy}."
    causes = (error, error.__cause__, error.__context__)
    cause = next((candidate for candidate in causes if isinstance(candidate, OmegaConfBaseException)), None)
    line = str(text if cause is None else cause).strip().partition("\n")[0]
    groups = _config_groups()
    quoted_key = re.search(r"(?:Could not (?:override|delete)|argument|parameters)[^']*'([^']+)'", text)
    if quoted_key is not None:
        key = quoted_key[1]
    elif cause is not None:
        key = str(cause.full_key or "")
    else:
        words = (argument.lstrip("+").partition("=") for argument in arguments)
        key = next((name for name, _, value in words if name in groups and "null" in value), "")
    if (missing_key := re.match(r"Key '([^']+)' (?:is )?not in", line)) is not None:
        if missing_key[1] not in key.split("."):  # the error is in an entry of the setting
            key = f"{key}.{missing_key[1]}"
        line = f"{key}: unknown {'group' if '/' in key else 'setting'}"
    line = line if key in line else f"{key}: {line}"
    hints = (hint.replace("KEY", key or "NAME") for part, hint in _HINTS.items() if re.search(part, line))
    if (hint := next(hints, None)) is not None:
        return line, f"; {hint}."
    if quoted_key is not None or isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return line, _did_you_mean(key, cause, groups)
    return line, "."


def _did_you_mean(key: str, cause: OmegaConfBaseException | None, groups: list[str]) -> str:
    """Return a hint for an unknown setting or group.

    The hint contains the nearest name, settings with the same last name, or the settings of the same part.
    """
    parent: Any = None if cause is None or "/" in key else cause.parent_node
    settings = [] if parent is None else list(_setting_names(OmegaConf.to_container(parent._get_root())))
    names = [*settings, *groups]
    if key in names:  # the setting exists, but the command uses it incorrectly
        return "."
    if closest_name(key, names, 0.8) is None and settings:
        if same_name := [name for name in settings if name.rpartition(".")[2] == key.rpartition(".")[2]]:
            return f"; did you mean {' or '.join(same_name[:3])}?"
        names = [str(name) for name in parent if not str(name).startswith("_")]
    return did_you_mean(key, names)


def _config_groups() -> list[str]:
    """Return the config groups that a command line can select."""
    folders = {path.parent for path in CONF_DIR.glob("**/*.yaml")}
    hidden = {CONF_DIR, *EXPORT_DIR.glob("**"), *BASE_DIR.glob("**")}
    return sorted(str(folder.relative_to(CONF_DIR)) for folder in folders - hidden)


def _setting_names(node: object, prefix: str = "") -> Iterator[str]:
    """Yield the full path of each setting in a config."""
    if not isinstance(node, dict):
        yield prefix
        return
    for name, child in node.items():
        yield from _setting_names(child, f"{prefix}.{name}" if prefix else str(name))


_OTHER_FOLDER = "set another folder with paths.log_dir=FOLDER"
_REMEDIES = {
    errno.ENOSPC: f"Free space on the disk, or {_OTHER_FOLDER}.",
    errno.EDQUOT: f"Free space within the quota, or {_OTHER_FOLDER}.",
    errno.EFBIG: f"Raise the limit on the size of files (ulimit -f), or {_OTHER_FOLDER}.",
    errno.EROFS: f"The filesystem is read-only. Mount it for writing, or {_OTHER_FOLDER}.",
}
# Errors that can occur when an incompatible state is loaded.
_RESTORE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OSError)


def storage_error(error: BaseException) -> str | None:
    """Return message and remedy if the system cannot write or extend a file; None for other errors.

    Examples:
        >>> print(storage_error(OSError(errno.EFBIG, "File too large", "last.ckpt")))
        File too large: 'last.ckpt'. Raise the limit on the size of files (ulimit -f), or set another folder with \
paths.log_dir=FOLDER.
    """
    remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    if not isinstance(error, OSError) or remedy is None:
        return None
    message = str(error).removeprefix(f"[Errno {error.errno}] ").rstrip(".")
    return f"{' '.join(message.split())}. {remedy}"


@contextmanager
def run_errors(folder: Path, checkpoint: Any) -> Iterator[None]:
    """Raise UserError if the files of a run fail during the run.

    Args:
        folder: The folder of the run.
        checkpoint: The checkpoint that the run resumes, or None.
    """
    try:
        yield
    except UserError:
        raise
    except _RESTORE_ERRORS as error:
        if isinstance(error, OSError):
            _check_folder(folder, error)
        if checkpoint is not None and storage_error(error) is None and _is_restoring(error):
            message = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
            raise UserError(
                f"{checkpoint} cannot be resumed: {message.rstrip('.')}. Choose another checkpoint, or start a new run "
                f"from its weights with init_from={checkpoint}."
            ) from error
        raise


def _check_folder(folder: Path, error: OSError) -> None:
    """Raise UserError if the run's folder was deleted or became inaccessible during the run."""
    path = str(error.filename or "")
    if not (folder / ".hydra").is_dir() and (path.startswith(str(folder)) or error.errno == errno.ENOENT):
        raise UserError(
            f"the run folder {folder} was deleted or moved during the run ({path}). Start the run again, and keep its "
            "folder until the end."
        ) from error
    if error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE) and path.startswith(str(folder)):
        raise UserError(
            f"{path} cannot be written or read ({error.strerror}). Repair the folder or its disk, or {_OTHER_FOLDER}."
        ) from error


def _is_restoring(error: BaseException) -> bool:
    """Return True if the traceback contains a function that restores a state. A collector restores its state late."""
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        code.co_name == "load_state_dict"
        or (code.co_filename.endswith("checkpoint_connector.py") and "restore" in code.co_name)
        for code in frames
    )
