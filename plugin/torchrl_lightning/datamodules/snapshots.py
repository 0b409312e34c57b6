"""Replay buffers kept beside the checkpoints that refer to them."""

from __future__ import annotations

import shutil
from pathlib import Path

from torchrl_lightning.replay import ExperienceBuffer

KEPT = 2


class BufferSnapshots:
    """A folder of buffer states, one subfolder for each, of which the newest are kept.

    A state that exists already is not written again, so that several checkpoints of one moment share it.

    Args:
        folder: where they lie; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, buffer: ExperienceBuffer, updates: int) -> str:
        """Writes the state after so many updates, atomically; gives its name and removes the oldest ones."""
        name = f"after_{updates}"
        if not (self.folder / name).is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            buffer.dumps(self.folder / name)
        for old in self.names()[:-KEPT]:
            if old != name:
                shutil.rmtree(self.folder / old, ignore_errors=True)
        return name

    def names(self) -> list[str]:
        """Names of the states at hand, oldest first."""
        found = [path.name for path in self.folder.glob("after_*") if path.name.removeprefix("after_").isdigit()]
        return sorted(found, key=lambda name: int(name.removeprefix("after_")))

    def load(self, buffer: ExperienceBuffer, name: str) -> None:
        """Reads a state into the buffer.

        Raises:
            FileNotFoundError: if it is not there any more; names those that are.
        """
        if not (self.folder / name).is_dir():
            raise FileNotFoundError(
                f"the checkpoint refers to the replay buffer {self.folder / name}, which does not exist; there is "
                f"{', '.join(self.names()) or 'none'}. Only the newest {KEPT} are kept: resume from the last checkpoint, "
                "or pass the buffer_dir of the run that wrote it."
            )
        buffer.loads(self.folder / name)
