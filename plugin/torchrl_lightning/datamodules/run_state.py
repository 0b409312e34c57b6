"""The ledger of resuming: what a rank of a run needs to go on, as its stream declares it."""

from __future__ import annotations

from typing import Any

from torchrl_lightning.stated import Entry, Stated


class RunState(Stated):
    """Save, check and load the attributes of a DataModule that its class lists in ``RUN_STATE``."""

    OWNER = "run"

    def __init__(self, data: Any) -> None:
        self.data = data

    def _entries(self) -> list[tuple[str, Entry, str]]:
        return [(name, entry, f"data.{entry.attribute or name}") for name, entry in self.data.RUN_STATE.items()]
