"""Actors of a Ray cluster: stale weights, stamped; those that die are replaced; errors come back; nobody is left."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.actor_critic import TinyActorCritic, fit, rollouts
from kit.careless import Careless, pair
from kit.counting import CountingEnv, FailingEnv, RandomEnv
from kit.processes import alive
from kit.replay import dqn, replay_data
from kit.replay import fit as fit_replay
from kit.states import differences, plain
from kit.worked import FollowedReplay, constant_policy
from torchrl_lightning import DQNModule, OnPolicyDataModule, RayCollector, ReplayService, VTraceBuffer
from torchrl_lightning._core.keys import TRAJ_IDS
from torchrl_lightning._core.rank_metrics import Sum, reduce_metrics
from torchrl_lightning.environments.env_errors import WorkerFault
from torchrl_lightning.ray import ray_collector
from torchrl_lightning.ray._actor import RolloutActor
from torchrl_lightning.ray.cluster import ClusterFault, connect, installed_versions

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.usefixtures("cluster"),
]
SIZES = {"num_collectors": 2, "num_envs": 2, "frames_per_batch": 8}


@pytest.fixture
def make_collector() -> Iterator[Callable[..., RayCollector]]:
    """Builds collectors, which end with the test."""
    collectors = []

    def make(env: Any = RandomEnv, **settings: Any) -> RayCollector:
        policy = settings.pop("policy", constant_policy())
        collectors.append(RayCollector(env, policy, **{"seed": 0, **SIZES, **settings}))
        return collectors[-1]

    yield make
    for collector in collectors:
        collector.shutdown()


class PidEnv(CountingEnv):
    """Says in its observation in which process it is."""

    def _observe(self) -> Any:
        observation = super()._observe()
        observation[0] = os.getpid() % 2**20
        return observation


class DyingEnv(CountingEnv):
    """Ends its process at the third step."""

    def step(self, action: Any) -> Any:
        if self.t == 2:
            os._exit(3)
        return super().step(action)


def publish(collector: RayCollector) -> None:
    """Let the policy take the action that the next version says."""
    with torch.no_grad():
        collector.policy.module.weight.fill_((collector.policy_version + 1) % 3)
    collector.update_policy_weights_()


def pid_of(batch: TensorDict) -> int:
    (pid,) = batch["observation"][..., 0].unique().int().tolist()
    return pid


def ids_of(batch: TensorDict) -> set[int]:
    return set(batch["collector", "traj_ids"].flatten().tolist())


def test_actor_process_skips_rarely_used_imports() -> None:
    named = ray.remote(lambda: list(sys.modules))
    imported = set(ray.get(named.remote()))
    assert "tensordict" in imported  # with what an actor needs, before it is there
    assert not imported & {"torch._dynamo", "mujoco"}


def test_rollouts_have_policy_versions_and_unique_trajectory_ids(make_collector: Any) -> None:
    collector = make_collector()
    ids_of_collector: dict[int, set[int]] = {0: set(), 1: set()}
    for number, batch in enumerate(collector):
        version = batch["collector", "policy_version"]
        assert batch.shape == (2, 4)
        assert batch.names == [None, "time"]
        assert torch.equal(batch["action"], version % 3)  # what is stamped is what acted
        assert collector.metrics()["collector/lag"] == number - int(version[0, 0])
        first = int(batch["collector", "env_ids"][0, 0])
        assert batch["collector", "env_ids"].tolist() == [[first] * 4, [first + 1] * 4]
        assert {id % 2 for id in ids_of(batch)} == {first // 2}
        ids_of_collector[first // 2] |= ids_of(batch)
        batch["next", "reward"].zero_()  # memory of its own
        publish(collector)
        time.sleep(0.05)
        if number >= 9 and all(ids_of_collector.values()):  # one may begin long after the other
            break
    assert reduce_metrics([collector.metrics(), {"collector/deaths": Sum(2)}])["collector/deaths"] == 2.0
    assert collector.metrics() == {
        "collector/lag": collector.metrics()["collector/lag"],
        "collector/deaths": 0.0,
        "collector/restarts": 0.0,
        "collector/lost_frames": 0.0,
    }


def test_sync_run_resumes_bit_for_bit(make_collector: Any) -> None:
    uninterrupted, resumed = (make_collector(sync=True, reset_at_each_batch=True, seed=seed) for seed in (0, 1))
    batches, state = [], None
    for batch in islice(uninterrupted, 6):
        batches.append(batch)
        publish(uninterrupted)
        if len(batches) == 4:
            state = uninterrupted.state_dict()
    versions = [int(batch["collector", "policy_version"][0, 0]) for batch in batches]
    assert versions == [0, 0, 2, 2, 4, 4]  # those of when the first of a round was asked for
    assert [int(batch["collector", "env_ids"][0, 0]) for batch in batches] == [0, 2] * 3
    resumed.load_state_dict(state)
    with torch.no_grad():
        resumed.policy.module.weight.fill_(resumed.policy_version % 3)
    earlier_ids = set.union(*map(ids_of, batches[:4]))
    for batch, other in zip(batches[4:], islice(resumed, 2), strict=True):
        assert (batch.exclude(TRAJ_IDS) == other.exclude(TRAJ_IDS)).all()
        assert not ids_of(other) & earlier_ids


def test_other_actors_continue_if_one_is_killed(make_collector: Any) -> None:
    collector = make_collector(PidEnv)
    before: dict[int, TensorDict] = {}
    while len(before) < 2:
        time.sleep(0.05)
        batch = collector.rollout()
        before[int(batch["collector", "env_ids"][0, 0])] = batch
    earlier_ids = set.union(*map(ids_of, before.values()))
    os.kill(pid_of(before[0]), signal.SIGKILL)
    while not collector.restarts:
        time.sleep(0.05)  # leaves a core to the one that begins
        batch = collector.rollout()
        if batch["collector", "env_ids"][0, 0] == 2:
            assert pid_of(batch) == pid_of(before[2])
        elif pid_of(batch) == pid_of(before[0]):  # it had been delivered
            earlier_ids |= ids_of(batch)
    assert pid_of(batch) != pid_of(before[0])
    assert batch["is_init"][:, 0].all()
    assert min(ids_of(batch)) > max(id for id in earlier_ids if id % 2 == 0)
    assert collector.lost_envs == [0, 1]
    counts = {"collector/deaths": 1.0, "collector/restarts": 1.0, "collector/lost_frames": 8.0}
    assert counts.items() <= collector.metrics().items()
    collector.shutdown()
    deadline = time.monotonic() + 60
    while any(alive(pid_of(batch)) for batch in (batch, before[2])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid_of(batch))
    assert not alive(pid_of(before[2]))


def kill_at_start(collector: RayCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the first actor of the last worker when it has started, before its first rollout is requested."""
    build = collector._build_actor

    def build_and_kill(worker: int) -> Any:
        actor = build(worker)
        if worker == collector.num_workers - 1 and not collector.deaths:
            os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        return actor

    monkeypatch.setattr(collector, "_build_actor", build_and_kill)


