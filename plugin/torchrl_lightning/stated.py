"""States that are declared: one kit saves them, checks them before anything changes, and loads them.

A part derives from :class:`Stated` and says in ``STATE`` what its state holds, in the order in which it is restored:

===================== ================================================================================================
:class:`Kept`         an attribute as it is: a number, a flag, a tensor, an array; or what a check makes of its value
:class:`Handed`       a property that says what is written, and whose setter copies what was read
:class:`Filled`       a tensor or array that is filled in place, because others hold it too
:class:`Fixed`        what the part was built with; a state of another is refused
:class:`Nested`       a part that is :class:`Stated` itself, or None
:class:`Drawn`        a random generator
``checks.Transforms`` the transforms of a buffer
===================== ================================================================================================

Checks are those of :mod:`torchrl_lightning.state`. A bound in them is a number, the name of an attribute of the part,
or a function of the part and of the state (whose earlier entries have been checked by then)::

    whole(0, "capacity")
    whole(-1, lambda ring, state: ring.capacity - 1)
    tensor(torch.int64, "num_envs", low=0, high=lambda ring, state: state["count"])

A check of your own takes ``(value, name, here)``: it returns what is put into the attribute, and refuses a value by
``raise wrong(value, name, "what was expected")``; ``here.part`` is the part, ``here.state`` the whole state. Where a
method of the part does that, name it: ``Kept("_read_episodes")``; it takes ``(value, name)``. An attribute may be one
of an attribute, ``"table.alpha"``, or a property that makes and takes what the state holds.

Hooks: ``_check_together(values)`` refuses entries that do not fit each other, ``_loaded()`` derives what follows from
them. An override of :meth:`~Stated.read_state` or :meth:`~Stated.put_state`, around ``super()``, takes a lock or adds
what no entry can say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchrl_lightning.files import Rows
from torchrl_lightning.state import Check, anything, check_state, generator, same


class Entry:
    """How one entry of a state is saved, checked and loaded.

    Args:
        attribute: Where the part keeps it; named as the entry by default.
        only: The name of an attribute of the part that says whether its states have the entry; they do by default.
    """

    def __init__(self, attribute: str = "", *, only: str = "") -> None:
        self.attribute, self.only = attribute, only

    def save(self, part: Any, attribute: str, copy: bool) -> Any:
        """Return the entry of a part's state, copied or not."""
        return saved(attrgetter(attribute)(part), copy)

    def check(self, part: Any, attribute: str) -> Check:
        """Return the check of the entry."""
        raise NotImplementedError

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Take over what the check returned."""


class Kept(Entry):
    """Keep an attribute: a copy in the state, a copy out of it.

    Args:
        check: The check of its value, which returns what is put into the attribute; or the name of a method that is.
        attribute: Where the part keeps it; named as the entry by default.
        form: What is written for it: a function of the attribute's value, which need not copy.

    The others are those of :class:`Entry`.
    """

    def __init__(
        self,
        check: Check | str = anything,
        attribute: str = "",
        form: Callable[[Any], Any] | None = None,
        *,
        only: str = "",
    ) -> None:
        super().__init__(attribute, only=only)
        self._check, self._form = check, form

    def save(self, part: Any, attribute: str, copy: bool) -> Any:
        """Return the attribute in its form."""
        value = attrgetter(attribute)(part)
        return saved(value if self._form is None else self._form(value), copy)

    def check(self, part: Any, attribute: str) -> Check:
        """Return the check that was given."""
        if not isinstance(self._check, str):
            return self._check
        method = getattr(part, self._check)
        return lambda value, name, here: method(value, name)

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Set the attribute to a copy."""
        _set(part, attribute, _each(value, _copied))


class Handed(Kept):
    """Hand the value to a property, whose setter copies what it takes. The arguments are those of :class:`Kept`."""

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Set the property."""
        _set(part, attribute, value)


class Filled(Kept):
    """Fill a tensor or array in place; its check compares the sizes. The arguments are those of :class:`Kept`."""

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Fill the attribute."""
        attrgetter(attribute)(part)[...] = value


class Fixed(Entry):
    """Refuse a state of a part that was built otherwise.

    Args:
        attribute: What the part was built with; named as the entry by default.
        argument: What the constructor calls it; as the entry by default.
    """

    def __init__(self, attribute: str = "", argument: str | None = None) -> None:
        super().__init__(attribute)
        self._argument = argument

    def check(self, part: Any, attribute: str) -> Check:
        """Expect what the part was built with."""
        return same(attrgetter(attribute)(part), part.OWNER, self._argument)


