"""Episodes of a Minari data set as demonstrations."""

from __future__ import annotations

__all__ = ["minari_demonstrations"]

from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_lightning.demonstrations.files import of_episode
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments.specs import EnvironmentSpecs, first_action, observation_leaves, space_to_spec


def minari_demonstrations(dataset: Any, specs: EnvironmentSpecs | None = None) -> Iterator[Demonstration]:
    """Read the episodes of a Minari data set, one at a time; needs the extra ``minari``.

    Their metadata name the ``environment``.

    Args:
        dataset: A ``minari.MinariDataset``, of which a filtered one gives a part, or the id of one on this machine;
            nothing is downloaded.
        specs: What the environment shows and takes: other entries of the observation are left out, and dtypes become
            those of the environment, as :func:`read_demonstration` has it.

    Raises:
        ImportError: Minari is not installed.
        FileNotFoundError: There is no data set of this id on this machine.
        TypeError: It is another object, or has a space without a TorchRL spec.
        ValueError: An episode is empty or not finite, or does not keep its values in the environment's dtypes; or a
            link in the data set leads to another file.

    Example:
        >>> for demonstration in minari_demonstrations("D4RL/door/human-v2"):  # doctest: +SKIP
        ...     print(demonstration.name, demonstration.total_reward)
    """
    try:
        import minari
    except ImportError as error:
        raise ImportError("Minari's data sets need minari: pip install 'torchrl-lightning[minari]'.") from error
    if isinstance(dataset, str):
        dataset = minari.load_dataset(dataset)
    if not isinstance(dataset, minari.MinariDataset):
        raise TypeError(f"dataset must be a minari.MinariDataset or the id of one, got a {type(dataset).__name__}.")
    _check_links(Path(dataset.spec.data_path))
    return _episodes(dataset, specs)


def _check_links(folder: Path) -> None:
    """Refuse a data set from which a link leads to other files, by a ValueError."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path} is a link; a data set holds its own files.")
        if path.suffix != ".hdf5":
            continue
        import h5py

        with h5py.File(path, "r") as file:

            def led_away(name: bytes, link: Any, file: Any = file) -> str | None:
                part = file[name] if link.type == h5py.h5l.TYPE_HARD else None
                if part is None or (isinstance(part, h5py.Dataset) and (part.is_virtual or part.external)):
                    return name.decode(errors="replace")  # which ends the visit
                return None

            if (name := file.id.links.visit(led_away, info=True)) is not None:
                raise ValueError(f"{path} was refused: {name!r} in it is a link, or kept in another file.")


def _episodes(dataset: Any, specs: EnvironmentSpecs | None) -> Iterator[Demonstration]:
    spec = dataset.spec
    environment = {} if spec.env_spec is None else {"environment": spec.env_spec.id}
    shown, start = None if specs is None else set(specs.keys), first_action(spec.action_space)
    leaves = [
        (path, key, space_to_spec(space, str(key)).shape)
        for path, key, space in observation_leaves(spec.observation_space)
        if shown is None or key in shown
    ]
    for episode in dataset.iterate_episodes():
        seen = {
            key: np.array(reduce(getitem, path, episode.observations)).reshape(-1, *shape)
            for path, key, shape in leaves
        }
        ended = {"terminated": bool(np.any(episode.terminations)), "truncated": bool(np.any(episode.truncations))}
        fields = {"name": f"{spec.dataset_id}, episode {episode.id}", "metadata": environment, **ended}
        actions = np.array(episode.actions)
        yield of_episode(specs, seen, actions - start if start else actions, episode.rewards, **fields)
