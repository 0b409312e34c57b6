"""Two learners share out the collectors of one cluster, each with experience of its own, and resume together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.actor_critic import TinyActorCritic, fit, rollouts
from kit.ranks import Report, fit_ranks, of_rank, reports, run_ranks
from kit.replay import replay_data
from kit.runs import SaveAt, parameters
from torchrl_lightning import OnPolicyDataModule, RayCollector
from torchrl_lightning._core.errors import UserError
from torchrl_lightning.environments import spawn_seed
from torchrl_lightning.ray.cluster import ClusterFault, check_resources, connect

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


class Watching(TinyActorCritic):
    """Notes what each rollout is of."""

    def on_train_epoch_start(self) -> None:
        self.__dict__.setdefault("seen", [])

    def annotate(self, rollout: Any) -> None:
        self.__dict__.setdefault("seen", []).append(
            [sorted(set(rollout["collector", "env_ids"].flatten().tolist())), float(rollout["observation"].sum())]
        )


def tell(module: Watching, data: OnPolicyDataModule) -> dict[str, Any]:
    return {
        "seed": data.collector.seed,
        "collectors": [data.collector.num_workers, data.collector.num_envs],
        "seen": module.seen,
        "frames": data.frames,
        "ended": parameters(module).tolist(),
    }


def learn(folder: Path, address: str) -> None:
    """A run of three rounds, and its second half once more."""

    def run(name: str, *callbacks: Any, resume: Path | None = None) -> None:
        torch.manual_seed(0)
        config = {"address": address, "logging_level": "error", "log_to_driver": False}
        make = partial(RayCollector, num_collectors=2, sync=True, ray_init_config=config)
        data = rollouts(num_envs=4, frames_per_batch=32, reset_at_each_batch=True, collector=make)
        report = Report(folder, name, tell)
        fit_ranks(Watching(), data, report, *callbacks, resume=resume, max_epochs=3)

    half = folder / "half.ckpt"
    run("whole", SaveAt(half, "on_train_epoch_end", 2, then="go on"))
    run("resumed", resume=half)


@pytest.fixture(scope="module")
def folder(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks(learn, tmp_path_factory.mktemp("ranks"), cluster, bare=True)


def test_ranks_learn_the_same_from_collectors_of_their_own(folder: Path) -> None:
    first, second = reports(folder, "whole")
    assert first["collectors"] == second["collectors"] == [1, 2]  # of two collectors with four environments
    assert [first["seed"], second["seed"]] == [spawn_seed(0, "collector", rank) for rank in range(2)]
    assert [ids for ids, _ in first["seen"] + second["seen"]] == [[0, 1]] * 6
    assert not {total for _, total in first["seen"]} & {total for _, total in second["seen"]}
    assert first["frames"] == second["frames"] == 3 * 2 * 32
    assert first["ended"] == second["ended"]


def test_resumed_ranks_equal_uninterrupted_ranks(folder: Path) -> None:
    for uninterrupted, resumed in zip(reports(folder, "whole"), reports(folder, "resumed"), strict=True):
        assert resumed["seen"] == uninterrupted["seen"][2:]
        assert resumed["frames"] == uninterrupted["frames"]
        assert resumed["ended"] == uninterrupted["ended"]


def test_number_of_rings_equals_the_environments_of_a_rank(tmp_path: Path) -> None:
    data = replay_data(num_envs=8, collector=partial(RayCollector, num_collectors=4))
    assert (data.envs_per_worker, data.envs_of_rank) == (2, 8)
    data.trainer = type("Two", (), {"world_size": 2, "lightning_module": None})()
    assert data._get_or_build_buffer().writer.num_envs == 4


def test_number_of_collectors_that_ranks_cannot_divide_is_refused(tmp_path: Path) -> None:
    data = rollouts(num_envs=6, frames_per_batch=32, collector=partial(RayCollector, num_collectors=3))
    with pytest.raises(UserError, match=r"^num_collectors must .*2.*3.*4"):
        fit(tmp_path, data, strategy=of_rank(0, 2))


def test_ranks_do_not_start_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("torchrl_lightning.ray.cluster.world_size", lambda: 2)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for config in ({}, {"address": "local"}, {"address": "127.0.0.1:1"}):
        with pytest.raises(ClusterFault, match=r"^The 2 ranks of a run need a running cluster"):
            connect(config)


def test_resources_are_counted_for_all_ranks(monkeypatch: pytest.MonkeyPatch, cluster: str) -> None:
    ray = pytest.importorskip("ray")
    check_resources(ray, 4, {"num_cpus": 1})
    monkeypatch.setattr("torchrl_lightning.ray.cluster.world_size", lambda: 2)
    with pytest.raises(ClusterFault, match=r"num_collectors=8.*8 CPU.*4"):
        check_resources(ray, 4, {"num_cpus": 1})