class Nested(Entry):
    """Keep the state of a part that is :class:`Stated` itself; None where there is none."""

    def save(self, part: Any, attribute: str, copy: bool) -> Any:
        """Return the state of the nested part."""
        held: Stated | None = attrgetter(attribute)(part)
        return None if held is None else held.state_dict(copy=copy)

    def check(self, part: Any, attribute: str) -> Check:
        """Let the nested part read its state."""
        held: Stated | None = attrgetter(attribute)(part)
        return same(None, part.OWNER) if held is None else lambda value, name, here: held.read_state(value)

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Let the nested part take over what it read."""
        held: Stated | None = attrgetter(attribute)(part)
        if held is not None:
            held.put_state(value)


class Drawn(Entry):
    """Keep the state of a random generator, which stays the same object."""

    def save(self, part: Any, attribute: str, copy: bool) -> Any:
        """Return the generator's state."""
        return attrgetter(attribute)(part).get_state()

    def check(self, part: Any, attribute: str) -> Check:
        """Expect the state of a generator on the same device."""
        return generator(attrgetter(attribute)(part).device)

    def put(self, part: Any, attribute: str, value: Any) -> None:
        """Set the generator's state."""
        attrgetter(attribute)(part).set_state(value)


class Stated:
    """A part with a state: plain data, a copy on both sides, taken wholly or not at all.

    As a base it comes before TorchRL's and Lightning's, whose methods of these names it replaces. A subclass repeats
    the entries of its base: ``STATE = {**Base.STATE, "more": Kept(flag)}``.

    Attributes:
        STATE: The entries, in the order in which they are restored.
        OWNER: What messages call the part.
        VERSION: The version of its states; None for the state of a part that is always saved within another's.

    Examples:
        >>> from torchrl_lightning.state import whole
        >>> class Deck(Stated):
        ...     OWNER, VERSION = "deck", 1
        ...     STATE = {
        ...         "size": Fixed(),
        ...         "drawn": Kept(whole(0, "size"), "_drawn"),
        ...         "generator": Drawn("_generator"),
        ...     }
        ...
        ...     def __init__(self, size: int) -> None:
        ...         self.size, self._drawn, self._generator = size, 0, torch.Generator()
        ...
        ...     def draw(self) -> int:
        ...         self._drawn += 1
        ...         return int(torch.randint(self.size, (), generator=self._generator))
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

    STATE: ClassVar[Mapping[str, Entry]] = {}
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
        schema = {name: entry.check(self, at) for name, entry, at in self._entries()}
        values = check_state(state_dict, schema, self.OWNER, self.VERSION, self)
        self._check_together(values)
        return values

    def put_state(self, values: Mapping[str, Any]) -> None:
        """Take over what :meth:`read_state` returned."""
        for name, entry, at in self._entries():
            entry.put(self, at, values[name])
        self._loaded()

    def _entries(self) -> list[tuple[str, Entry, str]]:
        """Return the name of each entry, the entry, and the attribute that it is about."""
        return [
            (name, entry, entry.attribute or name)
            for name, entry in self.STATE.items()
            if not entry.only or getattr(self, entry.only)
        ]

    def _check_together(self, values: Mapping[str, Any]) -> None:
        """Refuse entries that do not fit each other, by a ValueError; each has been checked."""

    def _loaded(self) -> None:
        """Derive what follows from the entries, which have just been loaded."""


def _set(part: Any, attribute: str, value: Any) -> None:
    *holders, last = attribute.split(".")
    for holder in holders:
        part = getattr(part, holder)
    setattr(part, last, value)


def saved(value: Any, copy: bool) -> Any:
    """Return a value as states hold it: arrays and rows as tensors, copied or not, also within dicts and lists."""

    def leaf_of(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)
        if isinstance(leaf, Rows):
            return leaf[:] if copy else leaf
        return leaf.clone() if copy and isinstance(leaf, Tensor) else leaf

    return _each(value, leaf_of)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change what is in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _each(each, change) for key, each in value.items()}
    return type(value)(_each(each, change) for each in value) if type(value) in (list, tuple) else change(value)
