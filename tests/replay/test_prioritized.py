from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import TensorDictMaxValueWriter
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from kit.golden import arrays
from kit.rings import HOUSES, UNEVEN, house, ring, uneven
from kit.rows import numbered
from kit.seeds import generator
from kit.states import differences, plain
from kit.statistics import chi_square
from torchrl_lightning.replay.priorities import Priorities
from torchrl_lightning.replay.prioritized import PrioritizedSampler
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.ring_writer import RingWriter


def make(capacity: int = 20, alpha: float = 1.0, beta: float = 1.0, **kwargs: Any) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, alpha, beta, **{"eps": 0.0, "generator": generator(), **kwargs})


kinds = pytest.mark.parametrize("kind", HOUSES)
# A plain ReplayBuffer does not read priorities from a TensorDict.
tensordict_kinds = pytest.mark.parametrize("kind", [kind for kind in HOUSES if kind != "torchrl_plain"])


def draw(buffer: Any, batches: int, size: int) -> Tensor:
    return torch.cat([buffer.sample(size)["number"] for _ in range(batches)])


@kinds
@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_draws_follow_the_priorities(kind: str, stratified: bool, alpha: float) -> None:
    buffer = HOUSES[kind](make(alpha=alpha, stratified=stratified))
    index = buffer.extend(numbered(9))
    priorities = torch.tensor([0.5, 1.0, 3.0, 0.2, 7.0, 1.0, 2.0, 0.1, 4.0])
    buffer.update_priority(index, priorities)
    cells = torch.cat([buffer.sampler.sample(buffer.storage, 16)[0] for _ in range(500)])
    # Strata reduce the variance of the counts, so the bound holds for them as well.
    values = buffer.storage.get(cells)["number"]
    assert chi_square(values, priorities**alpha) < 26.1  # 8 degrees of freedom, p = 0.001


def test_strata_draw_in_proportion_within_one() -> None:
    buffer = HOUSES["torchrl"](make())
    buffer.update_priority(buffer.extend(numbered(4)), torch.tensor([1.0, 2.0, 1.0, 4.0]))
    for _ in range(20):
        assert torch.bincount(buffer.sample(8)["number"]).tolist() == [1, 2, 1, 4]


def test_golden_frequencies_of_alf() -> None:
    golden = arrays("alf_prioritized_sampling")
    for stage in "abcd":
        leaves = torch.from_numpy(golden[f"{stage}_leaf_priorities"])
        cells = leaves.numel()  # ALF counts env * length + slot
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(cells), sampler=make(cells), batch_size=1000)
        buffer.update_priority(buffer.extend(numbered(cells)), leaves.reshape(-1))
        env, slot = golden[f"{stage}_unique_env_pos"][0], golden[f"{stage}_unique_env_pos"][1] % leaves.shape[1]
        counts = torch.bincount(buffer.sample()["number"], minlength=cells)
        expected = torch.zeros(cells, dtype=torch.int64)
        expected[torch.from_numpy(env * leaves.shape[1] + slot)] = torch.from_numpy(golden[f"{stage}_counts"])
        assert (counts - expected).abs().max() <= 1


@kinds
def test_sampler_draws_only_stored_cells(kind: str) -> None:
    buffer = house(kind, make(), numbered(3))
    assert set(draw(buffer, 20, 10).tolist()) == {0, 1, 2}
    buffer.extend(numbered(30, start=3))
    assert set(draw(buffer, 20, 40).tolist()) == set(range(13, 33))
    buffer.empty()
    with pytest.raises(RuntimeError, match="0 are stored"):
        buffer.sample(2)
    buffer.extend(numbered(2, start=50))
    assert set(draw(buffer, 20, 10).tolist()) == {50, 51}


def test_uneven_rings() -> None:
    buffer = uneven(make())
    assert sorted(set(draw(buffer, 20, 60).tolist())) == UNEVEN
    late = make()
    assert sorted(late.sample(buffer.storage, 200)[0].unique().tolist()) == buffer.writer.rings.filled_cells().tolist()


