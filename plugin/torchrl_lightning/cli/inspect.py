"""``torchrl-lightning-inspect``: summarise a run's buffer or demonstrations, and report suspicious values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lightning._core.untrusted import check_regular
from torchrl_lightning.cli.command import behind, quiet, use_threads, whole_output
from torchrl_lightning.cli.error_messages import UsageError, one_line
from torchrl_lightning.cli.working_directory import leave_out_working_directory

if TYPE_CHECKING:
    from torchrl_lightning.inspection.report import Inspection

_MEND = "name a run, one of its checkpoints, a folder of a saved buffer, or demonstrations"


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect the given source and print the result; return the exit status."""
    leave_out_working_directory()
    parser = argparse.ArgumentParser(
        prog="torchrl-lightning-inspect",
        description="Look inside a buffer: its entries, episodes, ages and priorities, and what looks wrong. A run "
        "that is still writing is read as it stands; nothing is changed, and no code in a file is run.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a run's folder, a checkpoint, the folder of a saved buffer, or demonstrations"
    )
    parser.add_argument("--last", type=int, metavar="N", help="look at the newest N cells alone")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures and episodes there, too")
    options = parser.parse_args(argv)
    with one_line():
        inspect(options.source, options.last, options.html)
    return 0


@behind
def inspect(source: str, last: int | None, html: Path | None) -> None:
    """Print the content of a source."""
    from rich.console import Console

    quiet()
    use_threads(1)
    if last is not None and last < 1:
        raise UsageError(f"--last {last}: expected a whole number of at least 1.")
    found = look(Path(source), last)
    if html is not None:
        try:
            found.write_html(html)
        except OSError as error:
            raise UsageError(f"--html {html} cannot be written: {error.strerror}; name another file.") from error
    with whole_output():
        width = None if os.isatty(1) else 120
        Console(width=width).print(found)
        if html is not None:
            print(f"page: {html}")


def look(source: Path, last: int | None = None) -> Inspection:
    """Inspect the buffer or demonstrations at a path.

    Raises:
        UsageError: The path is missing, damaged, not a file of this package, or does not contain a buffer.
    """
    from torchrl_lightning.demonstrations.io.safetensors_files import SUFFIXES

    if not source.exists():
        raise UsageError(f"there is no {source}; {_MEND}.")
    try:
        if not source.is_dir():
            check_regular(source)
        if source.is_dir():
            return _in_folder(source, last)
        if source.suffix in SUFFIXES:
            return _demonstrations([source], source)
        return _in_checkpoint(source, source.parent.parent, last)
    except (ValueError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        said = str(error).rstrip(".")
        raise UsageError(f"{said}." if ";" in said else f"{said}; {_MEND}.") from error


def _in_folder(folder: Path, last: int | None) -> Inspection:
    from torchrl_lightning._core.files import MANIFEST, read_state
    from torchrl_lightning.demonstrations.io.safetensors_files import SUFFIXES
    from torchrl_lightning.inspection.report import inspect_state

    if (folder / MANIFEST).is_file():
        return inspect_state(read_state(folder, streamed=True), folder, last=last)
    checkpoints = [*(folder / "checkpoints").glob("*.ckpt"), *folder.glob("*.ckpt")]
    if checkpoints:
        newest = max(checkpoints, key=lambda path: (path.stat().st_mtime_ns, path.name == "last.ckpt"))
        return _in_checkpoint(newest, folder, last)
    if saved := _newest_state(folder):  # a run without a checkpoint yet
        return inspect_state(read_state(saved, streamed=True), saved, last=last)
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))
    if files:
        return _demonstrations(files, folder)
    running = " (a run writes its first at its first evaluation)" if (folder / ".hydra").is_dir() else ""
    raise UsageError(f"{folder} holds no checkpoint{running}, no saved buffer and no demonstration; {_MEND}.")


def _newest_state(folder: Path) -> Path | None:
    from torchrl_lightning._core.files import MANIFEST

    found = list(folder.glob(f"**/after_*/{MANIFEST}"))
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent if found else None


def _in_checkpoint(path: Path, run: Path, last: int | None) -> Inspection:
    """Inspect the buffer of each rank, inside a checkpoint or next to it."""
    from torchrl_lightning._core.files import read_state
    from torchrl_lightning.datamodules._run.snapshots import snapshot_of
    from torchrl_lightning.deploy.loading import read_checkpoint
    from torchrl_lightning.inspection.buffer_views import contents_in, unreadable
    from torchrl_lightning.inspection.report import NoBufferError, inspect_contents

    stored = read_checkpoint(path, mapped=True)
    state: dict[str, Any] = {key: stored[key] for key in stored if isinstance(key, str) and key.endswith("DataModule")}
    if not state:
        raise UsageError(f"{path} was not written through one of our DataModules, so that it holds no buffer; {_MEND}.")
    torn: list[str] = []
    for data in state.values():
        ranks = data.get("ranks") if isinstance(data, dict) else None
        for number, own in enumerate(ranks if isinstance(ranks, list | tuple) else ()):
            if isinstance(own, dict) and isinstance(reference := own.get("snapshot"), dict):
                try:
                    own["buffer"] = read_state(snapshot_of(reference, run / "buffer"), streamed=True)
                except (ValueError, OSError) as error:
                    torn.append(unreadable(f"the buffer of rank {number}", error))
    try:
        return inspect_contents([*contents_in(state, str(path), last), *torn], path)
    except NoBufferError as error:
        raise UsageError(f"{path} holds no buffer; train with data.checkpoint_buffer=inside (or beside).") from error


def _demonstrations(files: Sequence[Path], source: Path) -> Inspection:
    from torchrl_lightning.demonstrations.io.safetensors_files import read_demonstration
    from torchrl_lightning.demonstrations.serialization import states_of
    from torchrl_lightning.inspection.buffer_views import demonstrations, unreadable
    from torchrl_lightning.inspection.report import inspect_contents

    read, torn = [], []
    for path in files:
        try:
            read.append(read_demonstration(path))
        except (ValueError, OSError, TypeError) as error:
            torn.append(unreadable(str(path), error))
    found = [demonstrations(states_of(read), str(source))] if read else []
    return inspect_contents([*found, *torn], source)
