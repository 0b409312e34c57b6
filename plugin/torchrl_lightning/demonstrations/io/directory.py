"""Read a directory of demonstrations at the start and during training, and save demonstrations in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from torchrl_lightning._core.file_limits import COLLECTION_BYTES, FILE_BYTES, MANIFEST_BYTES, MANIFEST_VALUES
from torchrl_lightning._core.files import replaced_files
from torchrl_lightning._core.tree import keyed_leaves
from torchrl_lightning._core.untrusted import read_json
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.demonstrations.io.safetensors_files import (
    SUFFIXES,
    read_demonstration,
    write_demonstrations,
)
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.environments.specs import EnvironmentSpecs

_SAVED_NAMES = ".saved.json"  # the names of the files that this class saved
_logger = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class DemonstrationDirectory:
    """Read the demonstrations of a directory in the order of their names, and save other demonstrations in it.

    An unusable file is skipped with a warning that names the file and the reason.

    Args:
        path: The directory. Its ``.npz`` and ``.safetensors`` files are read; hidden files and folders are skipped.
        specs: The environment's specs, without a frame stack.
        frame_skip: The number of frames in one step of the environment.
        human: The value of ``is_human`` for the demonstrations; None reads the value from the files.
        most: The maximum number of demonstrations at the start; None is unlimited.
        may_be_empty: Accept an empty or missing directory.
        taken: The names of files to skip, for example files that were read before.
        limit: The maximum unpacked size in bytes of all files that are read at the start or by one :meth:`poll`.
        recipe: The environment's recipe, if known. Demonstrations of another recipe are skipped, see
            :meth:`Demonstration.fits`.

    Attributes:
        initial: The demonstrations in the directory at the start.

    Raises:
        FileNotFoundError: The directory does not exist.
        ValueError: The directory lacks a usable demonstration, or has more than ``most``.

    Examples:
        >>> import tempfile, torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> steps = TensorDict({"observation": torch.zeros(2, 4), "action": torch.tensor([0, 1])}, [2])
        >>> steps["next", "reward"] = torch.ones(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     DemonstrationDirectory(folder, specs, may_be_empty=True).save([Demonstration(steps)], ["balanced"])
        ...     [demonstration.total_reward for demonstration in DemonstrationDirectory(folder, specs).initial]
        [2.0]
    """

    def __init__(
        self,
        path: str | Path,
        specs: EnvironmentSpecs,
        frame_skip: int = 1,
        human: bool | None = None,
        *,
        most: int | None = None,
        may_be_empty: bool = False,
        taken: Collection[str] = (),
        limit: int = COLLECTION_BYTES,
        recipe: EnvironmentRecipe | None = None,
    ) -> None:
        self.path, self.specs, self.human, self.recipe = Path(path), specs, human, recipe
        self.frame_skip, self.limit = integer(frame_skip, "frame_skip"), integer(limit, "limit")
        optional(integer)(most, "most")
        if not may_be_empty and not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is not a directory. Name a directory of demonstrations.")
        self._seen_names = set(taken)  # files that were read or saved
        self._first_error = ""  # the message of the first unusable file
        self._rejected: dict[str, tuple[_Stamp, bool]] = {}  # file stamp, and True if a warning was logged
        self.initial: tuple[Demonstration, ...] = tuple(self._read_new(at_start=True))
        if not self.initial and not may_be_empty:
            raise ValueError(
                f"{self.path} contains no usable demonstration ({len(self._rejected)} refused). Add a "
                f"{' or '.join(SUFFIXES)} file that was recorded in this environment.{self._first_error}"
            )
        if most is not None and len(self.initial) > most:
            raise ValueError(
                f"{self.path} must have at most {most} demonstrations (the capacity), got {len(self.initial)}. Remove "
                "some, or raise the capacity."
            )

    @property
    def taken(self) -> frozenset[str]:
        """The names of the files that were read or saved."""
        return frozenset(self._seen_names)

    def poll(self) -> list[Demonstration]:
        """Return the demonstrations that are new since the last call.

        An unreadable file is read again after each change of the file. The warning is logged at the first poll without
        a change. A file that another program is still writing therefore does not cause a warning.
        """
        return self._read_new(at_start=False)

    def _read_new(self, at_start: bool) -> list[Demonstration]:
        demonstrations, remaining_bytes = [], self.limit
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            if path.suffix not in SUFFIXES or path.name.startswith(".") or path.name in self._seen_names:
                continue
            try:
                stat = path.stat()
                stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            except OSError:  # a deleted file or a broken link
                continue
            if not path.is_file() or self._rejected.get(path.name) == (stamp, True):
                continue
            try:
                demonstration = self._load(path, remaining_bytes)
            except (OSError, ValueError, TypeError) as error:
                self._first_error = self._first_error or f" The first error: {error}"
                is_settled = at_start or self._rejected.get(path.name) == (stamp, False)
                if is_settled:
                    _logger.warning("Skipped a demonstration: %s", error)
                self._rejected[path.name] = stamp, is_settled
            else:
                self._seen_names.add(path.name)
                demonstrations.append(demonstration)
                remaining_bytes -= _num_bytes(demonstration)
        return demonstrations

    def _load(self, path: Path, remaining_bytes: int) -> Demonstration:
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{path} was refused: it is a link to {path.resolve()}, outside the directory.")
        if remaining_bytes < 1:
            raise ValueError(f"{path} was refused: the files before it reach the limit of {self.limit} bytes.")
        demonstration = read_demonstration(path, self.specs, limit=min(remaining_bytes, FILE_BYTES))
        demonstration.fits(self.specs, self.frame_skip, self.recipe)
        return demonstration if self.human is None else replace(demonstration, is_human=self.human)

    def save(self, demonstrations: Sequence[Demonstration], names: Sequence[str]) -> None:
        """Write each demonstration to ``NAME.safetensors``, and remove the files of earlier saves.

        All new files are complete before a new file replaces an old file. Files from other sources stay unless they
        have the same name. :meth:`poll` skips saved files.

        Raises:
            ValueError: The number of names differs from the number of demonstrations, two names are equal, or a name is
                not a plain file name.
            OSError: The directory cannot be written to. The earlier files stay complete.
        """
        files = [f"{name}.safetensors" for name in names]
        if (
            len(files) != len(demonstrations)
            or len(set(files)) != len(files)
            or not all(map(_is_plain_file_name, files))
        ):
            raise ValueError(
                f"names must be {len(demonstrations)} distinct file names without folders or a leading dot, got "
                f"{list(names)}."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        earlier_files = self._saved_names()
        # Write the list of names first: after a crash, it identifies the new files as saved by this class.
        with replaced_files(self.path / _SAVED_NAMES) as (file,):
            file.write(json.dumps(sorted({*earlier_files, *files})).encode())
        write_demonstrations(
            {self.path / file: demonstration for file, demonstration in zip(files, demonstrations, strict=True)}
        )
        self._seen_names.update(files)
        for stale in earlier_files - set(files):
            (self.path / stale).unlink(missing_ok=True)
            self._seen_names.discard(stale)

    def _saved_names(self) -> set[str]:
        """Return the names of the existing files of earlier saves."""
        try:
            names = read_json(self.path / _SAVED_NAMES, MANIFEST_BYTES, MANIFEST_VALUES)
        except (OSError, ValueError):
            return set()
        # Accept only plain names: another program may have written the list, and save() removes the listed files.
        plain_names = {name for name in names if _is_plain_file_name(name)} if isinstance(names, list) else set()
        return {name for name in plain_names if (self.path / name).is_file()}


def _num_bytes(demonstration: Demonstration) -> int:
    parts = (demonstration.steps, demonstration.last_observation)
    return sum(leaf.nbytes for part in parts if part is not None for _, leaf in keyed_leaves(part))


def _is_plain_file_name(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and Path(name).name == name
        and "\\" not in name
        and "\0" not in name
    )
