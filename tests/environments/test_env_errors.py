"""An environment that returns what its spaces do not allow is refused in one line, before anybody sees a rollout."""

from __future__ import annotations

from functools import partial
from traceback import extract_tb
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv, VectorWrapper
from tensordict.nn import TensorDictModule

from kit.counting import CountingEnv, still_policy
from kit.forks import forked_workers
from torchrl_lightning.collectors import AsynchronousCollector, GymnasiumCollector, play_episodes
from torchrl_lightning.environments.env_errors import EnvironmentFault


class Faulty(CountingEnv):
    """Returns something else from step ``at`` of its episodes on (0: their reset)."""

    def __init__(self, at: int, observation: Any = None, reward: float | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.at, self.wrong, self.reward = at, observation, reward

    def _observe(self) -> Any:
        good = super()._observe()
        if self.t < self.at or self.wrong is None:
            return good
        return {**good, **self.wrong} if self.kind == "dict" and isinstance(self.wrong, dict) else self.wrong

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        return (observation, reward if self.reward is None or self.t < self.at else self.reward, *rest)


def collect(*envs: Any, policy: Any = None, **kwargs: Any) -> Any:
    env = SyncVectorEnv([CountingEnv, *(lambda env=env: env for env in envs)], autoreset_mode="SameStep")
    collector = GymnasiumCollector(env, policy, frames_per_batch=8 * env.num_envs, seed=0, **kwargs)
    return collector.rollout()


WRONG: dict[str, tuple[Any, str]] = {
    "longer": (np.zeros(4, np.float32), r"shape \(4,\).*expected shape \(3,\)"),
    "one more dimension": (np.zeros((1, 3), np.float32), r"shape \(1, 3\)"),
    "a single number": (np.float32(1), r"shape \(\)"),
    "that would be broadcast": (np.zeros(1, np.float32), r"shape \(1,\)"),
    "ragged": ([[1.0], [1.0, 2.0]], r"dtype object"),
    "text": (np.array(["a", "b", "c"]), r"dtype <U1, expected .* dtype float32"),
    "complex": (np.zeros(3, np.complex64), r"dtype complex64"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("at", [0, 2, 5])
def test_observation_that_does_not_fit_its_space(case: str, at: int) -> None:
    # At its fifth step an episode ends, and its last observation is never put together with others.
    observation, message = WRONG[case]
    when = "after a reset" if at == 0 else f"At step {at - 1} of the rollout,"
    with pytest.raises(ValueError, match=rf"^{when}.*1.*'observation'.*{message}") as error:
        collect(Faulty(at, observation))
    assert "observation_space" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image": np.zeros((2, 2))}, r"'image' of shape \(2, 2\) and dtype float64, expected .* dtype uint8"),
        ({"image": np.zeros((2, 2), np.int64)}, r"'image' .* dtype int64"),
        ({"inner": {}}, r"'inner' without \['count'\]"),
        ({"inner": 3}, r"'inner' as int, expected a dict of \['count'\]"),
        (3, r"'observation' as int, expected a dict of \['image', 'inner', 'state'\]"),
    ],
)
def test_entry_that_does_not_fit_its_space(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"0.*0.*{message}"):
        GymnasiumCollector(lambda: Faulty(1, wrong, kind="dict"), frames_per_batch=4).rollout()


def test_rounded_or_wider_values_are_accepted() -> None:
    assert collect(Faulty(0, [1, 2, 3]), Faulty(0, np.ones(3, np.float64)))["observation"].dtype == torch.float32


def test_ready_vector_environment_is_not_broadcast() -> None:
    class Squeezing(VectorWrapper[Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            observation, info = self.env.reset(**kwargs)
            return observation[0], info

    env = Squeezing(SyncVectorEnv([CountingEnv] * 2, autoreset_mode="SameStep"))
    with pytest.raises(ValueError, match=r"shape \(3,\).*expected shape \(2, 3\)"):
        GymnasiumCollector(env, frames_per_batch=4).rollout()


def test_error_of_the_environment_itself_is_the_cause_with_its_own_frames() -> None:
    class Raising(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            raise ArithmeticError("mine")

    with pytest.raises(EnvironmentFault, match=r"1.*ArithmeticError") as error:
        collect(Raising())
    assert isinstance(error.value.__cause__, ArithmeticError)
    assert [frame.name for frame in extract_tb(error.value.__cause__.__traceback__)] == ["reset"]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_large_numbers_are_finite() -> None:
    assert collect(Faulty(1, np.full(3, 3e38, np.float32), 1e30))["observation"].max() > 2e38


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(value: float) -> None:
    wrong = np.array([0, value, 0], np.float32)
    with pytest.raises(ValueError, match=rf"0.*1.*'observation'.*{value}"):
        collect(Faulty(0, wrong))
    with pytest.raises(ValueError, match=rf"2.*1.*'observation'.*{value}"):
        collect(Faulty(3, wrong))
    with pytest.raises(ValueError, match=rf"3.*2.*{value}.*TransformReward"):
        collect(CountingEnv(), Faulty(4, reward=value))
    last = Faulty(5, {"state": wrong}, kind="dict")  # in the last observation of each episode alone
    with pytest.raises(ValueError, match=r"4.*'observation'"):
        GymnasiumCollector(lambda: last, frames_per_batch=8).rollout()


def test_reset_that_shows_no_numbers() -> None:
    class FaultyReset(CountingEnv):
        def _observe(self) -> Any:
            return super()._observe() if self.t else np.full(3, np.nan, np.float32)

    with pytest.raises(ValueError, match=r"At step 0 .* environment 1 .* first .* of an episode with nan"):
        collect(FaultyReset())


def test_failed_rollout_is_not_returned() -> None:
    collector = GymnasiumCollector(lambda: Faulty(3, reward=np.nan), frames_per_batch=1, seed=0)
    rows = collector.reused_rows()
    assert [next(rows)["next", "reward"].item() >= 0 for _ in range(2)] == [True, True]
    with pytest.raises(ValueError, match=r"environment 0 .* reward with nan"):
        next(rows)
    assert collector.closed


def test_environment_is_named_where_the_policy_fails_first() -> None:
    def act(observation: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=observation).sample()

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    with pytest.raises(ValueError, match=r"At step 1 .* environment 1 .* with nan"):
        collect(Faulty(2, np.full(3, np.nan, np.float32)), policy=policy)


def test_evaluation_refuses_it_too() -> None:
    with pytest.raises(ValueError, match=r"environment 0 .* reward with nan"):
        play_episodes(lambda: Faulty(2, reward=np.nan), still_policy(), 1, seed=0)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium says what it raises, too
@pytest.mark.parametrize(("at", "checked"), [(0, True), (1, True), (2, False)])
def test_environment_in_another_process_is_checked_there_once(at: int, checked: bool) -> None:
    # Gymnasium casts what it writes into its shared memory.
    faulty = partial(Faulty, at, {"image": np.full((2, 2), 7)}, kind="dict")
    collector = GymnasiumCollector(faulty, frames_per_batch=4, vectorization="async")
    with forked_workers():
        if checked:
            with pytest.raises(ValueError, match=r"0.*'image'.*int64"):
                next(iter(collector))
        else:
            assert (next(iter(collector))["next", "image"][0, 1:] == 7).all()
    collector.shutdown()


def test_worker_reports_a_fault_in_one_line() -> None:
    faulty = partial(Faulty, 0, np.zeros(4, np.float32))
    collector = AsynchronousCollector(faulty, num_workers=1, frames_per_batch=8)
    with forked_workers(), pytest.raises(ValueError, match=r"^In collector worker 0: .*shape \(4,\)") as error:
        collector.rollout()
    assert "\n" not in str(error.value)
