"""The parts on a CUDA device give the same results as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close

from kit.rings import ring
from kit.rollouts import make_rollout
from kit.runs import trainer
from kit.seeds import generator
from torchrl_lightning import OnPolicyDataModule, ReplayDataModule
from torchrl_lightning.agents import DQNModule, MLPNetwork, PPOModule
from torchrl_lightning.estimators import discounted_returns, gae, vtrace
from torchrl_lightning.kernels.scan import discounted_scan
from torchrl_lightning.kernels.segment_tree import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from torchrl_lightning.replay import PrioritizedSampler, RingStorage, SequenceSampler, UniformSampler
from torchrl_lightning.rollout import GAEBuffer

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:.*logger.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
]
SHAPES = [(7, 3, 1), (128, 8, 1), (16, 1024, 1), (1025, 2, 1)]


def assert_alike(far: Iterable[Tensor], near: Iterable[Tensor], tolerance: float = 1e-4) -> None:
    """Assert that the tensors are on the CUDA device and equal the tensors of the CPU."""
    for one, other in zip(far, near, strict=True):
        assert one.device.type == torch.device(DEVICE).type
        assert_close(one.cpu(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_scan(shape: tuple[int, ...], reverse: bool) -> None:
    x, discount = torch.randn(shape, generator=generator()), 0.5 + torch.rand(shape, generator=generator()) / 2
    far = discounted_scan(x.to(DEVICE), discount.to(DEVICE), reverse=reverse)
    assert_alike([far], [discounted_scan(x, discount, reverse=reverse)])


@pytest.mark.parametrize("shape", SHAPES)
def test_estimators(shape: tuple[int, ...]) -> None:
    rng = generator()
    terminated = torch.rand(shape, generator=rng) < 0.05
    done = terminated | (torch.rand(shape, generator=rng) < 0.05)
    names = ("reward", "value", "next_value", "log_pi", "log_mu")
    entries = {name: torch.randn(shape, generator=rng) / 4 for name in names}
    entries |= {"terminated": terminated, "done": done}

    def estimates(reward: Tensor, log_pi: Tensor, log_mu: Tensor, **others: Tensor) -> list[Tensor]:
        step = {"reward": reward, **others}
        returns = discounted_returns(reward, others["next_value"], others["terminated"], others["done"], 0.99)
        found = (gae(**step, gamma=0.99, lmbda=0.95), vtrace(log_pi, log_mu, **step, gamma=0.99), returns)
        return [each for one in found for each in one]

    far = {name: entry.to(DEVICE) for name, entry in entries.items()}
    assert_alike(estimates(**far), estimates(**entries))


@pytest.mark.parametrize("kind", [SumSegmentTree, MinSegmentTree, MaxSegmentTree])
def test_trees(kind: type[SumSegmentTree]) -> None:
    tree, twin, rng = kind(5000, device=DEVICE), kind(5000), generator()
    for _ in range(5):
        index = torch.randint(5000, (300,), generator=rng)
        values = torch.rand(300, dtype=torch.float64, generator=rng)
        tree[index.to(DEVICE)] = values.to(DEVICE)
        twin[index] = values
    assert tree.leaves.cpu().tolist() == twin.leaves.tolist()
    assert_close(tree.summary().cpu(), twin.summary())


def prioritized(capacity: int = 64) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, alpha=0.6, beta=0.4)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("sampler", [UniformSampler, prioritized, lambda: SequenceSampler(4)])
def test_rings(sampler: Callable[[], Any], n_steps: int) -> None:
    """Compare the rows of a CUDA buffer's batch with a CPU buffer, and load the CUDA buffer's state on the CPU."""

    def made(device: str, data: TensorDict | None) -> Any:
        storage = RingStorage(64, device=device)
        return ring(16, 4, sampler(), storage=storage, batch_size=32, n_steps=n_steps, data=data)

    steps = make_rollout(40, 4).exclude("collector")
    near, far = made("cpu", steps), made(DEVICE, steps.to(DEVICE))
    one, other = near.sample(), far.sample()
    keys = list(one.keys(True, True))
    # Devices round sums of rewards and products of discounts differently. All other entries are copied.
    computed = [key for key in (("next", "reward"), "gamma") if n_steps > 1]
    copied = [key for key in keys if key not in computed]
    assert_alike((other[key] for key in computed), (one[key] for key in computed), 1e-6)
    assert_alike((other[key] for key in copied), (one[key] for key in copied), 0.0)
    if isinstance(far.sampler, PrioritizedSampler):
        other["td_error"] = torch.rand(32, device=DEVICE)
        far.update_tensordict_priority(other)
    restored = made("cpu", None)
    restored.load_state_dict(far.state_dict())
    assert_close(restored.sample()["observation"], far.sample()["observation"].cpu())


def test_rollouts() -> None:
    batches, data = [], make_rollout(16, 4, state_value=torch.randn(16, 4, 1))
    data["next", "state_value"] = torch.randn(4, 16, 1)
    for device in ("cpu", DEVICE):
        buffer = GAEBuffer(16, device=device, num_envs=4, generator=generator())
        buffer.critic = None
        buffer.extend(data.to(device))
        buffer.before_gradients()
        batches.append(next(iter(buffer.generate_batches(num_mini_batch=2))))
    near, far = batches
    keys = ("observation", "advantage", "value_target")
    assert_alike((far[key] for key in keys), (near[key] for key in keys))


def on_policy() -> tuple[L.LightningModule, L.LightningDataModule]:
    data = OnPolicyDataModule(
        "CartPole-v1", num_envs=2, frames_per_batch=64, num_epochs=2, num_mini_batch=2, eval_episodes=1, seed=0
    )
    return PPOModule(MLPNetwork([16])), data


def replay() -> tuple[L.LightningModule, L.LightningDataModule]:
    data = ReplayDataModule(
        "CartPole-v1",
        num_envs=2,
        buffer=lambda num_envs: ring(128, num_envs, prioritized(256), n_steps=3),
        batch_size=8,
        frames_per_update=4,
        warmup_frames=32,
        updates_per_epoch=8,
        updates_per_step=2,
        eval_episodes=1,
        seed=0,
    )
    return DQNModule(MLPNetwork([16])), data


@pytest.mark.parametrize("make", [on_policy, replay])
@pytest.mark.parametrize(("first", "then"), [("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu")])
def test_training_goes_on_elsewhere(make: Callable[[], Any], first: str, then: str, tmp_path: Path) -> None:
    """The networks and the checkpoint move between the devices; the environments stay on the CPU."""
    module, data = make()
    begun = trainer(tmp_path, accelerator=first, devices=1)
    begun.fit(module, datamodule=data)
    begun.save_checkpoint(tmp_path / "last.ckpt")
    kept = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
    module, data = make()
    resumed = trainer(tmp_path, accelerator=then, devices=1, max_epochs=3)
    resumed.fit(module, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.current_epoch == 3
    assert all(tensor.isfinite().all() for tensor in module.state_dict().values())
    assert any(not torch.equal(tensor.cpu(), kept[name]) for name, tensor in module.state_dict().items())
