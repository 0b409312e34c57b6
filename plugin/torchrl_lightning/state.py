"""States that are declared: one kit saves them, checks them before anything changes, and loads them.

A part derives from :class:`Stated` and lists in ``STATE`` what its state holds, in the order in which it is restored:

==================== =================================================================================================
:class:`Attribute`   an attribute, which is set to a copy; without a check, one that the part was built with
:class:`InPlace`     a tensor or array that is filled in place, because others hold it too
:class:`Child`       a part that is :class:`Stated` itself, or None
==================== =================================================================================================

A check takes ``(value, name)``: it returns what is put into the attribute, or raises ``wrong(value, name, "what was
expected")``. Where it depends on the part, give a function of the part that returns the check::

    Attribute(whole(1))
    Attribute(of=lambda ring: whole(0, ring.capacity - 1))
    Attribute(of=lambda buffer: buffer._read_episodes)

An attribute may be one of an attribute, ``"table.alpha"``, or a property that makes and takes what the state holds.

Hooks: ``_check_together(values)`` refuses entries that do not fit each other, ``_loaded()`` derives what follows from
them. An override of :meth:`~Stated.read_state` or :meth:`~Stated.put_state`, around ``super()``, takes a lock or adds
what no entry can say.
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

from torchrl_lightning.files import Rows
from torchrl_lightning.ranges import Check

LARGEST = 1 << 60
"""Counters stay below: sums and products with them do not overflow."""

# ---- checks ----------------------------------------------------------------------------------------------------------


def check_state(
    state: Any,
    schema: Mapping[str, Check],
    owner: str,
    version: int | None = None,
    together: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Refuse a state of ``owner`` that lacks an entry of the schema, or in which one is wrong; others are ignored.

    With a version, ``schema_version`` must be that. The ValueError names the entry, what came and what was expected.
    Return what is taken over for each entry; ``together`` refuses those that do not fit each other.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"The {owner} state is foreign: it is {described(state)}, expected a dict.")
    if version is not None and (type(found := state.get("schema_version")) is not int or found != version):
        raise ValueError(
            f"The {owner} state has schema version {described(found)}, this release reads version {version}."
        )
    if missing := sorted(set(schema) - set(state)):
        found = sorted(map(str, state))
        raise ValueError(f"The {owner} state is foreign: it lacks {', '.join(missing)}; it has {found}.")
    try:
        values = {name: check(state[name], repr(name)) for name, check in schema.items()}
        if together is not None:
            together(values)
    except _WrongError as error:
        raise ValueError(f"The {owner} state is foreign: {error}.") from None
    return values


class _WrongError(ValueError):
    """An entry is wrong; the message lacks whose."""


def wrong(value: Any, name: str, expected: str) -> ValueError:
    """Return the error of a check: what came, and what was expected."""
    return _WrongError(f"{name} is {described(value)}, expected {expected}")


def described(value: Any) -> str:
    """Describe a value in a few words: tensors by dtype and shape, numbers and texts as they are."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:60]}..."
    return f"a {type(value).__name__}"


def expect(fits: Callable[[Any], Any], expected: str) -> Check:
    """Expect a value of which a function returns True; errors call it ``expected``."""

    def check(value: Any, name: str) -> Any:
        if not fits(value):
            raise wrong(value, name, expected)
        return value

    return check


anything = expect(lambda value: True, "anything")
flag = expect(lambda value: type(value) is bool, "True or False")
text = expect(lambda value: type(value) is str, "a string")
sequence = expect(lambda value: isinstance(value, list | tuple), "a list")
"""Expect a list, whose content is checked elsewhere."""
mapping = expect(
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    "a dict with strings as keys",
)
"""Expect a dict, whose content another schema checks."""


def whole(low: int = 0, high: int = LARGEST) -> Check:
    """Expect an integer in ``[low, high]``."""
    most = f", at most {high}" if high < LARGEST else ""
    return expect(lambda value: type(value) is int and low <= value <= high, f"an integer of at least {low}{most}")


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """Expect a finite number in ``[low, high]``, and return it as a float."""
    least, most = f" of at least {low}" if low > -math.inf else "", f", at most {high}" if high < math.inf else ""
    check = expect(
        lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high,
        f"a finite number{least}{most}",
    )
    return lambda value, name: float(check(value, name))


