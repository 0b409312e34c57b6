from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.golden import arrays
from kit.seeds import generator
from kit.statistics import chi_square
from torchrl_lightning.kernels.indices import unique_last
from torchrl_lightning.kernels.segment_tree import MaxSegmentTree, MinSegmentTree, SegmentTree, SumSegmentTree

KINDS = (SumSegmentTree, MaxSegmentTree, MinSegmentTree)
BACKENDS = ("numba", "torch")
backends = pytest.mark.parametrize("backend", BACKENDS)


@backends
def test_golden_trees(backend: Any) -> None:
    golden = arrays("segment_trees")
    for number in range(int(golden["n_trees"])):
        part = arrays("segment_trees", f"t{number}_")
        tree = KINDS[int(part["kind_sum0_max1_min2"])](int(part["capacity"]), backend=backend)
        ends = part["op_ptr"]
        for step, (begin, end) in enumerate(itertools.pairwise(ends)):
            tree[torch.from_numpy(part["op_index"][begin:end])] = torch.from_numpy(part["op_value"][begin:end])
            assert tree.summary().item() == part["summary"][step]
            assert tree.leaves.tolist() == part["leaves"][step].tolist()
            if isinstance(tree, SumSegmentTree):
                assert tree.nnz == part["nnz"][step]
        if isinstance(tree, SumSegmentTree) and tree.nnz:
            leaf_index = tree.find_sum_bound(torch.from_numpy(part["threshold"]))
            assert leaf_index.tolist() == part["bound"].tolist()


@backends
def test_golden_total_finds_the_last_nonzero_leaf(backend: Any) -> None:
    golden = arrays("segment_trees")
    # The recorded total comes from a float32 tree. Its rounded sums exceed the exact sum.
    tree = SumSegmentTree(len(golden["boundary_values"]), dtype=torch.float32, backend=backend)
    tree[:] = torch.from_numpy(golden["boundary_values"])
    assert tree.summary().item() == pytest.approx(float(golden["boundary_total"][0]), rel=1e-6)
    for total in (tree.summary(), torch.from_numpy(golden["boundary_total"]).clamp(max=tree.summary().item())):
        assert (tree.find_sum_bound(total) == int(golden["boundary_index"][0])).all()


Writes = list[tuple[list[int], list[float]]]


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, Writes]:
    capacity = draw(st.integers(1, 40))
    value = st.one_of(st.just(0.0), st.floats(0, 1e6, allow_subnormal=False))
    writes = draw(
        st.lists(st.lists(st.tuples(st.integers(0, capacity - 1), value), min_size=1, max_size=12), max_size=6)
    )
    return capacity, [([index for index, _ in write], [value for _, value in write]) for write in writes]


