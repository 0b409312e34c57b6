"""Describe likely mistakes in a buffer, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torchrl_lightning.inspection.episode_gallery import CUT, RUNNING, TERMINATED
from torchrl_lightning.inspection.summary import ACTIONS, WIDE, Summary

BOUND = 0.5  # report an action with more than this share of values at its bounds
ALONE = 100  # fewer steps are too few to report that an event never happens


def findings(summary: Summary) -> list[str]:
    """Return a sentence for each likely mistake.

    Args:
        summary: The statistics of the buffer.
    """
    return list(_findings(summary))


def _findings(summary: Summary) -> Iterator[str]:
    content = summary.content
    if not content.looked_at:
        yield "nothing is stored yet"
        return
    for entry in summary.entries:
        if entry.nans:
            yield f"{entry.name} holds {entry.nans:,} numbers that are NaN or infinite: find where they come from"
        whole_image = entry.size > WIDE and entry.constant == entry.size and _may_vary(entry.key, 1)
        if whole_image and content.looked_at >= ALONE:
            yield f"{entry.name} is the same image in every step: it tells a network nothing"
        if entry.constant and _may_vary(entry.key, entry.size) and content.looked_at >= ALONE:
            what = "is" if entry.size == 1 else f"has {entry.constant} of {entry.size} numbers that are"
            yield f"{entry.name} {what} the same in every step: it tells a network nothing"
    yield from _rewards(summary)
    yield from _ends(summary)
    yield from _actions(summary)
    yield from _draws(summary)


def _may_vary(key: tuple[str, ...], size: int) -> bool:
    """Return whether a constant entry is a likely mistake; image edges are often constant."""
    own = {"reward", "rewards", "done", "dones", "terminated", "truncated", "is_init", "collector", "demo", "index"}
    return size <= WIDE and not own & set(key)


def _rewards(summary: Summary) -> Iterator[str]:
    reward = summary.entry("reward", "rewards")
    if reward is None or reward.nans or summary.content.looked_at < ALONE:
        return
    if reward.low == reward.high == 0:
        yield f"{reward.name} is zero in every step: there is nothing to learn from"
    elif reward.low == reward.high and (summary.episodes is None or len(summary.episodes) <= 1):
        yield f"{reward.name} is {reward.low:g} in every step, and no episode ends: all policies look the same"


def _ends(summary: Summary) -> Iterator[str]:
    episodes, content = summary.episodes, summary.content
    if content.looked_at < ALONE:
        return
    terminated = summary.entry("terminated")
    if terminated is None and content.find("done", "dones") is None:
        yield "no entry says where episodes end: value targets reach from one into the next"
        return
    if terminated is not None and terminated.high == 0:
        yield f"{terminated.name} is never set: right for a task that only a time limit ends, else a mistake"
    if episodes is not None and len(episodes) and np.isin(episodes.end, (RUNNING, CUT)).all():
        yield "no episode has ended"
    ended = None if episodes is None else episodes.length[episodes.end == TERMINATED]
    if ended is not None and len(ended) > 10 and int(ended.max()) == 1:
        yield "every episode has one step"


def _actions(summary: Summary) -> Iterator[str]:
    action = summary.entry(*ACTIONS)
    if action is None or summary.content.looked_at < ALONE or not len(action.sample):
        return
    if action.counts:
        most = max(action.counts) / sum(action.counts)
        if most > 0.95 and len(action.counts) > 1:
            taken = int(action.low) + int(np.argmax(action.counts))
            yield f"{action.name} is {taken} in {most:.0%} of the steps: the policy hardly tries another"
    elif action.dtype.startswith(("float", "bfloat")) and action.size <= WIDE and action.high > action.low:
        near = 1e-3 * (action.high - action.low)
        low, high = action.sample.min(0), action.sample.max(0)
        at = ((action.sample <= low + near) | (action.sample >= high - near)).mean(0)
        for number in np.flatnonzero((at > BOUND) & (high > low)):
            which = action.name if action.size == 1 else f"{action.name}[{number}]"
            yield f"{which} lies at its bounds in {at[number]:.0%} of the steps: the policy is saturated"


def _draws(summary: Summary) -> Iterator[str]:
    priorities = summary.priorities
    if priorities is None or priorities.known < ALONE:
        return
    if priorities.largest >= 0.5:
        yield f"one priority holds {priorities.largest:.0%} of the mass: one step fills the batches"
    elif priorities.half * 1000 <= priorities.known:
        yield f"{priorities.half:,} of {priorities.known:,} steps hold half of the priorities' mass"
