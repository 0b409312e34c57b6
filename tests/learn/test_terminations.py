"""What is said where a world model ends episodes otherwise than the environment."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from learn.dynamics_fakes import SPECS, transitions
from learn.test_world_models import model
from torchrl_lightning import DynamicsEnsemble, WorldModelFit
from torchrl_lightning.learn import OutsideBox
from torchrl_lightning.learn.terminations import TerminationCheck

BOX = OutsideBox([-1.0, None], [1.0, None])


def rows(count: int = 50, terminates: bool = True) -> Any:
    found = transitions(count, torch.Generator().manual_seed(0))
    left = found["next", "observation"][:, :1].abs() > 1.0
    found["next", "terminated"] = left if terminates else torch.zeros_like(left)
    return found


@pytest.mark.parametrize("terminated", [None, BOX, OutsideBox([-0.5, None], [2.0, None])])
def test_disagreements_are_counted_and_said_once(terminated: Any, caplog: Any) -> None:
    check, world, stored = TerminationCheck(), model(terminated=terminated), rows()
    ends = int(stored["next", "terminated"].sum())
    first = stored["next", "observation"][:, 0]
    missed, invented = int(((first > 1) & (first < 2)).sum()), int(((first < -0.5) & (first >= -1)).sum())
    with caplog.at_level(logging.WARNING):
        check(world, rows(terminates=terminated is BOX))  # none stored that it lacks
        if terminated not in (None, BOX):
            caplog.clear()
            check = TerminationCheck()
        for _ in range(2):
            check(world, stored[:20], stored[20:])
    said = [record.getMessage() for record in caplog.records]
    if terminated is BOX:
        assert not said
    elif terminated is None:
        assert len(said) == 1
        assert said[0].startswith(f"{ends} of 50 stored steps terminate their episode, but the world model never ends")
        assert "Give terminated=" in said[0]
    else:
        assert len(said) == 1
        assert f"disagrees with {missed + invented} of 50 stored steps: it misses {missed} of the {ends}" in said[0]
        assert f"ends {invented} others" in said[0]


def test_steps_without_the_flag_or_before_a_reset_are_left_out(caplog: Any) -> None:
    check, world, stored = TerminationCheck(), model(), rows()
    with caplog.at_level(logging.WARNING):
        check(world, stored.exclude(("next", "terminated")))
        stored["next", "is_init"] = stored["next", "terminated"].clone()
        check(world, stored)
    assert not caplog.records


@pytest.mark.parametrize("learner", ["pets", "mbpo"])
def test_learners_look_at_the_first_fit_that_has_such_steps(learner: str, caplog: Any) -> None:
    module, fit = DynamicsEnsemble([8]).build(SPECS, num_members=2), WorldModelFit([8], num_members=2, num_elites=2)
    world = fit.build(SPECS)
    for terminates, said in ((False, 0), (True, 1), (True, 1)):
        with caplog.at_level(logging.WARNING):
            stored = rows(terminates=terminates)
            if learner == "pets":
                module.check_transitions(stored)
            else:
                fit.fit(world, stored[:40], stored[40:])
        assert len(caplog.records) == said
