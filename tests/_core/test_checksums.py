from __future__ import annotations

import collections
import io

import pytest
import torch

from torchrl_lightning._core.checksums import CHECKSUMS_KEY, add_checksums, checksum, invalid_tensors, verify_checksums

STATE = {
    "state_dict": collections.OrderedDict(
        weight=torch.arange(6.0).view(2, 3), bias=torch.zeros(3, dtype=torch.bfloat16)
    ),
    "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}],
    "empty": torch.zeros(0, 4),
    "epoch": 3,
}


def sealed():
    checkpoint = dict(STATE)
    add_checksums(checkpoint, "state_dict", "optimizer_states", "empty", "absent")
    return checkpoint


def test_checksums_verify_after_saving_and_loading():
    checkpoint = sealed()
    assert set(checkpoint[CHECKSUMS_KEY]) == {"state_dict", "optimizer_states", "empty"}
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    verify_checksums(torch.load(file, weights_only=True), "a.ckpt")
    verify_checksums(STATE, "one without checksums")


@pytest.mark.parametrize(
    "change",
    [
        {"state_dict": {**STATE["state_dict"], "weight": torch.arange(6.0).view(3, 2)}},
        {"state_dict": {**STATE["state_dict"], "weight": torch.arange(6).view(2, 3)}},
        {"state_dict": {**STATE["state_dict"], "more": 1}},
        {"state_dict": None},
        {"optimizer_states": []},
        {"empty": torch.zeros(4, 0)},
        {CHECKSUMS_KEY: [1]},
        {"other": {"x": [torch.zeros(3, device="meta")]}},
        {"other": (torch.eye(3).to_sparse(),)},
    ],
)
def test_changed_checkpoint_raises(change):
    with pytest.raises(ValueError, match=r"a\.ckpt .*use another checkpoint"):
        verify_checksums({**sealed(), **change}, "a.ckpt")


def test_checksum_depends_on_each_bit_but_not_on_memory_layout():
    tensor = torch.randn(5, 7)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor) != checksum(-tensor)
    assert checksum(torch.zeros(1)) != checksum(-torch.zeros(1))
    assert len({checksum(value) for value in (None, 0, 0.0, False, "0", [0], (0, 0), {0: 0}, {"0": 0})}) == 9
    assert checksum({1: "a", "b": 2}) == checksum({"b": 2, 1: "a"})
    assert list(invalid_tensors({"a": [torch.zeros(1), torch.zeros(1, device="meta")]})) == ["a.1"]


def test_flipped_bit_raises_instead_of_changing_a_weight():
    file = io.BytesIO()
    torch.save(sealed(), file)
    content = file.getvalue()
    num_errors = 0
    for bit in torch.randint(len(content) * 8, (300,), generator=torch.Generator().manual_seed(0)).tolist():
        data = bytearray(content)
        data[bit // 8] ^= 1 << bit % 8
        try:
            loaded = torch.load(io.BytesIO(data), weights_only=True)
            verify_checksums(loaded, "a.ckpt")
        except Exception:  # the zip and pickle readers raise errors of many types
            num_errors += 1
        else:
            # A changed bit in a name renames all its occurrences, so the entry is missing.
            for name in {"state_dict", "optimizer_states"} & set(loaded):
                assert checksum(loaded[name]) == checksum(STATE[name])
    assert num_errors > 50