def fields(owner: str, schema: Mapping[str, Check]) -> Check:
    """Expect a dict that has the entries of a schema, and return what is taken over for each."""
    return lambda value, name: check_state(value, schema, owner)


def list_of(check: Check) -> Check:
    """Expect a list, and return what is taken over for each of its items."""
    return lambda value, name: [check(item, f"an item of {name}") for item in sequence(value, name)]


def same(own: Any, owner: str, argument: str = "") -> Check:
    """Expect the value that a part, the owner, was built with as ``argument`` (named as the entry by default)."""

    def check(value: Any, name: str) -> Any:
        if type(value) is not type(own) or value != own:
            name = name.strip("'")
            raise ValueError(
                f"The state has {name}={described(value)}, this {owner} has {argument or name}={described(own)}; "
                f"build it with {argument or name}={described(value)} or load a matching state."
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
    """Expect a tensor of values in ``[low, high]``, where a size may be None for any, on the CPU if not anywhere."""

    def check(value: Any, name: str) -> Tensor:
        fits = (
            isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_meta
            and value.dtype == dtype
            and (anywhere or value.is_cpu)
            and value.ndim == len(shape)
            and all(size in (None, found) for size, found in zip(shape, value.shape, strict=True))
        )
        if not fits:
            expected = ", ".join("any" if size is None else str(size) for size in shape)
            raise wrong(value, name, f"a tensor [{expected}] of {str(dtype).removeprefix('torch.')}")
        found: Tensor = value
        if found.numel() and not ((low is None or (found >= low).all()) and (high is None or (found <= high).all())):
            limits = "what the other entries allow" if isinstance(high, Tensor) else f"{low} to {high}"
            raise _WrongError(
                f"{name} holds values from {found.min().item()} to {found.max().item()}, "
                f"expected {limits.replace('None', 'anything')}"
            )
        return found

    return check


def generator(device: torch.device | str) -> Check:
    """Expect the state of a generator on a device."""

    def check(value: Any, name: str) -> Tensor:
        try:
            state: Tensor = value.cpu()
            torch.Generator(device).set_state(state)
        except (RuntimeError, TypeError, AttributeError) as error:
            reason = str(error).split("\n")[0]
            raise _WrongError(f"{name} is no state of a random generator on {device} ({reason})") from error
        return state

    return check


# ---- entries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribute:
    """Save an attribute, and set it to a copy of what its check returns.

    Attributes:
        check: Returns what is put into the attribute. Without ``check`` and ``of``, the part was built with the value:
            a state of a part that was built otherwise is refused, and nothing is set.
        at: Where the part keeps it; named as the entry by default.
        form: Returns what is written for the attribute's value, and need not copy.
        of: Returns the check by the part, instead of ``check``.
        only: The name of an attribute of the part that says whether its states have the entry; they do by default.
        argument: What the constructor calls a value that the part was built with; as the entry by default.
    """

    check: Check | None = None
    at: str = ""
    form: Callable[[Any], Any] | None = None
    _: KW_ONLY
    of: Callable[[Any], Check] | None = None
    only: str = ""
    argument: str = ""

    @property
    def is_built(self) -> bool:
        """Whether the part was built with the value, which is compared and not set."""
        return type(self) is Attribute and self.check is None and self.of is None

    def save(self, part: Any, at: str, copy: bool) -> Any:
        """Return the entry of a part's state, copied or not."""
        value = attrgetter(at)(part)
        return saved(value if self.form is None else self.form(value), copy)

    def check_of(self, part: Any, at: str) -> Check:
        """Return the check of the entry."""
        if self.of is not None:
            return self.of(part)
        return self.check or same(attrgetter(at)(part), part.OWNER, self.argument)

    def put(self, part: Any, at: str, value: Any) -> None:
        """Take over what the check returned."""
        if not self.is_built:
            holder, _, name = at.rpartition(".")
            setattr(attrgetter(holder)(part) if holder else part, name, saved(value, True))


@dataclass(frozen=True)
class InPlace(Attribute):
    """Save a tensor or array, and fill it in place with another of its shape and type, with values in ``[low, high]``.

    ``at`` and ``only`` are those of :class:`Attribute`.
    """

    _: KW_ONLY
    low: float | None = None
    high: float | None = None

    def check_of(self, part: Any, at: str) -> Check:
        """Expect values of the same shape and type."""
        own = torch.as_tensor(attrgetter(at)(part))
        return tensor(own.dtype, *own.shape, low=self.low, high=self.high)

    def put(self, part: Any, at: str, value: Any) -> None:
        """Fill the attribute."""
        attrgetter(at)(part)[...] = value


@dataclass(frozen=True)
class Child(Attribute):
    """Save the state of a part of the part, which checks and loads it itself; None where there is none."""

    def save(self, part: Any, at: str, copy: bool) -> Any:
        """Return the state of the child."""
        child = attrgetter(at)(part)
        return None if child is None else child.state_dict(copy=copy)

    def check_of(self, part: Any, at: str) -> Check:
        """Let the child read its state."""
        child = attrgetter(at)(part)
        return same(None, part.OWNER) if child is None else lambda value, name: child.read_state(value)

    def put(self, part: Any, at: str, value: Any) -> None:
        """Let the child take over what it read."""
        if value is not None:
            attrgetter(at)(part).put_state(value)


GENERATOR = Attribute(of=lambda part: generator(part.generator.device), at="generator_state")
"""The entry of a part with a random generator, which stays the same object."""


class Stated:
    """A part with a state: plain data, a copy on both sides, taken wholly or not at all.

    As a base it comes before TorchRL's and Lightning's, whose methods of these names it replaces. A subclass repeats
    the entries of its base: ``STATE = {**Base.STATE, "more": Attribute(flag)}``.

    Attributes:
        STATE: The entries, in the order in which they are restored.
        OWNER: What messages call the part.
        VERSION: The version of its states; None for the state of a part that is always saved within another's.

    Examples:
        >>> from torchrl_lightning.parts import OwnGenerator
        >>> class Deck(OwnGenerator, Stated):
        ...     OWNER, VERSION = "deck", 1
        ...     STATE = {
        ...         "size": Attribute(),
        ...         "drawn": Attribute(of=lambda deck: whole(0, deck.size), at="_drawn"),
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
        """Return all that decides what comes next: tensors and scalars only.

        Args:
            copy: Return copies; otherwise views, for what reads them at once.
        """
        state = {name: entry.save(self, at, copy) for name, entry, at in self._entries()}
        return state if self.VERSION is None else {"schema_version": self.VERSION, **state}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing."""
        self.read_state(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state exactly: what comes next is what would have come next.

        Raises:
            ValueError: It is of another version or of a part that was built otherwise, lacks an entry, or one is wrong;
                nothing is changed.
        """
        self.put_state(self.read_state(state_dict))

    def read_state(self, state_dict: Any) -> dict[str, Any]:
        """Check a state with all that is nested in it, and return what :meth:`put_state` takes; change nothing."""
        schema = {name: entry.check_of(self, at) for name, entry, at in self._entries()}
        return check_state(state_dict, schema, self.OWNER, self.VERSION, self._check_together)

    def put_state(self, values: Mapping[str, Any]) -> None:
        """Take over what :meth:`read_state` returned."""
        for name, entry, at in self._entries():
            entry.put(self, at, values[name])
        self._loaded()

    def _entries(self) -> list[tuple[str, Attribute, str]]:
        """Return the name of each entry, the entry, and the attribute that it is about."""
        return [
            (name, entry, entry.at or name)
            for name, entry in self.STATE.items()
            if not entry.only or getattr(self, entry.only)
        ]

    def _check_together(self, values: Mapping[str, Any]) -> None:
        """Refuse entries that do not fit each other, by a ValueError; each has been checked by itself."""

    def _loaded(self) -> None:
        """Derive what follows from the entries, which have just been loaded."""


def saved(value: Any, copy: bool) -> Any:
    """Return a value as states hold it: arrays and rows as tensors, copied or not, also within dicts and lists."""
    if isinstance(value, dict):
        return {key: saved(entry, copy) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(saved(entry, copy) for entry in value)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not copy:
        return value
    return value[:] if isinstance(value, Rows) else value.clone() if isinstance(value, Tensor) else value
