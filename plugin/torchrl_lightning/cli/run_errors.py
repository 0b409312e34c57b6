"""Errors after a run has begun: a full disk, a deleted folder, a checkpoint that cannot be restored, in one line each.

Imports nothing heavy.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchrl_lightning.fitting import Fault

_ELSEWHERE = "name a folder elsewhere by paths.log_dir=FOLDER"
_REMEDIES = {
    errno.ENOSPC: f"Free space on the disk, or {_ELSEWHERE}.",
    errno.EDQUOT: f"Free space within the quota, or {_ELSEWHERE}.",
    errno.EFBIG: f"Raise the limit on the size of files (ulimit -f), or {_ELSEWHERE}.",
    errno.EROFS: f"The filesystem is read-only: mount it for writing, or {_ELSEWHERE}.",
}
# What reading a state raises that does not fit.
_RESTORING = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OSError)


def storage_error(error: BaseException) -> str | None:
    """Return the line and the remedy for a file that the system does not let grow; None for another error.

    Examples:
        >>> print(storage_error(OSError(errno.EFBIG, "File too large", "last.ckpt")))
        File too large: 'last.ckpt'. Raise the limit on the size of files (ulimit -f), or name a folder elsewhere by \
paths.log_dir=FOLDER.
    """
    remedy = _REMEDIES.get(error.errno or 0) if isinstance(error, OSError) else None
    if not isinstance(error, OSError) or remedy is None:
        return None
    said = str(error).removeprefix(f"[Errno {error.errno}] ").rstrip(".")
    return f"{' '.join(said.split())}. {remedy}"


@contextmanager
def run_errors(folder: Path, checkpoint: Any) -> Iterator[None]:
    """Raise a Fault for what happens to the files of a run while it is going on.

    Args:
        folder: The folder of the run.
        checkpoint: The checkpoint that the run resumes, or None.
    """
    try:
        yield
    except Fault:
        raise
    except _RESTORING as error:
        if isinstance(error, OSError):
            _check_folder(folder, error)
        if checkpoint is not None and storage_error(error) is None and _is_restoring(error):
            said = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
            raise Fault(
                f"{checkpoint} cannot be resumed: {said.rstrip('.')}. Take another checkpoint, or begin anew with its "
                f"weights by init_from={checkpoint}."
            ) from error
        raise


def _check_folder(folder: Path, error: OSError) -> None:
    """Raise a Fault if an error comes from a folder that is gone, or closed, since the run began."""
    where = str(error.filename or "")
    if not (folder / ".hydra").is_dir() and (where.startswith(str(folder)) or error.errno == errno.ENOENT):
        raise Fault(
            f"the folder of the run, {folder}, was deleted or moved while the run was going on ({where}). Start the "
            "run again, and leave its folder until it has ended."
        ) from error
    if error.errno in (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE) and where.startswith(str(folder)):
        raise Fault(
            f"{where} cannot be written or read ({error.strerror}). Mend the folder or its disk, or {_ELSEWHERE}."
        ) from error


def _is_restoring(error: BaseException) -> bool:
    """Return whether a state was being restored, by the functions of a traceback; a collector's is restored late."""
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        code.co_name == "load_state_dict"
        or (code.co_filename.endswith("checkpoint_connector.py") and "restore" in code.co_name)
        for code in frames
    )
