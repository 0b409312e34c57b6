"""Typed schemas of our configs; Hydra checks names and types of every field against them.

They are generated from the constructors, and a test fails where they differ. They lie on the lowest floor and import no
torch, because the search-path plugin stores them in every Hydra application of the environment.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from torchrl_lightning._schemas import buffers, callbacks, data, models, trainer

GROUP = "torchrl_lightning/schema"
SCHEMAS: dict[tuple[str, str], Any] = {
    **data.SCHEMAS,
    **buffers.SCHEMAS,
    **models.SCHEMAS,
    **trainer.SCHEMAS,
    **callbacks.SCHEMAS,
}


class _Schema(ConfigNode):
    """An entry of Hydra's store whose config is made when it is read: of all schemas an application reads a few."""

    made: DictConfig | None = None

    def __init__(self, name: str, schema: type, group: str) -> None:
        self.name, self.schema, self.group = name, schema, group
        self.package, self.provider = None, "torchrl-lightning"

    @property
    def node(self) -> DictConfig:
        """The config, which whoever loads it may change."""
        if self.made is None:
            self.made = OmegaConf.structured(self.schema)
        return self.made

    @node.setter
    def node(self, node: DictConfig) -> None:
        self.made = node


def register_schemas() -> None:
    """Store every schema in Hydra's ConfigStore; storing twice changes nothing."""
    for (group, name), schema in SCHEMAS.items():
        nodes = ConfigStore.instance().repo
        for part in f"{GROUP}/{group}".split("/"):
            nodes = nodes.setdefault(part, {})
        nodes[f"{name}.yaml"] = _Schema(f"{name}.yaml", schema, f"{GROUP}/{group}")
