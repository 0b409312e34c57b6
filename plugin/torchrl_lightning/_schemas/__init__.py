"""Typed schemas of our configs; Hydra checks names and types of every field against them.

They are generated from the constructors, and a test fails where they differ. They lie on the lowest floor and import no
torch, because the search-path plugin stores them in every Hydra application of the environment.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore

from torchrl_lightning._schemas import buffers, callbacks, data, models, trainer

GROUP = "torchrl_lightning/schema"
SCHEMAS: dict[tuple[str, str], Any] = {
    **data.SCHEMAS,
    **buffers.SCHEMAS,
    **models.SCHEMAS,
    **trainer.SCHEMAS,
    **callbacks.SCHEMAS,
}


def register_schemas() -> None:
    """Store every schema in Hydra's ConfigStore; storing twice changes nothing."""
    store = ConfigStore.instance()
    for (group, name), node in SCHEMAS.items():
        store.store(group=f"{GROUP}/{group}", name=name, node=node, provider="torchrl-lightning")
