"""GymnasiumCollector beyond what it shares with TorchRL's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import GRUModule, ProbabilisticActor

from kit.counting import ContinuousEnv, CountingEnv, FailingEnv, RandomEnv, vector_env
from kit.forks import forked_workers
from kit.images import first_action
from kit.rollouts import categorical_actor
from torchrl_lightning.collectors import GymnasiumCollector
from torchrl_lightning.environments.env_errors import EnvironmentFault


def stochastic_policy(seed: int = 0) -> ProbabilisticActor:
    torch.manual_seed(seed)
    return categorical_actor(nn.Linear(3, 3))


def collect(collector: GymnasiumCollector, batches: int) -> list[TensorDict]:
    return list(islice(collector, batches))


def same(first: TensorDict, second: TensorDict) -> bool:
    return bool((first == second).all())


def test_memory_is_time_major_and_fresh_or_the_same() -> None:
    kept, fresh = (
        collect(
            GymnasiumCollector(vector_env(), stochastic_policy(), frames_per_batch=20, seed=3, return_same_td=flag), 3
        )
        for flag in (True, False)
    )
    assert fresh[0]["observation"].transpose(0, 1).is_contiguous()
    assert len({batch["observation"].data_ptr() for batch in fresh}) == 3
    assert all(batch is kept[0] for batch in kept)
    assert same(kept[0], fresh[2])


def test_seed_comes_from_torch_if_not_given() -> None:
    def run():
        torch.manual_seed(7)
        return collect(GymnasiumCollector(RandomEnv, frames_per_batch=4), 1)[0]

    assert same(run(), run())


def test_restored_collector_begins_with_a_reset_otherwise() -> None:
    first = GymnasiumCollector(vector_env(), frames_per_batch=8, total_frames=24, seed=0)
    collect(first, 2)
    second = GymnasiumCollector(vector_env(), frames_per_batch=8, total_frames=24, seed=9)
    second.load_state_dict(first.state_dict())
    (batch,) = list(second)
    assert batch["is_init"][:, 0].all()
    assert batch["collector", "traj_ids"].min() >= 4
    assert second.frames == 24


def test_reset_and_set_seed_take_effect_at_the_next_batch() -> None:
    collector = GymnasiumCollector(RandomEnv, num_envs=2, frames_per_batch=2)
    collect(collector, 1)
    assert not collect(collector, 1)[0]["is_init"].any()
    collector.reset()
    assert collect(collector, 1)[0]["is_init"].all()
    last = collector.set_seed(3)
    first = collector.set_seed(3, static_seed=True)
    assert first != last
    batch = collect(collector, 1)[0]
    assert torch.equal(batch["observation"][0], batch["observation"][1])
    assert [seeds[-1] for seeds in collector.env.get_attr("seeds")] == [first, first]


def test_random_actions_first() -> None:
    policy = stochastic_policy()
    with torch.no_grad():
        policy[0].module.bias.copy_(torch.tensor([100.0, 0.0, 0.0]))
    collector = GymnasiumCollector(
        vector_env(), policy, frames_per_batch=40, init_random_frames=41, total_frames=120, seed=0
    )
    first, second, third = list(collector)
    assert not first["action_log_prob"].any()
    assert first["action"].unique().numel() == second["action"].unique().numel() == 3
    assert (third["action"] == 0).float().mean() > 0.5
    assert set(first.keys(True)) == set(third.keys(True))


def test_random_frames_keep_recurrent_keys() -> None:
    names = ["observation", "recurrent_state", "is_init"]
    gru = GRUModule(3, 2, in_keys=names, out_keys=["e", ("next", "recurrent_state")])
    head = TensorDictModule(lambda e: (e.sum(-1) > 0).long(), in_keys=["e"], out_keys=["action"])
    policy = nn.Sequential(gru, head)
    first, second = collect(GymnasiumCollector(vector_env(), policy, frames_per_batch=8, init_random_frames=8), 2)
    assert first["recurrent_state"].shape == first["next", "recurrent_state"].shape == (4, 2, 1, 2)
    assert not first["next", "recurrent_state"].any()
    assert not second["recurrent_state"][:, 0].any()
    assert second["recurrent_state"][3, 1].any()


def policy_of(function: Any, out_keys: Sequence[str] = ("action",)) -> TensorDictModule:
    return TensorDictModule(function, in_keys=["observation"], out_keys=[*out_keys])


def bounded_policy(value: float) -> TensorDictModule:
    return policy_of(lambda x: torch.full((*x.shape[:-1], 2), value))


def test_actions_are_clipped_only_if_asked() -> None:
    for clip, expected in ((False, 5.0), (True, 1.0)):
        collector = GymnasiumCollector(ContinuousEnv, bounded_policy(5.0), frames_per_batch=2, clip_actions=clip)
        batch = next(iter(collector))
        assert (batch["action"] == 5.0).all()
        assert (collector.env.get_attr("received")[0][0] == expected).all()
    with pytest.raises(ValueError, match="Box"):
        next(iter(GymnasiumCollector(CountingEnv, frames_per_batch=2, clip_actions=True)))


def test_bad_policies() -> None:
    def run(policy, env=CountingEnv):
        collector = GymnasiumCollector(env, policy, num_envs=2, frames_per_batch=4)
        next(iter(collector))

    for error, message, policy in (
        (KeyError, r"'action'.*writes 'logits'", policy_of(lambda x: x, ["logits"])),
        (ValueError, r"\(2, 3\)[\s\S]*not one-hot", policy_of(lambda x: torch.eye(3).long()[:2])),
        (TypeError, "TensorDictModule", nn.Linear(3, 1)),
        (TypeError, "must return a TensorDict", lambda td: td["observation"]),
        (TypeError, "int", 3),
    ):
        with pytest.raises(error, match=message):
            run(policy)
    with pytest.raises(ValueError, match="NaN"):
        run(bounded_policy(float("nan")), ContinuousEnv)


def test_end_and_shutdown() -> None:
    collector = GymnasiumCollector(vector_env(), frames_per_batch=8, total_frames=20)
    assert len(collector) == len(list(collector)) == 3
    assert list(collector) == []
    env = collector.env
    collector.shutdown()
    collector.shutdown()
    assert env.closed
    with pytest.raises(RuntimeError, match="shut down"):
        collector.rollout()
    with pytest.raises(RuntimeError, match="no length"):
        len(GymnasiumCollector(vector_env(), frames_per_batch=8))


def test_error_of_the_environment_shuts_down() -> None:
    collector = GymnasiumCollector(FailingEnv, num_envs=2, frames_per_batch=8)
    with pytest.raises(EnvironmentFault, match=r"At step 2 .* third step"):
        next(iter(collector))
    assert collector.closed


def test_processes_start_late_and_end() -> None:
    running = multiprocessing.active_children()
    collector = GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=4, vectorization="async", seed=0)
    assert collector.specs.num_envs == 2
    assert multiprocessing.active_children() == running
    with forked_workers():
        mine = next(iter(collector))
    processes = collector.env.processes
    assert len(processes) == 2
    collector.shutdown()
    assert not any(process.is_alive() for process in processes)
    other = next(iter(GymnasiumCollector("CartPole-v1", num_envs=2, frames_per_batch=4, seed=0)))
    assert same(mine, other)


def test_weights_are_copied_in_place() -> None:
    policy, other = stochastic_policy(0), stochastic_policy(1)
    collector = GymnasiumCollector(vector_env(), policy, frames_per_batch=4)
    weight = policy[0].module.weight
    for weights in (other, other.state_dict(), TensorDict.from_module(other)):
        with torch.no_grad():
            weight.zero_()
        collector.update_policy_weights_(weights)
        assert policy[0].module.weight is weight
        assert torch.equal(weight, other[0].module.weight)
    collector.update_policy_weights_()
    with pytest.raises(TypeError, match=r"nn\.Module to update its weights"):
        GymnasiumCollector(vector_env(), first_action, frames_per_batch=4).update_policy_weights_(other)


def test_trajectory_keeps_its_number_until_its_episode_ends() -> None:
    collector = GymnasiumCollector("CartPole-v1", num_envs=3, frames_per_batch=3 * 16, seed=0)
    rollout = torch.cat(collect(collector, 6), 1)
    numbers, done = rollout["collector", "traj_ids"], rollout["next", "done"].squeeze(-1)
    assert torch.equal(numbers[:, 1:] != numbers[:, :-1], done[:, :-1])
    of_each = [set(row.tolist()) for row in numbers]
    assert sum(map(len, of_each)) == len(set.union(*of_each)) == 3 + int(done[:, :-1].sum())
