"""Rollouts, batches and weights that are sent through a cluster arrive unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_lightning.ray._serialization import (
    as_arrays,
    as_rollout,
    copy_weights,
    load_weights,
    pack_batch,
    unpack_batch,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_of_each_dtype_arrives_unchanged(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(4, 3, 2).to(dtype)
    batch = TensorDict({"a": values, "next": {"b": values[..., 0]}}, [4, 3], names=[None, "time"])
    received = unpack_batch(*pack_batch(batch))
    assert received["a"].dtype == received["next", "b"].dtype == dtype
    assert (received == batch).all()
    rollout = as_rollout(as_arrays(batch))
    assert rollout["a"].dtype == dtype
    assert (rollout == batch).all()


def test_columns_of_bfloat16_arrays_can_be_selected() -> None:
    batch = TensorDict({"a": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)}, [4, 3])
    arrays = {key: np.ascontiguousarray(value[:, [3, 1]]) for key, value in as_arrays(batch).items()}
    assert as_rollout(arrays)["a"].tolist() == batch["a"][[3, 1]].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_of_each_dtype_arrive_unchanged(dtype: torch.dtype) -> None:
    sender, receiver = (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype) for _ in range(2))
    weights = copy_weights(sender)
    assert weights is not None
    load_weights(receiver, weights)
    for name, value in sender.state_dict().items():
        assert torch.equal(receiver.state_dict()[name], value)
