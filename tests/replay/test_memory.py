"""The free memory is the smaller value of the system and the container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from torchrl_lightning._core import memory

CPU = torch.device("cpu")


def test_unknown_free_memory_disables_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert memory.free_bytes(torch.device("meta")) is None
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "absent")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "absent")
    monkeypatch.delattr(os, "sysconf")
    assert memory.free_bytes(CPU) is None
    memory.check_free_memory(2**62, "anything", "lower its size")


def test_free_memory_respects_the_container_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(CPU) == 5 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.free_bytes(CPU) == 800  # the kernel can reclaim the memory of cached files
    with pytest.raises(ValueError, match=r"cupboard.*801.*800"):
        memory.check_free_memory(801, "a cupboard", "buy another")


def test_missing_folder_uses_the_disk_of_its_parent(tmp_path: Path) -> None:
    free = memory.free_bytes(CPU, tmp_path / "a" / "b")
    assert free is not None
    assert free > 0
    with pytest.raises(ValueError, match=f"{tmp_path}"):
        memory.check_free_memory(2**70, "a cupboard", "buy another", folder=tmp_path)
