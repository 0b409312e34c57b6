"""Wrap the API differences between Hydra 1.3 and 1.4; each function imports Hydra on use."""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import Any

config_dir: ContextVar[str | None] = ContextVar("config_dir", default=None)
"""The folder of ``--config-dir``, while Hydra is initialized for one of our commands."""

# Hydra blocks functions that delete or move files or end the process; a whitelist would override this blocklist.
_BLOCKED_MODULES = {"os", "posix", "nt", "shutil", "_sitebuiltins"}
_OUR_CALLBACKS = r"hydra\.utils\.instantiate\(\) resolved _target_='torchrl_lightning\.cli\."
_LOOKUP_FUNCTIONS = {f"hydra.utils.get_{kind}" for kind in ("class", "method", "object", "static_method")}


def hydra_main(config_path: str, config_name: str) -> Callable[[Callable[[Any], Any]], Callable[[], Any]]:
    """Return Hydra's decorator for a task function."""
    import hydra

    version_base: dict[str, Any] = {} if _has_whitelist() else {"version_base": "1.3"}
    return hydra.main(config_path=config_path, config_name=config_name, **version_base)


def options_parser() -> ArgumentParser:
    """Return a parser for Hydra's command-line options."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("overrides", nargs="*")
    for option in ("help,h", "hydra-help", "version", "resolve", "run,r", "multirun,m", "shell-completion,sc"):
        parser.add_argument(*_flags(option), action="store_true")
    for option in ("package,p", "config-path,cp", "config-name,cn", "config-dir,cd", "experimental-rerun"):
        parser.add_argument(*_flags(option))
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", const="all", nargs="?")
    return parser


def _flags(option: str) -> list[str]:
    return [f"{dashes}{name}" for dashes, name in zip(("--", "-"), option.split(","), strict=False)]


@contextmanager
def initialized(config_path: str, name: str, extra_folder: str | None = None) -> Iterator[Any]:
    """Initialize Hydra for a command, and yield the Hydra object.

    Args:
        config_path: The folder of the configs.
        name: The name of the job.
        extra_folder: A second config folder, after ``config_path`` on the search path.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    version_base: dict[str, Any] = {} if _has_whitelist() else {"version_base": "1.3"}
    if _has_whitelist():  # Hydra 1.4 warns without a whitelist, but a whitelist would block the callbacks of users
        warnings.filterwarnings("ignore", _OUR_CALLBACKS)
    token = config_dir.set(None if extra_folder is None else os.path.abspath(extra_folder))
    try:
        hydra = initialize_config_dir(os.path.abspath(config_path), name, **version_base)
    finally:
        config_dir.reset(token)
    with hydra:
        yield GlobalHydra.instance().hydra


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Register the resolver of an interpolation ``${name:}``; replace an earlier resolver."""
    from omegaconf import OmegaConf

    # OmegaConf 2.4 has ``register_resolver``; older versions use this name for a different function.
    version_base: Any = OmegaConf.register_resolver if _has_whitelist() else OmegaConf.register_new_resolver
    version_base(name, resolver, replace=True)


def instantiate(config: Any, **arguments: Any) -> Any:
    """Build the object of an already validated config; names on Hydra's blocklist stay blocked.

    Args:
        config: A config node, or plain dicts and lists.
        arguments: Further arguments, passed without validation.

    Examples:
        >>> instantiate({"_target_": "fractions.Fraction", "numerator": 3})
        Fraction(3, 1)
    """
    import hydra.utils
    from omegaconf import OmegaConf

    if _has_whitelist():
        plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
        arguments["_execution_whitelist_"] = sorted(
            {entry for name in _names_in(plain) for entry in _whitelist_entries(name)}
        )
    return hydra.utils.instantiate(config, **arguments)


def _has_whitelist() -> bool:
    import hydra.utils

    return hasattr(hydra.utils, "execution_whitelist")


def _names_in(node: Any) -> Iterator[str]:
    """Yield the names in a config that Hydra calls or looks up."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        names = [target, *((node.get("path"), *node.get("_args_", ())) if target in _LOOKUP_FUNCTIONS else ())]
        yield from (name for name in names if isinstance(name, str))
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    for value in children:
        yield from _names_in(value)


def _whitelist_entries(name: str) -> Iterator[str]:
    """Yield the whitelist entries that Hydra checks for a name: the name, its definition and nested functions."""
    try:
        definition = resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        definition = None  # Hydra reports the same error
    module, qualname = getattr(definition, "__module__", None), getattr(definition, "__qualname__", None)
    if module not in _BLOCKED_MODULES:
        yield name
        if qualname is not None:
            yield from (f"{module}.{qualname}", f"{module}.{qualname}.<locals>.*")
