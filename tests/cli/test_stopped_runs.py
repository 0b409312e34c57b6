"""A run that is stopped in one of five ways and resumed is the run that is not."""

from __future__ import annotations

import os
from functools import cache

import pytest

from cli.stopped_runs import differences, resumed, task, task_here, uninterrupted

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
# One experiment of each family, and the signals that stop it; what they do does not depend on the family.
FAMILIES = {
    "ppo_cartpole": ("SIGINT", "SIGTERM", "SIGKILL"),
    "ppod_mountaincar": ("SIGTERM",),
    "dqn_cartpole": ("SIGINT", "SIGKILL"),
    "sac_episodic_pendulum": ("SIGKILL",),
    "pets_pendulum": ("SIGINT",),
    "mbpo_pendulum": ("SIGTERM",),
}
CASES = [(experiment, way) for experiment, signals in FAMILIES.items() for way in ("epoch", "end", *signals)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Give the last checkpoint of a run that is not stopped."""
    return cache(lambda experiment: uninterrupted(experiment, tmp_path_factory.mktemp(experiment), run=task_here))


@pytest.mark.parametrize(("experiment", "way"), CASES)
def test_a_run_that_is_stopped_and_resumed_is_the_same_run(experiment, way, whole, tmp_path):
    expected = whole(experiment)
    assert differences(expected, resumed(experiment, tmp_path, way, run=task)) == []
