"""Calls that buffers over rings refuse, of two environments and full, and samplers of 12 priorities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from contracts.part import Refusal
from contracts.refusals import no_hooks, no_tensordict
from kit.rows import numbered
from torchrl_lightning import ExperienceBuffer, RingStorage

Call = Callable[[Any], Any]

SIZES = Refusal(
    "batch_size.*0",
    *(partial(ExperienceBuffer.sample, batch_size=size) for size in (-1, 2.5, True, "3")),
)


def extend(data: TensorDict | LazyStackedTensorDict, env_ids: Any = None) -> Call:
    return lambda ours: ours.extend(data.clone(), env_ids)


def stored(ours: ExperienceBuffer) -> Any:
    """Two steps as they were written."""
    return ours.storage.get(torch.tensor([0, 1]))


def another(**entries: Any) -> Call:
    """A write of two steps with other entries."""
    return lambda ours: ours.extend(stored(ours).update(entries))


def lacks(key: Any) -> Call:
    return lambda ours: ours.extend(stored(ours).exclude(key))


first, last = numbered(2).unbind(0)
NO_TENSORS = {
    "'x' is a NonTensorData": [numbered(2, x=x) for x in (NonTensorData("a", [2]), "text", np.array(["a", "b"]))],
    "'x' is a NonTensorStack": [numbered(2, x=NonTensorStack("a", "b"))],
    r"\('x', 'z'\) is a NonTensorData": [numbered(2).set("x", {"y": np.zeros(2), "z": "text"})],
    "'x' is a sparse": [numbered(2, x=torch.eye(2).to_sparse())],
    r"Only some rows have the entries \['extra'\]": [LazyStackedTensorDict(first, last.set("extra", torch.zeros(())))],
}
OTHER_IDS = ([0.5], [1.0], [True], torch.tensor([True, False]), "1")
WRONG_IDS = ([0, 0], [2], [-1], [])

WRITES = (
    *no_tensordict(
        ExperienceBuffer.extend,
        ExperienceBuffer.add,
        ExperienceBuffer.update_tensordict_priority,
        lambda ours, data: ours.write_back(data, ["observation"]),
        lambda ours, data: ours.writer.extend(data),
        lambda ours, data: ours.writer.add(data),
        lambda ours, data: ours.storage.set(slice(0, 3), data),
    ),
    no_hooks(lambda ours: ours, lambda ours: ours.storage),
    *(Refusal(says, *map(extend, data), error=TypeError, empty=True) for says, data in NO_TENSORS.items()),
    Refusal("meta", extend(numbered(2).to("meta")), empty=True),
    Refusal("time_dim", extend(TensorDict({"a": torch.zeros(2, 3)}, [2, 3])), empty=True),
    Refusal("2 rows.*got 6", extend(numbered(6)), empty=True),
    Refusal("2 rows.*got 1", lambda ours: ours.add(numbered(1)[0]), empty=True),
    Refusal(r"\[2\].*got \[3\]", lambda ours: ours.writer.extend(numbered(3)), empty=True),
    Refusal("2 environments, got 3", lambda ours: ours.extend(numbered(6).view(2, 3), time_dim=0), empty=True),
    Refusal(
        "env_ids",
        *(extend(numbered(1), ids) for ids in OTHER_IDS),
        *(lambda ours, ids=ids: ours.writer.cut(ids) for ids in OTHER_IDS),
        error=TypeError,
    ),
    Refusal(
        r"env_ids.*\[0, 2\)",
        *(extend(numbered(len(ids) or 1), torch.tensor(ids)) for ids in WRONG_IDS[:3]),
        *(lambda ours, ids=ids: ours.writer.extend(numbered(len(ids) or 1), torch.tensor(ids)) for ids in WRONG_IDS),
        empty=True,
    ),
    Refusal("'observation'", lacks("observation")),
    Refusal("'b' is new", another(b=torch.zeros(2))),
    Refusal("'next'", another(next=torch.zeros(2))),
    Refusal(r"'observation'.*\[2\] torch.float32", another(observation=torch.zeros(2, 2))),
    Refusal(r"'observation'.*\[1\] torch.float64", another(observation=torch.zeros(2, 1).double())),
    Refusal(r"\('next', 'reward'\)", lambda ours: ours.extend(stored(ours).set(("next", "reward"), torch.zeros(2, 2)))),
    Refusal("stores only dense tensors", another(observation="text"), error=TypeError),
)


def write_back(*keys: Any, without: str = "", **entries: Any) -> Call:
    """A batch whose rewards, and then other entries, are written back; some entries replaced, or left out."""

    def call(ours: ExperienceBuffer) -> None:
        batch, cells = stored(ours), torch.tensor([0, 1])
        batch["index"], batch["write_position"] = cells, ours.writer.rings.write_version(cells)
        batch["next", "reward"] += 100
        ours.write_back(batch.update(entries).exclude(without), [("next", "reward"), *keys])

    return call


WRITE_BACKS = (
    Refusal("must be .*, got .* torch.float64", write_back("observation", observation=torch.ones(2, 1).double())),
    Refusal(r"'observation'.*\[2\] torch.float32", write_back("observation", observation=torch.ones(2))),
    Refusal("no entry 'm'", write_back("m", m=torch.ones(2)), error=KeyError),
    Refusal("'observation'", write_back("observation", without="observation"), error=KeyError),
    Refusal("'index'", write_back(without="index"), error=KeyError),
    Refusal("'write_position'", write_back(without="write_position"), error=KeyError),
)


SHARED = (
    Refusal("shared", lambda ours: ours.share(False)),
    Refusal(r"buffer.share\(\)", lambda ours: ours.load_state_dict(ours.state_dict()), error=RuntimeError, empty=True),
)


def written_with(*priorities: float) -> Call:
    return extend(numbered(2, td_error=torch.tensor(priorities)))


NO_CELLS = ([0.5], torch.tensor([0.5]), np.array([1.0]))

PRIORITIES = (
    Refusal(
        r"got (nan|-1\.0|inf) in row 1; nothing was written",
        *(written_with(1.0, wrong) for wrong in (math.nan, -1.0, math.inf)),
        empty=True,
    ),
    Refusal(
        "Cells must be integers, got torch",
        *(lambda ours, cells=cells: ours.storage.get(cells) for cells in NO_CELLS),
        *(lambda ours, cells=cells: ours.storage.set(cells, stored(ours)[:1]) for cells in (*NO_CELLS, [[True]])),
        *(lambda ours, cells=cells: ours.update_priority(cells, 1.0) for cells in (*NO_CELLS, [[True]])),
        error=TypeError,
    ),
    Refusal(
        "'td_error'",
        lambda ours: ours.update_tensordict_priority(stored(ours).set("index", torch.tensor([0, 1]))),
        error=KeyError,
    ),
)


def set_to(**setting: Any) -> Call:
    """Change a setting."""
    ((name, value),) = setting.items()
    return lambda part: setattr(part, name, value)


def prefer(cells: list[int], *values: float, **generation: Tensor) -> Call:
    """Give priorities to a sampler."""
    return lambda sampler: sampler.update_priority(torch.tensor(cells), torch.tensor(values), **generation)


SAMPLER = (
    Refusal(
        r"finite and not negative, got .* for cell 2",
        *(prefer([0, 2], 5.0, wrong) for wrong in (-0.1, math.nan, math.inf)),
    ),
    Refusal(r"index.*\[0, 12\).*got 12", prefer([0, 12], 5.0, 1.0), error=IndexError),
    Refusal(r"index.*\[0, 12\).*got -2", prefer([0, -2], 5.0, 1.0), error=IndexError),
    Refusal(r"2 cells.*shape \[3\]", prefer([0, 1], 1.0, 1.0, 1.0)),
    Refusal("must be integers", lambda sampler: sampler.update_priority(torch.tensor([0.5]), 1.0), error=TypeError),
    Refusal("generation.*2.*got 1", prefer([0, 1], 1.0, 1.0, generation=torch.ones(1))),
    Refusal("alpha", set_to(alpha=-1.0)),
    Refusal("beta", set_to(beta=-1.0)),
    Refusal("batch_length=2", lambda sampler: sampler.sample(RingStorage(12), 2, 2)),
)
