"""Store states of replay buffers in a folder, to which checkpoints refer."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from torchrl_lightning._core.errors import IncompatibleError
from torchrl_lightning._core.files import check_writable
from torchrl_lightning.replay import ExperienceBuffer

NUM_KEPT = 2
_RUN, _NAME = re.compile(r"[0-9a-f]{8}"), re.compile(r"after_\d+_[0-9a-f]{8}")


class BufferSnapshots:
    """A folder of buffer states with a subfolder for each state; a run keeps the newest two.

    Each run has its own folder below ``root``, with a subfolder for each rank, so that runs with the same ``root``
    never remove or confuse states. A resumed run continues in the same folder. States are written atomically. A resumed
    run removes its initial state only after it has written two states, because a checkpoint then refers to the first
    new state. While a state is written, the disk contains three states.

    Args:
        root: parent folder of all runs; created with the first state.
        rank: rank of this process.
        run: name of the run's folder, eight hexadecimal digits.
    """

    def __init__(self, root: Path, rank: int, run: str) -> None:
        self.root, self.rank, self.run = root.absolute(), rank, run
        self._written: list[str] = []

    @property
    def folder(self) -> Path:
        """Folder of this run's states."""
        return self.root / self.run / f"rank_{self.rank}"

    def save(self, buffer: ExperienceBuffer, updates: int) -> dict[str, Any]:
        """Write the buffer's state atomically, then remove old states; return the reference for :meth:`load`."""
        name = f"after_{updates}_{secrets.token_hex(4)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        buffer.dumps(self.folder / name)
        self._written.append(name)
        if len(self._written) >= NUM_KEPT:
            self._remove_others(self._written[-NUM_KEPT:])
        return {"folder": str(self.folder), "run": self.run, "name": name}

    def _remove_others(self, names: list[str]) -> None:
        # Also remove states of a process that was killed before it wrote its checkpoint.
        for old in self.folder.iterdir():
            if old.name not in names and _NAME.fullmatch(old.name):
                shutil.rmtree(old, ignore_errors=True)

    def load(self, buffer: ExperienceBuffer, reference: dict[str, Any]) -> None:
        """Load a state into the buffer; :meth:`save` then continues in the folder of the loaded run, below ``root``.

        Raises:
            FileNotFoundError: The state no longer exists; the message names the existing states.
            ValueError: The state is damaged or does not fit the buffer, or the reference is invalid.
        """
        path = snapshot_of(reference, self.root, rank=self.rank)
        buffer.loads(path)
        self.run, self._written = str(reference["run"]), []


def snapshot_of(reference: dict[str, Any], root: Path, *, rank: int | None = None) -> Path:
    """Return the folder of a state, below ``root`` or at its original path.

    Args:
        reference: The result of :meth:`BufferSnapshots.save`.
        root: The current parent folder of all runs.
        rank: Rank of the state; None for the rank that wrote it.

    Raises:
        FileNotFoundError: The state no longer exists; the message names the existing states.
        ValueError: The reference is invalid.
    """
    run, name, recorded = (str(reference.get(key)) for key in ("run", "name", "folder"))
    if not (_RUN.fullmatch(run) and _NAME.fullmatch(name)):
        raise ValueError(f"the checkpoint's reference to a replay buffer is invalid: run={run!r}, name={name!r}.")
    written = Path(recorded)
    current = root / run / (written.name if rank is None else f"rank_{rank}")
    parent = next((folder for folder in (current, written) if (folder / name).is_dir()), None)
    if parent is None:
        existing = sorted(path.name for path in written.glob("after_*"))
        raise FileNotFoundError(
            f"the checkpoint refers to the replay buffer {written / name}, which is missing there and in {current}. "
            f"Existing buffers: {', '.join(existing) or 'none'}. A run keeps the newest {NUM_KEPT}: resume from its "
            "last checkpoint, or set buffer_dir to the new place of a moved folder."
        )
    if (parent / name).is_symlink():
        raise ValueError(f"the replay buffer {parent / name} must be a folder, got a symbolic link.")
    return parent / name


def check_folder(folder: Path, mode: str, checkpoint_buffer: str) -> None:
    """Validate ``buffer_dir``; raise IncompatibleError if the run does not use it, or an OSError if it is not writable.

    Args:
        folder: The setting ``buffer_dir``.
        mode: The place of the buffer in checkpoints of this run: ``inside``, ``beside`` or ``none``.
        checkpoint_buffer: The setting ``checkpoint_buffer``, which determines the mode.
    """
    if mode != "beside":
        raise IncompatibleError(
            f"buffer_dir must be None with checkpoint_buffer={checkpoint_buffer!r} on one rank, got {str(folder)!r}, "
            "to which nothing would be written. Leave it out, or set checkpoint_buffer='beside'."
        )
    check_writable(folder, "buffer_dir")
