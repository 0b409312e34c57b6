"""What the storage holds is found by its number; earlier states do not say how a demonstration ended."""

from __future__ import annotations

from kit.demonstrations import demo, rewarded
from torchrl_lightning import DemonstrationStorage


def filled() -> DemonstrationStorage:
    storage = DemonstrationStorage(4)
    over = {"terminated": False, "truncated": True}
    storage.replace([rewarded(is_human=True), rewarded(**over)], [demo(0.0, **over), demo(0.0)])
    return storage


def test_ends_are_unknown_in_earlier_states() -> None:
    storage = filled()
    state = storage.state_dict()
    for earlier in (*state["reward"], *state["value"]):
        del earlier["terminated"], earlier["truncated"]
    storage.load_state_dict(state)
    for each in (*storage.reward_demonstrations, *storage.value_demonstrations):
        assert (each.terminated, each.truncated, each.ends) == (None, None, (True, False))


def test_find_returns_the_stored_demonstration_of_a_serial_number() -> None:
    storage = filled()
    everyone = (*storage.reward_demonstrations, *storage.value_demonstrations)
    assert [storage.find(each.serial) for each in everyone] == [*everyone]  # type: ignore[arg-type]
    assert storage.find(99) is None
    assert len({each.serial for each in everyone}) == len(storage) == 4
