"""The parts on a CUDA device, against the same parts on the CPU. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close

from torchrl_lightning import OnPolicyDataModule, ReplayDataModule
from torchrl_lightning.estimators import discounted_returns, gae, vtrace
from torchrl_lightning.learn import DQNModule, MLPNetwork, PPOModule
from torchrl_lightning.replay import (
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    RingWriter,
    SequenceSampler,
    UniformSampler,
)
from torchrl_lightning.rollout import GAEBuffer
from torchrl_lightning.scan import discounted_scan
from torchrl_lightning.segment_tree import MaxSegmentTree, MinSegmentTree, SumSegmentTree

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*logger.*"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used.*"),
]
SHAPES = [(7, 3, 1), (128, 8, 1), (16, 1024, 1), (1025, 2, 1)]


def rollout(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return what the estimators read, time-major."""
    torch.manual_seed(sum(shape))
    terminated = torch.rand(shape) < 0.05
    return {
        "reward": torch.randn(shape),
        "value": torch.randn(shape),
        "next_value": torch.randn(shape),
        "terminated": terminated,
        "done": terminated | (torch.rand(shape) < 0.05),
    }


def there(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: entry.to(DEVICE) for name, entry in entries.items()}


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_scan(shape: tuple[int, ...], reverse: bool) -> None:
    torch.manual_seed(0)
    x, discount = torch.randn(shape), 0.5 + torch.rand(shape) / 2
    got = discounted_scan(x.to(DEVICE), discount.to(DEVICE), reverse=reverse)
    assert got.device.type == torch.device(DEVICE).type
    assert_close(got.cpu(), discounted_scan(x, discount, reverse=reverse), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_estimators(shape: tuple[int, ...]) -> None:
    entries = rollout(shape)
    log_pi, log_mu = torch.randn(2, *shape) / 4
    cases: list[Callable[[dict[str, Tensor], Tensor, Tensor], Any]] = [
        lambda e, pi, mu: gae(**e, gamma=0.99, lmbda=0.95),
        lambda e, pi, mu: vtrace(pi, mu, **e, gamma=0.99),
        lambda e, pi, mu: discounted_returns(e["reward"], e["next_value"], e["terminated"], e["done"], 0.99),
    ]
    for case in cases:
        got = case(there(entries), log_pi.to(DEVICE), log_mu.to(DEVICE))
        wanted = case(entries, log_pi, log_mu)
        for one, other in zip(got, wanted, strict=True):
            assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [SumSegmentTree, MinSegmentTree, MaxSegmentTree])
def test_trees(kind: type[SumSegmentTree]) -> None:
    torch.manual_seed(0)
    tree, twin = kind(5000, device=DEVICE), kind(5000)
    for _ in range(5):
        index, values = torch.randint(5000, (300,)), torch.rand(300, dtype=torch.float64)
        tree[index.to(DEVICE)] = values.to(DEVICE)
        twin[index] = values
    assert tree.leaves.cpu().tolist() == twin.leaves.tolist()
    assert_close(tree.summary().cpu(), twin.summary())


def steps(count: int, num_envs: int) -> list[TensorDict]:
    """Return successive steps of environments whose episodes last between 5 and 15 steps."""
    torch.manual_seed(1)
    found = []
    for t in range(count):
        done = (t + 1 + torch.arange(num_envs)) % (5 + torch.arange(num_envs) % 11) == 0
        flags = {"done": done[:, None], "terminated": done[:, None], "truncated": torch.zeros(num_envs, 1).bool()}
        entries = {
            "observation": torch.randn(num_envs, 3),
            "action": torch.randint(2, (num_envs,)),
            "next": {"observation": torch.randn(num_envs, 3), "reward": torch.randn(num_envs, 1), **flags},
        }
        found.append(TensorDict(entries, [num_envs]))
    return found


