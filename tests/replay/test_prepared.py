"""Prepared rows are written as ``extend`` writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import RewardScaling

from kit.rings import ring
from kit.seeds import generator
from torchrl_lightning.replay import PrioritizedSampler
from torchrl_lightning.replay.prepared import PreparedRows


def make_rows(*shape: int) -> TensorDict:
    flag = torch.zeros(*shape, 1, dtype=torch.bool)
    rows = TensorDict({"a": torch.zeros(*shape, 3), "is_init": flag}, list(shape))
    rows["next"] = TensorDict({"done": flag.clone(), "reward": torch.zeros(*shape, 1)}, list(shape))
    if len(shape) > 1:
        rows.names = ["time", None]
    return rows


def fill(rows: TensorDict, step: int) -> None:
    seeded = generator(step)
    rows["a"].normal_(generator=seeded)
    rows["next", "done"].copy_(torch.rand(rows["next", "done"].shape, generator=seeded) < 0.3)
    rows["is_init"].copy_(torch.rand(rows["is_init"].shape, generator=seeded) < 0.1)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return bool(torch.equal(first, second)) if isinstance(first, torch.Tensor) else first == second


@pytest.mark.parametrize("shape", [(2,), (3, 2), (7, 2)])
@pytest.mark.parametrize("change", ["nothing", "priorities", "uneven", "shared", "restored", "emptied"])
def test_prepared_rows_are_written_as_by_extend(shape: tuple[int, ...], change: str) -> None:
    sampler = {"sampler": lambda: PrioritizedSampler(10, alpha=0.7, beta=0.5)} if change == "priorities" else {}
    one, other = (ring(5, 2, **{key: make() for key, make in sampler.items()}) for _ in range(2))
    rows = make_rows(*shape)
    for buffer in (one, other):
        buffer.extend(rows)
    prepared = PreparedRows(one, rows)
    for step in range(8):
        fill(rows, step)
        assert torch.equal(prepared.write(), other.extend(rows))
        if step != 4:
            continue
        for buffer in (one, other):
            if change == "uneven":
                buffer.extend(make_rows(1), env_ids=torch.tensor([1]))
            elif change == "shared":
                buffer.share()
            elif change == "restored":
                buffer.load_state_dict(buffer.state_dict())
            elif change == "emptied":
                buffer.empty()
    assert same(one.state_dict(), other.state_dict())


def test_rows_that_extend_has_more_to_do_with_are_refused() -> None:
    rows = make_rows(2)
    with pytest.raises(ValueError, match="ring that has stored some"):
        PreparedRows(ring(5, 2), rows)

    def refused(rows: TensorDict, match: str, **kwargs: Any) -> None:
        buffer = ring(5, 2, **kwargs, data=rows)
        with pytest.raises(ValueError, match=match):
            PreparedRows(buffer, rows)

    refused(make_rows(2).set("td_error", torch.ones(2)), "write them by extend")
    refused(make_rows(2).set("a", torch.zeros(3, 2).T), "write them by extend")
    refused(make_rows(3, 2).set("a", torch.zeros(3, 2, 3).transpose(0, 1).contiguous().transpose(0, 1)), "by extend")
    refused(make_rows(2).set("is_init", torch.zeros(2, 1)), "write them by extend")
    refused(rows, "write them by extend", transform=RewardScaling(0.0, 1.0, in_keys=["a"]))
    buffer = ring(5, 2, data=rows)
    with pytest.raises(ValueError, match="does not fit what is stored"):
        PreparedRows(buffer, make_rows(2).set("b", torch.zeros(2)))
