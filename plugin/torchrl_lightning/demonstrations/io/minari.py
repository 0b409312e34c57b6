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
from torchrl_lightning.demonstrations.io.hdf5 import check_declared, opened
from torchrl_lightning.demonstrations.io.safetensors_files import of_episode
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

_METADATA, _DATA = "metadata.json", "main_data.hdf5"
_TOLD = ("environment", "recipe")  # additional metadata of our own data sets
_BARE = {"id", "env_kwargs", "time_limit", "vectorization", "step_timeout", "demonstrations_of"}


def minari_demonstrations(
    dataset: Any, specs: EnvironmentSpecs | None = None, *, limit: int = COLLECTION_BYTES
) -> Iterator[Demonstration]:
    """Read the episodes of a Minari data set, one at a time; needs the extra ``minari``.

    Their metadata contain the ``environment``.

    Args:
        dataset: A ``minari.MinariDataset``, which may be filtered, or the id of a local one; nothing is downloaded.
        specs: The environment's specs. Other observation entries are skipped, and dtypes become the environment's, see
            :func:`read_demonstration`.
        limit: The maximum unpacked size of its episodes in bytes.

    Raises:
        ImportError: Minari is not installed.
        FileNotFoundError: The id is not a local data set.
        TypeError: The object is not a data set, or has a space without a TorchRL spec.
        ValueError: An episode is empty or not finite, or the environment's dtypes cannot represent its values; a link
            in the data set points to another file; or its episodes declare more bytes than ``limit`` or the free
            memory.

    Examples:
        >>> for demonstration in minari_demonstrations("D4RL/door/human-v2"):  # doctest: +SKIP
        ...     print(demonstration.name, demonstration.total_reward)
    """
    minari = _imported()
    if isinstance(dataset, str):
        dataset = _on_this_machine(minari, dataset)
    if not isinstance(dataset, minari.MinariDataset):
        raise TypeError(f"dataset must be a minari.MinariDataset or the id of one, got a {type(dataset).__name__}.")
    _check_files(Path(dataset.spec.data_path), dataset, limit)
    return _episodes(dataset, specs)


def _on_this_machine(minari: Any, name: str) -> Any:
    """Return the local data set of an id; raise FileNotFoundError with similar ids if it does not exist."""
    from minari.storage.datasets_root_dir import get_dataset_path

    folder = get_dataset_path(name) / "data"
    if not folder.exists():
        known = did_you_mean(name, _names_below(get_dataset_path()))
        raise FileNotFoundError(
            f"there is no Minari data set {name!r} on this machine{known} Download it with: minari download {name}"
        )
    _check_metadata(folder)
    try:
        return minari.load_dataset(name)
    except Exception as error:  # Minari and Gymnasium can raise any exception for invalid metadata
        kind = type(error).__name__
        raise ValueError(f"{folder} holds no whole Minari data set: {kind}: {printable(error)}.") from error


def _names_below(root: Path) -> list[str]:
    """Return the ids of the local data sets, without reading their files."""
    folders = (*root.glob("*/data"), *root.glob("*/*/data"))
    return [folder.parent.relative_to(root).as_posix() for folder in folders]


def _check_metadata(folder: Path) -> None:
    """Validate the metadata of a data set before Minari reads them; raise OSError or ValueError.

    Minari would build the named environment if a space is missing, and an index of the declared number of episodes.
    """
    path = folder / _METADATA
    metadata = read_json(path, MINARI_BYTES, MINARI_VALUES)
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(metadata).__name__}.")
    for name in ("observation_space", "action_space"):
        if not isinstance(metadata.get(name), str):
            raise ValueError(
                f"{path} must hold {name} as a text, got {printable(metadata.get(name))}. If you trust whoever made "
                "the data set, load it by minari.load_dataset and give the object."
            )
    if metadata.get("data_format") != "hdf5":
        raise ValueError(
            f"{path} must have data_format 'hdf5', got {printable(metadata.get('data_format'))}. Load the data set by "
            "minari.load_dataset and give the object."
        )
    count = metadata.get("total_episodes")
    with opened(folder / _DATA) as file:
        stored = len(file)
    if type(count) is not int or not 0 <= count <= stored:
        raise ValueError(
            f"{path} must have total_episodes between 0 and {stored}, which {_DATA} holds, got {printable(count)}. "
            "Download the data set again."
        )


def _imported() -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError("Minari's data sets need minari: pip install 'torchrl-lightning[minari]'.") from error
    return minari


def _check_files(folder: Path, dataset: Any, limit: int) -> None:
    """Validate the files of a data set: none is a link, and its episodes are within the limit."""
    names = {f"episode_{number}" for number in dataset.episode_indices}
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path} is a link; a data set holds its own files.")
        if path.suffix == ".hdf5":
            with opened(path) as file:
                entries = [entry for name in sorted(names & set(file)) for entry in _datasets(file[name])]
                size = check_declared(entries, path, limit)
                _check_images(entries, path, limit - size)


