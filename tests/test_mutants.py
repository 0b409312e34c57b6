from __future__ import annotations

import ast

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
