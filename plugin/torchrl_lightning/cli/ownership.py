"""Which runs are the user's own: their folders are told apart by owner and by signature. Imports nothing heavy."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from contextlib import suppress
from pathlib import Path

from torchrl_lightning.limits import SIGNATURE_BYTES, YAML_BYTES
from torchrl_lightning.untrusted import read_regular

_log = logging.getLogger(__name__)
_CONFIG, _SIGNATURE = Path(".hydra") / "config.yaml", Path(".hydra") / "signature"


def own_run(checkpoint: Path) -> Path | None:
    """Return the folder of the user's own run that wrote a checkpoint; None if it is another's, or lies elsewhere.

    It is that of RUN/*.ckpt and RUN/checkpoints/*.ckpt, if folder, config and checkpoint are the user's, and no links
    lead to the config: in a shared folder anybody may put a config beside a file.
    """
    path = checkpoint.resolve()
    folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    config = folder / _CONFIG
    parts = (folder, path.parent, path, config.parent, config)
    if path.suffix != ".ckpt" or not config.is_file() or config.is_symlink() or config.parent.is_symlink():
        return None
    user = os.getuid() if hasattr(os, "getuid") else 0  # where nobody has a number, files have 0
    return folder if all(part.stat().st_uid == user for part in parts) else None


def sign(folder: Path) -> None:
    """Sign the config of a run that begins; without a home folder to keep the key in, it stays unsigned."""
    if not (folder / _CONFIG).is_file():
        return
    try:
        _make_key()
        (folder / _SIGNATURE).write_bytes(_signature(folder))
    except (OSError, RuntimeError, ValueError) as error:
        _log.debug("The config of the run is not signed: %s", error)


def is_signed(folder: Path) -> bool:
    """Return whether a run of the user's wrote a folder's config: who is given a folder owns it, but has no key to it.

    It was signed with the user's key, which lies in ``$XDG_STATE_HOME/torchrl-lightning``, by default below
    ``~/.local/state``, and does not travel with a folder.
    """
    with suppress(OSError, RuntimeError, ValueError):
        return hmac.compare_digest(read_regular(folder / _SIGNATURE, SIGNATURE_BYTES), _signature(folder))
    return False


def _signature(folder: Path) -> bytes:
    return hmac.new(_key(), read_regular(folder / _CONFIG, YAML_BYTES), "sha256").hexdigest().encode()


def _key() -> bytes:
    """Read the user's key."""
    path = _key_file()
    key = read_regular(path, SIGNATURE_BYTES)
    if len(key) != 32:
        raise OSError(f"{path} has {len(key)} bytes, expected 32; delete it.")
    return key


def _make_key() -> None:
    """Make the user's key, unless there is one."""
    path = _key_file()
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        with suppress(FileExistsError):  # of another process, which was faster
            os.link(made, path)
    finally:
        made.unlink(missing_ok=True)


def _key_file() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "torchrl-lightning" / "key"
