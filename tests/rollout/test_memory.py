"""The free memory is checked before memory is reserved."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from kit.rollouts import holding, make_rollout
from torchrl_lightning import GAEBuffer, RolloutStorage
from torchrl_lightning._core import memory

ROW = TensorDict({"pixels": torch.zeros(2, 10, dtype=torch.uint8), "state": torch.zeros(2, 3)}, [2])
BYTES = 2 * (10 + 3 * 4)


def test_too_little_memory_raises_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device, folder: 5 * BYTES)
    storage = RolloutStorage(6)
    with pytest.raises(ValueError, match=rf"size=6\).*{6 * BYTES} bytes.*{5 * BYTES} bytes"):
        storage.allocate(ROW)
    assert storage.data is None
    assert storage.num_envs is None
    small = RolloutStorage(5)
    small.allocate(ROW)
    with pytest.raises(ValueError, match=f"only {5 * BYTES} bytes"):
        small.resize(6)
    assert small.size == 5


def test_rollout_or_state_larger_than_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    full = holding(GAEBuffer(5))
    state, buffer = full.state_dict(), GAEBuffer(5)
    monkeypatch.setattr(memory, "free_bytes", lambda device, folder: 10)
    with pytest.raises(ValueError, match="10 bytes are free"):
        buffer.insert_data_slice(make_rollout())
    with pytest.raises(ValueError, match="10 bytes are free"):
        buffer.load_state_dict(state)
    assert len(buffer) == 0
    assert buffer.num_envs is None


def test_huge_size_is_rejected_before_allocation() -> None:
    with pytest.raises(ValueError, match=r"needs .* free in the memory of cpu"):
        RolloutStorage(2**50).allocate(ROW)


@pytest.mark.parametrize("steps", [5, 4])
def test_rollout_memory_is_owned_only_with_copy_false_and_equal_size(steps: int) -> None:
    rollout = make_rollout(steps, 3).transpose(0, 1).contiguous().transpose(0, 1)  # [N, T] over time-major memory
    expected = rollout.clone()
    default, owned, copied, env_major = (GAEBuffer(5, bootstrap=False) for _ in range(4))
    default.insert_data_slice(rollout)
    owned.insert_data_slice(rollout, copy=False)
    copied.insert_data_slice(rollout.contiguous(), copy=False)
    env_major.insert_data_slice(rollout.clone(), copy=False)
    states = [buffer.rollout.transpose(0, 1) for buffer in (default, owned, copied, env_major)]
    assert all((state == expected).all() for state in states)
    shares_memory = [
        buffer.rollout["action"].data_ptr() == rollout["action"].data_ptr() for buffer in (default, owned, copied)
    ]
    assert shares_memory == [False, steps == 5, False]
    owned.before_gradients()
    assert set(rollout.keys(True, True)) == set(expected.keys(True, True))
    restored = GAEBuffer(5, bootstrap=False)
    restored.load_state_dict(owned.state_dict())
    assert (restored.get_all_buffer_data() == owned.get_all_buffer_data()).all()
