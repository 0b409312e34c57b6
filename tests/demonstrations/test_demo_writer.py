"""What is kept of the agent's episodes: golden vectors, a brute-force twin, and what PPO+D's first codes got wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.demonstrations import demo, names, rewarded
from kit.golden import arrays
from torchrl_lightning import Demonstration, DemonstrationStorage, DemonstrationWriter


def build(
    capacity: int = 6, *loaded: Demonstration, **options: Any
) -> tuple[DemonstrationStorage, DemonstrationWriter]:
    storage = DemonstrationStorage(capacity)
    writer = DemonstrationWriter(storage, **options)
    writer.load(loaded)
    return storage, writer


def kept(storage: DemonstrationStorage) -> tuple[list[str], list[str]]:
    return names(storage.reward_demonstrations), names(storage.value_demonstrations)


def test_golden_capacity() -> None:
    storage, writer = build(6, rewarded(length=99, is_human=True, name="0"))
    golden = arrays("ppod_capacity_and_probs")
    for (number, is_reward, length, value), ids in zip(
        golden["ops"].tolist(), golden["ids_after"].tolist(), strict=True
    ):
        writer.add(rewarded(float(is_reward), int(length), value=value, name=str(int(number))))
        found = tuple([int(name) for name in every] for every in kept(storage))
        assert found == tuple([each for each in row if each >= 0] for row in ids)


def test_golden_truncation() -> None:
    golden = arrays("ppod_truncation_and_thresholds")
    for row, length, total in zip(
        *(golden[key] for key in ("rewards", "kept_length", "total_reward_of_cut")), strict=True
    ):
        storage, writer = build()
        assert writer.add(demo(*row[~np.isnan(row)])) == "reward"
        (found,) = storage.reward_demonstrations
        assert (found.length, found.total_reward) == (length, total)


def test_golden_thresholds() -> None:
    storage, writer = build(51)
    trace = arrays("ppod_truncation_and_thresholds")["threshold_trace_ref"]
    for episode_return, threshold, best, rewards, values in trace.tolist():
        writer.add(rewarded(episode_return))
        returns = [each.total_reward for each in storage.reward_demonstrations]
        found = (writer.threshold, max(returns), len(returns), len(storage.value_demonstrations))
        assert found == (threshold, best, rewards, values)


class Twin:
    """The rule written down once more, with a sort for each thing that is dropped."""

    def __init__(self, capacity: int, human: list[float], threshold: float | None) -> None:
        self.capacity, self.successes = capacity, 0
        self.human, self.agent, self.value = [*human], [], []  # type: ignore[var-annotated]
        floor = -math.inf if threshold is None else threshold
        self.threshold = max([floor, *([min(human)] if human else [])])

    def add(self, number: int, total: float, length: int, value: float) -> str | None:
        success = total >= self.threshold
        if success:
            self.successes += 1
            if all(total > each for each in [*self.human, *(each[1] for each in self.agent)]):
                self.agent = []
            self.agent.append((number, total, length))
        else:
            self.value.append((number, value))
        places = max(0, self.capacity - 1 - self.successes)
        room = max(0, min(places, self.capacity - len(self.human) - len(self.agent)))
        best = sorted(self.value, key=lambda each: (each[1], each[0]), reverse=True)[:room]
        self.value = [each for each in self.value if each in best]
        if len(self.human) + len(self.agent) > self.capacity:
            self.agent.remove(sorted(self.agent, key=lambda each: (-each[2], each[0]))[0])
        returns = [*self.human, *(each[1] for each in self.agent)]
        if success and returns:
            self.threshold = max(self.threshold, min(returns))
        here = [each[0] for each in [*self.agent, *self.value]]
        return None if number not in here else "reward" if success else "value"


EPISODES = st.tuples(
    st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.integers(1, 4), st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 2.0])
)


@settings(max_examples=30, deadline=None)
@given(
    capacity=st.integers(1, 5),
    human=st.lists(st.sampled_from([0.0, 1.0]), max_size=2),
    threshold=st.sampled_from([None, 0.0, 1.0]),
    episodes=st.lists(EPISODES, max_size=20),
)
def test_writer_equals_its_reference(capacity: int, human: list[float], threshold: Any, episodes: list[Any]) -> None:
    human = human[:capacity]
    given_ones = [rewarded(total, is_human=True, name="human") for total in human]
    storage, writer = build(capacity, *given_ones, reward_threshold=threshold)
    twin = Twin(capacity, human, threshold)
    for number, (total, length, value) in enumerate(episodes):
        where = writer.add(rewarded(total, length, value=value, name=str(number)))
        assert where == twin.add(number, total, length, value)
        expected = ["human"] * len(human) + [str(each[0]) for each in twin.agent], [str(each[0]) for each in twin.value]
        assert kept(storage) == expected
        assert (storage.successes, writer.threshold) == (twin.successes, twin.threshold)


THRESHOLDS = [sign * number / 100 for number in range(1, 101) for sign in (1, -1)]


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_return_that_equals_the_threshold_is_a_success(parts: int, scale: float) -> None:
    missed = []
    for number in THRESHOLDS:
        threshold = number * scale
        storage, writer = build(3, reward_threshold=threshold, cut_after_reward=False)
        if writer.add(demo(*[threshold / parts] * parts)) != "reward":
            missed.append(threshold)
        assert (storage.successes, storage.annealed) == (1, 0.5) or threshold in missed
    assert missed == []


@pytest.mark.parametrize("number", [0.07, 0.7, -0.3, 12345.678])
def test_return_that_equals_a_demonstrations_is_a_success_in_any_order_of_rewards(number: float) -> None:
    rewards = [number * part for part in (0.1, 0.7, 0.2)]
    for human in (rewards, [number]):
        for agent in (rewards[::-1], [number], [number / 3] * 3):
            storage, writer = build(9, demo(*human, is_human=True, name="human"), cut_after_reward=False)
            threshold = writer.threshold
            assert [writer.add(demo(*agent, name=name)) for name in "abc"] == ["reward"] * 3
            assert kept(storage) == (["human", "a", "b", "c"], [])
            assert writer.threshold == threshold


def test_return_that_is_higher_only_by_rounding_replaces_no_demonstration() -> None:
    storage, writer = build(9, reward_threshold=0.5, cut_after_reward=False)
    totals = [demo(0.3, name="whole"), demo(0.1, 0.2, name="parts"), demo(0.2, 0.1, name="turned")]
    for each in sorted((each for each in totals), key=lambda each: each.total_reward):
        assert writer.add(demo(*each.rewards.tolist(), 0.4, name=each.name)) == "reward"
    assert len(storage.reward_demonstrations) == 3
    writer.add(rewarded(0.71, name="better"))
    assert kept(storage)[0] == ["better"]


@pytest.mark.parametrize(("total", "where"), [(0.7 - 2e-6, "value"), (-0.7, "value"), (0.7 - 5e-7, "reward")])
def test_return_below_the_threshold_is_a_failure(total: float, where: str) -> None:
    storage, writer = build(3, reward_threshold=0.7, cut_after_reward=False)
    assert writer.add(demo(total)) == where
    assert storage.successes == (where == "reward")


def test_human_demonstrations_stay_when_a_better_one_comes() -> None:
    storage, writer = build(6, rewarded(1.0, 9, is_human=True, name="human"))
    for name, total in (("a", 1.0), ("b", 1.0), ("better", 2.0), ("as good", 2.0), ("worse", 1.5)):
        writer.add(rewarded(total, name=name))
    assert kept(storage)[0] == ["human", "better", "as good", "worse"]
    assert writer.threshold == 1.0


def test_capacity_rule_protects_only_human_demonstrations() -> None:
    agent, human = rewarded(length=9, name="agent"), rewarded(length=8, is_human=True, name="human")
    storage, writer = build(3, agent, human)
    assert kept(storage)[0] == ["human", "agent"]
    for name in ("a", "b"):
        writer.add(rewarded(length=2, name=name))
    assert kept(storage)[0] == ["human", "a", "b"]


def test_reward_demonstrations_take_capacity_from_value_demonstrations() -> None:
    humans = [rewarded(1.0, is_human=True, name=name) for name in ("first", "second")]
    storage, writer = build(3, *humans)
    for name, value in (("a", 1.0), ("b", 2.0), ("c", 0.5)):
        writer.add(rewarded(0.0, value=value, name=name))
    assert kept(storage) == (["first", "second"], ["b"])  # without the humans, three places less one are for values


def test_loading_raises_the_threshold_without_counting_a_success() -> None:
    storage, writer = build(3)
    writer.load([rewarded(2.0), rewarded(3.0, is_human=True)])
    assert (writer.threshold, storage.successes, storage.annealed) == (2.0, 0, 0.0)
    assert writer.add(rewarded(1.0)) == "value"


def test_steps_after_the_last_reward_are_cut_by_option() -> None:
    episode = demo(0.0, -1.0, 3.0, -1.0)
    for cut, length, total in ((True, 3, 2.0), (False, 4, 1.0)):
        storage, writer = build(cut_after_reward=cut)
        writer.add(episode)
        (found,) = storage.reward_demonstrations
        assert (found.length, found.total_reward) == (length, total)
        assert (found.last_observation is not None) == cut


def test_stored_demonstration_is_a_copy() -> None:
    storage, writer = build()
    image = torch.zeros(1, 2, 2)
    steps = demo(1.0).steps.clone().set("image", image)
    writer.add(Demonstration(steps))
    image += 1
    assert not storage.reward_demonstrations[0].steps["image"].any()


def test_replayed_demonstration_that_is_added_again_is_stored_twice() -> None:
    storage, writer = build()
    writer.add(rewarded())
    writer.add(storage.reward_demonstrations[0])
    first, second = storage.reward_demonstrations
    assert first.serial != second.serial


def test_refresh_replaces_the_value_of_a_stored_demonstration() -> None:
    storage, writer = build(3, rewarded(is_human=True))
    for name in "ab":
        writer.add(rewarded(0.0, value=1.0, name=name))
    replayed, other = storage.value_demonstrations
    # Two environments may replay the same one.
    assert writer.refresh(replayed, 0.25)
    assert writer.refresh(replayed, 0.5)
    assert [each.value for each in storage.value_demonstrations] == [0.5, 1.0]
    assert storage.value_demonstrations[0].steps is replayed.steps
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="value"):
            writer.refresh(other, wrong)
    writer.add(rewarded(0.0, value=2.0, name="c"))
    assert kept(storage)[1] == ["b", "c"]
    assert not writer.refresh(replayed, 9.0)
    assert not writer.refresh(rewarded(), 9.0)


@pytest.mark.parametrize("total", [1.0, 0.0])
def test_failed_call_changes_nothing(total: float, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, writer = build(2, rewarded(is_human=True))
    writer.add(rewarded(0.0, value=1.0))

    def seen() -> tuple[Any, ...]:
        contents = storage.reward_demonstrations, storage.value_demonstrations
        return *contents, storage.successes, storage.annealed, writer.state_dict()

    before = seen()
    with pytest.raises(ValueError, match="is a human demonstration"):
        writer.add(rewarded(total, is_human=True))
    with pytest.raises(ValueError, match="2 new demonstrations and 1 stored human ones exceed the capacity 2"):
        writer.load([rewarded(), rewarded()])
    monkeypatch.setattr("torchrl_lightning.demonstrations.trajectory.replace", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.add(rewarded(total, value=2.0))
    with pytest.raises(ZeroDivisionError):
        writer.load([rewarded()])
    assert seen() == before
