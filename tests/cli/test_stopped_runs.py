"""A stopped and resumed run equals an uninterrupted run: one experiment per family, stopped in five ways."""

from __future__ import annotations

import os
from functools import cache

import pytest

from cli.stopped_runs import WAYS, differences, resumed, task, task_here, uninterrupted

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
FAMILIES = {
    "on-policy": "ppo_cartpole",
    "demonstrations": "ppod_mountaincar",
    "replay": "dqn_cartpole",
    "episodic": "sac_episodic_pendulum",
    "model of the environment": "pets_pendulum",
    "branches of a model": "mbpo_pendulum",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a cached function that returns the last checkpoint of an uninterrupted run."""
    return cache(lambda experiment: uninterrupted(experiment, tmp_path_factory.mktemp(experiment), run=task_here))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("experiment", FAMILIES.values(), ids=FAMILIES)
def test_run_that_is_stopped_and_resumed_is_the_same_run(experiment, way, whole, tmp_path):
    expected = whole(experiment)
    assert differences(expected, resumed(experiment, tmp_path, way, run=task)) == []
