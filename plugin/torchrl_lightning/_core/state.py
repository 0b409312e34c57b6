"""Declared states: save them, validate them before anything changes, and load them.

A part derives from :class:`Stateful` and lists the entries of its state in ``STATE``, in the order of loading:

==================== =================================================================================================
:class:`Attribute`   an attribute that is set to a copy; without a check, an argument that must equal the saved value
:class:`InPlace`     a tensor or array that is filled in place, because other objects share it
:class:`Child`       another part that is :class:`Stateful`, or None
==================== =================================================================================================

A check takes ``(value, name)``. It returns the value to store, or raises ``state_error(value, name, "the expected
value")``. If the check depends on the part, pass a function that takes the part and returns the check::

    Attribute(bounded_integer(1))
    Attribute(check_for=lambda ring: bounded_integer(0, ring.capacity - 1))
    Attribute(check_for=lambda buffer: buffer._read_episodes)

An attribute may be nested, as ``"table.alpha"``. It may also be a property that returns and accepts the saved value.

Hooks: ``_validate_consistency(values)`` raises ValueError if entries conflict, and ``_post_load()`` updates derived
attributes. To take a lock, or to handle a value that no entry can describe, override :meth:`~Stateful.validate_state`
or :meth:`~Stateful.apply_state` and call ``super()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning._core.files import ChunkedTensor
from torchrl_lightning._core.validators import Check

MAX_COUNT = 1 << 60
"""Upper limit of counters, so that sums and products with them do not overflow."""

# ---- checks ----------------------------------------------------------------------------------------------------------


def check_state(
    state: Any,
    schema: Mapping[str, Check],
    owner: str,
    version: int | None = None,
    together: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Validate a state of ``owner`` by a schema, and return the value to store for each entry of the schema.

    Other entries are ignored. If ``version`` is given, ``schema_version`` must equal it. ``together`` checks the
    values for conflicts. The ValueError contains the entry, the received value and the expected value.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"The {owner} state must be a dict, got {describe_value(state)}.")
    saved_version = state.get("schema_version")
    if version is not None and (type(saved_version) is not int or saved_version != version):
        raise ValueError(
            f"The {owner} state has schema version {describe_value(saved_version)}, "
            f"this release reads version {version}."
        )
    if missing := sorted(set(schema) - set(state)):
        names = sorted(map(str, state))
        raise ValueError(f"The {owner} state is foreign: it lacks {', '.join(missing)}; it has {names}.")
    try:
        values = {name: check(state[name], repr(name)) for name, check in schema.items()}
        if together is not None:
            together(values)
    except _InvalidEntryError as error:
        raise ValueError(f"The {owner} state is foreign: {error}.") from None
    return values


class _InvalidEntryError(ValueError):
    """An entry is invalid; the message does not yet name the owner."""


def state_error(value: Any, name: str, expected: str) -> ValueError:
    """Return the error of a check, with the received and the expected value."""
    return _InvalidEntryError(f"{name} is {describe_value(value)}, expected {expected}")


def describe_value(value: Any) -> str:
    """Describe a value in a few words: a tensor by dtype and shape, a number or string by its repr."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}..."
    return f"a {type(value).__name__}"


def expect(predicate: Callable[[Any], Any], expected: str) -> Check:
    """Return a check that ``predicate(value)`` is true; ``expected`` describes the expected value in errors."""

    def check(value: Any, name: str) -> Any:
        if not predicate(value):
            raise state_error(value, name, expected)
        return value

    return check


any_value = expect(lambda value: True, "anything")
flag = expect(lambda value: type(value) is bool, "True or False")
text = expect(lambda value: type(value) is str, "a string")
sequence = expect(lambda value: isinstance(value, list | tuple), "a list")
"""Expect a list; another check validates its content."""
mapping = expect(
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    "a dict with strings as keys",
)
"""Expect a dict; another schema validates its content."""


