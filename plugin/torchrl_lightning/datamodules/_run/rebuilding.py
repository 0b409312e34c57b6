"""Pickle DataModules, and rebuild them from a checkpoint with the plain settings of the run."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Self, cast

import lightning as L
import numpy as np
from omegaconf import OmegaConf

from torchrl_lightning._core.checksums import verify_checksums
from torchrl_lightning._core.launchers import MainProcessState
from torchrl_lightning._core.mixins import PickleByValueMixin
from torchrl_lightning._core.plain_yaml import read_config
from torchrl_lightning._core.ranks import state_of_rank
from torchrl_lightning._core.state import Attribute, Stateful
from torchrl_lightning._core.suggestions import did_you_mean
from torchrl_lightning._core.trust import LARGEST, check_config
from torchrl_lightning.callbacks.checkpoint_io import read_within_limits
from torchrl_lightning.datamodules._run.arguments import check_fingerprint

UNSTORED_ARGUMENTS = "to_give"
"""State key for the names of arguments that are not in the stored settings."""
_NOT_PLAIN: Any = object()


class RunState(Stateful):
    """The state of a rank: the attributes of a DataModule that its class lists in ``RUN_STATE``."""

    OWNER = "run"

    def __init__(self, data: Any) -> None:
        self.data = data

    def _entries(self) -> list[tuple[str, Attribute, str]]:
        return [(name, entry, f"data.{entry.attribute or name}") for name, entry in self.data.RUN_STATE.items()]


class RebuildableDataModule(PickleByValueMixin, MainProcessState):
    """Store the plain arguments of a DataModule in ``hparams``, and rebuild a DataModule from them.

    Plain values are numbers, strings, booleans, None, and lists and dicts of these. ``hparams`` contains the arguments
    that the user passed, also to the constructor of a subclass. Checkpoints store ``hparams``, and only
    :meth:`load_from_checkpoint` reads them.
    """

    NOT_IN_FILES: ClassVar[tuple[str, ...]] = ("env", "eval_env")
    """Arguments that are never read from a checkpoint, because they may name modules and folders."""

    _arguments: dict[str, Any] | None = None
    """The arguments of the outermost constructor; None after they are stored in ``hparams``."""
    _is_set_up = False
    _pending_state: dict[str, Any] | None = None
    """A loaded state that ``setup`` restores."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _record_arguments(cls.__init__)  # type: ignore[method-assign]

    def _store_settings(self) -> None:
        """Fill ``hparams`` from the outermost constructor's arguments, and record the names of arguments not stored."""
        arguments, self._arguments = self._arguments or {}, None
        parameters = inspect.signature(type(self).__init__).parameters
        hparams = {name: _to_plain(value) for name, value in arguments.items() if name not in self.NOT_IN_FILES}
        hparams = {name: value for name, value in hparams.items() if value is not _NOT_PLAIN}
        self._unstored_arguments = [
            name
            for name, value in arguments.items()
            if name not in hparams and (name not in parameters or value is not parameters[name].default)
        ]
        # Pass the outermost frame: from a constructor's frame, Lightning would also collect the arguments.
        *_, frame = _outer_frames()
        cast(L.LightningDataModule, self).save_hyperparameters(hparams, logger=False, frame=frame)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | os.PathLike[str] | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build a DataModule with the settings of a checkpoint, to continue its run.

        ``setup("fit")`` builds environment and buffer and restores the state.

        Args:
            checkpoint_path: the checkpoint: a path, a URL, or an open file.
            map_location: device of loaded tensors; the CPU if None.
            hparams_file: a YAML file with settings that replace the settings of the checkpoint.
            weights_only: load only tensors and plain values; True if None.
            kwargs: the run's arguments that checkpoints do not store: environments, classes, functions, folders and
                data sets. Any other argument replaces a setting of the checkpoint.

        Raises:
            TypeError: An argument is missing or unknown.
            ValueError: The checkpoint is from another DataModule or environment, its settings are not plain, or
                ``hparams_file`` is not a YAML mapping of plain values or exceeds a limit.
            OSError: The file does not exist or is not a regular file.
        """
        parameters = inspect.signature(cls.__init__).parameters
        accepts_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in kwargs:
            if name not in parameters and not accepts_any:
                raise TypeError(f"{cls.__name__} has no setting {name!r}{did_you_mean(name, parameters)}")
        is_path = isinstance(checkpoint_path, str | os.PathLike)
        source = os.fspath(checkpoint_path) if is_path else checkpoint_path
        checkpoint = read_within_limits(source, map_location or "cpu", weights_only is not False)
        verify_checksums(checkpoint, str(checkpoint_path))
        state = checkpoint.get(cls.__qualname__)
        if not isinstance(state, dict):
            raise ValueError(
                f"{checkpoint_path} must contain the state of a {cls.__qualname__}, got none. Pass the checkpoint of a "
                "run with this DataModule."
            )
        stored = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})  # type: ignore[attr-defined]
        if hparams_file is not None:
            stored = OmegaConf.to_container(read_config(os.fspath(hparams_file)))
        settings = {
            name: value
            for name, value in stored.items()
            if name not in kwargs and name not in cls.NOT_IN_FILES and (name in parameters or accepts_any)
        }
        check_config(settings, where=f"the settings in {checkpoint_path}")
        required = [
            name
            for name, parameter in list(parameters.items())[1:]
            if parameter.default is parameter.empty and _accepts_keyword(parameter)
        ]
        unstored = [name for name in state.get(UNSTORED_ARGUMENTS, ()) if name in parameters or accepts_any]
        if missing := [name for name in dict.fromkeys([*required, *unstored]) if name not in {*settings, *kwargs}]:
            raise TypeError(
                f"{cls.__name__}.load_from_checkpoint needs {', '.join(f'{name}=' for name in missing)}: checkpoints "
                "do not store environments, classes, functions, folders and data sets. Pass the arguments of the run."
            )
        loaded = cls(**settings, **kwargs)
        cast(L.LightningDataModule, loaded).load_state_dict(state)
        return loaded

    def _defer_state(self, state: dict[str, Any], fingerprint: Mapping[str, Any]) -> None:
        """Restore counters and statistics; keep the state until ``setup``, when learner, buffer and ranks are known.

        Args:
            state: The state of a run with the same fingerprint.
            fingerprint: The known part of this run's fingerprint.
        """
        check_fingerprint({name: state["fingerprint"].get(name) for name in fingerprint}, fingerprint)
        rank_state = state_of_rank(state["ranks"][:1], 0, 1)
        data = cast(Any, self)
        run_state = data._run_state.validate_state(rank_state)
        for load, statistics in data._statistics_loaders(state):
            copy.deepcopy(load)(statistics)  # errors occur in the copy, before anything changes
        data.load_statistics(state)
        data._run_state.apply_state(run_state)
        data._environments.restore_clipping(state.get("specs", {}), evaluates=False)
        vars(data)["seed"] = state.get("seed") if data.seed is None else data.seed
        self._pending_state = state

    def _restore_pending_state(self) -> None:
        """Restore the state that was loaded before ``setup``, if there is one."""
        state, self._pending_state = self._pending_state, None
        if state is not None:
            cast(L.LightningDataModule, self).load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # A copy does not have a trainer, like copies of Lightning's modules.
        return {**vars(self), "trainer": None, "_learner_api_cache": None}

    def _user_values(self) -> dict[str, Any]:
        attributes = vars(self)
        values = {name: attributes[name] for name in self.NOT_IN_FILES if name in attributes}
        return {name: value for name, value in values.items() if _to_plain(value) is _NOT_PLAIN} | {
            **super()._user_values()
        }


def _record_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it first records its arguments by name, if no subclass's constructor has done so."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._arguments is None:
            self._arguments = _bind_arguments(init, self, args, kwargs)
        init(self, *args, **kwargs)
        self._is_constructed = True  # later assignments are checked

    return __init__


def _bind_arguments(
    init: Callable[..., None], part: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments by name, with defaults; an empty dict if the constructor does not accept them."""
    signature = inspect.signature(init)
    try:
        bound = signature.bind(part, *args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return named


def _accepts_keyword(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _outer_frames() -> Iterator[Any]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _to_plain(value: Any) -> Any:
    """Convert a value to plain numbers, strings, booleans, None, lists and dicts; ``_NOT_PLAIN`` if impossible."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or type(value) in (bool, float, str):
        return value
    if isinstance(value, int) and not isinstance(value, Enum):
        return int(value) if abs(value) < LARGEST else _NOT_PLAIN
    if isinstance(value, float | str) and not isinstance(value, Enum):
        return float(value) if isinstance(value, float) else str(value)
    if isinstance(value, Mapping):
        items: Any = {key: _to_plain(item) for key, item in value.items()}
        is_plain = all(type(key) is str and not key.startswith("_") for key in items)
        return items if is_plain and _NOT_PLAIN not in items.values() else _NOT_PLAIN
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview | str):
        items = [_to_plain(item) for item in value]
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return _NOT_PLAIN