def prioritized(capacity: int = 64) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, alpha=0.6, beta=0.4)


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("sampler", [UniformSampler, prioritized, lambda: SequenceSampler(4)])
def test_rings(sampler: Callable[[], Any], n_steps: int) -> None:
    """Every row of a batch is what a buffer on the CPU holds in the same cell; the state goes from one to the other."""
    near, far = (
        ExperienceBuffer(
            storage=RingStorage(64, device=device),
            writer=RingWriter(num_envs=4),
            sampler=sampler(),
            batch_size=32,
            n_steps=n_steps,
            generator=torch.Generator().manual_seed(0),
        )
        for device in ("cpu", DEVICE)
    )
    for step in steps(40, 4):
        near.extend(step)
        far.extend(step.to(DEVICE))
    one, other = near.sample(), far.sample()
    assert other["observation"].device.type == torch.device(DEVICE).type
    assert_close(other["index"].cpu(), one["index"])
    for key in one.keys(True, True):
        assert_close(other[key].cpu(), one[key], msg=str(key))
    if isinstance(far.sampler, PrioritizedSampler):
        other["td_error"] = torch.rand(32, device=DEVICE)
        far.update_tensordict_priority(other)
    restored = ExperienceBuffer(
        storage=RingStorage(64), writer=RingWriter(num_envs=4), sampler=sampler(), batch_size=32, n_steps=n_steps
    )
    restored.load_state_dict(far.state_dict())
    assert_close(restored.sample()["observation"], far.sample()["observation"].cpu())


def test_rollouts() -> None:
    torch.manual_seed(0)
    flat = rollout((16, 4, 1))
    batches = []
    for device in ("cpu", DEVICE):
        buffer = GAEBuffer(16, device=device, num_envs=4, time_dim=0, generator=torch.Generator().manual_seed(0))
        buffer.critic = None
        step = TensorDict(
            {
                "observation": torch.arange(64.0).view(16, 4, 1),
                "state_value": flat["value"],
                "next": {
                    "observation": torch.ones(16, 4, 1),
                    "state_value": flat["next_value"],
                    "reward": flat["reward"],
                    "terminated": flat["terminated"],
                    "done": flat["done"],
                    "truncated": flat["done"] & ~flat["terminated"],
                },
            },
            [16, 4],
        )
        buffer.extend(step.to(device))
        buffer.before_gradients()
        batches.append(next(iter(buffer.generate_batches(num_mini_batch=2))))
    near, far = batches
    assert far["advantage"].device.type == torch.device(DEVICE).type
    for key in ("observation", "advantage", "value_target"):
        assert_close(far[key].cpu(), near[key], rtol=1e-4, atol=1e-4)


def on_policy() -> tuple[L.LightningModule, L.LightningDataModule]:
    data = OnPolicyDataModule(
        "CartPole-v1", num_envs=2, frames_per_batch=64, num_epochs=2, num_mini_batch=2, eval_episodes=1, seed=0
    )
    return PPOModule(MLPNetwork([16])), data


def replay() -> tuple[L.LightningModule, L.LightningDataModule]:
    data = ReplayDataModule(
        "CartPole-v1",
        num_envs=2,
        buffer=lambda num_envs: ExperienceBuffer(
            storage=RingStorage(256), sampler=prioritized(256), num_envs=num_envs, n_steps=3
        ),
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
    """Networks on the device, environments on the CPU, and a checkpoint that goes from one device to the other."""

    def trainer(accelerator: str, epochs: int) -> L.Trainer:
        return L.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )

    module, data = make()
    begun = trainer(first, 2)
    begun.fit(module, datamodule=data)
    begun.save_checkpoint(tmp_path / "last.ckpt")
    kept = {name: tensor.cpu().clone() for name, tensor in module.state_dict().items()}
    module, data = make()
    resumed = trainer(then, 3)
    resumed.fit(module, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.current_epoch == 3
    assert all(tensor.isfinite().all() for tensor in module.state_dict().values())
    assert any(not torch.equal(tensor.cpu(), kept[name]) for name, tensor in module.state_dict().items())
