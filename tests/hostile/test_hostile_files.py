"""A selection of hostile files is safe to read; ``python -m tests.hostile`` reads all of them."""

from __future__ import annotations

from functools import cache

import pytest

from hostile.base import make_base, warm_up
from hostile.corpus import all_cases
from hostile.readers import READERS
from hostile.running import Base, Case, readings_of

CHOSEN = {
    "checkpoint": [
        *("no byte", "a changed bit", "a FIFO", "pickle, os.system", "pickle, a name with escape codes"),
        *("pickle, a bytearray of 3 GB", "pickle, a stride of zero", "pickle, lists that unfold"),
        *("values, a network of huge layers", "values, names of weights with escape codes"),
        *("values, weights that are a list", "values, moments of more numbers", "model, optimizer: a script"),
    ],
    "state": [
        *("rewards of 1e30", "a length of zero", "names with escape codes", "a manifest of 60 MB", "a deep manifest"),
        "a FIFO as a manifest",
    ],
    "run": ["a FIFO as a log", "a FIFO as a record", "aliases of a config", "a tag that calls", "an open quote"],
    "policy": ["weights of 10 TB", "a module", "a deep config"],
    "demonstration": [
        *("npz of objects", "npz that declares 4 TB", "safetensors that is a FIFO", "metadata with escape codes"),
    ],
    "data set": ["HDF5 that is a FIFO"],
}


@cache
def listed() -> list[Case]:
    """Return all hostile files. Not at import, because every test worker collects this file."""
    return all_cases()


def cases() -> dict[tuple[str, str], Case]:
    """Return all hostile files by kind and name."""
    return {(case.kind, case.name): case for case in listed()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return make_base(tmp_path_factory.mktemp("base"))


def test_whole_files_are_read(base, tmp_path):
    assert warm_up(base, tmp_path) == []


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CHOSEN.items() for name in names])
def test_hostile_file_runs_writes_and_costs_nothing(base, tmp_path, kind, name):
    readings = readings_of(cases()[kind, name], READERS[kind], base, tmp_path / "file")
    problems = [problem for _, reading in readings for problem in reading.problems]
    assert problems == []


def test_names_are_unique_and_each_kind_has_readers():
    assert len(cases()) == len(listed()) > 380
    assert {case.kind for case in listed()} <= set(READERS)