def test_actor_that_dies_before_its_first_rollout_is_replaced(
    make_collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = make_collector()
    kill_at_start(collector, monkeypatch)
    yielded: set[int] = set()
    while yielded != {0, 2}:
        batch = collector.rollout()
        yielded.add(int(batch["collector", "env_ids"][0, 0]))
    assert (collector.deaths, collector.restarts, collector.lost_frames) == (1, 1, 8)
    assert collector.lost_envs == [2, 3]


def test_sync_actor_that_dies_before_its_first_rollout_raises_one_line(
    make_collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = make_collector(sync=True)
    kill_at_start(collector, monkeypatch)
    collector.rollout()
    with pytest.raises(WorkerFault, match=r"^Collector worker 1 died: .*resume the run\.$"):
        collector.rollout()


class UnbuildableEnv(CountingEnv):
    def __init__(self) -> None:
        raise OSError("the simulator is missing")


def test_error_of_a_start_is_not_answered_by_restarts(make_collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make_collector(UnbuildableEnv, num_collectors=1)
    with pytest.raises(WorkerFault, match="the simulator is missing"):
        collector.rollout()
    assert (collector.deaths, collector.closed) == (0, True)

    class Failing(RolloutActor):
        def __init__(self, *_: Any) -> None:
            raise ModuleNotFoundError("No module named 'here_alone'")

    monkeypatch.setattr("torchrl_lightning.ray.ray_collector.RolloutActor", Failing)
    collector = make_collector(num_collectors=1)
    message = (
        r"^Collector worker \d cannot start: ModuleNotFoundError: No module named 'here_alone'.* same versions .*$"
    )
    with pytest.raises(ClusterFault, match=message):
        collector.rollout()
    assert (collector.deaths, collector.closed) == (0, True)


def test_actor_that_was_ended_for_its_memory_is_replaced(make_collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collector, wait_for, calls = make_collector(num_collectors=1), ray_collector.wait_for, []

    def killed_once(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise ray.exceptions.OutOfMemoryError("the memory monitor has ended it")
        return wait_for(*args)

    monkeypatch.setattr(ray_collector, "wait_for", killed_once)
    assert collector.rollout().shape == (2, 4)
    assert (collector.deaths, collector.restarts) == (1, 1)


def test_setup_that_fails_on_a_machine_raises_one_line(make_collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ray.exceptions.RuntimeEnvSetupError("no such package\nin the index")

    monkeypatch.setattr(ray_collector, "wait_for", fail)
    with pytest.raises(ClusterFault, match=r"^Collector worker \d cannot run .*no such package in .* remote_configs"):
        make_collector(num_collectors=1).rollout()


def test_sync_collector_raises_if_an_actor_dies(make_collector: Any) -> None:
    collector = make_collector(PidEnv, sync=True, num_collectors=1)
    os.kill(pid_of(next(iter(collector))), signal.SIGKILL)
    with pytest.raises(WorkerFault, match=r"0.*[\s\S]*sync=True"):
        [collector.rollout() for _ in range(3)]
    assert collector.closed


def test_actor_that_dies_repeatedly_raises(make_collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_lightning.ray.ray_collector._MAX_FAILURES", 2)
    collector = make_collector(DyingEnv, num_collectors=1)
    with pytest.raises(WorkerFault, match="worker 0 died 2 times in succession"):
        collector.rollout()


def test_errors_of_environments_and_policies_are_raised(make_collector: Any) -> None:
    with pytest.raises(WorkerFault, match=r"worker 0: At step 2 .* environment 0 .*: the third step") as error:
        make_collector(FailingEnv, num_collectors=1).rollout()
    assert error.value.__notes__[0].startswith("Traceback")  # the environment's own
    collector = make_collector(num_collectors=1)
    collector.policy.module.forward = None
    with pytest.raises(RuntimeError, match=r"0 failed:[\s\S]*TypeError"):
        collector.rollout()


def test_module_that_actors_cannot_import_is_named_with_a_remedy(
    make_collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "here_alone", module := ModuleType("here_alone"))
    exec("def make():\n    pass", vars(module))  # in no file
    with pytest.raises(ClusterFault, match=r"0.*'here_alone'.*py_modules"):
        make_collector(module.make, num_collectors=1).rollout()


def test_settings_reach_the_actor(make_collector: Any) -> None:
    """What is replayed is followed, weights come as seldom as is asked for, the first frames are random."""
    replay = FollowedReplay(2)
    collector = make_collector(num_collectors=1, max_weight_update_interval=3, init_random_frames=16, replay=replay)
    batches = []
    for _ in range(10):
        batches.append(collector.rollout())
        publish(collector)
    actions = [batch["action"].unique().tolist() for batch in batches]
    assert max(map(len, actions[:2])) > 1
    assert all(len(of_one) == 1 for of_one in actions[2:])
    versions = {int(batch["collector", "policy_version"][0, 0]) for batch in batches}
    assert {0, 3} < versions <= {0, 3, 6, 9}
    assert not replay.told
    replay.content = 2
    last = [collector.rollout() for _ in range(5)][-1]
    assert last["demo", "mask"][:, -1].all()
    assert (last["action"][:, -1] == 2).all()
    assert replay.told == [0]


def test_fit_divides_its_environments_and_logs_deaths(tmp_path: Path) -> None:
    class Watching(TinyActorCritic):
        history: list[dict[str, float]] = []

        def on_train_epoch_end(self) -> None:
            self.history.append(self.trainer.datamodule.metrics())

    make = partial(RayCollector, num_collectors=2)
    data = rollouts(buffer=VTraceBuffer, num_envs=4, frames_per_batch=32, collector=make)
    assert isinstance(data, OnPolicyDataModule)
    assert data.rollout_length == 16
    fit(tmp_path, data, Watching())
    assert data.frames == 64
    assert Watching.history[-1]["collector/deaths"] == 0.0
    assert {"collector/lag", "collector/lost_frames"} <= set(Watching.history[-1])


def test_fit_continues_if_its_replay_service_is_killed(tmp_path: Path) -> None:
    """The actors write there by themselves; what the service had not saved comes again, each row once."""
    history: list[dict[str, float]] = []

    class Killing(DQNModule):
        def on_train_epoch_end(self) -> None:
            data = self.trainer.datamodule
            history.append(data.metrics())
            (actor,) = data._row_store._actors
            if len(history) == 1:
                os.kill(ray.get(actor.__ray_call__.remote(lambda service: os.getpid())), signal.SIGKILL)
            else:
                for _ in range(300):  # rows may still be under way to a service that was restarted
                    rows = ray.get(actor.__ray_call__.remote(lambda service: len(service._buffer)))
                    if rows >= data.frames:
                        break
                    time.sleep(0.1)
                assert rows >= data.frames

    source = partial(ReplayService, folder=tmp_path / "service", unacknowledged=2, batches_per_call=2)
    data = replay_data(source=source, num_envs=4, collector=partial(RayCollector, num_collectors=1))
    fit_replay(tmp_path, data, dqn(Killing))
    assert (data.frames, data.updates) == (60, 20)
    assert history[-1]["collector/deaths"] == 0.0
    assert history[-1]["replay/size"] >= 40.0


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_collectors": 99}, ClusterFault, "num_collectors=99 need 99 CPU, but the cluster has 4"),
        ({"remote_configs": {"resources": {"moon": 1}}}, ClusterFault, "need 2 moon, but the cluster has 0"),
        ({"num_collectors": 0}, ValueError, "num_collectors must"),
        ({"max_weight_update_interval": -2}, ValueError, "max_weight_update_interval must"),
    ],
)
def test_invalid_settings_are_refused(make_collector: Any, settings: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_collector(**settings).rollout()


def test_missing_ray_names_the_extra(make_collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = make_collector()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterFault, match=r"'torchrl-lightning\[ray\]'"):
        collector.rollout()


def test_different_version_on_another_machine_is_refused(make_collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**installed_versions(), "Python": "3.99.0"}
    monkeypatch.setattr("torchrl_lightning.ray.ray_collector.installed_versions", lambda: versions)
    with pytest.raises(ClusterFault, match=r"Python 3\.99\.0 .*got 3\."):
        make_collector(num_collectors=1).rollout()


@pytest.fixture
def cluster_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No cluster is known; where Ray would note one."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_unreachable_address_raises_one_line(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(ClusterFault, match=r"address='127.0.0.1:1'."):
        connect({"address": "127.0.0.1:1"})
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:1")
    with pytest.raises(ClusterFault, match=r"address='ray://127.0.0.1:1'"):
        connect({})
    assert time.monotonic() - began < 20


def test_address_of_a_killed_cluster_is_ignored(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda **config: configs.append(config))
    cluster_file.write_text("127.0.0.1:1")
    connect({"num_cpus": 1})
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster_file.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        connect({})
    cluster_file.unlink()
    connect({"address": None})
    assert configs == [{"num_cpus": 1, "address": "local"}, {}, {"address": None}]


def test_environments_that_reuse_memory_give_the_same_rollouts(make_collector) -> None:
    rollouts = []
    for maker in pair(Careless, observation="dict", action="box", buffers=2):
        collector = make_collector(maker, policy=None, sync=True, num_collectors=1, frames_per_batch=60)
        rollouts.append(collector.rollout())
        collector.shutdown()
    assert rollouts[1]["next", "done"].sum() > 9
    assert not differences(plain(rollouts[0]), plain(rollouts[1]))
