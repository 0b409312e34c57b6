"""Whatever an environment does wrong is told in one line, however it is stepped, and no process is left."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torchrl.envs import GymWrapper

from kit.counting import still_policy
from kit.forks import forked_workers
from kit.misbehaving import FAULTS, Fault, Misbehaving, dies, insists, sleeps
from torchrl_lightning.collectors import AsynchronousCollector, GymnasiumCollector, TorchRLCollector, play_episodes
from torchrl_lightning.demonstrations import record_demonstrations
from torchrl_lightning.environments import EnvironmentRecipe, make_environment
from torchrl_lightning.environments.env_errors import EnvironmentFault

SIZES: dict[str, Any] = {"frames_per_batch": 16, "seed": 0}


def collected(collector: Any) -> None:
    try:
        for _ in range(2):
            collector.rollout()
    except BaseException:
        collector.shutdown(raise_on_error=False)
        raise
    collector.shutdown()


def by_torchrl(make: Any) -> None:
    collected(TorchRLCollector(make_environment(lambda: GymWrapper(make()), 2), **SIZES))


WAYS: dict[str, Callable[[Any], object]] = {
    "sync": lambda make: collected(GymnasiumCollector(make, num_envs=2, **SIZES)),
    "async": lambda make: collected(GymnasiumCollector(make, num_envs=2, vectorization="async", **SIZES)),
    "workers": lambda make: collected(AsynchronousCollector(make, num_workers=1, num_envs=2, **SIZES)),
    "TorchRL": by_torchrl,
    "evaluation": lambda make: play_episodes(make, still_policy(), 2, seed=0),
    "recording": lambda make: list(record_demonstrations(make, still_policy(), 2, seed=0)),
}

# What TorchRL's GymWrapper reads as something else, without a word.
READ_BY_TORCHRL = {
    *(
        f"{call} returns {what}"
        for call in ("reset", "step")
        for what in ("a deeper observation", "an observation of complex numbers", "no info", "info as a list")
    ),
    "step returns a reward of one row",
    "step returns no reward",
}


@pytest.mark.filterwarnings("ignore")  # Gymnasium's and torch's, of what is refused then
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_faulty_environment_is_reported_in_one_line(way: str, name: str) -> None:
    fault: Fault = FAULTS[name]
    with forked_workers():
        if way == "TorchRL" and name in READ_BY_TORCHRL:
            WAYS[way](partial(Misbehaving, fault))
            return
        with pytest.raises(EnvironmentFault) as error:
            WAYS[way](partial(Misbehaving, fault))
    line = str(error.value)
    assert "\n" not in line
    assert re.search(fault.says, line)
    assert re.search("environment", line)
    assert fault.call in ("make", "reset", "close") or "At step" in line
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("way", ["async", "workers"])
@pytest.mark.parametrize("call", ["reset", "step"])
def test_dead_process_is_reported_with_its_exit_code(way: str, call: str) -> None:
    with forked_workers(), pytest.raises(EnvironmentFault, match="died with exit code 3") as error:
        WAYS[way](partial(Misbehaving, Fault(call, "", dies)))
    assert isinstance(error.value, RuntimeError)
    assert not multiprocessing.active_children()


def timed(fault: Fault) -> EnvironmentRecipe:
    return EnvironmentRecipe(partial(Misbehaving, fault), step_timeout=0.2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", ["make", "reset", "step", "close"])
@pytest.mark.parametrize("way", WAYS)
def test_environment_that_hangs_is_interrupted(way: str, call: str) -> None:
    began = time.monotonic()
    with forked_workers(), pytest.raises(EnvironmentFault, match=r"step_timeout=0.2") as error:
        WAYS[way](timed(Fault(call, "", sleeps)))
    line = str(error.value)
    assert re.search(rf"environment.* in {call} \(misbehaving.py, line", line)
    assert "\n" not in line
    assert time.monotonic() - began < 5
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("way", ["async", "workers"])
@pytest.mark.parametrize("call", ["reset", "step"])
def test_process_whose_environment_cannot_be_interrupted_is_ended(way: str, call: str) -> None:
    with forked_workers(), pytest.raises(EnvironmentFault, match=r"0.*step_timeout=0.2"):
        WAYS[way](timed(Fault(call, "", insists)))
    assert not multiprocessing.active_children()
