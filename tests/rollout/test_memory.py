"""Memory is asked for before it is reserved."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from kit.rollouts import holding, make_rollout
from torchrl_lightning import GAEBuffer, RolloutStorage
from torchrl_lightning._core import memory

ROW = TensorDict({"pixels": torch.zeros(2, 10, dtype=torch.uint8), "state": torch.zeros(2, 3)}, [2])
BYTES = 2 * (10 + 3 * 4)


def test_too_little_memory_is_an_error_that_names_both_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rollout_and_a_state_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    full = holding(GAEBuffer(5))
    state, buffer = full.state_dict(), GAEBuffer(5)
    monkeypatch.setattr(memory, "free_bytes", lambda device, folder: 10)
    with pytest.raises(ValueError, match="10 bytes are free"):
        buffer.insert_data_slice(make_rollout())
    with pytest.raises(ValueError, match="10 bytes are free"):
        buffer.load_state_dict(state)
    assert len(buffer) == 0
    assert buffer.num_envs is None


def test_huge_size_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"needs .* free in the memory of cpu"):
        RolloutStorage(2**50).allocate(ROW)


@pytest.mark.parametrize("steps", [5, 4])
def test_rollouts_memory_is_taken_over_only_where_that_is_asked_for_and_fits(steps: int) -> None:
    turned = make_rollout(steps, 3).transpose(0, 1).contiguous().transpose(0, 1)  # [N, T] over time-major memory
    expected = turned.clone()
    given, taken, copied, tall = (GAEBuffer(5, bootstrap=False) for _ in range(4))
    given.insert_data_slice(turned)
    taken.insert_data_slice(turned, copy=False)
    copied.insert_data_slice(turned.contiguous(), copy=False)
    tall.insert_data_slice(turned.clone(), copy=False)
    states = [buffer.rollout.transpose(0, 1) for buffer in (given, taken, copied, tall)]
    assert all((state == expected).all() for state in states)
    same = [buffer.rollout["action"].data_ptr() == turned["action"].data_ptr() for buffer in (given, taken, copied)]
    assert same == [False, steps == 5, False]
    taken.before_gradients()
    assert set(turned.keys(True, True)) == set(expected.keys(True, True))
    again = GAEBuffer(5, bootstrap=False)
    again.load_state_dict(taken.state_dict())
    assert (again.get_all_buffer_data() == taken.get_all_buffer_data()).all()
