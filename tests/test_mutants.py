from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.listed import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


def test_list_holds_enough_mutants_all_different() -> None:
    assert len(MUTANTS) >= 80
    assert len({(mutant.file, mutant.text, mutant.replacement) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.file.name)
def test_mutant_applies_and_changes_the_code(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    before, after = ast.parse(source), ast.parse(mutant.apply_to(source))
    assert ast.dump(before) != ast.dump(after)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.file.name)
def test_mutant_names_existing_tests(mutant: Mutant) -> None:
    assert mutant.tests
    assert not mutant.error(ROOT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"text": "no such text"}, "text must occur once in .*loss_functions.py, got 0 times: 'no such text'"),
        ({"text": "return"}, "text must occur once in .*, got .* times: 'return'"),
        ({"file": Path("plugin/none.py")}, "plugin/none.py must be a file"),
        ({"tests": ("tests/none.py",)}, "must be test files or tests in them, got tests/none.py"),
        ({"tests": ("tests/test_mutants.py::test_none",)}, "must be test files or tests in them, got .*::test_none"),
    ],
)
def test_mutant_that_cannot_be_tried_is_named(changes: dict[str, Any], message: str) -> None:
    file = Path("plugin/torchrl_lightning/agents/loss_functions.py")
    mutant = Mutant(
        file, "torch.maximum(unclipped, DISTANCES", "torch.minimum(far, DISTANCES", ("tests/test_mutants.py",)
    )
    error = replace(mutant, **changes).error(ROOT)
    assert bool(error) == bool(message)
    assert re.search(message, error)