def bounded_integer(low: int = 0, high: int = MAX_COUNT) -> Check:
    """Expect an integer in ``[low, high]``."""
    upper = f", at most {high}" if high < MAX_COUNT else ""
    return expect(lambda value: type(value) is int and low <= value <= high, f"an integer of at least {low}{upper}")


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Expect a finite number in ``[low, high]``, and return it as a float."""
    lower, upper = f" of at least {low}" if low > -math.inf else "", f", at most {high}" if high < math.inf else ""
    check = expect(
        lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high,
        f"a finite number{lower}{upper}",
    )
    return lambda value, name: float(check(value, name))


def fields(owner: str, schema: Mapping[str, Check]) -> Check:
    """Expect a dict with the entries of a schema, and return the value to store for each entry."""
    return lambda value, name: check_state(value, schema, owner)


def list_of(check: Check) -> Check:
    """Expect a list, and return the value to store for each item."""
    return lambda value, name: [check(item, f"an item of {name}") for item in sequence(value, name)]


def same(expected: Any, owner: str, argument: str = "") -> Check:
    """Expect the value of the owner's constructor argument ``argument``, which has the entry's name by default."""

    def check(value: Any, name: str) -> Any:
        if type(value) is not type(expected) or value != expected:
            name = name.strip("'")
            raise ValueError(
                f"The state has {name}={describe_value(value)}, this {owner} has "
                f"{argument or name}={describe_value(expected)}; "
                f"build it with {argument or name}={describe_value(value)} or load a matching state."
            )
        return value

    return check


def tensor(
    dtype: torch.dtype,
    *shape: int | None,
    low: float | Tensor | None = None,
    high: float | Tensor | None = None,
    anywhere: bool = False,
) -> Check:
    """Expect a tensor with values in ``[low, high]``, on the CPU unless ``anywhere``; None in ``shape`` is any size."""

    def check(value: Any, name: str) -> Tensor:
        is_match = (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_meta
            and value.dtype == dtype
            and (anywhere or value.is_cpu)
            and value.ndim == len(shape)
            and all(size in (None, tensor_size) for size, tensor_size in zip(shape, value.shape, strict=True))
        )
        if not is_match:
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise state_error(value, name, f"a tensor [{expected}] of {str(dtype).removeprefix('torch.')}")
        tensor_size: Tensor = value
        if tensor_size.numel() and not (
            (low is None or (tensor_size >= low).all()) and (high is None or (tensor_size <= high).all())
        ):
            limits = "values that fit the other entries" if isinstance(high, Tensor) else f"{low} to {high}"
            raise _InvalidEntryError(
                f"{name} holds values from {tensor_size.min().item()} to {tensor_size.max().item()}, "
                f"expected {limits.replace('None', 'anything')}"
            )
        return tensor_size

    return check


def generator(device: torch.device | str) -> Check:
    """Expect the state of a generator on a device."""

    def check(value: Any, name: str) -> Tensor:
        try:
            state: Tensor = value.cpu()
            torch.Generator(device).set_state(state)
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = str(error).split("\n")[0]
            raise _InvalidEntryError(f"{name} is not a state of a random generator on {device} ({reason})") from error
        return state

    return check


# ---- entries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribute:
    """Entry that saves an attribute, and sets it to a copy of the value that its check returns.

    Attributes:
        check: Returns the value to store. Without ``check`` and ``check_for``, the attribute is a build value: the
            constructor sets it, and a state with another value is rejected.
        attribute: The path of the attribute in the part; the entry's name by default.
        to_saved: Returns the saved form of the attribute's value; the form may share memory with the value.
        check_for: Function that takes the part and returns the check; it replaces ``check``.
        exists_if: The name of another attribute of the part. The entry exists only if that attribute is true; by
            default, the entry always exists.
        argument: The constructor argument of a build value; the entry's name by default.
    """

    check: Check | None = None
    attribute: str = ""
    to_saved: Callable[[Any], Any] | None = None
    _: KW_ONLY
    check_for: Callable[[Any], Check] | None = None
    exists_if: str = ""
    argument: str = ""

    @property
    def is_built(self) -> bool:
        """Whether this is a build value, which is compared and not set."""
        return type(self) is Attribute and self.check is None and self.check_for is None

    def save(self, part: Any, path: str, copy: bool) -> Any:
        """Return the entry's value in the state of a part; copy it if ``copy`` is True."""
        value = attrgetter(path)(part)
        return to_plain(value if self.to_saved is None else self.to_saved(value), copy)

    def check_of(self, part: Any, path: str) -> Check:
        """Return the check of the entry."""
        if self.check_for is not None:
            return self.check_for(part)
        return self.check or same(attrgetter(path)(part), part.OWNER, self.argument)

    def store(self, part: Any, path: str, value: Any) -> None:
        """Store the value that the check returned."""
        if not self.is_built:
            owner_path, _, name = path.rpartition(".")
            setattr(attrgetter(owner_path)(part) if owner_path else part, name, to_plain(value, True))


@dataclass(frozen=True)
class InPlace(Attribute):
    """Entry that fills a tensor or array in place with values in ``[low, high]`` of the same shape and dtype.

    ``attribute`` and ``exists_if`` have the same meaning as in :class:`Attribute`.
    """

    _: KW_ONLY
    low: float | None = None
    high: float | None = None

    def check_of(self, part: Any, path: str) -> Check:
        """Expect values of the same shape and dtype."""
        current = torch.as_tensor(attrgetter(path)(part))
        return tensor(current.dtype, *current.shape, low=self.low, high=self.high)

    def store(self, part: Any, path: str, value: Any) -> None:
        """Fill the attribute."""
        attrgetter(path)(part)[...] = value


