"""``torchrl-lightning-inspect``: summarise a run's buffer or demonstrations, and report suspicious values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_lightning._core.untrusted import check_regular
from torchrl_lightning.cli.command import cleanup, flushed_output, limit_threads, silence_libraries
from torchrl_lightning.cli.error_messages import UsageError, exit_with_one_line
from torchrl_lightning.cli.working_directory import leave_out_working_directory

if TYPE_CHECKING:
    from torchrl_lightning.inspection.report import Inspection

_REMEDY = "name a run, a checkpoint, a folder of a saved buffer, or demonstrations"


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect the given source and print the result; return the exit status."""
    leave_out_working_directory()
    parser = argparse.ArgumentParser(
        prog="torchrl-lightning-inspect",
        description="Inspect a buffer: its entries, episodes, ages, priorities and suspicious values. The run may "
        "still be active. Nothing is changed, and no code in a file is run.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a run folder, a checkpoint, the folder of a saved buffer, or demonstrations"
    )
    parser.add_argument("--last", type=int, metavar="N", help="inspect only the newest N cells")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with pictures and episodes")
    options = parser.parse_args(argv)
    with exit_with_one_line():
        inspect(options.source, options.last, options.html)
    return 0


@cleanup
def inspect(source: str, last: int | None, html: Path | None) -> None:
    """Print the content of a source."""
    from rich.console import Console

    silence_libraries()
    limit_threads(1)
    if last is not None and last < 1:
        raise UsageError(f"--last {last}: expected a whole number of at least 1.")
    inspection = inspect_path(Path(source), last)
    if html is not None:
        try:
            inspection.write_html(html)
        except OSError as error:
            raise UsageError(f"--html {html} cannot be written: {error.strerror}; choose another file.") from error
    with flushed_output():
        width = None if os.isatty(1) else 120
        Console(width=width).print(inspection)
        if html is not None:
            print(f"page: {html}")


def inspect_path(source: Path, last: int | None = None) -> Inspection:
    """Inspect the buffer or demonstrations at a path.

    Raises:
        UsageError: The path is missing, is damaged, is not a file of this package, or does not contain a buffer.
    """
    from torchrl_lightning.demonstrations.io.safetensors_files import SUFFIXES

    if not source.exists():
        raise UsageError(f"{source} does not exist; {_REMEDY}.")
    try:
        if not source.is_dir():
            check_regular(source)
        if source.is_dir():
            return _inspect_folder(source, last)
        if source.suffix in SUFFIXES:
            return _inspect_demonstrations([source], source)
        return _inspect_checkpoint(source, source.parent.parent, last)
    except (ValueError, OSError) as error:
        if isinstance(error, UsageError):
            raise
        message = str(error).rstrip(".")
        raise UsageError(f"{message}." if ";" in message else f"{message}; {_REMEDY}.") from error


def _inspect_folder(folder: Path, last: int | None) -> Inspection:
    from torchrl_lightning._core.files import MANIFEST, read_state_folder
    from torchrl_lightning.demonstrations.io.safetensors_files import SUFFIXES
    from torchrl_lightning.inspection.report import inspect_state

    if (folder / MANIFEST).is_file():
        return inspect_state(read_state_folder(folder, streamed=True), folder, last=last)
    checkpoints = [*(folder / "checkpoints").glob("*.ckpt"), *folder.glob("*.ckpt")]
    if checkpoints:
        newest = max(checkpoints, key=lambda path: (path.stat().st_mtime_ns, path.name == "last.ckpt"))
        return _inspect_checkpoint(newest, folder, last)
    if newest_state := _newest_state(folder):  # the run has not written a checkpoint yet
        return inspect_state(read_state_folder(newest_state, streamed=True), newest_state, last=last)
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))
    if files:
        return _inspect_demonstrations(files, folder)
    running = " (a run writes the first one at its first evaluation)" if (folder / ".hydra").is_dir() else ""
    raise UsageError(f"{folder} contains no checkpoint{running}, no saved buffer and no demonstration; {_REMEDY}.")


def _newest_state(folder: Path) -> Path | None:
    from torchrl_lightning._core.files import MANIFEST

    manifests = list(folder.glob(f"**/after_*/{MANIFEST}"))
    return max(manifests, key=lambda path: path.stat().st_mtime_ns).parent if manifests else None


def _inspect_checkpoint(path: Path, run: Path, last: int | None) -> Inspection:
    """Inspect the buffer of each rank, which is in the checkpoint or in a file next to the checkpoint."""
    from torchrl_lightning._core.files import read_state_folder
    from torchrl_lightning.datamodules._run.snapshots import snapshot_of
    from torchrl_lightning.deploy.loading import read_checkpoint
    from torchrl_lightning.inspection.buffer_views import find_buffers, unreadable
    from torchrl_lightning.inspection.report import NoBufferError, inspect_contents

    stored = read_checkpoint(path, mapped=True)
    state: dict[str, Any] = {key: stored[key] for key in stored if isinstance(key, str) and key.endswith("DataModule")}
    if not state:
        raise UsageError(
            f"{path} contains no buffer, because it was written without a DataModule of this package; {_REMEDY}."
        )
    unreadable_parts: list[str] = []
    for data in state.values():
        ranks = data.get("ranks") if isinstance(data, dict) else None
        for number, rank_state in enumerate(ranks if isinstance(ranks, list | tuple) else ()):
            if isinstance(rank_state, dict) and isinstance(reference := rank_state.get("snapshot"), dict):
                try:
                    rank_state["buffer"] = read_state_folder(snapshot_of(reference, run / "buffer"), streamed=True)
                except (ValueError, OSError) as error:
                    unreadable_parts.append(unreadable(f"the buffer of rank {number}", error))
    try:
        return inspect_contents([*find_buffers(state, str(path), last), *unreadable_parts], path)
    except NoBufferError as error:
        raise UsageError(f"{path} contains no buffer; train with data.checkpoint_buffer=inside (or beside).") from error


def _inspect_demonstrations(files: Sequence[Path], source: Path) -> Inspection:
    from torchrl_lightning.demonstrations.io.safetensors_files import read_demonstration
    from torchrl_lightning.demonstrations.serialization import to_states
    from torchrl_lightning.inspection.buffer_views import demonstrations, unreadable
    from torchrl_lightning.inspection.report import inspect_contents

    readable, unreadable_parts = [], []
    for path in files:
        try:
            readable.append(read_demonstration(path))
        except (ValueError, OSError, TypeError) as error:
            unreadable_parts.append(unreadable(str(path), error))
    views = [demonstrations(to_states(readable), str(source))] if readable else []
    return inspect_contents([*views, *unreadable_parts], source)


if __name__ == "__main__":
    raise SystemExit(main())
