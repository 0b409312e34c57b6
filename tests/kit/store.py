"""What other tests have put into Hydra is no part of a run of ours, where nothing ever imports TorchRL's configs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.config_store import ConfigStore

from torchrl_lightning._schemas import register_schemas


@contextmanager
def only_our_schemas() -> Iterator[None]:
    """Take TorchRL's groups out of Hydra's store for a while."""
    store = ConfigStore.instance()
    before = store.repo
    # Neither Hydra's groups nor ours clash; TorchRL stores its nodes without the name of a provider.
    store.repo = {group: nodes for group, nodes in before.items() if group in ("hydra", "_dummy_empty_config_.yaml")}
    register_schemas()
    try:
        yield
    finally:
        store.repo = before