@backends
@settings(max_examples=60, deadline=None)
@given(history=histories(), fraction=st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_trees_equal_brute_force(backend: Any, history: tuple[int, Writes], fraction: list[float]) -> None:
    capacity, writes = history
    trees = [kind(capacity, backend=backend) for kind in KINDS]
    brute = np.zeros(capacity)
    for index, values in writes:
        for i, value in zip(index, values, strict=True):
            brute[i] = value
        for tree in trees:
            tree[index] = values
    total, highest, lowest = (tree.summary().item() for tree in trees)
    assert highest == brute.max()
    assert lowest == brute.min()
    assert total == pytest.approx(brute.sum(), rel=1e-12)
    assert trees[0][:].tolist() == brute.tolist()
    assert trees[0].nnz == np.count_nonzero(brute)
    if total > 0:
        thresholds = np.array(fraction) * total
        leaf_index = trees[0].find_sum_bound(torch.from_numpy(thresholds)).numpy()
        assert (brute[leaf_index] > 0).all()
        sums, slack = np.cumsum(brute), 1e-9 * total
        assert (thresholds <= sums[leaf_index] + slack).all()
        assert (thresholds >= sums[leaf_index] - brute[leaf_index] - slack).all()


@settings(max_examples=40, deadline=None)
@given(history=histories())
def test_inner_nodes_depend_only_on_the_leaves(history: tuple[int, Writes]) -> None:
    capacity, writes = history
    tree, other = SumSegmentTree(capacity, backend="numba"), SumSegmentTree(capacity, backend="torch")
    for index, values in writes:
        tree[index] = values
        other[index] = values
    restored = SumSegmentTree(capacity)
    restored.load_state_dict(tree.state_dict())
    assert restored.summary().item() == tree.summary().item() == other.summary().item()
    assert restored.nnz == tree.nnz == other.nnz


@pytest.mark.parametrize("capacity", [1, 2, 3, 4, 7, 8, 9, 16, 31, 33, 64, 65, 128, 500, 512, 1000, 4096, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_backends_agree_bit_for_bit_at_every_depth(kind: type[SegmentTree], capacity: int) -> None:
    seeded = generator(capacity)
    compiled, plain = (kind(capacity, backend=backend) for backend in BACKENDS)
    for count in (1, 3, 40, capacity):
        index = torch.randint(capacity, (count,), generator=seeded)
        value = torch.rand(count, dtype=torch.float64, generator=seeded)
        for tree in (compiled, plain):
            tree[index] = value
        assert compiled.summary() == plain.summary()
        if isinstance(compiled, SumSegmentTree) and isinstance(plain, SumSegmentTree):
            where = torch.rand(200, dtype=torch.float64, generator=seeded) * plain.summary()
            assert torch.equal(compiled.find_sum_bound(where), plain.find_sum_bound(where))


def test_unique_last_returns_last_occurrences() -> None:
    index = torch.tensor([5, 1, 5, 2, 1])
    assert sorted(unique_last(index).tolist()) == [2, 3, 4]


@backends
def test_search_never_ends_in_an_empty_leaf_despite_rounding(backend: Any) -> None:
    # Sums like 0.1 + 0.2 + 0.3 are rounded, so a remainder can exceed the sum of the right subtree.
    seeded = generator(0)
    tree = SumSegmentTree(1000, dtype=torch.float32, backend=backend)
    values = torch.rand(1000, generator=seeded)
    values[torch.rand(1000, generator=seeded) < 0.7] = 0.0
    values[-100:] = 0.0
    tree[:] = values
    total = tree.summary()
    near = torch.cat([values.cumsum(0), total.view(1)]).clamp(max=total.item())
    thresholds = torch.cat(
        [near, torch.nextafter(near, torch.zeros(())), torch.nextafter(near, total).clamp(max=total)]
    )
    assert (values[tree.find_sum_bound(thresholds)] > 0).all()


@backends
def test_search_frequencies_match_the_leaves(backend: Any) -> None:
    seeded = generator(1)
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.5], dtype=torch.float64)
    tree = SumSegmentTree(7, backend=backend)
    tree[:] = weights
    leaf_index = tree.find_sum_bound(torch.rand(40_000, generator=seeded, dtype=torch.float64) * tree.summary())
    assert chi_square(leaf_index, weights) < 18.5  # 4 degrees of freedom, p = 0.001


@backends
def test_thresholds_must_lie_within_the_total(backend: Any) -> None:
    tree = SumSegmentTree(5, backend=backend)
    with pytest.raises(ValueError, match="every leaf is zero"):
        tree.find_sum_bound(0.0)
    tree[2] = 4.0
    for threshold in (-0.1, 4.1, math.nan):
        with pytest.raises(ValueError, match=r"between 0 and the total 4\.0"):
            tree.find_sum_bound([1.0, threshold])
    assert tree.find_sum_bound([]).shape == (0,)
    assert tree.find_sum_bound([[0.0, 4.0]]).tolist() == [[2, 2]]


@backends
def test_infinite_and_negative_leaves_of_minimum_and_maximum(backend: Any) -> None:
    lowest = MinSegmentTree(3, initial=math.inf, backend=backend)
    highest = MaxSegmentTree(3, initial=-math.inf, backend=backend)
    assert (lowest.summary().item(), highest.summary().item()) == (math.inf, -math.inf)
    lowest[1], highest[1] = -2.0, -3.0
    assert (lowest.summary().item(), highest.summary().item()) == (-2.0, -3.0)
    with pytest.raises(ValueError, match="must be a number, got nan"):
        lowest[0] = math.nan


def test_values_with_an_overflowing_sum_raise() -> None:
    tree = SumSegmentTree(4, dtype=torch.float32)
    with pytest.raises(ValueError, match="finite and not negative"):
        tree[0] = 3e38


def test_empty_index_changes_nothing() -> None:
    tree = SumSegmentTree(3)
    tree[[]] = []
    tree[torch.empty(0, dtype=torch.int64)] = 1.0
    assert tree[[]].shape == (0,)
    assert tree.nnz == 0


def test_slices_scalars_and_shapes() -> None:
    tree = SegmentTree(6, "sum")
    tree[1:5:2] = 3.0
    tree[torch.tensor([0, 5], dtype=torch.int32)] = torch.tensor([1, 2])
    assert tree[:].tolist() == [1.0, 3.0, 0.0, 3.0, 0.0, 2.0]
    assert tree[torch.tensor([[0, 1], [5, 3]])].tolist() == [[1.0, 3.0], [2.0, 3.0]]
    assert (tree[1].shape, len(tree)) == (torch.Size([]), 6)


def test_state_contains_only_changed_leaves() -> None:
    tree = SumSegmentTree(9)
    tree[[1, 4]] = [2.0, 3.0]
    state = tree.state_dict()
    assert state["leaves"].tolist() == [0.0, 2.0, 0.0, 0.0, 3.0]
    with pytest.raises(ValueError, match="got 10 leaves, but the capacity is 9"):
        tree.load_state_dict({**state, "leaves": torch.ones(10, dtype=torch.float64)})
    assert tree.state_dict()["leaves"].equal(state["leaves"])


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.add, "sum"),
        (torch.min, "min"),
        (torch.minimum, "min"),
        (torch.max, "max"),
        (torch.maximum, "max"),
    ],
)
def test_operation_may_be_a_torch_function(function: Any, name: str) -> None:
    one, other = SegmentTree(3, function), SegmentTree(3, name)
    one[:] = other[:] = [3.0, 1.0, 2.0]
    assert one.summary() == other.summary() == {"sum": 6.0, "min": 1.0, "max": 3.0}[name]
    assert one.op == name
    other.load_state_dict(one.state_dict())


@pytest.mark.cuda
def test_cuda_equals_cpu() -> None:
    seeded = generator(2)
    tree, twin = SumSegmentTree(5000, device="cuda"), SumSegmentTree(5000)
    for _ in range(5):
        index = torch.randint(5000, (300,), generator=seeded)
        values = torch.rand(300, generator=seeded, dtype=torch.float64)
        tree[index.cuda()] = values.cuda()
        twin[index] = values
    assert tree.leaves.cpu().tolist() == twin.leaves.tolist()
    assert tree.summary().item() == twin.summary().item()
    thresholds = torch.rand(1000, generator=seeded, dtype=torch.float64) * twin.summary()
    assert (tree.find_sum_bound(thresholds.cuda()).cpu() == twin.find_sum_bound(thresholds)).float().mean() > 0.999
