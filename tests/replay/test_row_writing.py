"""A write stores complete rows, or leaves nothing that can be sampled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from kit.rings import ring
from torchrl_lightning.replay import ExperienceBuffer, UniformSampler
from torchrl_lightning.replay.cells import Cells

ENVS, LENGTH = 3, 4


def step(number: int, rows: int = ENVS) -> TensorDict:
    value = torch.full((rows, 2), float(number))
    done = torch.tensor([[number % 3 == 2]] * rows)
    return TensorDict({"a": value, "b": value.double(), "next": {"done": done}}, [rows])


def filled(steps: int) -> ExperienceBuffer:
    ours = ring(LENGTH, ENVS, batch_size=200)
    for number in range(steps):
        ours.extend(step(number))
    return ours


KINDS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "transposed": (torch.float32, lambda value: value.t().contiguous().t()),
    "expanded": (torch.float32, lambda value: value[:, :1].expand(-1, 4)),
    "strided": (torch.int16, lambda value: value.repeat_interleave(2, 0)[::2]),
    "bfloat16": (torch.bfloat16, lambda value: value),
    "float8": (torch.float8_e4m3fn, lambda value: value),
    "conjugated": (torch.complex64, lambda value: value.conj()),
    "negated": (torch.float32, lambda value: torch.complex(value, value).conj().imag),
    "parameter": (torch.float32, nn.Parameter),
    "with a gradient": (torch.float32, lambda value: value.requires_grad_() * 2),
    "empty": (torch.float32, lambda value: value[:, :0]),
}


@pytest.mark.parametrize("env_ids", [None, [2, 0]])
@pytest.mark.parametrize("kind", KINDS)
def test_leaves_of_all_kinds_are_written(kind: str, env_ids: list[int] | None) -> None:
    dtype, make = KINDS[kind]
    ours = ring(LENGTH, ENVS)
    rows = ENVS if env_ids is None else len(env_ids)
    for number in range(2 * LENGTH + 1):
        leaf = make((torch.arange(rows * 4).view(rows, 4) + number).to(dtype))
        data = TensorDict({"a": leaf, "n": torch.full((rows,), number)}, [rows])
        index = ours.extend(data, env_ids)
        found = ours.storage.get(index)
        assert found["n"].tolist() == [number] * rows
        assert torch.equal(found["a"].to(torch.complex64), leaf.detach().to(torch.complex64).resolve_neg())
        assert found["a"].dtype == dtype


@pytest.mark.parametrize("steps", [2, LENGTH, 2 * LENGTH + 1])
@pytest.mark.parametrize("env_ids", [None, [1]])
def test_interrupted_write_leaves_no_incomplete_row(
    steps: int, env_ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = filled(steps)

    def interrupted(cells: Cells, leaves: list[Tensor], index: Tensor) -> None:
        cells.leaves[0].index_copy_(0, index, leaves[0])
        raise KeyboardInterrupt

    match = Cells.match
    with monkeypatch.context() as patch:  # as on a device: the leaves are copied one after the other
        patch.setattr(Cells, "match", lambda cells, data, rows: (match(cells, data, rows)[0], None))
        patch.setattr(Cells, "scatter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours.extend(step(90, ENVS if env_ids is None else 1), env_ids)
    writer = ours.writer
    assert writer.positions.tolist() == [steps] * ENVS
    kept = writer.rings.filled_cells()
    env, position = writer.rings.env_of(kept), writer.rings.position_of(kept)
    ends = torch.minimum(position + (2 - position) % 3, torch.tensor(steps - 1))
    lost = (ENVS if env_ids is None else 1) if steps >= LENGTH else 0
    assert len(kept) == len(ours) == ENVS * min(steps, LENGTH) - lost
    restored = ring(LENGTH, ENVS, batch_size=200)
    restored.load_state_dict(ours.state_dict())
    for one in (ours, restored):
        batch = one.sample()
        assert set(batch["index"].tolist()) == set(kept.tolist())
        assert (batch["a"] == batch["b"]).all()
        assert batch["a"].max() < steps
        assert torch.equal(one.writer.index.end(env, position), ends)
        for number in range(steps, steps + LENGTH):  # new steps fill the dropped cells again
            one.extend(step(number))
        assert one.writer.is_uniformly_filled
        assert len(one) == ENVS * min(steps + LENGTH, LENGTH)
        assert set(one.sample()["a"][:, 0].tolist()) == set(range(steps, steps + LENGTH))


def test_claimed_cells_are_not_sampled() -> None:
    ours = filled(2 * LENGTH)
    ours.set_sampler(UniformSampler(stratified=True))
    ours.writer.claim(ours.writer.rings.ids, 2)
    assert len(ours) == ENVS * (LENGTH - 2)
    assert set(ours.sample()["a"][:, 0].tolist()) == {6, 7}
    ours.extend(step(8))
    assert set(ours.sample()["a"][:, 0].tolist()) == {6, 7, 8}
    ours.empty()
    ours.extend(step(9))
    assert len(ours) == ENVS


def test_long_write_keeps_the_newest_steps() -> None:
    ours = filled(1)
    many = torch.stack([step(number) for number in range(1, 3 * LENGTH)])
    ours.extend(many, time_dim=0)
    assert ours[:]["a"][:, 0].view(LENGTH, ENVS)[:, 0].sort().values.tolist() == [8, 9, 10, 11]
    ours.extend(many, torch.arange(ENVS).flip(0), time_dim=0)
    assert ours.writer.positions.tolist() == [6 * LENGTH - 1] * ENVS
