"""Every entry of a saved state is needed: a part that is restored without it gives something else."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from contracts.dropped import declared, name_of, without
from contracts.need import Need, of_part
from contracts.needs import NEEDS
from contracts.table import PARTS
from kit.states import differences, plain
from torchrl_lightning.state import Stated

DECLARED = declared()
KEPT = [name for name, entry in DECLARED.items() if not entry.is_built]
OURS = {name: of_part(part) for name, part in PARTS.items() if part.ours and "memory" in part.ways}


@cache
def saved(need: Need) -> Any:
    torch.manual_seed(0)
    one = need.make()
    need.use(one)
    return one.state_dict()


def gone_on(need: Need, dropped: str | None, restored: set[str] | None = None) -> Any:
    """Return what a part gives that was restored without an entry, or the words of its error."""
    torch.manual_seed(0)
    other = need.make()
    try:
        with without(dropped, restored):
            other.load_state_dict(saved(need))
        return plain(need.ask(other))
    except Exception as error:
        return repr(error)


@cache
def whole(need: Need) -> Any:
    return gone_on(need, None)


@cache
def entries_restored() -> dict[str, list[Need]]:
    """Return the parts of the other contracts by the entries that they restore."""
    found: dict[str, list[Need]] = {}
    for need in OURS.values():
        restored: set[str] = set()
        with without(None, restored):
            need.make().load_state_dict(saved(need))
        for name in restored:
            found.setdefault(name, []).append(need)
    return found


@pytest.mark.parametrize("name", KEPT)
def test_a_part_that_is_restored_without_an_entry_gives_something_else(name: str) -> None:
    needs = [NEEDS[name]] if name in NEEDS else entries_restored().get(name, [])
    for need in needs:
        assert not isinstance(whole(need), str), whole(need)
        assert not differences(gone_on(need, None), whole(need)), "a restored part is not exact"
        if differences(gone_on(need, name), whole(need)):
            return
    raise AssertionError(f"{name} changes nothing in {len(needs)} uses")


def other(value: Any) -> Any:
    """Return what a part that was built otherwise has in the place of a value."""
    if isinstance(value, str) or value is None:
        return f"{value}x"
    return not value if isinstance(value, bool) else value + 1


ON_A_CLUSTER = {"RayCollector.num_collectors"}  # the tests of that collector start one


def test_a_state_of_a_part_that_was_built_otherwise_is_refused() -> None:
    refused: set[str] = set()
    whole = Stated.read_state

    def read_state(part: Stated, state: Any) -> Any:
        read = whole(part, state)
        for name, entry, _ in part._entries():
            if entry.is_built and name_of(part, name, entry) not in refused:
                with pytest.raises(ValueError, match=f"The state has {name}=.*, this .* has .*; build it with"):
                    whole(part, {**state, name: other(state[name])})
                refused.add(name_of(part, name, entry))
        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stated, "read_state", read_state)
        for need in OURS.values():
            need.make().load_state_dict(saved(need))
    assert refused | ON_A_CLUSTER == {name for name, entry in DECLARED.items() if entry.is_built}