def test_several_dimensions() -> None:
    sampler = make(12)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=8, dim_extend=0, priority_key="td"
    )
    buffer.extend(TensorDict({"number": torch.arange(6).view(2, 3)}, [2, 3]))
    buffer.update_priority(torch.tensor([[1, 2], [0, 1]]), torch.tensor([3.0, 2.0]))
    assert sampler.table.priorities[:7].tolist() == [1.0, 2.0, 1.0, 1.0, 1.0, 3.0, -1.0]
    batch = buffer.sample()
    assert torch.equal(batch["index"][:, 0] * 3 + batch["index"][:, 1], batch["number"])
    buffer.update_priority(batch["index"], torch.full((8,), 9.0))
    drawn = batch["number"].unique()
    assert (sampler.table.priorities[drawn] == 9.0).all()
    buffer.extend(TensorDict({"number": torch.arange(6, 9).view(1, 3)}, [1, 3]))
    assert sampler.table.priorities[6:9].tolist() == [9.0, 9.0, 9.0]


@pytest.mark.parametrize("alpha", [0.6, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights(alpha: float, beta: float) -> None:
    priorities = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0], dtype=torch.float64)
    probability = priorities**alpha / (priorities**alpha).sum()
    raw = (5 * probability) ** -beta
    for norm in ("batch", "buffer", None):
        buffer = HOUSES["torchrl"](make(alpha=alpha, beta=beta, weight_norm=norm))
        buffer.update_priority(buffer.extend(numbered(5)), priorities)
        batch = buffer.sample(6)
        expected = raw[batch["number"]]
        expected = expected / {"batch": expected.max(), "buffer": raw.max(), None: 1.0}[norm]
        assert batch["priority_weight"].dtype is torch.float32
        torch.testing.assert_close(batch["priority_weight"], expected.float())


def test_weights_correct_the_bias() -> None:
    # The weighted mean E_P[w f] / E_P[w] equals the plain mean for all priorities.
    buffer = HOUSES["torchrl"](make(beta=1.0, weight_norm="buffer"))
    buffer.update_priority(buffer.extend(numbered(10)), torch.arange(1.0, 11.0))
    batch = buffer.sample(20_000)
    weight = batch["priority_weight"].double()
    assert float((weight * batch["number"]).sum() / weight.sum()) == pytest.approx(4.5, abs=0.05)


def test_cells_without_priority_do_not_change_buffer_weights() -> None:
    buffer = HOUSES["torchrl"](make(weight_norm="buffer"))
    buffer.update_priority(buffer.extend(numbered(3)), torch.tensor([0.0, 2.0, 4.0]))
    batch = buffer.sample(6)
    assert set(batch["number"].tolist()) == {1, 2}
    assert batch["priority_weight"].max() == 1.0


@tensordict_kinds
def test_priorities_are_updated_from_a_batch(kind: str) -> None:
    sampler = make()
    assert isinstance(sampler, TorchRLPrioritizedSampler)
    buffer = house(kind, sampler, numbered(8))
    batch = buffer.sample(64)
    batch["td_error"] = batch["number"].float() + 1
    buffer.update_tensordict_priority(batch)
    assert sampler.table.priorities[:8].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@kinds
def test_new_data_get_the_highest_priority_so_far(kind: str) -> None:
    sampler = make(initial_priority=0.5)
    buffer = house(kind, sampler, numbered(2))
    assert sampler.table.priorities[:2].tolist() == [0.5, 0.5]
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([6.0, 0.1]))
    buffer.extend(numbered(2))
    buffer.update_priority(torch.tensor([0, 2]), torch.tensor([0.2, 0.3]))
    buffer.extend(numbered(1))
    buffer.add(numbered(1)[0])
    assert sampler.table.priorities[:6].tolist() == pytest.approx([0.2, 0.1, 0.3, 6.0, 6.0, 6.0], abs=1e-7)


