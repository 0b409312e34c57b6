"""TorchRL environments are collected from, played and refused as Gymnasium's are."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    FrameSkipTransform,
    GymEnv,
    InitTracker,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNormV2,
)
from torchrl.modules import GRUModule

from kit.states import differences, plain
from kit.torchrl_envs import Walk, cart_pole, still
from torchrl_lightning import environment_specs, play_episodes
from torchrl_lightning.collectors import TorchRLCollector
from torchrl_lightning.environments import make_environment, spawn_seed

ahead = TensorDictModule(lambda x: x[..., :1] * 0 + 1, in_keys=["observation"], out_keys=["action"])
noisy = TensorDictModule(lambda x: torch.rand_like(x[..., :1]), in_keys=["observation"], out_keys=["action"])


def collector(policy=noisy, env=None, frames=16, **settings):
    env = make_environment(Walk, 2) if env is None else env
    return TorchRLCollector(env, policy, frames_per_batch=frames, **{"seed": 0, **settings})


def test_batches_equal_torchrls_collector() -> None:
    def env():
        return TransformedEnv(cart_pole(), Compose(StepCounter(20), RewardSum()))

    left = TensorDictModule(lambda x: (x[..., 0] > 0).long(), in_keys=["observation"], out_keys=["action"])
    ours = collector(left, make_environment(env, 2), 80)
    theirs = TransformedEnv(SerialEnv(2, env), InitTracker())
    reference = Collector(theirs, left, frames_per_batch=80)
    mine = ours.rollout()
    theirs.set_seed(spawn_seed(0, "environment", 0))
    reference.reset_at_each_iter = True
    other = reference.rollout()
    other["collector", "traj_ids"] -= int(other["collector", "traj_ids"].min())
    assert mine.names == other.names
    assert not differences(plain(mine), plain(other))
    ours.shutdown()
    reference.shutdown()


def test_counters_of_transforms_are_no_observations() -> None:
    env = make_environment(lambda: TransformedEnv(cart_pole(), Compose(StepCounter(20), RewardSum())), 2)
    specs = environment_specs(env)
    assert (specs.keys, specs.num_envs, specs.action.n) == (["observation"], 2, 2)


def test_episodes_run_on_across_batches_and_frames_are_counted() -> None:
    made = collector(still, frames=4, total_frames=12)
    batches = list(made)
    assert (len(batches), made.frames) == (3, 12)
    joined = torch.cat(batches, 1)
    assert joined["observation"][:, :, 1].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert torch.equal(joined["next", "observation"][:, :-1], joined["observation"][:, 1:])
    made.shutdown()
    made.shutdown()
    assert made.env.is_closed
    with pytest.raises(RuntimeError, match="was shut down"):
        made.rollout()


def test_last_observation_of_an_episode_is_kept() -> None:
    batch = collector(ahead, env=Walk([2])).rollout()
    ends = batch["next", "done"][..., 0]
    assert (batch["next", "observation"][ends][:, 0] > 2).all()
    assert (batch["observation"][:, 1:][ends[:, :-1]][:, 1] == 0).all()


@pytest.mark.parametrize("primed", [False, True])
def test_recurrent_states_are_carried_and_begin_anew(primed) -> None:
    names = ["observation", "recurrent_state", "is_init"]
    memory = GRUModule(2, 3, in_keys=names, out_keys=["embed", ("next", "recurrent_state")])
    policy = TensorDictSequential(memory, TensorDictModule(lambda x: x[..., :1], ["embed"], ["action"]))
    env = SerialEnv(2, Walk)
    if primed:
        env = TransformedEnv(env, Compose(InitTracker(), memory.make_tensordict_primer()))
    made = collector(policy, env, 32, init_random_frames=32)
    drawn, batch = made.rollout(), made.rollout()
    assert set(drawn.keys(True, True)) == set(batch.keys(True, True))
    assert not drawn["embed"].any()
    assert not drawn["next", "recurrent_state"].any()
    assert drawn["action"].std() > 0.3
    starts = batch["is_init"][..., 0]
    assert starts.any()
    assert not batch["recurrent_state"][starts].any()
    goes_on = ~starts[:, 1:]
    carried = batch["next", "recurrent_state"][:, :-1][goes_on]
    assert carried.any(-1).all()
    assert torch.equal(batch["recurrent_state"][:, 1:][goes_on], carried)
    assert play_episodes(Walk, policy, 2, seed=0)["episode_length"].max() <= 7


def test_resets_begin_different_episodes() -> None:
    made = collector(reset_at_each_batch=True)
    first, second = made.rollout(), made.rollout()
    assert second["collector", "traj_ids"].min() > first["collector", "traj_ids"].max()
    assert not torch.equal(first["observation"][:, 0], second["observation"][:, 0])


def test_environment_that_cannot_be_seeded_is_refused_where_a_resume_would_differ() -> None:
    made = collector(env=Walk([2], seeded=False), reset_at_each_batch=True)
    with pytest.raises(ValueError, match=r"'observation'.*set_seed"):
        made.rollout()


def test_played_episodes() -> None:
    for env, count in ((Walk, None), (lambda: Walk([3]), 10), (Walk(), None), (Walk([3]), None)):
        played = play_episodes(env, ahead, 7, num_envs=count, seed=1)
        assert played["episode_length"].tolist() == [2] * 7 or played["episode_length"].max() == 3
        assert played["terminated"].all()
        assert not played["truncated"].any()
    played = play_episodes(Walk, still, 3, seed=1)
    assert played["episode_length"].tolist() == [7] * 3
    assert played["truncated"].all()
    assert torch.equal(played["episode_return"], play_episodes(Walk, still, 3, seed=1)["episode_return"])


@pytest.mark.parametrize(
    ("env", "num_envs", "message"),
    [
        (lambda: Walk([3]), 2, "num_envs must be 3, .*got 2"),
        (Walk([3]), 2, "num_envs must be 3"),
        (lambda: Walk([3, 1]), 3, r"batch size must have one dimension, got \[3, 1\]"),
        (lambda: TransformedEnv(cart_pole(), VecNormV2(["observation"])), 2, "Set normalize_observation=True"),
        (lambda: TransformedEnv(cart_pole(), FrameSkipTransform(2)), 2, "Give frame_skip= to GymEnv"),
        (lambda: GymEnv("CartPole-v1", num_envs=2), 2, "bogus transition .* Remove num_envs from GymEnv"),
        (
            lambda: TransformedEnv(Walk(), RenameTransform(["reward"], ["score"])),
            2,
            r"reward keys must be \['reward'\], got \['score'\]",
        ),
    ],
)
def test_unsupported_environment_is_rejected(env, num_envs, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_environment(env, num_envs)


def test_name_that_is_unknown() -> None:
    with pytest.raises(ValueError, match="cannot be made: Environment `Nope` doesn't exist"):
        make_environment(partial(GymEnv, "Nope-v0"))
