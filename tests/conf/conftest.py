"""Fixtures that compose our configs, isolated from the groups that other tests register in Hydra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from omegaconf import DictConfig

from kit.store import composed_run, only_our_schemas


@pytest.fixture(autouse=True)
def without_torchrls_groups() -> Iterator[None]:
    with only_our_schemas():
        yield


@pytest.fixture
def compose_train(tmp_path: Path) -> Callable[..., DictConfig]:
    return partial(composed_run, into=tmp_path)