def test_highest_priority_that_is_still_stored() -> None:
    sampler = make(4, initial_priority=0.0, max_priority_within_buffer=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
    buffer.extend(numbered(4))
    buffer.update_priority(torch.arange(4), torch.tensor([9.0, 2.0, 5.0, 1.0]))
    assert sampler.default_priority == 9.0
    buffer.update_priority(torch.tensor([0]), torch.tensor([0.5]))
    assert sampler.default_priority == 5.0
    buffer.empty()
    assert sampler.default_priority == 0.0


@tensordict_kinds
def test_priorities_in_written_data_are_used(kind: str) -> None:
    sampler = make()
    buffer = HOUSES[kind](sampler)
    buffer.extend(numbered(3, td_error=torch.tensor([[1.0], [2.0], [5.0]])))
    assert sampler.table.priorities[:3].tolist() == [1.0, 2.0, 5.0]
    assert chi_square(draw(buffer, 100, 16), torch.tensor([1.0, 2.0, 5.0])) < 13.8


def test_late_updates_do_not_change_newer_steps() -> None:
    ours = ring(4, sampler=make(4), filled=4, batch_size=8)
    batch = ours.sample()
    ours.extend(numbered(2))
    batch["td_error"] = torch.full((8,), 7.0)
    ours.update_tensordict_priority(batch)
    assert set(batch["index"].tolist()) == {0, 1, 2, 3}
    assert ours.sampler.table.priorities.tolist() == [1, 1, 7, 7]
    del batch["write_generation"]
    ours.update_tensordict_priority(batch)
    assert ours.sampler.table.priorities.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("storage", [LazyTensorStorage, RingStorage])
def test_torchrl_buffers_skip_late_updates_with_generations(storage: Any) -> None:
    writer = RingWriter() if storage is RingStorage else None
    buffer = TensorDictReplayBuffer(storage=storage(4), writer=writer, sampler=make(4), batch_size=8)
    buffer.extend(numbered(4))
    batch = buffer.sample()
    buffer.extend(numbered(2))
    errors = torch.full((8,), 7.0)
    assert set(batch["index"].tolist()) == {0, 1, 2, 3}
    buffer.sampler.update_priority(batch["index"], errors, generation=batch["write_generation"])
    assert buffer.sampler.table.priorities.tolist() == [1, 1, 7, 7]
    buffer.update_tensordict_priority(batch.set("td_error", errors))  # as documented, also updates overwritten cells
    assert buffer.sampler.table.priorities.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_priority_updates_skip_empty_cells(backend: Any) -> None:
    sampler = make(6)
    sampler.table = Priorities(6, 1.0, 0.0, backend=backend)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler)
    buffer.extend(numbered(2))
    buffer.update_priority(torch.tensor([-1, 1, 4]), torch.tensor([5.0, 6.0, 7.0]))
    buffer.update_priority(torch.tensor([3, -1]), 8.0)
    assert sampler.table.priorities.tolist() == [1.0, 6.0, -1.0, -1.0, -1.0, -1.0]
    assert sampler.default_priority == 6.0


def test_priorities_with_further_dimensions_are_reduced() -> None:
    values = torch.tensor([[1.0, 5.0, 3.0], [2.0, 8.0, 2.0]])
    for reduction, expected in (("max", [5, 8]), ("min", [1, 2]), ("mean", [3, 4]), ("median", [3, 2])):
        sampler = make(reduction=reduction)
        sampler.mark_update(slice(0, 2))
        sampler.update_priority(torch.tensor([0, 1]), values)
        assert sampler.table.priorities[:2].tolist() == expected
        ours = ring(8, sampler=make(8, reduction=reduction))
        ours.extend(numbered(2, td_error=values))
        assert ours.sampler.table.priorities[:2].tolist() == expected


def test_max_value_writer() -> None:
    sampler = make(3)
    writer = TensorDictMaxValueWriter(rank_key="rank")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler, writer=writer, batch_size=30)
    buffer.extend(numbered(5, rank=torch.tensor([1.0, 5.0, 2.0, 9.0, 0.5])))
    assert set(buffer.sample()["rank"].tolist()) == {5.0, 2.0, 9.0}


