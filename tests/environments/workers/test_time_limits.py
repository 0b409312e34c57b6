"""An environment that hangs ends the run, also where nothing interrupts it, and after SIGTERM with its status."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit.forks import Forked, forked_workers
from kit.misbehaving import Fault, Misbehaving, insists, sleeps
from torchrl_lightning.collectors import AsynchronousCollector, GymnasiumCollector
from torchrl_lightning.environments import EnvironmentRecipe
from torchrl_lightning.environments.workers.time_limits import TimedCalls


def collecting(does: Callable[[], None], seconds: float | None, make: Callable[..., Any] = GymnasiumCollector) -> None:
    """Hang in the fourth step, in a run that takes note of SIGTERM alone, as Lightning does."""
    signal.signal(signal.SIGTERM, lambda *_: None)

    def hang() -> None:
        sys.stdout.write("hangs\n")
        does()

    recipe = EnvironmentRecipe(partial(Misbehaving, Fault("step", "", hang, at=4)), step_timeout=seconds)
    make(recipe, num_envs=2, frames_per_batch=16, seed=0).rollout()


def test_uninterruptible_call_ends_the_process_with_one_line_and_the_stack(tmp_path: Path) -> None:
    process = Forked(partial(collecting, insists, 0.2), tmp_path)
    assert process.ends(20) == 1
    line, stack = process.said.split("recipe.\n")
    assert line == (
        "hangs\n\nerror: At step 3 of the rollout, environment 0 did not return within step_timeout=0.2 seconds. "
        "Fix the environment, or increase step_timeout of its "
    )
    assert 'misbehaving.py", line' in stack
    assert "in insists\n" in stack


@pytest.mark.parametrize("does", [sleeps, insists])
def test_sigterm_ends_a_process_whose_environment_hangs(does: Callable[[], None], tmp_path: Path) -> None:
    process = Forked(partial(collecting, does, 1.0), tmp_path)
    process.waits_for(lambda: "hangs" in process.said, 20)
    process.send(signal.SIGTERM)
    assert process.ends(20) == 143
    assert "environment 0 did not return before the process had to exit" in process.said
    assert "Traceback" not in process.said


def by_a_worker(recipe: EnvironmentRecipe, **options: Any) -> AsynchronousCollector:
    return AsynchronousCollector(recipe, num_workers=1, **options)


def test_sigterm_ends_a_process_whose_workers_environment_hangs(tmp_path: Path) -> None:
    with forked_workers():
        process = Forked(partial(collecting, insists, None, by_a_worker), tmp_path)
    process.waits_for(lambda: "hangs" in process.said, 20)
    process.send(signal.SIGTERM)
    assert process.ends(40) == 143
    assert "did not return before the process had to exit" in process.said


def goes_on() -> None:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    earlier = TimedCalls(60.0)
    sys.stdout.write("ready\n")
    while not came:
        time.sleep(0.01)
    time.sleep(0.1)  # the watch has seen it
    with TimedCalls(60.0, after_sigterm=0.1).running():
        time.sleep(1.0)
    sys.stdout.write(f"has {earlier.seconds:g} seconds\n")


def test_process_that_goes_on_after_sigterm_gives_its_environments_their_time(tmp_path: Path) -> None:
    process = Forked(goes_on, tmp_path)
    process.waits_for(lambda: "ready" in process.said, 20)
    process.send(signal.SIGTERM)
    assert process.ends(20) == 0, process.said
    assert "has 60 seconds" in process.said


def test_call_within_its_limit_is_not_interrupted() -> None:
    recipe = EnvironmentRecipe("CartPole-v1", step_timeout=0.05)
    collector = GymnasiumCollector(recipe, num_envs=2, frames_per_batch=2000, seed=0)
    plain = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=2000, seed=0)
    for batch, other in zip((collector.rollout() for _ in range(3)), (plain.rollout() for _ in range(3)), strict=True):
        assert (batch == other).all()
    collector.shutdown()
    plain.shutdown()
