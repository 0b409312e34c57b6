"""Rename entries of a Dict observation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from torchrl_lightning._core.keys import RESERVED, UNNAMEABLE, dotted_name

RENAME_REMEDY = (
    "Rename it inside the environment. For a Gymnasium environment use torchrl.envs.GymWrapper(EnvironmentRecipe(id, "
    "rename=...)()), or pass the environment without TorchRL's wrapper."
)


class RenameObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Rename entries of a Dict observation.

    Args:
        env: an environment with a Dict observation.
        names: the old and new names. Name an entry of a nested Dict by its path, such as ``arm.position``. If this path
            is itself the name of an entry, that entry is renamed. The new name replaces only the last part of the path.
            Write an old name that is not a string as a string.

    Raises:
        ValueError: the observation is not a Dict, an entry is missing, or two entries would have the same name.

    Examples:
        >>> from gymnasium.wrappers import TimeAwareObservation
        >>> timed = TimeAwareObservation(gym.make("CartPole-v1"), flatten=False)
        >>> list(RenameObservation(timed, {"time": "clock"}).observation_space)
        ['clock', 'obs']
    """

    def __init__(self, env: gym.Env[Any, Any], names: Mapping[str, str]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Dict):
            raise ValueError(f"rename={dict(names)} needs a Dict as the observation, got {space}. Remove rename.")
        paths: dict[str, tuple[Any, ...]] = {}
        for path in sorted((path for path, _ in entries_of(space)), key=len):
            paths.setdefault(dotted_name(path), path)
        if missing := [name for name in names if name not in paths]:
            raise ValueError(
                f"rename must name observed entries, {sorted(paths)}, got {dict(names)}: {missing} are missing."
            )
        self._names = {paths[old]: new for old, new in names.items()}
        self._nested = {path[:end] for path in self._names for end in range(1, len(path))}  # contain renamed entries
        self._renames = names
        self._root = self._new_names(space, ())
        self.observation_space = self._renamed_space(space, ())

    def observation(self, observation: Any) -> Any:
        """Return the same entries under their new names."""
        if self._nested:
            return self._renamed(observation, ())
        return {new: observation[name] for name, new in self._root.items()}

    def _renamed(self, observation: Any, path: tuple[Any, ...]) -> Any:
        return {
            self._names.get((*path, name), name): self._renamed(value, (*path, name))
            if (*path, name) in self._nested
            else value
            for name, value in observation.items()
        }

    def _new_names(self, space: spaces.Dict, path: tuple[Any, ...]) -> dict[Any, Any]:
        names = {name: self._names.get((*path, name), name) for name in space.spaces}
        _check_unique(list(names.values()), self._renames)
        return names

    def _renamed_space(self, space: spaces.Space[Any], path: tuple[Any, ...]) -> spaces.Space[Any]:
        if not isinstance(space, spaces.Dict) or (path and path not in self._nested):
            return space
        names = self._new_names(space, path)
        return spaces.Dict(
            {names[name]: self._renamed_space(entry, (*path, name)) for name, entry in space.spaces.items()}
        )


def entries_of(space: spaces.Space[Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield path and space of each entry of a Dict space, nested ones included; yield nothing for other spaces."""
    for name, entry in space.spaces.items() if isinstance(space, spaces.Dict) else ():
        yield (*path, name), entry
        yield from entries_of(entry, (*path, name))


def check_rename(rename: Any) -> dict[str, str]:
    """Validate and return the new names of entries: strings without duplicates or reserved names."""
    pairs = list(rename.items()) if isinstance(rename, Mapping) else None
    if pairs is None or not all(isinstance(new, str) and new for _, new in pairs):
        raise TypeError(f"rename must map old to new names, such as {{reward: last_reward}}, got {rename!r}.")
    names = {str(old): new for old, new in pairs}
    if reserved := sorted((RESERVED | UNNAMEABLE).intersection(names.values())):
        raise ValueError(
            f"rename must not use the reserved names {', '.join(map(repr, reserved))}, got {rename}. Choose others."
        )
    _check_unique([new for old, new in names.items() if "." not in old], rename)
    return names


def new_names(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return the final name of each entry; raise ValueError if an entry is missing or two have the same name."""
    names = list(names)
    if missing := [name for name in rename if name not in names]:
        raise ValueError(
            f"rename must name observed entries, {sorted(names)}, got {dict(rename)}: {missing} are missing."
        )
    renamed = {name: rename.get(name, name) for name in names}
    _check_unique(list(renamed.values()), rename)
    return renamed


def _check_unique(names: list[Any], rename: Mapping[str, str]) -> None:
    if duplicates := sorted({repr(name) for name in names if names.count(name) > 1}):
        raise ValueError(
            f"rename must give each entry a different name, got {', '.join(duplicates)} twice after {dict(rename)}."
        )