def test_zero_priorities_are_never_drawn_and_only_zeros_raise_an_error() -> None:
    buffer = HOUSES["torchrl"](make())
    index = buffer.extend(numbered(4))
    buffer.update_priority(index, torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert set(draw(buffer, 50, 10).tolist()) == {1, 3}
    buffer.update_priority(index, 0.0)
    before = plain(buffer.sampler.state_dict())
    with pytest.raises(RuntimeError, match="All 4 stored priorities are zero"):
        buffer.sample(2)
    assert not differences(plain(buffer.sampler.state_dict()), before)


@pytest.mark.parametrize("filled", [0, 3])
@pytest.mark.parametrize("kind", ["torchrl", "ours"])
def test_capacity_must_cover_the_storage(kind: str, filled: int) -> None:
    buffer = HOUSES[kind](None)
    if filled:
        buffer.extend(numbered(filled))
    buffer.set_sampler(make(12))
    before = plain(buffer.state_dict())
    with pytest.raises(ValueError, match=r"20.*12.*max_capacity=20"):
        buffer.extend(numbered(3))
    assert kind == "torchrl" or not differences(plain(buffer.state_dict()), before)


def test_sampler_of_a_filled_storage_adds_its_cells() -> None:
    buffer = house("torchrl", None, numbered(5))
    sampler = make()
    buffer.set_sampler(sampler)
    assert set(draw(buffer, 10, 20).tolist()) == set(range(5))
    other = make()
    other.update_priority(torch.tensor([2]), 3.0, storage=buffer.storage)
    assert other.table.priorities[:6].tolist() == [1.0, 1.0, 3.0, 1.0, 1.0, -1.0]


def test_alpha_changes_to_zero_and_back() -> None:
    buffer = HOUSES["torchrl"](make(alpha=0.7))
    priorities = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    buffer.update_priority(buffer.extend(numbered(3)), priorities)
    sampler = buffer.sampler
    for alpha in (0.0, 1.0, 0.5):
        sampler.alpha = alpha
        torch.testing.assert_close(
            sampler.table.tree.leaves[:4], torch.cat([priorities**alpha, torch.zeros(1)]).double()
        )


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_torchrl_schedulers(name: str) -> None:
    buffer = HOUSES["torchrl"](make(**{name: 0.4}))
    buffer.update_priority(buffer.extend(numbered(4)), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    scheduler = LinearScheduler(buffer, name, final_value=1.0, num_steps=3)
    seen = []
    for _ in range(5):
        scheduler.step()
        seen.append(getattr(buffer.sampler, name))
    assert seen == pytest.approx([0.6, 0.8, 1.0, 1.0, 1.0])
    batch = buffer.sample(8)
    expected = 1 / (batch["number"] + 1.0)
    torch.testing.assert_close(batch["priority_weight"], expected / expected.max())


def test_single_precision() -> None:
    buffer = HOUSES["torchrl"](make(dtype=torch.float32))
    buffer.update_priority(buffer.extend(numbered(3)), torch.tensor([1.0, 2.0, 5.0]))
    assert buffer.sampler.dtype is torch.float32
    assert chi_square(draw(buffer, 200, 16), torch.tensor([1.0, 2.0, 5.0])) < 13.8


def test_moved_memory_is_detected() -> None:
    sampler, storage = make(), LazyTensorStorage(20)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=4)
    buffer.extend(numbered(3))
    buffer.sample()
    for part in (sampler.table.tree.nodes, sampler.table.priorities, sampler.table.generations):
        part.share_memory_()  # the same move as when a process is started
    buffer.update_priority(torch.tensor([0, 1, 2]), torch.tensor([0.0, 5.0, 0.0]))
    assert sampler.table.priorities[:3].tolist() == [0.0, 5.0, 0.0]
    assert buffer.sample()["index"].tolist() == [1, 1, 1, 1]


def test_state_has_only_written_cells() -> None:
    sampler = make(1000)
    sampler.mark_update(torch.arange(3))
    assert all(len(sampler.state_dict()[key]) == 3 for key in ("priorities", "leaves", "generations"))


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[str, Any]]]:
    capacity = draw(st.integers(1, 12))
    cell, value = st.integers(0, capacity - 1), st.floats(0, 100)
    step = st.one_of(
        st.tuples(st.just("mark"), st.lists(cell, min_size=1, max_size=6)),
        st.tuples(st.just("update"), st.lists(st.tuples(st.integers(-1, capacity - 1), value), min_size=1, max_size=6)),
        st.tuples(st.just("late"), st.lists(st.tuples(cell, value), min_size=1, max_size=6)),
        st.tuples(st.just("alpha"), st.sampled_from([0.0, 0.5, 1.0])),
        st.tuples(st.just("clear"), st.none()),
    )
    return capacity, draw(st.lists(step, max_size=12))


