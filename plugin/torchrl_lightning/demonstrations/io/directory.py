"""A directory of demonstrations: read at the start, polled during training, and written to."""

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

_SAVED = ".saved.json"  # the names of the files that this class saved
_logger = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


class DemonstrationDirectory:
    """Read the demonstrations of a directory in the order of their names, and save others there.

    An unusable file is skipped with a warning that names it and the reason.

    Args:
        path: The directory. Its ``.npz`` and ``.safetensors`` files are read, hidden files and folders are not.
        specs: The environment's specs, without a frame stack.
        frame_skip: The number of frames in one step of the environment.
        human: Set ``is_human`` of the demonstrations; None reads it from the files.
        most: The maximum number of demonstrations at the start; None is unlimited.
        may_be_empty: Accept an empty or missing directory.
        taken: The names of files to skip, for example because they were read before.
        limit: The maximum unpacked size in bytes of all files that are read at the start or by one :meth:`poll`.
        recipe: The environment's recipe, if known. Demonstrations of another recipe are skipped, see
            :meth:`Demonstration.fits`.

    Attributes:
        initial: The demonstrations that the directory had at the start.

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
            raise FileNotFoundError(f"{self.path} is no directory; name one that holds demonstrations.")
        self._known = set(taken)  # files that were read or saved
        self._first = ""  # the error of the first unusable file
        self._refused: dict[str, tuple[_Stamp, bool]] = {}  # file stamp, and whether a warning was logged
        self.initial: tuple[Demonstration, ...] = tuple(self._read(at_start=True))
        if not self.initial and not may_be_empty:
            raise ValueError(
                f"{self.path} holds no demonstration that can be used ({len(self._refused)} refused); it needs a "
                f"{' or '.join(SUFFIXES)} file that was recorded in this environment.{self._first}"
            )
        if most is not None and len(self.initial) > most:
            raise ValueError(
                f"{self.path} holds {len(self.initial)} demonstrations, more than the capacity of {most}; take some "
                "away, or enlarge the capacity."
            )

    @property
    def taken(self) -> frozenset[str]:
        """The names of the files that were read or saved."""
        return frozenset(self._known)

    def poll(self) -> list[Demonstration]:
        """Return the demonstrations that are new since the last call.

        An unreadable file is read again at each poll after a change. The warning is logged at the first poll without a
        change, so that a file that is still being written does not cause one.
        """
        return self._read(at_start=False)

    def _read(self, at_start: bool) -> list[Demonstration]:
        found, left = [], self.limit
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            if path.suffix not in SUFFIXES or path.name.startswith(".") or path.name in self._known:
                continue
            try:
                there = path.stat()
                stamp = (there.st_ino, there.st_size, there.st_mtime_ns)
            except OSError:  # a deleted file or a broken link
                continue
            if not path.is_file() or self._refused.get(path.name) == (stamp, True):
                continue
            try:
                demonstration = self._load(path, left)
            except (OSError, ValueError, TypeError) as error:
                self._first = self._first or f" The first: {error}"
                is_settled = at_start or self._refused.get(path.name) == (stamp, False)
                if is_settled:
                    _logger.warning("A demonstration is left out: %s", error)
                self._refused[path.name] = stamp, is_settled
            else:
                self._known.add(path.name)
                found.append(demonstration)
                left -= _bytes_of(demonstration)
        return found

    def _load(self, path: Path, left: int) -> Demonstration:
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{path} was refused: it is a link out of the directory, to {path.resolve()}.")
        if left < 1:
            raise ValueError(f"{path} was refused: the files before it have the {self.limit} bytes of the limit.")
        demonstration = read_demonstration(path, self.specs, limit=min(left, FILE_BYTES))
        demonstration.fits(self.specs, self.frame_skip, self.recipe)
        return demonstration if self.human is None else replace(demonstration, is_human=self.human)

    def save(self, demonstrations: Sequence[Demonstration], names: Sequence[str]) -> None:
        """Write each demonstration to ``NAME.safetensors``, and remove the other files of earlier saves.

        All new files are complete before one replaces an old file. Files from other sources stay unless they have the
        same name. :meth:`poll` skips saved files.

        Raises:
            ValueError: The names are not one per demonstration, not distinct, or not plain file names.
            OSError: The directory cannot be written to; the earlier files stay complete.
        """
        files = [f"{name}.safetensors" for name in names]
        if len(files) != len(demonstrations) or len(set(files)) != len(files) or not all(map(_is_plain, files)):
            raise ValueError(
                f"names={list(names)} must be {len(demonstrations)} distinct names of files, without folders or a dot "
                "in front."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        earlier = self._saved()
        # Write the list of names first, so that after a crash the new files are known as ours.
        with replaced_files(self.path / _SAVED) as (file,):
            file.write(json.dumps(sorted({*earlier, *files})).encode())
        write_demonstrations(
            {self.path / file: demonstration for file, demonstration in zip(files, demonstrations, strict=True)}
        )
        self._known.update(files)
        for stale in earlier - set(files):
            (self.path / stale).unlink(missing_ok=True)
            self._known.discard(stale)

    def _saved(self) -> set[str]:
        """Return the names of the existing files of earlier saves."""
        try:
            names = read_json(self.path / _SAVED, MANIFEST_BYTES, MANIFEST_VALUES)
        except (OSError, ValueError):
            return set()
        # These files will be removed, so do not trust a list that another program may have written.
        plain = {name for name in names if _is_plain(name)} if isinstance(names, list) else set()
        return {name for name in plain if (self.path / name).is_file()}


def _bytes_of(demonstration: Demonstration) -> int:
    parts = (demonstration.steps, demonstration.last_observation)
    return sum(leaf.nbytes for part in parts if part is not None for _, leaf in keyed_leaves(part))


def _is_plain(name: object) -> bool:
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and Path(name).name == name
        and "\\" not in name
        and "\0" not in name
    )
