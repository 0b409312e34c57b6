"""States of replay buffers, kept beside the checkpoints that refer to them."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from torchrl_lightning.files import check_writable
from torchrl_lightning.fitting import MisfitError
from torchrl_lightning.replay import ExperienceBuffer

KEPT = 2
_RUN, _NAME = re.compile(r"[0-9a-f]{8}"), re.compile(r"after_\d+_[0-9a-f]{8}")


class BufferSnapshots:
    """A folder of buffer states, one subfolder for each, of which a run keeps the newest two.

    Every run has a folder of its own below ``root``, which runs that resume it continue to use, so that runs that share
    a ``root`` never remove or confuse each other's states; each rank has its own. A state appears whole or not at all.
    The state that a run resumed from is removed only when the run has written two states itself: by then, a checkpoint
    that refers to the first of them exists. While a state is written, the disk holds three.

    Args:
        root: where all runs' folders lie; made when the first state is written.
        rank: which process this is.
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
        """Write the buffer's state, atomically, then remove what is too old; return what :meth:`load` needs."""
        name = f"after_{updates}_{secrets.token_hex(4)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        buffer.dumps(self.folder / name)
        self._written.append(name)
        if len(self._written) >= KEPT:
            self._remove_all_but(self._written[-KEPT:])
        return {"folder": str(self.folder), "run": self.run, "name": name}

    def _remove_all_but(self, names: list[str]) -> None:
        # Includes what a killed process had finished without writing its checkpoint.
        for old in self.folder.iterdir():
            if old.name not in names and _NAME.fullmatch(old.name):
                shutil.rmtree(old, ignore_errors=True)

    def load(self, buffer: ExperienceBuffer, reference: dict[str, Any]) -> None:
        """Read a state into the buffer, and continue in the folder of the run that wrote it, if it is below ``root``.

        Raises:
            FileNotFoundError: the state no longer exists; the message names those that do.
            ValueError: the state is damaged or does not fit the buffer, or the reference is not one of ours.
        """
        found = snapshot_of(reference, self.root, rank=self.rank)
        buffer.loads(found)
        self.run, self._written = str(reference["run"]), []


def snapshot_of(reference: dict[str, Any], root: Path, *, rank: int | None = None) -> Path:
    """Return the folder of a state, below ``root`` or where it was written.

    Args:
        reference: What :meth:`BufferSnapshots.save` returned.
        root: Where all runs' folders lie now.
        rank: Whose it is; None for the rank that wrote it.

    Raises:
        FileNotFoundError: The state no longer exists; the message names those that do.
        ValueError: The reference is not one of ours.
    """
    run, name, recorded = (str(reference.get(key)) for key in ("run", "name", "folder"))
    if not (_RUN.fullmatch(run) and _NAME.fullmatch(name)):
        raise ValueError(f"the checkpoint refers to a replay buffer as {run!r}, {name!r}, which we never wrote.")
    written = Path(recorded)
    here = root / run / (written.name if rank is None else f"rank_{rank}")
    found = next((folder for folder in (here, written) if (folder / name).is_dir()), None)
    if found is None:
        there = sorted(path.name for path in written.glob("after_*"))
        raise FileNotFoundError(
            f"the checkpoint refers to the replay buffer {written / name}, which is neither there nor in {here}; "
            f"there is {', '.join(there) or 'none'}. A run keeps its newest {KEPT}: resume from its last one, "
            "or pass the buffer_dir that its folder was moved to."
        )
    if (found / name).is_symlink():
        raise ValueError(f"the replay buffer {found / name} is a link, which we never write.")
    return found / name


def check_folder(folder: Path, mode: str, checkpoint_buffer: str) -> None:
    """Validate ``buffer_dir``; raise MisfitError if nothing will be written there, or an OSError if nothing can be.

    Args:
        folder: The setting ``buffer_dir``.
        mode: Where checkpoints of this run keep the buffer.
        checkpoint_buffer: The setting from which the mode follows.
    """
    if mode != "beside":
        raise MisfitError(
            f"buffer_dir must be None with checkpoint_buffer={checkpoint_buffer!r} on one rank, got {str(folder)!r}, "
            "to which nothing would be written. Leave it out, or give checkpoint_buffer='beside'."
        )
    check_writable(folder, "buffer_dir")
