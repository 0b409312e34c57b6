"""With only TorchRL's methods, the first read of a rollout computes its advantages and targets once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from kit.rollouts import linear_actor, make_critic, make_rollout
from torchrl_lightning import GAEBuffer, PPOBuffer, PPODBuffer, VanillaOnPolicyBuffer, VTraceBuffer

STEPS, ENVS = 40, 5
BUFFERS: list[Any] = [
    VanillaOnPolicyBuffer,
    GAEBuffer,
    partial(VTraceBuffer, actor=linear_actor()),
    PPODBuffer,
    partial(PPOBuffer, None, None),
]
READS: dict[str, Callable[[Any], Any]] = {
    "sample": lambda buffer: buffer.sample(),
    "iteration": lambda buffer: torch.cat([*buffer]),
    "index": lambda buffer: buffer[:],
    "mini-batches": lambda buffer: torch.cat([*buffer.generate_batches(4)]),
    "all data": lambda buffer: buffer.get_all_buffer_data(),
}


def extended_buffer(make: Any, critic: Any = None, data: TensorDict | None = None, **options: Any) -> Any:
    """Return a buffer on which only TorchRL's ``extend`` was called."""
    buffer = make(size=STEPS, critic=critic, batch_size=8, **options)
    buffer.extend(make_rollout(STEPS, ENVS) if data is None else data)
    return buffer


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", BUFFERS)
def test_reads_equal_the_estimates_of_before_gradients(make: Any, read: str) -> None:
    buffer, twin = (extended_buffer(make, make_critic()) for _ in range(2))
    twin.before_gradients()
    expected = twin.rollout
    batch = READS[read](buffer)
    step = batch["observation"].long().flatten()  # observations count the steps
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(batch[key].flatten(), expected[key].flatten()[step])


@pytest.mark.parametrize("make", BUFFERS)
def test_estimates_are_computed_once_for_each_write(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    critic = make_critic()
    buffer = extended_buffer(make, critic)
    for read in READS.values():
        read(buffer)
        num_calls = len(critic.module.seen)
        assert num_calls > 0
        for read_again in READS.values():
            read_again(buffer)
        assert len(critic.module.seen) == num_calls
    buffer.empty()
    buffer.extend(make_rollout(STEPS, ENVS, seed=1))
    assert buffer.sample()["advantage"].shape == (8, 1)
    assert len(critic.module.seen) == 2 * num_calls


def test_second_write_estimates_again() -> None:
    buffer, single_write = (GAEBuffer(6, critic=make_critic(), batch_size=4) for _ in range(2))
    first, second = make_rollout(6, 2).split([3, 3], 1)
    buffer.extend(first)
    buffer.sample()
    buffer.extend(second)
    single_write.extend(make_rollout(6, 2))
    torch.testing.assert_close(buffer[:]["advantage"], single_write[:]["advantage"])


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("make", [make for make in BUFFERS if not isinstance(make, partial) or make.args])
def test_read_without_critic_and_values_is_rejected(make: Any, read: str) -> None:
    buffer = extended_buffer(make)
    with pytest.raises(RuntimeError, match=r"'state_value'.*critic="):
        READS[read](buffer)
    assert buffer.step == STEPS
    buffer.critic = make_critic()
    assert READS[read](buffer)["advantage"].isfinite().all()


@pytest.mark.parametrize(("make", "decay"), [(VanillaOnPolicyBuffer, 0.99), (GAEBuffer, 0.99 * 0.95)])
def test_estimates_need_no_critic_without_bootstrap(make: Any, decay: float) -> None:
    data = make_rollout(STEPS, ENVS)
    buffer = extended_buffer(make, None, data, bootstrap=False, standardize_advantages=False)
    expected, reward, done = torch.zeros(ENVS, 1), data["next", "reward"], data["next", "done"]
    for t in reversed(range(STEPS)):
        expected = reward[:, t] + decay * expected.masked_fill(done[:, t], 0.0)
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(buffer[:][key][t], expected)


def test_given_advantages_are_kept() -> None:
    data = make_rollout(STEPS, ENVS)
    data["advantage"] = data["value_target"] = data["observation"].clone()
    batch = extended_buffer(GAEBuffer, None, data).sample()
    torch.testing.assert_close(batch["advantage"], batch["observation"])


def test_restored_buffer_keeps_its_estimates() -> None:
    critic = make_critic()
    buffer = extended_buffer(GAEBuffer, make_critic())
    buffer.sample()
    restored = GAEBuffer(STEPS, critic=critic, batch_size=8)
    restored.load_state_dict(buffer.state_dict())
    assert torch.equal(restored.sample()["advantage"], buffer.sample()["advantage"])
    assert critic.module.seen == []
