"""What the contracts ask of a part: one row of their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

WAYS = ("memory", "file", "folder", "pickle", "deepcopy")
SAVED = ("memory", "file", "folder")  # of what is not copied


class Refusal:
    """Calls of a part that are refused, and change nothing.

    Args:
        says: words of the error.
        calls: what is called; each makes what it calls with anew.
        error: its kind.
        empty: whether an empty part refuses them in these words, too.
    """

    def __init__(
        self, says: str, *calls: Callable[[Any], Any], error: type[Exception] = ValueError, empty: bool = False
    ) -> None:
        self.says, self.calls, self.error, self.empty = says, calls, error, empty

    def __str__(self) -> str:
        return self.says


@dataclass(frozen=True, kw_only=True)
class Part:
    """How a part with a state is built and used; its state is exact, checked, a copy, and plain data.

    Args:
        make: builds an empty one from the seed of its generator.
        fill: puts data in that are numbered from a number on.
        ask: takes what it gives next, as a user does; may change it.
        ways: how its state travels.
        within: entries of the state that are mutated; all by default.
        usable: what a part is asked for behind a mutated state that it took; what it is asked for by default.
        foreign: others, by the words with which they refuse a state of this one.
        edited: places in the state and what is put there, by the words of the refusal.
        refuses: calls that a filled one refuses; it goes on as if they had not been made.
        empty: words of the error when an empty one is asked; no words for none.
        canonical: ways behind which the states of both stay the same, too.
        ours: whether its state is ours and is taken; that of another library's buffer is restored, and that is all.
        shares: whether a pickle of it shares its cells.
    """

    make: Callable[[int], Any]
    fill: Callable[[Any, int], Any]
    ask: Callable[[Any], Any]
    ways: tuple[str, ...] = WAYS
    within: tuple[str | tuple[Any, ...], ...] = ()
    usable: Callable[[Any], Any] | None = None
    foreign: dict[str, Callable[[], Any]] = field(default_factory=dict)
    edited: dict[str, tuple[tuple[Any, ...], Any]] = field(default_factory=dict)
    refuses: tuple[Refusal, ...] = ()
    empty: tuple[type[Exception], str] | None = None
    canonical: tuple[str, ...] = WAYS
    ours: bool = True
    shares: bool = False

    def but(self, **fields: Any) -> Part:
        """Another that differs in some fields."""
        return replace(self, **fields)

    def made(self, seed: int = 0, first: int = 0, fillings: int = 2) -> Any:
        """One that holds numbered data, and was used."""
        part = self.make(seed)
        for filling in range(fillings):
            self.fill(part, first + 40 * filling)
            if not filling:
                self.ask(part)
        return part


Unfiled = partial(Part, ways=("memory", "file", "pickle", "deepcopy"))
"""A part whose state no folder holds."""