def _datasets(group: Any) -> list[Any]:
    """Return the data sets of a group, at any level."""
    from h5py import Dataset

    entries: list[Any] = []
    group.visititems(lambda _, entry: entries.append(entry) if isinstance(entry, Dataset) else None)
    return entries


def _check_images(entries: Iterable[Any], path: Path, limit: int) -> None:
    """Validate the size of compressed images, estimated from the first image of each episode."""
    left = limit
    for entry in entries:
        if entry.dtype.kind != "O" or not entry.shape or not entry.shape[0] or "observations" not in entry.name:
            continue
        first = entry[0]
        if not isinstance(first, np.ndarray) or first.dtype != np.uint8:
            continue  # a string
        from PIL import Image

        with Image.open(io.BytesIO(first.tobytes())) as image:
            left -= entry.shape[0] * image.size[0] * image.size[1] * len(image.getbands())
        if left < 0:
            raise ValueError(f"{path} was refused: its images have more bytes than the limit of {limit}.")


def _episodes(dataset: Any, specs: EnvironmentSpecs | None) -> Iterator[Demonstration]:
    spec, metadata = dataset.spec, dataset.storage.metadata
    known = {} if spec.env_spec is None else {"environment": spec.env_spec.id}
    known |= {name: metadata[name] for name in _TOLD if name in metadata}
    shown, form = None if specs is None else set(specs.keys), ActionFormat.of_space(spec.action_space)
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
        fields = {
            "frame_skip": metadata.get("frame_skip", 1),
            "name": f"{spec.dataset_id}, episode {episode.id}",
            "metadata": known,
            **ended,
        }
        yield of_episode(specs, seen, form.from_environment(np.array(episode.actions)), episode.rewards, **fields)


def write_minari(
    id: str, demonstrations: Iterable[Demonstration], specs: EnvironmentSpecs, recipe: EnvironmentRecipe | None
) -> None:
    """Write demonstrations of one environment as a local Minari data set.

    Images are stored without JPEG compression. The data set contains Gymnasium's spec of the environment if the recipe
    does not modify the environment.

    Args:
        id: The id of the data set.
        demonstrations: The demonstrations, read one at a time.
        specs: The environment's specs.
        recipe: The environment's recipe, if known.

    Raises:
        ImportError: Minari is not installed.
        ValueError: The id exists already or is invalid, or there are no demonstrations; nothing was written.
    """
    minari = _imported()
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.dataset.minari_storage import MinariStorage
    from minari.namespace import create_namespace, list_local_namespaces
    from minari.storage.datasets_root_dir import get_dataset_path

    try:
        namespace, *_ = parse_dataset_id(id)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{id!r} is no name of a data set; it is NAME-v0 or NAMESPACE/NAME-v0.") from error
    path = get_dataset_path(id)
    if path.exists():
        raise ValueError(f"{path} exists; name another version, or delete it by minari.delete_dataset({id!r}).")
    shown = specs.observation
    observation = spec_to_space(shown["observation"] if specs.keys == ["observation"] else shown)
    action, form = action_space_of(specs), specs.action_format

    def episodes() -> Iterator[Any]:
        for demonstration in demonstrations:
            last = np.arange(demonstration.length) == demonstration.length - 1
            terminated, truncated = demonstration.ends
            yield EpisodeBuffer(
                observations=_observed(demonstration, specs),
                actions=form.to_environment(demonstration.steps["action"].numpy()),
                rewards=demonstration.rewards.numpy(),
                terminations=last & terminated,
                truncations=last & truncated,
                infos={},
            )

    with temporary_sibling(get_dataset_path() / path.name, Path.mkdir) as folder:
        storage = MinariStorage.new(folder / "data", observation, action, _spec_of(recipe), jpeg_encoding=False)
        told = {**recipe_metadata(recipe), "frame_skip": 1 if recipe is None else recipe.action_repeat}
        storage.update_metadata({"dataset_id": id, "minari_version": minari.__version__, **told})
        storage.update_episodes(episodes())
        if not storage.total_episodes:
            raise ValueError("there are no whole episodes to write.")
        if namespace is not None and namespace not in list_local_namespaces():
            create_namespace(namespace)
        folder.rename(path)


def _observed(demonstration: Demonstration, specs: EnvironmentSpecs) -> Any:
    """Return the observations before all steps and after the last one, nested like the data set's space."""
    player = DemoPlayback(demonstration, 1, 0)
    if specs.keys == ["observation"]:
        return player.whole("observation")
    seen: dict[str, Any] = {}
    for key in specs.keys:
        *above, name = path_of(key)
        reduce(lambda level, part: level.setdefault(part, {}), above, seen)[name] = player.whole(key)
    return seen


def _spec_of(recipe: EnvironmentRecipe | None) -> EnvSpec | None:
    if recipe is None or not isinstance(recipe.id, str) or not set(recipe.settings()) <= _BARE:
        return None
    spec = copy.deepcopy(gym.spec(recipe.id))
    spec.kwargs.update(recipe.env_kwargs)
    spec.max_episode_steps = recipe.time_limit or spec.max_episode_steps
    return spec
