"""Read Minari data sets as demonstrations, and write demonstrations as Minari data sets."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from torchrl_lightning._core.file_limits import COLLECTION_BYTES, MINARI_BYTES, MINARI_VALUES
from torchrl_lightning._core.files import temporary_sibling
from torchrl_lightning._core.suggestions import did_you_mean
from torchrl_lightning._core.tree import path_of
from torchrl_lightning._core.untrusted import printable, read_json
from torchrl_lightning.demonstrations.io.hdf5 import check_declared_size, open_hdf5
from torchrl_lightning.demonstrations.io.safetensors_files import demonstration_from_arrays
from torchrl_lightning.demonstrations.replay.playback import DemoPlayback
from torchrl_lightning.demonstrations.task_check import recipe_metadata
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments.actions import ActionFormat
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.environments.specs import (
    EnvironmentSpecs,
    action_space_of,
    observation_leaves,
    space_to_spec,
    spec_to_space,
)

_METADATA_FILE, _DATA_FILE = "metadata.json", "main_data.hdf5"
_EXTRA_METADATA = ("environment", "recipe")  # additional metadata of our own data sets
_SPEC_SETTINGS = {"id", "env_kwargs", "time_limit", "vectorization", "step_timeout", "demonstrations_of"}


def minari_demonstrations(
    dataset: Any, specs: EnvironmentSpecs | None = None, *, limit: int = COLLECTION_BYTES
) -> Iterator[Demonstration]:
    """Read the episodes of a Minari data set, one at a time; requires the extra ``minari``.

    The metadata of each demonstration contain the ``environment``.

    Args:
        dataset: A ``minari.MinariDataset``, which may be filtered, or the id of a local data set. Nothing is
            downloaded.
        specs: The environment's specs. Observation entries that the specs lack are skipped. Entries get the
            environment's dtypes, see :func:`read_demonstration`.
        limit: The maximum unpacked size of the data set's episodes in bytes.

    Raises:
        ImportError: Minari is not installed.
        FileNotFoundError: A local data set with this id does not exist.
        TypeError: The object is not a data set, or TorchRL does not have a spec for one of its spaces.
        ValueError: An episode is empty, has values that are not finite, or has values that the environment's dtypes
            cannot represent. Or a link in the data set points to another file, or the episodes declare more bytes than
            ``limit`` or the free memory.

    Examples:
        >>> for demonstration in minari_demonstrations("D4RL/door/human-v2"):  # doctest: +SKIP
        ...     print(demonstration.name, demonstration.total_reward)
    """
    minari = _import_minari()
    if isinstance(dataset, str):
        dataset = _load_local(minari, dataset)
    if not isinstance(dataset, minari.MinariDataset):
        raise TypeError(f"dataset must be a minari.MinariDataset or the id of one, got a {type(dataset).__name__}.")
    _check_files(Path(dataset.spec.data_path), dataset, limit)
    return _episodes(dataset, specs)


def _load_local(minari: Any, name: str) -> Any:
    """Return the local data set of an id. If it does not exist, raise FileNotFoundError with similar ids."""
    from minari.storage.datasets_root_dir import get_dataset_path

    folder = get_dataset_path(name) / "data"
    if not folder.exists():
        suggestion = did_you_mean(name, _dataset_ids(get_dataset_path()))
        raise FileNotFoundError(
            f"the Minari data set {name!r} does not exist in {folder.parent}{suggestion} Download it with: "
            f"minari download {name}, or set MINARI_DATASETS_PATH to its folder."
        )
    _check_metadata(folder)
    try:
        return minari.load_dataset(name)
    except Exception as error:  # Minari and Gymnasium can raise any exception for invalid metadata
        error_type = type(error).__name__
        raise ValueError(f"{folder} is not a complete Minari data set: {error_type}: {printable(error)}.") from error


def _dataset_ids(root: Path) -> list[str]:
    """Return the ids of the local data sets, without reading their files."""
    folders = (*root.glob("*/data"), *root.glob("*/*/data"))
    return [folder.parent.relative_to(root).as_posix() for folder in folders]


def _check_metadata(folder: Path) -> None:
    """Validate the metadata of a data set before Minari reads the metadata; raise OSError or ValueError.

    If a space were missing, Minari would build the declared environment. Minari also allocates an index for the
    declared number of episodes.
    """
    path = folder / _METADATA_FILE
    metadata = read_json(path, MINARI_BYTES, MINARI_VALUES)
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} must contain a JSON object, got a {type(metadata).__name__}.")
    for name in ("observation_space", "action_space"):
        if not isinstance(metadata.get(name), str):
            raise ValueError(
                f"{path} must contain {name} as a string, got {printable(metadata.get(name))}. If you trust the "
                "author of the data set, load it with minari.load_dataset() and pass the object."
            )
    if metadata.get("data_format") != "hdf5":
        raise ValueError(
            f"{path} must have data_format 'hdf5', got {printable(metadata.get('data_format'))}. Load the data set "
            "with minari.load_dataset() and pass the object."
        )
    num_episodes = metadata.get("total_episodes")
    with open_hdf5(folder / _DATA_FILE) as file:
        num_stored = len(file)
    if type(num_episodes) is not int or not 0 <= num_episodes <= num_stored:
        raise ValueError(
            f"{path} must have total_episodes between 0 and {num_stored}, the number in {_DATA_FILE}, got "
            f"{printable(num_episodes)}. "
            "Download the data set again."
        )


def _import_minari() -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError("Minari's data sets need minari: pip install 'torchrl-lightning[minari]'.") from error
    return minari


def _check_files(folder: Path, dataset: Any, limit: int) -> None:
    """Validate that the files of a data set are not links, and that the episodes are within the size limit."""
    names = {f"episode_{number}" for number in dataset.episode_indices}
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path} is a link. The folder of a data set must contain all its files.")
        if path.suffix == ".hdf5":
            with open_hdf5(path) as file:
                entries = [entry for name in sorted(names & set(file)) for entry in _datasets(file[name])]
                size = check_declared_size(entries, path, limit)
                _check_images(entries, path, limit - size)


def _datasets(group: Any) -> list[Any]:
    """Return the data sets of a group, at any level."""
    from h5py import Dataset

    entries: list[Any] = []
    group.visititems(lambda _, entry: entries.append(entry) if isinstance(entry, Dataset) else None)
    return entries


def _check_images(entries: Iterable[Any], path: Path, limit: int) -> None:
    """Validate the unpacked size of compressed images, estimated from the first image of each episode."""
    remaining = limit
    for entry in entries:
        if entry.dtype.kind != "O" or not entry.shape or not entry.shape[0] or "observations" not in entry.name:
            continue
        image_bytes = entry[0]
        if not isinstance(image_bytes, np.ndarray) or image_bytes.dtype != np.uint8:
            continue  # the entry contains strings
        from PIL import Image

        with Image.open(io.BytesIO(image_bytes.tobytes())) as image:
            remaining -= entry.shape[0] * image.size[0] * image.size[1] * len(image.getbands())
        if remaining < 0:
            raise ValueError(f"{path} was refused: its images have more bytes than the limit of {limit}.")


def _episodes(dataset: Any, specs: EnvironmentSpecs | None) -> Iterator[Demonstration]:
    spec, metadata = dataset.spec, dataset.storage.metadata
    known_metadata = {} if spec.env_spec is None else {"environment": spec.env_spec.id}
    known_metadata |= {name: metadata[name] for name in _EXTRA_METADATA if name in metadata}
    keys, action_format = None if specs is None else set(specs.keys), ActionFormat.from_space(spec.action_space)
    leaves = [
        (path, key, space_to_spec(space, str(key)).shape)
        for path, key, space in observation_leaves(spec.observation_space)
        if keys is None or key in keys
    ]
    for episode in dataset.iterate_episodes():
        observations = {
            key: np.array(reduce(getitem, path, episode.observations)).reshape(-1, *shape)
            for path, key, shape in leaves
        }
        end_flags = {"terminated": bool(np.any(episode.terminations)), "truncated": bool(np.any(episode.truncations))}
        fields = {
            "frame_skip": metadata.get("frame_skip", 1),
            "name": f"{spec.dataset_id}, episode {episode.id}",
            "metadata": known_metadata,
            **end_flags,
        }
        yield demonstration_from_arrays(
            specs, observations, action_format.from_environment(np.array(episode.actions)), episode.rewards, **fields
        )


def write_minari(
    id: str, demonstrations: Iterable[Demonstration], specs: EnvironmentSpecs, recipe: EnvironmentRecipe | None
) -> None:
    """Write demonstrations of one environment as a local Minari data set.

    Images are stored without JPEG compression. If the recipe does not modify the environment, the data set also
    contains Gymnasium's spec of the environment.

    Args:
        id: The id of the data set.
        demonstrations: The demonstrations. They are read one at a time.
        specs: The environment's specs.
        recipe: The environment's recipe, if known.

    Raises:
        ImportError: Minari is not installed.
        ValueError: The id exists already or is invalid, or ``demonstrations`` is empty. Nothing was written.
    """
    minari = _import_minari()
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.dataset.minari_storage import MinariStorage
    from minari.namespace import create_namespace, list_local_namespaces
    from minari.storage.datasets_root_dir import get_dataset_path

    try:
        namespace, *_ = parse_dataset_id(id)
    except (TypeError, ValueError) as error:
        raise ValueError(f"The id of a data set must be NAME-v0 or NAMESPACE/NAME-v0, got {id!r}.") from error
    path = get_dataset_path(id)
    if path.exists():
        raise ValueError(f"{path} exists. Name another version, or delete it with minari.delete_dataset({id!r}).")
    observation_spec = specs.observation
    observation_space = spec_to_space(
        observation_spec["observation"] if specs.keys == ["observation"] else observation_spec
    )
    action_space, action_format = action_space_of(specs), specs.action_format

    def episodes() -> Iterator[Any]:
        for demonstration in demonstrations:
            is_last = np.arange(demonstration.length) == demonstration.length - 1
            terminated, truncated = demonstration.ends
            yield EpisodeBuffer(
                observations=_nested_observations(demonstration, specs),
                actions=action_format.to_environment(demonstration.steps["action"].numpy()),
                rewards=demonstration.rewards.numpy(),
                terminations=is_last & terminated,
                truncations=is_last & truncated,
                infos={},
            )

    with temporary_sibling(get_dataset_path() / path.name, Path.mkdir) as folder:
        storage = MinariStorage.new(
            folder / "data", observation_space, action_space, _gym_spec(recipe), jpeg_encoding=False
        )
        extra_metadata = {**recipe_metadata(recipe), "frame_skip": 1 if recipe is None else recipe.action_repeat}
        storage.update_metadata({"dataset_id": id, "minari_version": minari.__version__, **extra_metadata})
        storage.update_episodes(episodes())
        if not storage.total_episodes:
            raise ValueError("the source contains no complete episode.")
        if namespace is not None and namespace not in list_local_namespaces():
            create_namespace(namespace)
        folder.rename(path)


def _nested_observations(demonstration: Demonstration, specs: EnvironmentSpecs) -> Any:
    """Return the observations before all steps and after the last step, nested like the data set's space."""
    playback = DemoPlayback(demonstration, 1, 0)
    if specs.keys == ["observation"]:
        return playback.all_observations("observation")
    observations: dict[str, Any] = {}
    for key in specs.keys:
        *parents, name = path_of(key)
        reduce(lambda level, part: level.setdefault(part, {}), parents, observations)[name] = playback.all_observations(
            key
        )
    return observations


def _gym_spec(recipe: EnvironmentRecipe | None) -> EnvSpec | None:
    if recipe is None or not isinstance(recipe.id, str) or not set(recipe.settings()) <= _SPEC_SETTINGS:
        return None
    spec = copy.deepcopy(gym.spec(recipe.id))
    spec.kwargs.update(recipe.env_kwargs)
    spec.max_episode_steps = recipe.time_limit or spec.max_episode_steps
    return spec
