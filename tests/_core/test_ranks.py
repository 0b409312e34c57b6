"""Two real processes exchange values as ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.forks import Forked
from torchrl_lightning._core import ranks
from torchrl_lightning._core.ranks import all_gather

SIZES = [(0, 0), (3, 5), (8000, 8200), (10, 20000), (50000, 1), (0, 10)]
"""Number of bytes on each of the two ranks; a value of up to about 8 kB needs one operation."""


def exchange(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    operations = []
    gather: Callable[..., Any] = dist.all_gather
    dist.all_gather = lambda *arguments: operations.append(1) or gather(*arguments)
    rows = []
    for sizes in SIZES:
        before = len(operations)
        values = all_gather({"rank": rank, "data": b"x" * sizes[rank], "tensor": torch.full([2], rank)})
        content = [[value["rank"], len(value["data"]), value["tensor"].tolist()] for value in values]
        rows.append([content, len(operations) - before])
    (folder / f"{rank}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def exchange_all(folder: Path) -> None:
    processes = [get_context("fork").Process(target=exchange, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_values_of_all_sizes_are_exchanged(tmp_path: Path) -> None:
    process = Forked(partial(exchange_all, tmp_path), tmp_path)
    assert process.ends(120) == 0, process.said
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    for sizes, (content, operations) in zip(SIZES, first, strict=True):
        assert content == [[rank, sizes[rank], [rank, rank]] for rank in range(2)]
        assert operations == (1 if max(sizes) < 8000 else 2)


def test_backend_of_another_device_exchanges_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "is_distributed", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(ranks, "world_size", lambda: 2)

    def gather(values: list[Any], value: Any) -> None:
        values[:] = [value, "other"]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert all_gather("own") == ["own", "other"]
