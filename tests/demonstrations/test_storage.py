"""What the storage holds, its exact state, and which states it refuses."""

from __future__ import annotations

import pytest

from kit.demonstrations import demo, rewarded
from kit.files import through_file
from kit.states import equal
from torchrl_lightning import DemonstrationStorage, DemonstrationWriter


def filled(capacity: int = 4) -> DemonstrationStorage:
    storage = DemonstrationStorage(capacity)
    writer = DemonstrationWriter(storage)
    writer.load([rewarded(length=3, is_human=True, name="human.npz", frame_skip=2, metadata={"seed": 3})])
    for episode in (demo(0.0, 1.0, 0.0, name="cut"), demo(0.0, 0.0, value=0.5), demo(0.0, name="no value")):
        writer.add(episode)
    return storage


def same(one: DemonstrationStorage, other: DemonstrationStorage) -> bool:
    return equal(one.state_dict(), other.state_dict())


def test_how_they_ended_is_restored_and_unknown_in_earlier_states() -> None:
    storage, other = DemonstrationStorage(2), DemonstrationStorage(2)
    storage.replace([demo(1.0, terminated=False, truncated=True)], [demo(0.0, terminated=True, truncated=False)])
    state = through_file(storage.state_dict())
    other.load_state_dict(state)
    assert [each.ends for each in (*other.reward_demonstrations, *other.value_demonstrations)] == [
        (False, True),
        (True, False),
    ]
    for earlier in (*state["reward"], *state["value"]):
        del earlier["terminated"], earlier["truncated"]
    other.load_state_dict(state)
    assert other.reward_demonstrations[0].terminated is None


def test_serial_numbers_find_what_is_kept() -> None:
    storage = filled()
    everyone = (*storage.reward_demonstrations, *storage.value_demonstrations)
    assert [storage.find(each.serial) for each in everyone] == [*everyone]  # type: ignore[arg-type]
    assert storage.find(99) is None
    assert len({each.serial for each in everyone}) == len(storage)


def test_more_than_the_capacity_is_refused() -> None:
    storage = filled()
    before = storage.reward_demonstrations
    with pytest.raises(ValueError, match="There are 5 demonstrations, 4 have a place"):
        storage.replace([rewarded()] * 3, [rewarded()] * 2)
    assert storage.reward_demonstrations is before
