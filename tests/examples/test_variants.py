"""The guide's tables of runs with other settings than an experiment."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.results import GUIDE, experiments_table, written
from benchmarks.run_logs import (
    PROJECT,
    VARIANTS,
    Evaluation,
    ResultsError,
    RunLog,
    Score,
    arguments_of,
    config_digest,
    log_path,
)
from benchmarks.variants import mask_table, read_entry, read_variant, replay_table, scores

RESULTS = PROJECT / "examples" / "results"
NAME = "cartpole_uniform"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a project with our configs and the logs of all variants."""
    shutil.copytree(PROJECT / "conf", tmp_path / "conf")
    shutil.copytree(RESULTS / VARIANTS, tmp_path / "examples" / "results" / VARIANTS)
    shutil.copy(RESULTS / f"{VARIANTS}.yaml", tmp_path / "examples" / "results")
    return tmp_path


def test_each_listed_variant_has_logs_and_a_table_with_it():
    compared = {name for pairs in read_entry("replay").values() for pair in pairs.values() for name in pair}
    masked = {name for pair in read_entry("masks").values() for name in pair}
    assert compared | masked | {*read_entry("descriptions")} == {*read_entry("runs")}
    assert {*read_entry("runs")} == {path.name for path in (RESULTS / VARIANTS).iterdir()}
    assert all(len(read_variant(name)) >= 3 for name in read_entry("runs"))


def test_pages_have_the_tables_of_the_variants():
    pages = written()
    assert replay_table() in pages[GUIDE]
    assert mask_table() in pages[GUIDE.with_name("environments.md")]
    assert experiments_table(["ddpg_her_fetchreach_without"]).splitlines()[-1] in pages[GUIDE.with_name("hindsight.md")]


@pytest.mark.parametrize(("change", "name"), [("arguments", NAME), ("group", "cartpole_prioritized"), ("log", NAME)])
def test_log_of_other_settings_raises_with_the_remedy(change, name, root):
    assert replay_table(root) == replay_table()
    listing, group = root / "examples" / "results" / f"{VARIANTS}.yaml", root / "conf" / "env" / "cartpole.yaml"
    log = log_path(NAME, 0, root)
    if change == "arguments":
        listing.write_text(listing.read_text().replace("data.total_frames=30000", "data.total_frames=30001", 1))
    elif change == "group":
        group.write_text(re.sub(r"num_envs: \d+", "num_envs: 3", group.read_text()))
    else:
        log.write_text(log.read_text().replace("# threads: 1", "# threads: 2"))
    with pytest.raises(ResultsError, match=rf"must be .*got .*results\.py run {name} --seeds 0"):
        replay_table(root)


def test_variant_without_logs_or_without_arguments_raises(root):
    shutil.rmtree(log_path(NAME, 0, root).parent)
    with pytest.raises(ResultsError, match=rf"{NAME} must have logs, got none\..*results\.py run {NAME}"):
        replay_table(root)
    with pytest.raises(ResultsError, match=r"NAME must be an experiment of .*variants\.yaml, got none"):
        config_digest("none", root)


def test_command_of_a_variant_has_its_arguments(root):
    (log, *_) = read_variant("dqn_taxi", root)
    assert log.command == "torchrl-lightning-train experiment=dqn_cartpole env=taxi seed=0"
    assert arguments_of("dqn_taxi", root) == ["experiment=dqn_cartpole", "env=taxi"]
    assert arguments_of("dqn_cartpole", root) == ["experiment=dqn_cartpole"]


def test_seed_has_its_mean_over_training_and_its_last_score():
    log = RunLog("", "", "", "", "", 1, 0, 20, 1.0, Score(0.5, 0.0), None, None, (Evaluation(10, 1.0, 0.0),))
    curve = (Evaluation(10, 2.0, 0.0), Evaluation(20, 4.0, 0.0))
    learning, ends = scores([log, replace(log, seed=1, curve=curve, last=Score(5.0, 0.0))])
    np.testing.assert_array_equal(learning, [1.0, 3.0])
    np.testing.assert_array_equal(ends, [0.5, 5.0])