@dataclass(frozen=True)
class Child(Attribute):
    """Entry for the state of a child, which the child validates and loads; None without a child."""

    def save(self, part: Any, path: str, copy: bool) -> Any:
        """Return the state of the child."""
        child = attrgetter(path)(part)
        return None if child is None else child.state_dict(copy=copy)

    def check_of(self, part: Any, path: str) -> Check:
        """Return the child's own check of its state."""
        child = attrgetter(path)(part)
        return same(None, part.OWNER) if child is None else lambda value, name: child.validate_state(value)

    def store(self, part: Any, path: str, value: Any) -> None:
        """Store the validated values in the child."""
        if value is not None:
            attrgetter(path)(part).apply_state(value)


GENERATOR = Attribute(check_for=lambda part: generator(part.generator.device), attribute="generator_state")
"""The entry of a random generator; loading keeps the generator object."""


class Stateful:
    """Base of parts with a declared state, which is loaded entirely or not at all.

    A state is plain data, which is copied when it is saved and loaded. List this base before the bases of TorchRL and
    Lightning, because it replaces their methods of the same names. A subclass repeats the entries of its base:
    ``STATE = {**Base.STATE, "more": Attribute(flag)}``.

    Attributes:
        STATE: The entries, in the order of loading.
        OWNER: The name of the part in messages.
        VERSION: The version of the part's states; None for a part that is saved only within another part.

    Examples:
        >>> from torchrl_lightning._core.mixins import GeneratorMixin
        >>> class Deck(GeneratorMixin, Stateful):
        ...     OWNER, VERSION = "deck", 1
        ...     STATE = {
        ...         "size": Attribute(),
        ...         "drawn": Attribute(check_for=lambda deck: bounded_integer(0, deck.size), attribute="_drawn"),
        ...         "generator": GENERATOR,
        ...     }
        ...
        ...     def __init__(self, size: int) -> None:
        ...         self.size, self._drawn = size, 0
        ...
        ...     def draw(self) -> int:
        ...         self._drawn += 1
        ...         return int(torch.randint(self.size, (), generator=self.generator))
        >>> one, other = Deck(52), Deck(52)
        >>> state = one.state_dict()
        >>> list(state)
        ['schema_version', 'size', 'drawn', 'generator']
        >>> other.load_state_dict(state)
        >>> one.draw() == other.draw()
        True
        >>> other.load_state_dict({**state, "drawn": 53})
        Traceback (most recent call last):
            ...
        ValueError: The deck state is foreign: 'drawn' is 53, expected an integer of at least 0, at most 52.
        >>> Deck(32).load_state_dict(state)
        Traceback (most recent call last):
            ...
        ValueError: The state has size=52, this deck has size=32; build it with size=52 or load a matching state.
    """

    STATE: ClassVar[Mapping[str, Attribute]] = {}
    OWNER: ClassVar[str]
    VERSION: ClassVar[int | None] = None

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Return the complete state: tensors and scalars only.

        Args:
            copy: Return copies. False returns views, for a caller that reads them immediately.
        """
        state = {name: entry.save(self, path, copy) for name, entry, path in self._entries()}
        return state if self.VERSION is None else {"schema_version": self.VERSION, **state}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Validate a state as :meth:`load_state_dict` does; change nothing."""
        self.validate_state(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state exactly: the part continues as the saved part would have continued.

        Raises:
            ValueError: The version or a build value differs, or an entry is missing or invalid; nothing is changed.
        """
        self.apply_state(self.validate_state(state_dict))

    def validate_state(self, state_dict: Any) -> dict[str, Any]:
        """Validate a state with its nested states, and return the values for :meth:`apply_state`; change nothing."""
        schema = {name: entry.check_of(self, path) for name, entry, path in self._entries()}
        return check_state(state_dict, schema, self.OWNER, self.VERSION, self._validate_consistency)

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Store the values that :meth:`validate_state` returned."""
        for name, entry, path in self._entries():
            entry.store(self, path, values[name])
        self._post_load()

    def _entries(self) -> list[tuple[str, Attribute, str]]:
        """Return the name of each entry, the entry, and the path of its attribute."""
        return [
            (name, entry, entry.attribute or name)
            for name, entry in self.STATE.items()
            if not entry.exists_if or getattr(self, entry.exists_if)
        ]

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        """Validate entries together; raise ValueError if they conflict. Each entry is already validated by itself."""

    def _post_load(self) -> None:
        """Update derived attributes after the entries are loaded."""


def to_plain(value: Any, copy: bool) -> Any:
    """Convert arrays to tensors, also within dicts and lists; if ``copy`` is True, copy tensors and gather rows."""
    if isinstance(value, dict):
        return {key: to_plain(item, copy) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item, copy) for item in value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not copy:
        return value
    return value[:] if isinstance(value, ChunkedTensor) else value.clone() if isinstance(value, Tensor) else value
