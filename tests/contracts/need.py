"""How a part is used so that an entry of its state decides something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from contracts.part import Part


class Need(NamedTuple):
    """How a part is made, used before it is saved, and asked after its state was loaded into another one."""

    make: Callable[[], Any]
    use: Callable[[Any], Any]
    ask: Callable[[Any], Any]


class Together:
    """Parts that are saved and loaded one after the other, as those of a run."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def state_dict(self) -> list[Any]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def of_part(part: Part) -> Need:
    """Use a part as the other contracts do."""

    def use(one: Any) -> None:
        part.fill(one, 0)
        part.ask(one)
        part.fill(one, 40)

    def ask(one: Any) -> Any:
        given = []
        for start in (500, 600):
            given.append(part.ask(one))
            part.fill(one, start)
        return [*given, part.ask(one)]

    return Need(partial(part.make, 0), use, ask)


def changed(need: Need, **attributes: Any) -> Need:
    """Change attributes before a part is saved."""

    def use(one: Any) -> None:
        need.use(one)
        for path, value in attributes.items():
            *holders, last = path.split("__")
            held = one
            for holder in holders:
                held = getattr(held, holder)
            setattr(held, last, value)

    return need._replace(use=use)
