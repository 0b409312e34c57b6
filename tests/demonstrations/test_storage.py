"""What the storage holds, its exact state, and which states it refuses."""

from __future__ import annotations

import pytest

from kit.demonstrations import demo, names, rewarded
from kit.files import through_file
from kit.states import check_mutants, equal
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


def test_a_state_restores_everything() -> None:
    storage, other = filled(), DemonstrationStorage(4)
    other.load_state_dict(through_file(storage.state_dict()))
    assert same(storage, other)
    cut = other.reward_demonstrations[1]
    assert cut.steps.is_locked
    assert cut.last_observation is not None
    # Both go on alike.
    for each in (storage, other):
        writer = DemonstrationWriter(each, reward_threshold=1.0)
        assert writer.add(rewarded(2.0, name="next")) == "reward"
        assert names(each.reward_demonstrations) == ["human.npz", "next"]
    assert same(storage, other)


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


def test_a_state_is_a_copy_on_both_sides() -> None:
    storage, other = filled(), DemonstrationStorage(4)
    state = storage.state_dict()
    other.load_state_dict(state)
    for demonstration in state["reward"]:
        demonstration["steps"]["image"] += 1
        demonstration["metadata"]["seed"] = 4
    assert same(storage, other)
    assert same(storage, filled())


def test_another_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="The state has capacity=4, this demonstration storage has capacity=5"):
        DemonstrationStorage(5).load_state_dict(filled().state_dict())


def test_every_mutant_of_a_state_is_refused_or_taken_whole() -> None:
    storage, other = DemonstrationStorage(2), DemonstrationStorage(2)
    writer = DemonstrationWriter(storage)
    over = {"terminated": False, "truncated": True}
    for episode in (demo(1.0, 0.0, name="cut", metadata={"seed": 3}), demo(0.0, value=0.5, **over)):
        writer.add(episode)
    check_mutants(other, storage.state_dict(), repr)


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
    with pytest.raises(ValueError, match="capacity must be a positive integer"):
        DemonstrationStorage(0)
