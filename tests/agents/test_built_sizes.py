"""Components of a stored config are checked against the stored weights and size limits before they are built."""

from __future__ import annotations

import copy
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit import hostile
from torchrl_lightning import load_policy
from torchrl_lightning._core.trust import check_config
from torchrl_lightning.deploy.loading import CONFIG, without_training
from torchrl_lightning.deploy.weights import TooManyTensorsError, bounded_tensors, check_weights

LINEAR = {"_target_": "torch.nn.Linear", "in_features": 30000, "out_features": 30000}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a checkpoint of a run with one rollout."""
    return hostile.checkpoint_of_a_run(tmp_path_factory.mktemp("stored"))


def check_cheap(action: Callable[[], Any], message: str | None = None) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=message) as raised:
        action()
    assert "\n" not in str(raised.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 200
    assert time.process_time() - began < 10


def save(stored: dict[str, Any], path: Path, **model: Any) -> Path:
    torch.save({**stored, CONFIG: {**stored[CONFIG], "model": {**hostile.MODEL, **model}}}, path)
    return path


NETWORKS = {
    "wide layers": {"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [20000, 20000]},
    "wider layers": {"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [10**7]},
    "layers by another type": {"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [1e9]},
    "many layers": {"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [4] * 15_000},
    "ten million layers": {"_target_": "torchrl_lightning.RecurrentNetwork", "num_layers": 10**7},
    "thousands of layers": {"_target_": "torchrl_lightning.RecurrentNetwork", "num_layers": 4000},
    "a part beside": {**hostile.MODEL["network"], "activation": LINEAR},
    "a part on a device of its own": {**hostile.MODEL["network"], "activation": {**LINEAR, "device": "cpu"}},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network_that_the_weights_do_not_explain_is_refused_cheaply(
    name: str, stored: dict[str, Any], tmp_path: Path
) -> None:
    path = save(stored, tmp_path / "evil.ckpt", network=NETWORKS[name])
    check_cheap(lambda: load_policy(path))


def test_loaded_policy_builds_no_optimizer(stored: dict[str, Any], tmp_path: Path) -> None:
    optimizer = {"_target_": "torch.optim.Adam", "_partial_": True, "params": LINEAR}
    path = save(stored, tmp_path / "a.ckpt", optimizer=optimizer, critic_optimizer=optimizer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    policy = load_policy(path)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 200
    own = load_policy(save(stored, tmp_path / "b.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), own.parameters(), strict=True))


def test_loaded_policy_builds_no_buffer() -> None:
    sampler = {"_target_": "torchrl_lightning.PrioritizedSampler", "max_capacity": 10**8}
    buffer = {"_target_": "torchrl_lightning.ExperienceBuffer", "_partial_": True, "sampler": sampler}
    data = {"_target_": "torchrl_lightning.ReplayDataModule", "env": "CartPole-v1", "buffer": buffer, "source": buffer}
    assert without_training(data) == {
        "_target_": "torchrl_lightning.ReplayDataModule",
        "env": "CartPole-v1",
        "buffer": {"_target_": "torchrl_lightning.ExperienceBuffer", "_partial_": True},
    }
    assert without_training({**hostile.DATA, "buffer": buffer}) == hostile.DATA
    foreign = {"_target_": "mine.Module", "optimizer": 1}
    assert without_training(foreign) == foreign


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ({"_target_": "torchrl_lightning.RecurrentNetwork", "num_layers": 10**7}, "num_layers"),
        ({"_target_": "torchrl_lightning.MLPNetwork", "hidden_sizes": [[4, 10**6]]}, "hidden_sizes"),
        ({"_target_": "torchrl_lightning.PrioritizedSampler", "max_capacity": 10**9}, "max_capacity"),
        ({"_target_": "torchrl_lightning.RingStorage", "max_size": 10**9}, "max_size"),
        ({"_target_": "torchrl_lightning.RingStorage", "max_size": -(10**9)}, "max_size"),
        ({**hostile.DATA, "num_envs": 10**6}, "num_envs"),
        ({**hostile.DATA, "frames_per_batch": 10**9}, "frames_per_batch"),
        ({"_target_": hostile.RECIPE, "id": "CartPole-v1", "frame_stack": 10**9}, "frame_stack"),
        ({"_target_": hostile.RECIPE, "id": "X-v0", "env_kwargs": {"size": 10**6}}, "size"),
        ({"_target_": hostile.RECIPE, "id": "X-v0", "env_kwargs": {"num_crossings": 10**6}}, "num_crossings"),
        (
            {
                "_target_": hostile.RECIPE,
                "id": "X-v0",
                "wrappers": [{"_target_": "gymnasium.wrappers.FrameStackObservation", "stack_size": 10**9}],
            },
            "stack_size",
        ),
        (
            {
                "_target_": hostile.RECIPE,
                "id": "X-v0",
                "wrappers": [{"_target_": "gymnasium.wrappers.ResizeObservation", "shape": [10**5, 10**5]}],
            },
            "shape",
        ),
    ],
)
def test_counts_of_a_file_have_upper_bounds(node: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=-?\d+"):
        check_config(node, where="a")
    check_config(node, where="a", trusted=True)


def test_large_numbers_other_than_counts_are_accepted() -> None:
    recipe = {
        "_target_": hostile.RECIPE,
        "id": "X-v0",
        "time_limit": 10**9,
        "env_kwargs": {"seed": 1 << 40, "max_episode_steps": 10**7, "max_num_frames_per_episode": 10**8},
    }
    check_config({**hostile.DATA, "env": recipe, "total_frames": 10**12, "seed": 1 << 62}, where="a")


def test_stack_of_a_billion_frames_is_not_allocated(stored: dict[str, Any], tmp_path: Path) -> None:
    stored_copy = copy.deepcopy(stored)
    wrapper = {"_target_": "gymnasium.wrappers.FrameStackObservation", "stack_size": 10**9}
    stored_copy["OnPolicyDataModule"]["fingerprint"]["environment"] = {"id": "CartPole-v1", "wrappers": [wrapper]}
    torch.save(stored_copy, tmp_path / "evil.ckpt")
    check_cheap(load_policy(tmp_path / "evil.ckpt").recipe, "stack_size=1000000000 is more than")


# -- the mode --------------------------------------------------------------------------------------------------------
def test_modules_of_the_size_of_their_weights_are_built_as_without() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(300, 300), nn.LSTM(300, 50, num_layers=2), nn.BatchNorm1d(3))
        nn.init.orthogonal_(layers[0].weight)
        return copy.deepcopy(layers)

    expected = make()
    with bounded_tensors(expected.state_dict()):
        stored_copy = make()
    for name, value in expected.state_dict().items():
        assert torch.equal(stored_copy.state_dict()[name], value)
    check_weights(make, {"state_dict": expected.state_dict()})


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(30000, 30000),
        lambda: nn.Linear(30000, 30000, device="cpu"),
        lambda: torch.empty(1 << 30),
        lambda: torch.zeros(1 << 30),
        lambda: torch.ones(1 << 30, dtype=torch.int8),
        lambda: torch.full((1 << 30,), 2.0),
        lambda: torch.rand(1 << 30),
        lambda: torch.randn(1 << 30),
        lambda: torch.arange(1 << 30),
        lambda: torch.eye(1 << 15),
        lambda: torch.linspace(0, 1, 1 << 30),
        lambda: torch.zeros(3).new_zeros(1 << 30),
        lambda: torch.zeros(3).repeat(1 << 28),
        lambda: torch.cat([torch.zeros(1 << 20)] * (1 << 10)),
        lambda: [nn.Linear(1, 1) for _ in range(10**7)],
    ],
)
def test_memory_beyond_the_size_of_the_weights_is_not_allocated(make: Callable[[], Any]) -> None:
    def build() -> None:
        with bounded_tensors({"weight": torch.zeros(10)}):
            make()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooManyTensorsError):
        build()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 200
