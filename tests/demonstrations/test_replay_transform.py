"""Demonstrations take the place of episodes of TorchRL environments: what is seen, what rests, and what follows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import (
    CatFrames,
    Compose,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import GRUModule

from kit.demonstrations import check_golden, golden_replay, stored
from kit.lines import Line, Scripted, imitator, line_demo
from kit.torchrl_envs import Walk
from torchrl_lightning import (
    DemonstrationActor,
    DemonstrationReplay,
    DemonstrationReplayTransform,
    DemonstrationSampler,
    environment_specs,
    record_demonstrations,
)
from torchrl_lightning.collectors import TorchRLCollector

PLAYED = [100.0, 101.0, 102.0, 103.0]


class Counting(Line):
    """Shows how many steps were made in it ever."""

    def _shown(self) -> Any:
        return np.full(1, self.steps, np.float32)


def line(kind: type[Line] = Line) -> Any:
    return GymWrapper(kind())


def replay_of(*places: int | None, num_envs: int = 2, demos: Any = None, **options: Any) -> DemonstrationReplay:
    return DemonstrationReplay(stored(*(demos or [line_demo()])), Scripted(*places), num_envs, **options)


def wrapped(env: Any, *places: int | None, **options: Any) -> Any:
    return DemonstrationReplayTransform(replay_of(*places, num_envs=env.batch_size.numel(), **options)).wrap(env)


def played(env: Any, steps: int, policy: Any = None) -> Any:
    return env.rollout(steps, DemonstrationActor(policy or imitator()), break_when_any_done=False)


def numbers(values: torch.Tensor) -> Any:
    return values.squeeze(-1).tolist()


def test_golden_sequence() -> None:
    golden, demonstration = golden_replay()
    env = TransformedEnv(wrapped(line(), None, 0, demos=[demonstration]), InitTracker(), auto_unwrap=False)
    row = played(env, 12)
    check_golden(row, golden)
    ends = golden["done_before"][1:].bool().tolist()
    assert numbers(row["is_init"]) == [True, *ends]
    assert numbers(row["next", "terminated"])[:-1] == ends
    assert numbers(row["next", "observation"])[:7] == [1, 2, 3, 101, 102, 103, 103]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["SerialEnv", "ParallelEnv", "TorchRLCollector", "Collector"])
def test_environments_that_replay_are_not_stepped(kind: str) -> None:
    make = partial(line, Counting)
    base = ParallelEnv(2, make, mp_start_method="fork") if kind == "ParallelEnv" else SerialEnv(2, make)
    env = wrapped(base, 0, None, 0, 0, None)
    policy = DemonstrationActor(imitator())
    if kind == "TorchRLCollector":
        # Building it resets the environment, which draws too; what a script says is not taken back.
        env = wrapped(base, 0, None, 0, None, 0, 0, None)
        batch = TorchRLCollector(env, policy, frames_per_batch=22, seed=0).rollout()
    elif kind == "Collector":
        made = Collector(env, policy, frames_per_batch=22, auto_register_policy_transforms=True)
        batch = next(iter(made))
    else:
        batch = played(env, 11)
    assert numbers(batch["observation"]) == [[*PLAYED, *PLAYED, 0, 1, 2], [0, 1, 2, *PLAYED, 3, 4, 5, 6]]
    assert numbers(batch["demo", "mask"]) == [[True] * 8 + [False] * 3, [False] * 3 + [True] * 4 + [False] * 4]
    assert numbers(batch["demo", "serial"]) == [[0] * 8 + [-1] * 3, [-1] * 3 + [0] * 4 + [-1] * 4]
    assert batch["action"][batch["demo", "mask"]].tolist() == [50.0, 51.0, 52.0, 53.0] * 3
    env.close()


def test_a_single_environment_without_a_batch() -> None:
    row = played(wrapped(line(Counting), 0, None, 0), 9)
    assert numbers(row["observation"]) == [*PLAYED, 0, 1, 2, 100, 101]
    assert numbers(row["demo", "action"])[:5] == [50, 51, 52, 53, 0]
    assert row["demo", "serial"].shape == (9, 1)


@pytest.mark.parametrize(("last", "expected"), [(7.0, 7.0), (None, 103.0)])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_the_end_of_a_demonstration(last: float | None, expected: float, ends: Any) -> None:
    row = played(wrapped(line(), 0, demos=[line_demo(last=last)], ends=ends), 4)
    assert numbers(row["next", "observation"]) == [101.0, 102.0, 103.0, expected]
    assert numbers(row["next", "reward"]) == [0.0, 0.0, 0.0, 1.0]
    for name in ("terminated", "truncated"):
        assert numbers(row["next", name]) == [False, False, False, name == ends]
    assert numbers(row["next", "done"]) == [False, False, False, True]


@pytest.mark.parametrize("terminated", [False, True])
@pytest.mark.parametrize("has_truncated", [False, True])
def test_it_ends_as_it_was_recorded(terminated: bool, has_truncated: bool) -> None:
    shown, env = line_demo(last=7.0, terminated=terminated, truncated=not terminated), line()
    if not has_truncated:
        del env.full_done_spec["truncated"]
    row = played(wrapped(env, 0, demos=[shown], ends="recorded"), 4)
    assert numbers(row["next", "done"]) == [False, False, False, True]
    assert numbers(row["next", "terminated"]) == [False, False, False, terminated]
    if has_truncated:
        assert numbers(row["next", "truncated"]) == [False, False, False, not terminated]


def test_frames_are_stacked_above() -> None:
    env = wrapped(SerialEnv(2, line), None, 0, 0, None)
    stacked = TransformedEnv(env, CatFrames(2, -1, in_keys=["observation"]), auto_unwrap=False)
    shown = played(stacked, 7, TensorDictModule(lambda x: x[..., -1:], ["observation"], ["action"]))["observation"]
    assert shown[0].tolist() == [[0, 0], [0, 1], [1, 2], [100, 100], [100, 101], [101, 102], [102, 103]]
    assert shown[1].tolist() == [[100, 100], [100, 101], [101, 102], [102, 103], [0, 0], [0, 1], [1, 2]]


def test_one_hot_actions_of_a_recorded_demonstration() -> None:
    right = TensorDictModule(
        lambda x: torch.eye(2, dtype=torch.int64)[(x[..., 2] > 0).long()], ["observation"], ["action"]
    )
    demonstration = next(record_demonstrations(lambda: GymEnv("CartPole-v1"), right, 1, seed=0))
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    demonstration.fits(environment_specs(env))
    row = played(wrapped(env, None, 0, demos=[demonstration]), demonstration.length, right)[1]
    assert row["demo", "mask"].all()
    for key in ("observation", "action", ("next", "reward")):
        assert torch.equal(row[key], demonstration.steps[key])
    assert torch.equal(row["next", "observation"][-1], demonstration.last_observation["observation"])


def recurrent_policy() -> TensorDictSequential:
    torch.manual_seed(0)
    gru = GRUModule(
        input_size=1, hidden_size=4, in_keys=["observation", "state", "is_init"], out_keys=["seen", ("next", "state")]
    )
    return TensorDictSequential(gru, TensorDictModule(lambda x: x[..., :1], ["seen"], ["action"]))


@pytest.mark.parametrize("beneath", [False, True])
def test_recurrent_states_follow_the_demonstration(beneath: bool) -> None:
    policy = recurrent_policy()
    if beneath:
        primer = policy[0].make_tensordict_primer
        base = SerialEnv(2, lambda: TransformedEnv(line(), Compose(InitTracker(), primer())))
    else:
        base = SerialEnv(2, line)
    collector = TorchRLCollector(wrapped(base, None, 0, None, 0, None), DemonstrationActor(policy), frames_per_batch=20)
    batch = collector.rollout()
    mask, starts = batch["demo", "mask"][..., 0], batch["is_init"][..., 0]
    assert mask.any()
    assert not mask.all()
    assert (
        starts.tolist() == torch.cat([torch.ones(2, 1, dtype=torch.bool), batch["next", "done"][:, :-1, 0]], 1).tolist()
    )
    state = torch.zeros_like(batch["state"][:, 0])
    for t in range(10):
        state = state * ~starts[:, t, None, None]
        torch.testing.assert_close(batch["state"][:, t] * ~starts[:, t, None, None], state)
        step = TensorDict(
            {"observation": batch["observation"][:, t], "state": state, "is_init": starts[:, t, None]}, [2]
        )
        state = policy(step)["next", "state"]
        torch.testing.assert_close(batch["next", "state"][:, t], state)


def test_a_limit_of_steps_above_cuts_one_and_leaves_the_others() -> None:
    env = wrapped(SerialEnv(2, line), None, 0, 0, demos=[line_demo(9)])
    limited = TransformedEnv(env, StepCounter(5), auto_unwrap=False)
    row = played(limited, 10)
    assert numbers(row["observation"]) == [
        [0, 1, 2, 100, 101, 102, 103, 104, 100, 101],
        [100, 101, 102, 103, 104, 100, 101, 102, 103, 104],
    ]


def test_a_step_that_is_left_out_above_leaves_the_demonstration_where_it_is() -> None:
    env = wrapped(SerialEnv(2, line), 0)
    step = env.reset().set("_step", torch.tensor([True, False])).set("action", torch.zeros(2, 1))
    assert numbers(env.step(step)["next", "observation"]) == [101, 100]


def test_specs_are_those_of_the_environment_beneath() -> None:
    base = SerialEnv(2, line)
    env = wrapped(base, 0)
    assert environment_specs(env).observation == environment_specs(base).observation
    assert env.rollout(3)["demo"].keys() == {"mask", "action", "serial"}


@pytest.mark.parametrize(
    ("num_envs", "rho", "reset_at_each_batch"), [(3, 0.6, True), (3, 1.0, False), (None, 1.0, False)]
)
def test_a_resumed_run_goes_on_within_a_demonstration(
    num_envs: int | None, rho: float, reset_at_each_batch: bool
) -> None:
    policy, storage = DemonstrationActor(recurrent_policy()), stored(line_demo(9), line_demo(7, first=200.0))

    def fresh() -> tuple[Any, DemonstrationReplay]:
        env = line() if num_envs is None else SerialEnv(num_envs, line)
        sampler = DemonstrationSampler(rho, 0.0, generator=torch.Generator().manual_seed(3))
        replay = DemonstrationReplay(storage, sampler, num_envs or 1)
        options = {"frames_per_batch": 4 * (num_envs or 1), "seed": 1, "reset_at_each_batch": reset_at_each_batch}
        return TorchRLCollector(DemonstrationReplayTransform(replay).wrap(env), policy, **options), replay

    (whole, replay), (resumed, restored) = fresh(), fresh()
    whole.rollout()
    assert replay.playing.any()
    restored.load_state_dict(replay.state_dict())
    resumed.load_state_dict(whole.state_dict())
    for _ in range(4):
        one, other = whole.rollout().exclude("collector"), resumed.rollout().exclude("collector")
        assert (one == other).all()


def test_bad_input() -> None:
    base = SerialEnv(2, line)
    with pytest.raises(ValueError, match=r"for 3 environments, got a batch of \[2\]"):
        DemonstrationReplayTransform(replay_of(0, num_envs=3)).wrap(base)
    with pytest.raises(ValueError, match=r"Walk steps its 2 environments at once.*SerialEnv"):
        DemonstrationReplayTransform(replay_of(0)).wrap(Walk([2]))
    walk = Walk()
    del walk.full_done_spec["truncated"]
    with pytest.raises(ValueError, match=r"end as 'truncated', the environment has the flags \['done', 'terminated'\]"):
        DemonstrationReplayTransform(replay_of(0, num_envs=1, ends="truncated")).wrap(walk)
    with pytest.raises(ValueError, match="by its method wrap"):
        TransformedEnv(base, DemonstrationReplayTransform(replay_of(0))).reset()
