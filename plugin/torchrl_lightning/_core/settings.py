"""Declare settings as class fields with checks, which subclasses inherit and ``help`` and editors display.

attrs and dataclasses do not fit here. OmegaConf turns their instances into configs, so ``hydra.utils.instantiate``
fails if an agent is an argument. LightningCLI's subclass mode rejects attrs classes and dataclasses as bases. The
generated ``__setattr__`` bypasses the registration of modules. attrs stores every field, but some arguments
must only be passed to a base.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

from tensordict.utils import NestedKey

from torchrl_lightning._core.suggestions import did_you_mean
from torchrl_lightning._core.validators import (
    Check,
    Checked,
    boolean,
    check_defaults,
    finite,
    finite_positive,
    fraction,
    integer,
    non_negative,
    one_of,
    optional,
    positive,
    positive_fraction,
)

Positive = Annotated[float, positive]
FinitePositive = Annotated[float, finite_positive]
Finite = Annotated[float, finite]
NonNegative = Annotated[float, non_negative]
Fraction = Annotated[float, fraction]
PositiveFraction = Annotated[float, positive_fraction]
PositiveInt = Annotated[int, integer]
Boolean = Annotated[bool, boolean]

_REQUIRED: Any = inspect.Parameter.empty


def choices(*options: Any) -> Check:
    """Return a check that a setting is one of these options, for use in an annotation."""
    return lambda value, name: one_of(value, name, options)


def default_factory(make: Callable[[], Any]) -> Check:
    """Return a check that replaces None by the result of ``make()``, for use in an annotation."""
    return lambda value, name: make() if value is None else value


@dataclass(frozen=True)
class Setting:
    """A setting of a class: its type, default and check, and the attribute that stores it.

    Args:
        default: The default value; ``inspect.Parameter.empty`` for a required argument.
        kw_only: False for a positional argument.
        name: The name of the argument.
        init: False for a computed attribute that is not an argument.
        attribute: The attribute that stores the setting; empty if the setting is only passed to the other bases.
        annotation: The type as written in the class.
        value_type: The evaluated type; ``Any`` if the type uses names that are imported only for type checkers.
        check: Function that takes the value and the name of the setting, and returns the validated value to store.
    """

    default: Any = _REQUIRED
    kw_only: bool = True
    name: str = ""
    init: bool = True
    attribute: str = ""
    annotation: Any = None
    value_type: Any = Any
    check: Check | None = None

    @property
    def parameter(self) -> inspect.Parameter:
        """The constructor parameter."""
        kind = inspect.Parameter.KEYWORD_ONLY if self.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Parameter(self.name, kind, default=self.default, annotation=self.annotation)


def setting(*, default: Any = _REQUIRED, kw_only: bool = True, alias: str = "") -> Any:
    """Declare a setting that needs more than an annotation and a default.

    Args:
        default: The default value; without one the argument is required. :func:`default_factory` builds mutable
            defaults.
        kw_only: False for a positional argument.
        alias: The name of the argument, if a property of that name exposes a private attribute.
    """
    return Setting(default, kw_only, alias)


def computed(*, init: Literal[False] = False) -> Any:
    """Declare a computed attribute, which is not an argument even if a base class has a setting of this name."""
    return Setting(init=init)


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(setting, computed))
class Settings:
    """Base of classes that declare their settings as attributes with a type and a default.

    A setting is passed by name and stored as an attribute. The checks in the annotations run first, so an object never
    has invalid settings. Then ``_init_bases`` passes the settings annotated as ``InitVar`` to the constructor of the
    other bases, without storing these settings. Finally ``__post_init__`` completes the object. The positional settings
    of the bases come before the positional settings of the class, unless the class declares the same settings again. A
    subclass with its own ``__init__`` is built like any other class.

    Raises:
        TypeError: A setting is unknown, or a required setting is missing.
        ValueError: A check rejects a setting.

    Examples:
        >>> class Rate(Settings):
        ...     learning_rate: Positive = 3e-4
        >>> class Clipped(Rate):
        ...     clip_epsilon: Positive | None = None
        >>> inspect.signature(Clipped)
        <Signature (*, clip_epsilon: 'Positive | None' = None, learning_rate: 'Positive' = 0.0003)>
        >>> Clipped(clip_epsilon=0)
        Traceback (most recent call last):
            ...
        ValueError: clip_epsilon must be above 0, got 0.
    """

    settings_of_class: ClassVar[Mapping[str, Setting]] = types.MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        constructor_owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        if issubclass(constructor_owner, Settings) and "settings_of_class" not in vars(constructor_owner):
            return  # the subclass has its own constructor
        declared, computed_names = _declared_settings(cls)
        inherited: dict[str, Setting] = {}
        for base in cls.__bases__:
            for name, setting in getattr(base, "settings_of_class", {}).items():
                if name not in declared and setting.attribute not in computed_names:
                    inherited.setdefault(name, setting)
        positional = {name: setting for name, setting in inherited.items() if not setting.kw_only}
        cls.settings_of_class = {**positional, **declared, **inherited}
        cls.__init__ = _constructor(cls)  # type: ignore[method-assign]

    def _init_bases(self, **arguments: Any) -> None:
        """Call the constructor of the other bases; override this method if a base takes other arguments."""
        super().__init__(**arguments)

    def __post_init__(self) -> None:
        """Complete the object after its settings are stored; call ``super().__post_init__()`` first."""

    @classmethod
    def check_assignments(cls, attribute: str, check: Check | None, name: str) -> None:
        """Validate later assignments to an attribute by a check; None removes a base's check. Messages use ``name``."""
        if check is not None:
            Checked(check, name).add_to(cls, attribute)
        elif isinstance(inspect.getattr_static(cls, attribute, None), Checked):
            Checked(lambda value, _: value).add_to(cls, attribute)

    def require_effect(self, name: str, has_effect: Any, needs: str) -> None:
        """Validate that a setting without effect has its default value; raise ValueError with the remedy if not.

        Args:
            name: The setting. A class without this setting is valid.
            has_effect: Whether this setting has an effect with the values of the other settings.
            needs: The requirement for an effect, for the message.
        """
        setting = self.settings_of_class.get(name)
        if has_effect or setting is None:
            return
        value = vars(self).get(setting.attribute)
        check_defaults(f"without {needs}", f"give {needs}", **{name: (value, setting.default)})


