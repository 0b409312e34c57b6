"""Describe likely mistakes in a buffer, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchrl_lightning.inspection.episode_gallery import CUT, RUNNING, TERMINATED
from torchrl_lightning.inspection.summary import ACTIONS, MAX_COLUMNS, Summary

SATURATED_SHARE = 0.5  # report an action if a larger share of its values is at a bound
OFTEN_CONSTANT = {
    "collector",
    "demo",
    "done",
    "dones",
    "index",
    "is_init",
    "reward",
    "rewards",
    "terminated",
    "truncated",
}
MIN_STEPS = 100  # minimum number of steps to report that an event never happens


def findings(summary: Summary) -> list[str]:
    """Return a sentence for each likely mistake.

    Args:
        summary: The statistics of the buffer.
    """
    return list(_findings(summary))


def _findings(summary: Summary) -> Iterator[str]:
    view = summary.view
    if not view.num_inspected:
        yield "nothing is stored yet"
        return
    for entry in summary.entries:
        if entry.nans:
            yield f"{entry.name} holds {entry.nans:,} numbers that are NaN or infinite: find their source"
        whole_image = entry.size > MAX_COLUMNS and entry.constant == entry.size and _may_vary(entry.key, 1)
        if whole_image and view.num_inspected >= MIN_STEPS:
            yield f"{entry.name} is the same image in every step: a network cannot learn from it"
        if entry.constant and _may_vary(entry.key, entry.size) and view.num_inspected >= MIN_STEPS:
            description = "is" if entry.size == 1 else f"has {entry.constant} of {entry.size} numbers that are"
            yield f"{entry.name} {description} the same in every step: a network cannot learn from it"
    yield from _rewards(summary)
    yield from _ends(summary)
    yield from _actions(summary)
    yield from _sampling(summary)


def _may_vary(key: tuple[str, ...], size: int) -> bool:
    """Return whether a constant entry is a likely mistake; image edges are often constant."""
    return size <= MAX_COLUMNS and OFTEN_CONSTANT.isdisjoint(key)


def _rewards(summary: Summary) -> Iterator[str]:
    reward = summary.entry("reward", "rewards")
    if reward is None or reward.nans or summary.view.num_inspected < MIN_STEPS:
        return
    if reward.low == reward.high == 0:
        yield f"{reward.name} is zero in every step: there is nothing to learn from"
    elif reward.low == reward.high and (summary.episodes is None or len(summary.episodes) <= 1):
        yield f"{reward.name} is {reward.low:g} in every step, and no episode ends: all policies have the same return"


def _ends(summary: Summary) -> Iterator[str]:
    episodes, view = summary.episodes, summary.view
    if view.num_inspected < MIN_STEPS:
        return
    terminated = summary.entry("terminated")
    if terminated is None and view.find("done", "dones") is None:
        yield "no entry marks the ends of episodes: value targets continue into the next episode"
        return
    if terminated is not None and terminated.high == 0:
        yield f"{terminated.name} is never set, which is correct only for a task without terminal states"
    if episodes is not None and len(episodes) and np.isin(episodes.end_kind, (RUNNING, CUT)).all():
        yield "no episode has ended"
    ended = None if episodes is None else episodes.length[episodes.end_kind == TERMINATED]
    if ended is not None and len(ended) > 10 and int(ended.max()) == 1:
        yield "every episode has one step"


def _actions(summary: Summary) -> Iterator[str]:
    action = summary.entry(*ACTIONS)
    if action is None or summary.view.num_inspected < MIN_STEPS or not len(action.sample):
        return
    if action.counts:
        largest_share = max(action.counts) / sum(action.counts)
        if largest_share > 0.95 and len(action.counts) > 1:
            action_value = int(action.low) + int(np.argmax(action.counts))
            share = f"{largest_share:.0%} of the steps"
            yield f"{action.name} is {action_value} in {share}: the policy rarely takes another action"
    elif action.dtype.startswith(("float", "bfloat")) and action.size <= MAX_COLUMNS and action.high > action.low:
        tolerance = 1e-3 * (action.high - action.low)
        low, high = action.sample.min(0), action.sample.max(0)
        share_at_bounds = ((action.sample <= low + tolerance) | (action.sample >= high - tolerance)).mean(0)
        for number in np.flatnonzero((share_at_bounds > SATURATED_SHARE) & (high > low)):
            name = action.name if action.size == 1 else f"{action.name}[{number}]"
            yield f"{name} is at its bounds in {share_at_bounds[number]:.0%} of the steps: the policy is saturated"


def _sampling(summary: Summary) -> Iterator[str]:
    priorities = summary.priorities
    if priorities is None or priorities.num_cells < MIN_STEPS:
        return
    if priorities.largest >= 0.5:
        yield f"one step has {priorities.largest:.0%} of the sampling probability: it fills the batches"
    elif priorities.half * 1000 <= priorities.num_cells:
        yield f"{priorities.half:,} of {priorities.num_cells:,} steps have half of the sampling probability"
