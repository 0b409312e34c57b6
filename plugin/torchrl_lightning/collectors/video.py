"""Record one episode of a policy as a video."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium
import numpy as np
import torch

from torchrl_lightning._core.errors import UserError
from torchrl_lightning._core.files import replaced_files
from torchrl_lightning.collectors.episodes import play_episodes
from torchrl_lightning.environments.policy_calls import Policy
from torchrl_lightning.environments.seeds import IsolatedRng
from torchrl_lightning.environments.workers.threads import close_environment

_REQUIREMENT = "a video needs an environment that renders images with render_mode='rgb_array'"


def check_renderable(env: Any) -> None:
    """Check that an environment can be recorded: build, reset and render it.

    Args:
        env: An id or a factory, as for :func:`record_video`.

    Raises:
        UserError: A package is missing, or the environment renders no image.

    Examples:
        >>> from torchrl_lightning import make_vector_env
        >>> check_renderable(make_vector_env("CartPole-v1", 1))
        Traceback (most recent call last):
            ...
        torchrl_lightning._core.errors.UserError: eval_env must be an id or a factory to record a video, got a ready \
PartialStepVectorEnv.
    """
    if not isinstance(env, str) and not callable(env):
        raise UserError(f"eval_env must be an id or a factory to record a video, got a ready {type(env).__name__}.")
    try:
        import moviepy  # noqa: F401
    except ImportError as error:
        raise UserError(
            "a video needs moviepy. Install it by pip install 'torchrl-lightning[video]', or remove the video."
        ) from error
    image = None
    try:
        with IsolatedRng(None, torch.device("cpu")), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this function raises an error instead of Gymnasium's warnings
            environment = _rendering_factory(env)()
            try:
                if isinstance(environment, gymnasium.Env):
                    environment.reset(seed=0)
                    image = environment.render()
            finally:
                close_environment(environment)
    except Exception as error:  # environments and rendering libraries raise any type
        raise UserError(f"{_REQUIREMENT}, but this failed: {' '.join(str(error).split())}") from error
    if not isinstance(environment, gymnasium.Env):
        raise UserError(
            f"a video needs a Gymnasium environment, got TorchRL's {type(environment).__name__}. Remove the video."
        )
    if not isinstance(image, np.ndarray):
        raise UserError(f"{_REQUIREMENT}, got {type(image).__name__}. Remove the video.")


def record_video(
    env: Any, policy: Policy, path: Path, *, seed: int, deterministic: bool = True, clip_actions: bool = False
) -> None:
    """Play one episode and write it atomically as a video; its frames stay in memory until the episode ends.

    Args:
        env: An id, or a factory of a Gymnasium environment that takes ``render_mode``.
        policy: The policy to record.
        path: The video file; an existing file is replaced, and its folder is created.
        seed: Base seed of environment and policy.
        deterministic: Take the mode of the policy's distribution; False draws a sample.
        clip_actions: See :func:`~torchrl_lightning.play_episodes`.
    """
    make = _rendering_factory(env)
    with TemporaryDirectory() as folder:

        def make_recorder() -> Any:
            return gymnasium.wrappers.RecordVideo(make(), f"{folder}/made", episode_trigger=lambda number: number == 0)

        options: dict[str, Any] = {"seed": seed, "deterministic": deterministic, "clip_actions": clip_actions}
        play_episodes(make_recorder, policy, 1, num_envs=1, **options)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_files(path) as (file,), next(Path(folder).glob("made/*.mp4")).open("rb") as video:
            shutil.copyfileobj(video, file)


def _rendering_factory(env: Any) -> Callable[[], Any]:
    """Return a factory of an environment with ``render_mode="rgb_array"``."""
    return lambda: (
        gymnasium.make(env, render_mode="rgb_array") if isinstance(env, str) else env(render_mode="rgb_array")
    )
