"""The logs of the replay ablations, and the guide's table that is built from them."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from benchmarks import ablations
from benchmarks.ablations import FOLDER, MARK, SAID, given, scores, table
from benchmarks.earlier_logs import Row
from benchmarks.results import GUIDE, ResultsError, with_table


def test_guide_has_the_table_that_the_logs_make():
    page = GUIDE.read_text()
    assert with_table(page, table(), MARK) == page, "run python tests/benchmarks/ablations.py table"
    compared = {name for pairs in SAID["compared"].values() for pair in pairs.values() for name in pair}
    assert compared == set(SAID["runs"]) == {path.stem for path in FOLDER.iterdir()}


def test_results_of_other_settings_and_unknown_runs_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ResultsError, match="cartpole_uniform"):
        given("none")
    shutil.copytree(FOLDER, tmp_path / "logs")
    changed = {**SAID["runs"], "cartpole_uniform": [*given("cartpole_uniform"), "data.batch_size=64"]}
    monkeypatch.setitem(ablations.SAID, "runs", changed)
    with pytest.raises(ResultsError, match=r"tests/benchmarks/ablations\.py.*cartpole_uniform"):
        table(tmp_path / "logs")


def test_seed_counts_by_its_mean_over_training_and_by_its_end():
    rows = [Row(1, 10, 2.0, 0.0, 0), Row(1, 20, 4.0, 0.0, 0), Row(1, 20, 5.0, 0.0, 100, 1.0)]
    rows += [Row(0, 10, 1.0, 0.0, 0), Row(0, 10, 0.5, 0.0, 100, 1.0)]
    learning, ends = scores(rows)
    np.testing.assert_array_equal(learning, [1.0, 3.0])
    np.testing.assert_array_equal(ends, [0.5, 5.0])
