"""Warnings about world models that disagree with the environment about terminations."""

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
    ("settings", "learns_terminated", "message"),
    [
        ({"terminated": BOX}, False, None),
        ({}, True, None),
        (
            {},
            False,
            "{ends} of 50 stored steps terminate .*no terminations.* Set terminated.*data.terminated=true",
        ),
        *(
            (
                {"terminated": OutsideBox([-0.5, None], [2.0, None])},
                learns_terminated,
                "disagrees with {total} of 50 stored steps: it misses {missed} of the {ends} .* {spurious} other",
            )
            for learns_terminated in (False, True)
        ),
    ],
    ids=["same", "learnt", "never", "other", "other, served"],
)
def test_disagreements_are_counted_in_one_warning(
    settings: Any, learns_terminated: bool, message: str | None, caplog: Any
) -> None:
    check, world, stored = (
        TerminationCheck(),
        world_model(targets_of(terminated=learns_terminated), **settings),
        walled(50),
    )
    first = stored["next", "observation"][:, 0]
    missed, spurious = int(((first > 1) & (first < 2)).sum()), int(((first < -0.5) & (first >= -1)).sum())
    counts = {"ends": int((first.abs() > 1).sum()), "missed": missed, "spurious": spurious, "total": missed + spurious}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(world, stored[:20], stored[20:])
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (message is not None)
    assert message is None or re.search(message.format(**counts), warnings[0])


def test_termination_check_ignores_steps_without_flag_or_before_a_reset(caplog: Any) -> None:
    check, world, stored = TerminationCheck(), world_model(), walled(50)
    with caplog.at_level(logging.WARNING):
        check(world, stored.exclude(("next", "terminated")))
        stored["next", "is_init"] = stored["next", "terminated"].clone()
        check(world, stored)
    assert not caplog.records


@pytest.mark.parametrize("learner", ["pets", "mbpo"])
def test_learners_warn_at_the_first_fit_with_terminations(learner: str, caplog: Any) -> None:
    module, fit = DynamicsEnsemble([8]).build(POINT, num_members=2), WorldModelFit([8], num_members=2, num_elites=2)
    world = fit.build(POINT)
    for terminates, warnings in ((False, 0), (True, 1), (True, 1)):
        with caplog.at_level(logging.WARNING):
            stored = walled(50)
            stored["next", "terminated"] &= terminates
            if learner == "pets":
                module.check_transitions(stored)
            else:
                fit.fit(world, stored[:40], stored[40:])
        assert len(caplog.records) == warnings