def _declared_settings(cls: type[Settings]) -> tuple[dict[str, Setting], set[str]]:
    """Return the settings that a class declares, and the names of its computed attributes.

    The class attributes of the settings are deleted, because they would hide attributes of a base. Plain settings, such
    as numbers, switches and names, are also validated on later assignments.
    """
    declared: dict[str, Setting] = {}
    computed_names = set[str]()
    for name, annotation in inspect.get_annotations(cls).items():
        value = vars(cls).get(name, _REQUIRED)
        is_private = name.startswith("_") and not isinstance(value, Setting)
        if value is _REQUIRED or is_private or str(annotation).startswith("ClassVar"):
            continue
        setting = value if isinstance(value, Setting) else Setting(value)
        delattr(cls, name)
        if setting.init:
            argument, is_stored = setting.name or name, not str(annotation).startswith("InitVar[")
            annotation = annotation if is_stored else annotation[len("InitVar[") : -1]
            value_type = _resolve_annotation(annotation, cls)
            fields = {
                "name": argument,
                "attribute": name if is_stored else "",
                "annotation": annotation,
                "value_type": value_type,
            }
            declared[argument] = replace(setting, **fields, check=(check := _check_in(value_type)))
            if is_stored and check is not None and _is_plain(value_type) and _is_free(cls, name):
                cls.check_assignments(name, check, argument)
        else:
            computed_names.add(name)
            cls.check_assignments(name, None, name)
    return declared, computed_names


def _constructor(cls: type) -> Callable[..., None]:
    settings: Mapping[str, Setting] = vars(cls)["settings_of_class"]
    ordered = sorted(settings.values(), key=lambda setting: setting.kw_only)
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([self_parameter, *(setting.parameter for setting in ordered)])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in settings]
            if not unknown:
                raise TypeError(f"{cls.__name__}: {error}; its settings are {', '.join(settings)}") from None
            suggestion = did_you_mean(unknown[0], settings)
            raise TypeError(f"{cls.__name__} has no setting {unknown[0]!r}{suggestion}") from None
        bound.apply_defaults()
        values, base_arguments = {}, {}
        for name, setting in settings.items():
            value = bound.arguments[name]
            value = value if setting.check is None else setting.check(value, name)
            if setting.attribute:
                values[setting.attribute] = value
            else:
                base_arguments[name] = value
        self._init_bases(**base_arguments)
        for name, value in values.items():
            setattr(self, name, value)
        self.__post_init__()

    __init__.__doc__ = "Take the settings."
    __init__.__qualname__, __init__.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    __init__.__annotations__ = {name: _accepted_type(setting) for name, setting in settings.items()} | {"return": None}
    vars(__init__)["__signature__"] = signature
    return __init__


def _resolve_annotation(annotation: Any, cls: type) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[cls.__module__]), dict(vars(cls)))
    except NameError:  # the annotation uses a name that is imported only for type checkers
        return Any


def _check_in(annotation: Any) -> Check | None:
    if typing.get_origin(annotation) is Annotated:
        return typing.cast(Check, annotation.__metadata__[0])
    members = typing.get_args(annotation) if _is_union(annotation) else ()
    checks = [check for check in map(_check_in, members) if check is not None]
    if len(checks) != 1:
        return None
    return optional(checks[0]) if type(None) in members else checks[0]


def _accepted_type(setting: Setting) -> Any:
    """Return the type of the values that a setting accepts, including None if None is the default."""
    plain_type = _without_checks(setting.value_type)
    return plain_type | None if setting.default is None else plain_type


_PLAIN_ORIGINS = (Literal, tuple, list, dict, Sequence, Mapping)


def _is_plain(annotation: Any) -> bool:
    """Return whether ``nn.Module`` stores a setting unchanged: a number, switch, name, key, list, dict or None."""
    plain_type = _without_checks(annotation)
    members = typing.get_args(plain_type) if _is_union(plain_type) else (plain_type,)
    simple_types = int, float, bool, str, NestedKey, type(None)
    return all(member in simple_types or typing.get_origin(member) in _PLAIN_ORIGINS for member in members)


def _is_free(cls: type, name: str) -> bool:
    """Return True if the class does not yet have this attribute, or has it only as a :class:`Checked`."""
    existing = inspect.getattr_static(cls, name, None)
    return existing is None or isinstance(existing, Checked)


def _without_checks(annotation: Any) -> Any:
    """Return a type without the checks in it."""
    if typing.get_origin(annotation) is Annotated:
        return annotation.__origin__
    if _is_union(annotation):
        return functools.reduce(operator.or_, map(_without_checks, typing.get_args(annotation)))
    return annotation


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)
