"""A part goes on from its state as if nothing had happened, and takes no other."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrl.envs import ObservationNorm

from contracts import rollouts
from contracts.part import Part, Refusal
from contracts.table import PARTS
from kit.files import through_file
from kit.states import changed, check_mutants, check_refused, differences, entries, plain

# For each part and what it has several of.
EVERY = {
    kind: [
        pytest.param(part, each, id=f"{name}-{each}") for name, part in PARTS.items() for each in getattr(part, kind)
    ]
    for kind in ("ways", "foreign", "edited", "refuses")
}


OURS = [pytest.param(part, id=name) for name, part in PARTS.items() if part.ours]
parts = pytest.mark.parametrize("part", OURS)


def go_on(part: Part, one: Any, other: Any) -> None:
    """Both give the same, now and behind further data."""
    for start in (500, 600):
        assert not differences(plain(part.ask(one)), plain(part.ask(other)))
        for each in (one, other):
            part.fill(each, start)
    assert not differences(plain(part.ask(one)), plain(part.ask(other)))


@pytest.mark.parametrize(("part", "way"), EVERY["ways"])
def test_restored_one_goes_on_as_the_original(part: Part, way: str, tmp_path: Path) -> None:
    one = part.made(fillings=1 if way == "file" else 2)
    if way == "memory":  # into one that holds something else
        other = part.made(1, first=7)
        other.load_state_dict(one.state_dict())
    elif way == "file":
        other = part.make(2)
        other.load_state_dict(through_file(one.state_dict()))
    elif way == "folder":
        other = part.make(3)
        one.dumps(str(tmp_path / "state"))
        other.loads(tmp_path / "state")
    else:
        other = pickle.loads(pickle.dumps(one)) if way == "pickle" else copy.deepcopy(one)
    go_on(part, one, other)
    if way in part.canonical:
        assert not differences(one.state_dict(), other.state_dict())


@parts
def test_state_is_a_copy_on_both_sides(part: Part) -> None:
    one, other = part.made(), part.make(1)
    state = one.state_dict()
    kept = copy.deepcopy(state)
    other.load_state_dict(state)
    for each in (one, other):
        part.fill(each, 500)
        part.ask(each)
        assert not differences(state, kept)
    other.load_state_dict(state)
    for _, value in entries(state):
        if isinstance(value, Tensor) and value.dtype != torch.bool:
            value += 1
        elif isinstance(value, Tensor):
            value.logical_not_()
    assert not differences(other.state_dict(), kept)


@parts
def test_edited_state_is_taken_wholly_or_not_at_all(part: Part) -> None:
    check_mutants(part.made(1, first=7), part.made().state_dict(), part.usable or part.ask, part.within)


@parts
def test_another_version_is_refused(part: Part) -> None:
    one = part.made(1)
    state = one.state_dict()
    for path, _ in entries(state):
        if path[-1] == "schema_version":
            check_refused(one, changed(state, path, 99), "has schema version 99, this release reads version")


@pytest.mark.parametrize(("part", "says"), EVERY["foreign"])
def test_state_of_another_is_refused_by_name(part: Part, says: str) -> None:
    check_refused(part.foreign[says](), part.made().state_dict(), says)


@pytest.mark.parametrize(("part", "says"), EVERY["edited"])
def test_what_is_wrong_in_a_state_is_named(part: Part, says: str) -> None:
    state = changed(part.made().state_dict(), *part.edited[says])
    for one in (part.made(1, first=7), part.make(1)):
        check_refused(one, state, says)


FOLDERS = [each for each in EVERY["ways"] if each.values[1] == "folder" and each.values[0].ours]


@pytest.mark.parametrize(("part", "way"), FOLDERS)
def test_damaged_file_changes_nothing(part: Part, way: str, tmp_path: Path) -> None:
    one = part.made(1, first=7)
    kept = copy.deepcopy(one.state_dict())
    with pytest.raises(FileNotFoundError, match="has no saved state"):
        one.loads(tmp_path / "state")
    part.made().dumps(tmp_path / "state")
    for file in (tmp_path / "state").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="damaged or foreign"):
        one.loads(tmp_path / "state")
    assert not differences(one.state_dict(), kept)


COPIES = [
    each
    for each in EVERY["ways"]
    if each.values[1] == "deepcopy" or (each.values[1] == "pickle" and not each.values[0].shares)
]


@pytest.mark.parametrize(("part", "way"), COPIES)
def test_copy_and_its_original_leave_each_other_alone(part: Part, way: str) -> None:
    one = part.made()
    other = pickle.loads(pickle.dumps(one)) if way == "pickle" else copy.deepcopy(one)
    for moved, still in ((one, other), (other, one)):
        kept = copy.deepcopy(still.state_dict())
        part.fill(moved, 500)
        part.ask(moved)
        assert not differences(still.state_dict(), kept)


@parts
def test_state_of_an_empty_one_empties_another(part: Part, tmp_path: Path) -> None:
    empty, one, twin = part.make(0), part.made(), part.make(0)
    one.load_state_dict(through_file(empty.state_dict()))
    for each in (one, twin):
        part.fill(each, 20)
    assert not differences(plain(part.ask(one)), plain(part.ask(twin)))


def test_rollout_that_is_half_sampled_goes_on() -> None:
    one, other = rollouts.build(0), rollouts.build(1)
    rollouts.collect(one, 0)
    one.sample(4)
    other.load_state_dict(one.state_dict())
    for _ in range(7):
        assert not differences(plain(one.sample(4)), plain(other.sample(4)))


def test_transform_of_a_rollout_buffer_is_restored() -> None:
    norms = [ObservationNorm(torch.zeros(4), torch.ones(4), in_keys=["observation"]) for _ in range(2)]
    one, other = (rollouts.build(0, transform=norm) for norm in norms)
    rollouts.collect(one, 0)
    norms[0].loc.add_(5.0)
    other.load_state_dict(one.state_dict())
    assert torch.equal(norms[1].loc, norms[0].loc)


@pytest.mark.parametrize("part", [pytest.param(part, id=name) for name, part in PARTS.items() if part.empty])
def test_empty_one_says_so(part: Part) -> None:
    one, (error, says) = part.make(0), part.empty
    assert len(one) == 0
    with pytest.raises(error, match=says):
        part.ask(one)


@parts
def test_what_it_gives_comes_of_its_own_seed(part: Part) -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        one = part.made()
        before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
        found.append(plain(part.ask(one)))
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002
    assert not differences(*found)


@pytest.mark.parametrize(("part", "refusal"), EVERY["refuses"])
def test_refused_call_changes_nothing(part: Part, refusal: Refusal) -> None:
    for make in (part.made, partial(part.make, 0))[: 1 + refusal.empty]:
        one, twin = make(), make()
        for call in refusal.calls:
            kept = copy.deepcopy(one.state_dict())
            with pytest.raises(refusal.error, match=refusal.says):
                call(one)
            assert not differences(one.state_dict(), kept)
        part.fill(one, 500)
        part.fill(twin, 500)
        assert not differences(plain(part.ask(one)), plain(part.ask(twin)))
