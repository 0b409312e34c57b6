"""Rename entries of a Dict observation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import gymnasium as gym
from gymnasium import spaces

from torchrl_lightning._core.keys import RESERVED, UNNAMEABLE, joined

WITHIN = (
    "Rename it within the environment, as torchrl.envs.GymWrapper(EnvironmentRecipe(id, rename=...)()) does for one of "
    "Gymnasium's, or take that without TorchRL's wrapper."
)


class RenameObservation(gym.ObservationWrapper[Any, Any, Any]):
    """Rename entries of a Dict observation.

    Args:
        env: an environment with a Dict observation.
        names: the old and new names. An entry of a nested Dict is named by its path, such as ``arm.position``, unless
            an entry has this name itself. The new name replaces only the last part of the path. Write an old name that
            is not a string as a string.

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
            raise ValueError(f"rename={dict(names)} names entries of a Dict, but the environment observes {space}.")
        paths: dict[str, tuple[Any, ...]] = {}
        for path in sorted((path for path, _ in entries_of(space)), key=len):
            paths.setdefault(joined(path), path)
        if missing := [name for name in names if name not in paths]:
            raise ValueError(
                f"rename={dict(names)} names {missing}, which are not there; the environment observes {sorted(paths)}."
            )
        self._names = {paths[old]: new for old, new in names.items()}
        self._nested = {path[:end] for path in self._names for end in range(1, len(path))}  # contain renamed entries
        self._given = names
        self._root = self._new_names(space, ())
        self.observation_space = self._renamed_space(space, ())

    def observation(self, observation: Any) -> Any:
        """Return the same entries under their new names."""
        if self._nested:
            return self._renamed(observation, ())
        return {new: observation[name] for name, new in self._root.items()}

    def _renamed(self, shown: Any, path: tuple[Any, ...]) -> Any:
        return {
            self._names.get((*path, name), name): self._renamed(value, (*path, name))
            if (*path, name) in self._nested
            else value
            for name, value in shown.items()
        }

    def _new_names(self, space: spaces.Dict, path: tuple[Any, ...]) -> dict[Any, Any]:
        names = {name: self._names.get((*path, name), name) for name in space.spaces}
        _refuse_twice(list(names.values()), self._given)
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
        raise TypeError(f"rename={rename!r} must give entries other names, such as {{reward: last_reward}}.")
    names = {str(old): new for old, new in pairs}
    if taken := sorted((RESERVED | UNNAMEABLE).intersection(names.values())):
        raise ValueError(
            f"rename={rename} takes {', '.join(map(repr, taken))}, which a run or TorchRL keeps for itself; take "
            "another."
        )
    _refuse_twice([new for old, new in names.items() if "." not in old], rename)
    return names


def new_names(shown: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return the final name of each entry; raise ValueError if an entry is missing or two have the same name."""
    shown = list(shown)
    if missing := [name for name in rename if name not in shown]:
        raise ValueError(
            f"rename={dict(rename)} names {missing}, which are not there; the environment observes {sorted(shown)}."
        )
    names = {name: rename.get(name, name) for name in shown}
    _refuse_twice(list(names.values()), rename)
    return names


def _refuse_twice(names: list[Any], rename: Mapping[str, str]) -> None:
    if twice := sorted({repr(name) for name in names if names.count(name) > 1}):
        raise ValueError(
            f"rename={dict(rename)} gives two entries the name {', '.join(twice)}; give each one of its own."
        )
