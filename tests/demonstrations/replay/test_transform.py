"""Demonstrations take the place of episodes of TorchRL environments: what is seen, what rests, and what follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import (
    CatFrames,
    Compose,
    GymEnv,
    GymWrapper,
    InitTracker,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import GRUModule

from kit.demonstrations import stored
from kit.lines import Counting, Line, Scripted, check_memory, imitator, line_demo
from kit.seeds import generator
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


def line() -> Any:
    return GymWrapper(Line())


def replay_of(*places: int | None, num_envs: int = 2, demos: Any = None, **options: Any) -> DemonstrationReplay:
    return DemonstrationReplay(stored(*(demos or [line_demo()])), Scripted(*places), num_envs, **options)


def wrapped(env: Any, *places: int | None, **options: Any) -> Any:
    return DemonstrationReplayTransform(replay_of(*places, num_envs=env.batch_size.numel(), **options)).wrap(env)


def played(env: Any, steps: int, policy: Any = None) -> Any:
    return env.rollout(steps, DemonstrationActor(policy or imitator()), break_when_any_done=False)


def numbers(values: torch.Tensor) -> Any:
    return values.squeeze(-1).tolist()


def test_single_environment_without_a_batch() -> None:
    row = played(wrapped(GymWrapper(Counting()), 0, None, 0), 9)
    assert numbers(row["observation"]) == [100, 101, 102, 103, 0, 1, 2, 100, 101]
    assert numbers(row["demo", "action"])[:5] == [50, 51, 52, 53, 0]
    assert row["demo", "serial"].shape == (9, 1)


@pytest.mark.parametrize("terminated", [False, True])
def test_recorded_end_is_written_in_environments_without_truncation(terminated: bool) -> None:
    shown, env = line_demo(last=7.0, terminated=terminated, truncated=not terminated), line()
    del env.full_done_spec["truncated"]
    following = played(wrapped(env, 0, demos=[shown], ends="recorded"), 4)["next"]
    assert numbers(following["done"]) == [False, False, False, True]
    assert numbers(following["terminated"]) == [False, False, False, terminated]


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
    mask, starts, done = batch["demo", "mask"], batch["is_init"], batch["next", "done"]
    assert mask.any()
    assert not mask.all()
    assert starts[:, 0].all()
    assert starts[:, 1:].equal(done[:, :-1])
    check_memory(batch, policy, "state")


def test_step_limit_above_cuts_only_its_own_environment() -> None:
    env = wrapped(SerialEnv(2, line), None, 0, 0, demos=[line_demo(9)])
    limited = TransformedEnv(env, StepCounter(5), auto_unwrap=False)
    row = played(limited, 10)
    assert numbers(row["observation"]) == [
        [0, 1, 2, 100, 101, 102, 103, 104, 100, 101],
        [100, 101, 102, 103, 104, 100, 101, 102, 103, 104],
    ]


def test_skipped_step_does_not_advance_the_demonstration() -> None:
    env = wrapped(SerialEnv(2, line), 0)
    step = env.reset().set("_step", torch.tensor([True, False])).set("action", torch.zeros(2, 1))
    assert numbers(env.step(step)["next", "observation"]) == [101, 100]


def test_specs_equal_the_specs_of_the_wrapped_environment() -> None:
    base = SerialEnv(2, line)
    env = wrapped(base, 0)
    assert environment_specs(env).observation == environment_specs(base).observation
    assert env.rollout(3)["demo"].keys() == {"mask", "action", "serial"}


@pytest.mark.parametrize(("num_envs", "rho"), [(2, 0.6), (2, 1.0), (None, 1.0)])
def test_resumed_run_goes_on_within_a_demonstration(num_envs: int | None, rho: float) -> None:
    policy, storage = DemonstrationActor(recurrent_policy()), stored(line_demo(9), line_demo(7, first=200.0))

    def fresh() -> tuple[Any, DemonstrationReplay]:
        env = line() if num_envs is None else SerialEnv(num_envs, line)
        sampler = DemonstrationSampler(rho, 0.0, generator=generator(3))
        replay = DemonstrationReplay(storage, sampler, num_envs or 1)
        # What an environment of its own does is repeated where it is reset by seeds.
        options = {"frames_per_batch": 4 * (num_envs or 1), "seed": 1, "reset_at_each_batch": rho < 1}
        return TorchRLCollector(DemonstrationReplayTransform(replay).wrap(env), policy, **options), replay

    (whole, replay), (resumed, restored) = fresh(), fresh()
    whole.rollout()
    assert replay.playing.any()
    restored.load_state_dict(replay.state_dict())
    resumed.load_state_dict(whole.state_dict())
    for _ in range(3):
        one, other = whole.rollout().exclude("collector"), resumed.rollout().exclude("collector")
        assert (one == other).all()


def test_bad_input() -> None:
    base = SerialEnv(2, line)
    with pytest.raises(ValueError, match=r"batch size \[3\], like the replay, got \[2\]"):
        DemonstrationReplayTransform(replay_of(0, num_envs=3)).wrap(base)
    with pytest.raises(ValueError, match=r"2.*SerialEnv"):
        DemonstrationReplayTransform(replay_of(0)).wrap(Walk([2]))
    walk = Walk()
    del walk.full_done_spec["truncated"]
    with pytest.raises(ValueError, match=r"\['done', 'terminated'\], got 'truncated'"):
        DemonstrationReplayTransform(replay_of(0, num_envs=1, ends="truncated")).wrap(walk)
    with pytest.raises(ValueError, match="with its method wrap"):
        TransformedEnv(base, DemonstrationReplayTransform(replay_of(0))).reset()