LATE = [("mark", [0, 1]), ("late", [(0, 5.0)]), ("mark", [0]), ("late", [(0, 7.0), (1, 7.0)])]


@pytest.mark.parametrize("backend", ["numba", "torch"])
@settings(max_examples=60, deadline=None)
@example(history=(2, [*LATE, ("clear", None), *LATE]))
@given(history=histories())
def test_table_matches_a_dictionary(backend: Any, history: tuple[int, list[tuple[str, Any]]]) -> None:
    capacity, steps = history
    table = Priorities(capacity, 1.0, 0.1, keep_lowest=True, keep_highest=True, backend=backend)
    known: dict[int, float] = {}
    drawn = table.generations.clone()  # the generations of a batch drawn at the last "late" step
    written: set[int] = set()
    for kind, argument in steps:
        if kind == "mark":
            table.write(torch.tensor(argument), 2.0)
            known.update(dict.fromkeys(argument, 2.0))
            written |= set(argument)
        elif kind == "clear":
            table.clear()
            known.clear()
        elif kind == "alpha":
            table.change_alpha(argument)
        else:
            index = torch.tensor([cell for cell, _ in argument])
            values = torch.tensor([value for _, value in argument], dtype=torch.float64)
            late = kind == "late"
            table.write(index, values, drawn[index] if late else None)
            known.update({c: v for c, v in argument if c in known and not (late and c in written)})
            if late:
                drawn, written = table.generations.clone(), set()
    expected = torch.full((capacity,), -1.0, dtype=torch.float64)
    for cell, value in known.items():
        expected[cell] = value
    assert table.priorities.tolist() == expected.tolist()
    assert table.count == len(known)
    leaves = torch.where(expected >= 0, (expected.clamp(min=0) + 0.1) ** table.alpha, 0.0)
    torch.testing.assert_close(table.tree.leaves, leaves, rtol=1e-14, atol=0)
    assert table.total == pytest.approx(float(leaves.sum()))
    assert table.maximum == max(known.values(), default=0.0)
    assert table.lowest is not None
    assert float(table.lowest.summary()) == min(known.values(), default=math.inf)
    if known:
        cells, weights, stamps = table.draw(table.uniform(32, generator(0)), stratified=True, beta=0.5)
        assert set(cells.tolist()) <= set(known)
        assert torch.equal(stamps, table.generations[cells])
        leaves = table.tree.leaves[cells]
        torch.testing.assert_close(weights, ((leaves / leaves.min()) ** -0.5).float())


@pytest.mark.parametrize("cell", [-2, 20])
def test_cell_out_of_range_is_rejected_before_anything_changes(cell: int) -> None:
    sampler = make()
    sampler.mark_update(torch.arange(20))
    before = sampler.state_dict()
    with pytest.raises(IndexError, match=rf"index must be in .* got {cell}\."):
        sampler.update_priority(torch.tensor([3, cell]), torch.tensor([5.0, 9.0]))
    assert not differences(sampler.state_dict(), before)
