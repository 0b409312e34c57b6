"""Prepared rows are written as ``extend`` writes them."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import RewardScaling

from kit.rings import ring
from kit.seeds import generator
from kit.states import differences
from torchrl_lightning.datamodules._run.step_writer import PreparedWrite
from torchrl_lightning.replay import PrioritizedSampler


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


@pytest.mark.parametrize("shape", [(2,), (3, 2), (7, 2)])
@pytest.mark.parametrize("change", ["nothing", "priorities", "uneven", "shared", "restored", "emptied"])
def test_prepared_rows_are_written_as_by_extend(shape: tuple[int, ...], change: str) -> None:
    rows = make_rows(*shape)
    prefers = change == "priorities"
    one, other = (ring(5, 2, PrioritizedSampler(10, 0.7, 0.5) if prefers else None, data=rows) for _ in range(2))
    prepared = PreparedWrite(one, rows)
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
    assert not differences(one.state_dict(), other.state_dict())


TRANSPOSED = torch.zeros(3, 2, 3).transpose(0, 1).contiguous().transpose(0, 1)
REFUSED = {
    "priorities": make_rows(2).set("td_error", torch.ones(2)),
    "a row in pieces": make_rows(2).set("a", torch.zeros(3, 2).T),
    "a rollout in pieces": make_rows(3, 2).set("a", TRANSPOSED),
    "flags that are numbers": make_rows(2).set("is_init", torch.zeros(2, 1)),
}


@pytest.mark.parametrize("rows", REFUSED.values(), ids=REFUSED)
def test_rows_that_need_conversion_are_refused(rows: TensorDict) -> None:
    with pytest.raises(ValueError, match="rows must be stored without"):
        PreparedWrite(ring(5, 2, data=rows), rows)


def test_buffers_that_transform_rows_are_refused() -> None:
    rows = make_rows(2)
    with pytest.raises(ValueError, match="buffer must be a ring with stored rows"):
        PreparedWrite(ring(5, 2), rows)
    with pytest.raises(ValueError, match="rows must be stored without"):
        PreparedWrite(ring(5, 2, data=rows, transform=RewardScaling(0.0, 1.0, in_keys=["a"])), rows)
    with pytest.raises(ValueError, match="keys, shapes and dtypes"):
        PreparedWrite(ring(5, 2, data=rows), make_rows(2).set("b", torch.zeros(2)))
