"""Let an argument of a DataModule take effect when it is assigned later, or refuse the assignment."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any, ClassVar, cast

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from torchrl_lightning._core.settings import Settings
from torchrl_lightning._core.state import any_value
from torchrl_lightning._core.validators import Check, Checked


class Until(Enum):
    """The time until which an argument may be assigned; the value completes the error message."""

    CONSTRUCTION = "be passed to the constructor, because the parts of the run are built with it"
    FIRST_FIT = "be assigned before the first fit, because the generators of the run are seeded with it"
    FIT = "be assigned before or after a fit, because the length of an epoch is fixed during a fit"
    ALWAYS = ""


# All other arguments of our DataModules must be passed to the constructor.
ASSIGNABLE = {
    "batch_size": Until.ALWAYS,
    "checkpoint_buffer": Until.FIT,
    "eval_episodes": Until.ALWAYS,
    "eval_mode": Until.ALWAYS,
    "eval_num_envs": Until.ALWAYS,
    "max_epochs_per_fit": Until.ALWAYS,
    "num_epochs": Until.FIT,
    "seed": Until.FIRST_FIT,
    "shuffle": Until.ALWAYS,
    "total_frames": Until.ALWAYS,
    "updates_per_epoch": Until.FIT,
    "warmup_frames": Until.ALWAYS,
}
_PACKAGE = __name__.rpartition("._run.")[0]


class Assigned(Checked):
    """An argument that is validated, stored and recorded in ``hparams`` if it is assigned after the constructor.

    Args:
        check: The check of the argument.
        name: The name of the argument.
        until: The time until which it may be assigned; None if the class does not have this argument.
    """

    def __init__(self, check: Check | str, name: str, until: Until | None) -> None:
        super().__init__(check, name)
        self._until = until

    def __set__(self, instance: Any, value: Any) -> None:
        if not instance._is_constructed:
            super().__set__(instance, value)
            return
        check_assignment(instance, self._setting, self._until, value)
        earlier = vars(instance).get(self._name)
        super().__set__(instance, value)
        try:
            instance._check_settings()
        except ValueError:
            vars(instance)[self._name] = earlier
            raise
        if self._setting in instance.hparams:
            instance.hparams[self._setting] = vars(instance)[self._name]


def check_assignment(data: Any, name: str, until: Until | None, value: Any) -> None:
    """Validate that an argument may still be assigned, and not to None; raise ValueError with the remedy if not."""
    kind = type(data).__name__
    text = repr(value) if isinstance(value, bool | int | float | str) else f"an object of {type(value).__name__}"
    if until is None:
        raise ValueError(f"{name} must be left out, got {text}. {kind} does not have this argument.")
    is_late = {
        Until.CONSTRUCTION: True,
        Until.FIRST_FIT: data._is_set_up,
        Until.FIT: data.trainer is not None and _is_fitting(data.trainer),
        Until.ALWAYS: False,
    }
    if is_late[until]:
        remedy = "Assign it then" if until is Until.FIT else f"Build a new {kind}"
        raise ValueError(f"{name} must {until.value}, got {text} later. {remedy}.")
    if value is None:
        raise ValueError(f"{name} must not be None after the constructor, which computes the default. Assign a value.")


def _is_fitting(trainer: L.Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


class LateAssignments:
    """Base of DataModules that check assignments to their arguments after the constructor."""

    _is_constructed = False
    _times: ClassVar[dict[str, Until]] = {}

    def _check_settings(self) -> None:
        """Validate settings against each other; raise ValueError if one has no effect."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        settings = cast(type[Settings], cls).settings_of_class
        if cls.__module__.startswith(_PACKAGE):
            cls._times = {**{name: ASSIGNABLE.get(name, Until.CONSTRUCTION) for name in settings}, **cls._times}
        for name, until in cls._times.items():
            if name in settings:
                for attribute in {name, settings[name].attribute or name}:
                    _check_later(cls, attribute, name, until)
            else:
                _check_later(cls, name, name, None)


def _check_later(cls: type, attribute: str, name: str, until: Until | None) -> None:
    """Add a check to an attribute of a class, unless a user's subclass defines this attribute in another way."""
    existing = inspect.getattr_static(cls, attribute, None)
    if isinstance(existing, property):
        if existing.fset is None:
            setter = lambda data, value: check_assignment(data, name, until, value)  # noqa: E731
            setattr(cls, attribute, existing.setter(setter))
    elif existing is None or isinstance(existing, Checked):
        check = any_value if existing is None else existing._check
        Assigned(check, name, until).add_to(cls, attribute)
