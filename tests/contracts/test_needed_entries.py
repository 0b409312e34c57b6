"""Every entry of a saved state is needed: a part that is restored without it goes on otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from contracts.part import Part
from contracts.table import PARTS
from kit.states import differences, plain
from torchrl_lightning.stated import Entry, Fixed, Stated

OURS = {name: part for name, part in PARTS.items() if part.ours and "memory" in part.ways}
# Into what a state is loaded: a part that holds other data, and one that is empty.
TARGETS: tuple[Callable[[Part], Any], ...] = (lambda part: part.made(1, first=7), lambda part: part.make(1))

# Entries that no part of the table needs: a part that shows the need, or the removal of the entry, is missing.
UNSHOWN = {
    "Rings.oldest",
    "Rings.era",
    "Rings.successors",
    "SuccessorCheck.matched",
    "SuccessorCheck.differed",
    "ExperienceBuffer.transform",
    "PrioritizedSampler.beta",
    "PrioritizedSampler.start_length",
    "SequenceSampler.generator",
    "HoldoutSplit.seen",
    "HoldoutSplit.era",
    "RewardScale.gamma",
    "RewardScale.env_ids",
    "RolloutBuffer.sampler",
    "MinibatchSampler.len_storage",
    "MinibatchSampler.remaining",
    "MinibatchSampler.drop_last",
    "MinibatchSampler.shuffle",
    "MinibatchSampler.ran_out",
    "MinibatchSampler.generator",
    "RolloutBuffer.writer",
    "RolloutWriter.write_count",
    "RolloutBuffer.transforms",
    "RolloutBuffer.generator",
    "RolloutBuffer.consumed",
    "BranchedReplay.length",
    "BranchedReplay.split",
    "BranchedReplay.fitted_at",
    "DemonstrationStorage.next_serial",
    "DemonstrationSampler.alpha",
    "DemonstrationReplay.chosen",
    "DemonstrationHooks.writer",
    "DemonstrationHooks.replay",
    "DemonstrationHooks.rollouts",
    "DemonstrationHooks.is_tracked",
    "DemonstrationHooks.taken",
    "CollectorBase.frames",
}


@contextmanager
def ignoring(ignored: Entry | None, put: list[tuple[str, str, Entry]] | None = None) -> Iterator[None]:
    """Restore no values of an entry; note all entries with their classes and names."""
    whole = Stated.put_state

    def put_state(part: Stated, values: Any) -> None:
        for name, entry, at in part._entries():
            if put is not None:
                owner = next(
                    cls for cls in reversed(type(part).__mro__) if entry in vars(cls).get("STATE", {}).values()
                )
                put.append((owner.__name__, name, entry))
            if entry is not ignored:
                entry.put(part, at, values[name])
        part._loaded()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stated, "put_state", put_state)
        yield
    assert Stated.put_state is whole


def goes_on(part: Part, one: Any) -> list[Any]:
    """Return what a part gives, now and after further data; the words of an error for one that cannot go on."""
    given = []
    try:
        for start in (500, 600):
            given.append(plain(part.ask(one)))
            part.fill(one, start)
        given.append(plain(part.ask(one)))
    except Exception as error:
        given.append(repr(error))
    return given


def restored(part: Part, target: Callable[[Part], Any], ignored: Entry | None) -> list[Any]:
    one, other = part.made(), target(part)
    with ignoring(ignored):
        try:
            other.load_state_dict(one.state_dict())
        except Exception as error:
            return [repr(error)]
    return goes_on(part, other)


@cache
def declared() -> dict[Entry, tuple[str, list[str]]]:
    """Return each entry that the table's parts restore, with its name and the parts that do."""
    found: dict[Entry, tuple[str, list[str]]] = {}
    for name, part in OURS.items():
        put: list[tuple[str, str, Entry]] = []
        with ignoring(None, put):
            part.make(1).load_state_dict(part.made().state_dict())
        for owner, entry_name, entry in put:
            if not isinstance(entry, Fixed):
                users = found.setdefault(entry, (f"{owner}.{entry_name}", []))[1]
                users += [] if name in users else [name]
    return found


def is_needed(entry: Entry, users: list[str]) -> bool:
    for name in users:
        for target in TARGETS:
            if differences(restored(OURS[name], target, entry), restored(OURS[name], target, None)):
                return True
    return False


def test_every_entry_of_a_state_changes_what_comes_next() -> None:
    needless = {name for entry, (name, users) in declared().items() if not is_needed(entry, users)}
    assert needless <= UNSHOWN
