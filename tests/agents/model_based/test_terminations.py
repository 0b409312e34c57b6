"""What is said where a world model ends episodes otherwise than the environment."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from kit.world_models import POINT, targets_of, walled, world_model
from torchrl_lightning import DynamicsEnsemble, WorldModelFit
from torchrl_lightning.agents import OutsideBox
from torchrl_lightning.agents.model_based.terminations import TerminationCheck

BOX = OutsideBox([-1.0, None], [1.0, None])


@pytest.mark.parametrize(
    ("settings", "learnt", "says"),
    [
        ({"terminated": BOX}, False, None),
        ({}, True, None),
        (
            {},
            False,
            "{ends} of 50 stored steps terminate their episode, but the world model never ends.* Give terminated=.*; "
            "or have it learnt by data.terminated=true",
        ),
        *(
            (
                {"terminated": OutsideBox([-0.5, None], [2.0, None])},
                learnt,
                "disagrees with {both} of 50 stored steps: it misses {missed} of the {ends}.* ends {invented} others",
            )
            for learnt in (False, True)
        ),
    ],
    ids=["same", "learnt", "never", "other", "other, served"],
)
def test_disagreements_are_counted_and_said_once(settings: Any, learnt: bool, says: str | None, caplog: Any) -> None:
    check, world, stored = TerminationCheck(), world_model(targets_of(terminated=learnt), **settings), walled(50)
    first = stored["next", "observation"][:, 0]
    missed, invented = int(((first > 1) & (first < 2)).sum()), int(((first < -0.5) & (first >= -1)).sum())
    counts = {"ends": int((first.abs() > 1).sum()), "missed": missed, "invented": invented, "both": missed + invented}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(world, stored[:20], stored[20:])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (says is not None)
    assert says is None or re.search(says.format(**counts), said[0])


def test_steps_without_the_flag_or_before_a_reset_are_left_out(caplog: Any) -> None:
    check, world, stored = TerminationCheck(), world_model(), walled(50)
    with caplog.at_level(logging.WARNING):
        check(world, stored.exclude(("next", "terminated")))
        stored["next", "is_init"] = stored["next", "terminated"].clone()
        check(world, stored)
    assert not caplog.records


@pytest.mark.parametrize("learner", ["pets", "mbpo"])
def test_learners_look_at_the_first_fit_that_has_such_steps(learner: str, caplog: Any) -> None:
    module, fit = DynamicsEnsemble([8]).build(POINT, num_members=2), WorldModelFit([8], num_members=2, num_elites=2)
    world = fit.build(POINT)
    for terminates, said in ((False, 0), (True, 1), (True, 1)):
        with caplog.at_level(logging.WARNING):
            stored = walled(50)
            stored["next", "terminated"] &= terminates
            if learner == "pets":
                module.check_transitions(stored)
            else:
                fit.fit(world, stored[:40], stored[40:])
        assert len(caplog.records) == said
