"""A data set of demonstrations, and its steps as a replay buffer holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_lightning.demonstrations._faults import DemonstrationFault
from torchrl_lightning.demonstrations.directory import DemonstrationDirectory
from torchrl_lightning.demonstrations.files import SUFFIXES, read_demonstration
from torchrl_lightning.demonstrations.minari import minari_demonstrations
from torchrl_lightning.demonstrations.players import Player
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.entries import path_of
from torchrl_lightning.environments.recipe import EnvironmentRecipe
from torchrl_lightning.environments.specs import EnvironmentSpecs
from torchrl_lightning.keys import ACTION, REWARD

MINARI = "minari:"


def read_dataset(
    dataset: Any, specs: EnvironmentSpecs, frame_skip: int = 1, recipe: EnvironmentRecipe | None = None
) -> list[Demonstration]:
    """Read the demonstrations of a data set.

    Args:
        dataset: A directory, of which a file that cannot be used is left out, by a warning; one file; ``"minari:ID"``,
            a Minari data set on this machine; or a ``minari.MinariDataset``.
        specs: What the environment shows and takes, without a frame stack.
        frame_skip: How many frames the environment takes in one step.
        recipe: That of the environment, if known.

    Raises:
        DemonstrationFault: There is no such data set, it holds no steps, or those of another environment.

    Example:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> read_dataset("nowhere", environment_specs(make_vector_env("CartPole-v1", 1)))
        Traceback (most recent call last):
            ...
        torchrl_lightning.demonstrations._faults.DemonstrationFault: dataset=nowhere: nowhere does not exist; \
name a directory that holds demonstrations, or a .npz or .safetensors file.
    """
    path = dataset_path(dataset)
    try:
        if path is not None:
            if path.is_dir() or path.suffix not in SUFFIXES:
                return list(DemonstrationDirectory(path, specs, frame_skip, recipe=recipe).initial)
            found = [read_demonstration(path, specs)]
        else:
            found = list(
                minari_demonstrations(dataset.removeprefix(MINARI) if isinstance(dataset, str) else dataset, specs)
            )
        for demonstration in found:
            demonstration.fits(specs, frame_skip, recipe)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise DemonstrationFault(f"dataset={dataset}: {error}") from error
    if not found:
        raise DemonstrationFault(f"dataset={dataset} holds no episodes.")
    return found


def dataset_path(dataset: Any) -> Path | None:
    """Return the path that a data set is, of a directory or of a file; None where it is one of Minari's.

    Raises:
        DemonstrationFault: Nothing is there.
    """
    if not isinstance(dataset, str | Path) or str(dataset).startswith(MINARI):
        return None
    path = Path(dataset)
    if not path.exists():
        raise DemonstrationFault(
            f"dataset={dataset}: {path} does not exist; name a directory that holds demonstrations, or a "
            f"{' or '.join(SUFFIXES)} file."
        )
    return path


def transitions(demonstration: Demonstration, specs: EnvironmentSpecs) -> TensorDict:
    """Return the steps of a demonstration, ``[T]``, as a collector delivers those of an environment.

    It ends as :attr:`Demonstration.ends` says. Where the last observation is not known, the one before it stands in its
    place.

    Args:
        demonstration: One that fits the environment.
        specs: What the environment shows and takes; images become its frame stacks, as those of an
            :class:`~torchrl_lightning.EnvironmentRecipe`.

    Example:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> steps = TensorDict({"observation": torch.arange(8.0).view(2, 4), "action": torch.tensor([0, 1])}, [2])
        >>> steps["next", "reward"] = torch.ones(2, 1)
        >>> rows = transitions(Demonstration(steps), environment_specs(make_vector_env("CartPole-v1", 1)))
        >>> rows["next", "observation"][:, 0].tolist(), rows["next", "terminated"].flatten().tolist()
        ([4.0, 4.0], [False, True])
    """
    steps, length = demonstration.steps, demonstration.length
    first, ended, never = torch.zeros(3, length, 1, dtype=torch.bool)
    first[0] = ended[-1] = True
    terminated, truncated = demonstration.ends
    following = {
        "reward": steps.get(REWARD),
        "done": ended,
        "terminated": ended if terminated else never,
        "truncated": ended if truncated else never,
        "is_init": never,
    }
    rows = TensorDict({ACTION: steps.get(ACTION), "is_init": first, "next": following}, [length])
    for key in demonstration.observation_keys:
        frames = specs.observation[key].shape.numel() // max(1, steps.get(key)[0].numel())
        seen = torch.from_numpy(Player(demonstration, frames, 0).whole(key))
        rows[key], rows["next", *path_of(key)] = seen[:-1], seen[1:]
    return rows
