"""A fault of one of several environments is reported with its number, whoever built the environments."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from tensordict.nn import TensorDictModule
from torchrl.envs import GymWrapper

from kit.forks import Forked
from kit.misbehaving import Fault, Misbehaving, raises, sleeps
from torchrl_lightning.collectors import GymnasiumCollector, TorchRLCollector
from torchrl_lightning.collectors.vector_stepper import VectorStepper
from torchrl_lightning.environments import EnvironmentRecipe, make_environment, make_vector_env
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.workers import time_limits
from torchrl_lightning.environments.workers.time_limits import TimedCalls

GOOD = Fault("none", "")


def put(index: int, value: Any) -> Callable[[Any], Any]:
    return lambda returned: (*returned[:index], value, *returned[index + 1 :])


FAULTS = {
    "step raises": (Fault("step", "", raises, at=3), r"ArithmeticError in step \(misbehaving.py, line \d+\): too much"),
    "step returns nothing": (Fault("step", "", becomes=lambda _: None, at=3), "None"),
    "step returns a short tuple": (Fault("step", "", becomes=lambda returned: returned[:-1], at=3), "tuple|values"),
    "step returns an empty tuple": (Fault("step", "", becomes=lambda _: (), at=3), "tuple|values"),
    "step returns a reward as text": (Fault("step", "", becomes=put(1, "x"), at=3), "reward|float"),
    "step returns two flags": (Fault("step", "", becomes=put(2, np.array([True, False])), at=3), "truth|sequence"),
    "step returns a longer observation": (Fault("step", "", becomes=put(0, np.zeros(4)), at=3), r"shape \(4,\)"),
    "reset raises": (Fault("reset", "", raises), r"ArithmeticError in reset \(misbehaving.py, line \d+\): too much"),
    "reset returns no info": (Fault("reset", "", becomes=put(1, None)), "None"),
    "reset returns a longer observation": (Fault("reset", "", becomes=put(0, np.zeros(4))), r"shape \(4,\)"),
}


def of_second(fault: Fault) -> list[Callable[[], Misbehaving]]:
    return [partial(Misbehaving, each) for each in (GOOD, fault, GOOD)]


@pytest.mark.filterwarnings("ignore")  # Gymnasium's, about what is refused then
@pytest.mark.parametrize("mode", ["SameStep", "Disabled", None])
@pytest.mark.parametrize("name", FAULTS)
def test_later_fault_of_one_of_several_names_its_number(mode: str | None, name: str) -> None:
    fault, says = FAULTS[name]
    makers = iter(of_second(fault))
    env: Any = (lambda: next(makers)()) if mode is None else SyncVectorEnv(of_second(fault), autoreset_mode=mode)
    collector = GymnasiumCollector(env, num_envs=3, frames_per_batch=48, seed=0)
    where = "At step 2 of the rollout, " if fault.call == "step" else "(after a reset )?"
    with pytest.raises(EnvironmentFault, match=rf"^{where}environment 1.*({says})"):
        collector.rollout()
    collector.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_fault_in_a_reset_of_some_names_its_number() -> None:
    resets = iter([lambda: None, raises])
    makers = iter(of_second(Fault("reset", "", lambda: next(resets)())))
    stepper = VectorStepper(make_vector_env(lambda: next(makers)(), 3))
    leaves = stepper.reset([1, 2, 3])
    leaves = stepper.reset_some(np.array([True, False, True]), leaves)
    with pytest.raises(EnvironmentFault, match=r"1.*ArithmeticError"):
        stepper.reset_some(np.array([False, True, False]), leaves)
    stepper.close()


def test_error_of_the_policy_is_not_a_fault_of_the_environment() -> None:
    def act(observation: Any) -> Any:
        raise KeyError("mine")

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    env = make_environment(lambda: GymWrapper(Misbehaving(GOOD)), 2)
    for collector in (
        TorchRLCollector(env, policy, frames_per_batch=8, seed=0),
        GymnasiumCollector(partial(Misbehaving, GOOD), policy, num_envs=2, frames_per_batch=8, seed=0),
    ):
        with pytest.raises(KeyError, match="mine"):
            collector.rollout()
        collector.shutdown()


def in_a_thread() -> None:
    recipe = EnvironmentRecipe(partial(Misbehaving, Fault("step", "", sleeps, at=2)), step_timeout=0.2)
    collector = GymnasiumCollector(recipe, num_envs=2, frames_per_batch=8, seed=0)
    thread = threading.Thread(target=collector.rollout)
    thread.start()
    try:
        thread.join()
    except BaseException as error:  # meant for the thread
        sys.stdout.write(f"interrupted {error!r}\n")


def test_call_in_another_thread_ends_the_process_and_leaves_the_main_thread_alone(tmp_path: Path) -> None:
    process = Forked(in_a_thread, tmp_path)
    assert process.ends(20) == 1
    assert "At step 1 of the rollout, environment 0 did not return within step_timeout=0.2 seconds" in process.said
    assert "interrupted" not in process.said


def uses_its_own_alarm() -> None:
    came: list[int] = []

    def waits() -> None:
        signal.signal(signal.SIGALRM, lambda number, frame: came.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        while not came:
            time.sleep(0.01)

    recipe = EnvironmentRecipe(partial(Misbehaving, Fault("step", "", waits)), step_timeout=5.0)
    GymnasiumCollector(recipe, frames_per_batch=2, seed=0).rollout()
    sys.stdout.write("rang\n")


def test_environment_may_use_an_alarm_of_its_own(tmp_path: Path) -> None:
    process = Forked(uses_its_own_alarm, tmp_path)
    assert process.ends(20) == 0, process.said
    assert process.said == "rang\n"


def test_limit_applies_through_nested_calls() -> None:
    calls = TimedCalls(0.2)

    def nested() -> None:
        with calls.running():
            with calls.running():
                pass
            time.sleep(3)

    with pytest.raises(TimeoutError, match=r"step_timeout=0\.2"):
        nested()


def waits_through_a_pause() -> None:
    calls = TimedCalls(0.2)
    try:
        with calls.running():
            sys.stdout.write("waiting\n")
            time.sleep(20)
    except TimeoutError:
        sys.stdout.write("interrupted\n")


def test_pause_of_the_process_leaves_an_overdue_call_time_to_be_interrupted(tmp_path: Path) -> None:
    process = Forked(waits_through_a_pause, tmp_path)
    process.waits_for(lambda: process.said == "waiting\n")
    process.send(signal.SIGSTOP)
    time.sleep(2.5)  # longer than the limit and the time to react to the interruption
    process.send(signal.SIGCONT)
    assert process.ends(20) == 0, process.said
    assert process.said == "waiting\ninterrupted\n"


def after_a_first_call_in_a_thread() -> None:
    thread = threading.Thread(target=TimedCalls, args=[1.0])
    thread.start()
    thread.join()


def after_a_fit_that_restores_the_handlers() -> None:
    before = signal.getsignal(signal.SIGURG)
    TimedCalls(1.0)
    signal.signal(signal.SIGURG, before)  # as a Trainer does whose environments were built during the fit


@pytest.mark.parametrize("prepare", [after_a_first_call_in_a_thread, after_a_fit_that_restores_the_handlers])
def test_overdue_call_of_the_main_thread_is_interrupted_in_any_process(
    prepare: Callable[[], object], tmp_path: Path
) -> None:
    def waits() -> None:
        time_limits._replace_watchdog()  # the watchdog of a new process
        signal.signal(signal.SIGURG, signal.SIG_DFL)
        prepare()
        calls = TimedCalls(0.2)
        with pytest.raises(TimeoutError), calls.running():
            time.sleep(20)

    process = Forked(waits, tmp_path)
    assert process.ends(20) == 0, process.said
