"""The environments of collection and evaluation: build them when needed, compare and close them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from gymnasium.vector import VectorEnv
from torchrl.envs import EnvBase

from torchrl_lightning._core.memory import check_free_memory
from torchrl_lightning._core.protocols import CollectorApi
from torchrl_lightning.datamodules._run.evaluation import EnvironmentView, check_evaluation, view_of
from torchrl_lightning.environments import (
    EnvironmentRecipe,
    EnvironmentSpecs,
    close_environment,
    environment_specs,
    make_environment,
)
from torchrl_lightning.environments.actions import check_clipping
from torchrl_lightning.environments.backends.next_step import with_reset_tracking
from torchrl_lightning.environments.backends.vector_env import vectorization_of
from torchrl_lightning.environments.goals import EnvironmentGoals
from torchrl_lightning.environments.policy_calls import clips_actions

logger = logging.getLogger(__name__)


class RunEnvironments:
    """Build and close the environment of collection, and check that evaluation uses the same environment.

    Args:
        env: an id, a factory of one environment, or a ready environment.
        num_envs: number of parallel environments.
        eval_env: the environment of evaluation, in a form that ``env`` accepts; a new ``env`` if None.
        drops_reset_rows: accept a ready vector environment in mode ``NEXT_STEP``.
        clip_actions: whether collection, evaluation and policies in checkpoints clip actions to their Box. None if this
            is unknown before the collector is built.

    Raises:
        ValueError: ``env`` is ready and ``eval_env`` is None, but evaluation needs a second environment.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int,
        eval_env: Any,
        drops_reset_rows: bool = False,
        clip_actions: bool | None = False,
    ) -> None:
        if is_ready(env) and eval_env is None:
            raise ValueError(
                f"eval_env must be an id or a factory if env is a ready environment ({type(env).__name__}), got None: "
                "a ready environment cannot be built again for evaluation. Pass eval_env=, or pass env= as an id or a "
                "factory."
            )
        self.env, self.num_envs = with_reset_tracking(env) if drops_reset_rows else env, num_envs
        self.eval_env = env if eval_env is None else eval_env
        self._eval_env_given = eval_env is not None
        self._knows_clipping, self._clips = clip_actions is not None, bool(clip_actions)
        self._collection_env: VectorEnv | EnvBase | None = None
        self.goals = EnvironmentGoals(self.eval_env if is_ready(env) else env)
        """The goal functions of the environment, read from a separate copy."""

    @property
    def specs(self) -> EnvironmentSpecs:
        """Specs of one environment, the number of environments, and whether actions are clipped."""
        return self._specs.with_clipping(self._clips)

    @cached_property
    def _specs(self) -> EnvironmentSpecs:
        with self._inspected_env() as env:
            stack = self.env.frame_stack if isinstance(self.env, EnvironmentRecipe) else None
            return replace(environment_specs(env), num_envs=self.num_envs, frame_stack=stack)

    def clips(self, policy: object) -> bool:
        """Return whether the actions of a policy are clipped."""
        return self._clips or clips_actions(policy)

    def check_clipping(self) -> None:
        """Validate that actions have a Box if collection clips them; raise ValueError if not."""
        check_clipping(self.specs.action_format, self.specs.action)

    def adopt_clipping(self, collector: CollectorApi) -> None:
        """Use ``clip_actions`` of the built collector if its factory does not have a parameter ``clip_actions``."""
        if collector.clip_actions is not None and not self._knows_clipping:
            self._clips = collector.clip_actions

    def restore_clipping(self, state: Mapping[str, Any], *, evaluates: bool) -> None:
        """Clip actions like the checkpoint's run, for an evaluation or until a collector is built.

        Args:
            state: The specs of the checkpoint.
            evaluates: True for an evaluation without collection. Otherwise a known setting of the collector has
                priority.
        """
        if evaluates or not self._knows_clipping:
            self._clips |= bool(state.get("action_format", {}).get("clip", False))

    def check_memory(self, frames: int) -> None:
        """Raise an error if a rollout of this number of frames does not fit into memory."""
        entries = [*self.specs.observation.values(True, True)] * 2 + [self.specs.action]  # before and after each step
        check_free_memory(
            frames * sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries),
            f"A rollout of {frames} frames",
            "lower frames_per_batch, or use smaller observations",
        )

    def get_or_build(self) -> VectorEnv | EnvBase:
        """Return the environment of collection; build it at the first call."""
        if self._collection_env is None:
            self._collection_env = make_environment(self.env, self.num_envs)
        return self._collection_env

    def check_evaluation(self, collection: EnvironmentView | None = None) -> None:
        """Check that evaluation and collection use the same environment.

        If the wrappers differ in an allowed way, a warning is logged.

        Args:
            collection: the view of the environment of a user's collector; None for ``env``.

        Raises:
            ValueError: The message names each difference.
        """
        if collection is None:
            if not self._eval_env_given and vectorization_of(self.env) != "envpool":
                return
            with self._inspected_env() as env:
                collection = view_of(env)
        env = make_environment(self.eval_env, None, vectorization="sync")
        try:
            difference = check_evaluation(collection, view_of(env), is_user_env=self._eval_env_given)
        finally:
            if not is_ready(self.eval_env):
                close_environment(env)
        if difference is not None:
            logger.warning("eval_env differs from the environment of collection: %s.", difference)

    @contextmanager
    def _inspected_env(self) -> Iterator[VectorEnv | EnvBase]:
        """Yield the environment for inspection, or, if it has worker processes, a copy without worker processes."""
        if vectorization_of(self.env) != "async":
            yield self.get_or_build()
        else:
            env = make_environment(self.env, 1, vectorization="sync", own_number=True)
            try:
                yield env
            finally:
                close_environment(env)

    def __getstate__(self) -> dict[str, Any]:
        # A copy builds its own environment, because processes and simulators cannot be copied.
        return {**vars(self), "_collection_env": self._collection_env if self._collection_env is self.env else None}

    def close(self) -> None:
        """Close the environments that this object has built; the user closes a ready environment."""
        self.goals.close()
        env, self._collection_env = self._collection_env, None
        if env is not None and env is not self.env:
            close_environment(env)


def is_ready(env: object) -> bool:
    """Return whether ``env`` is a ready environment, not an id or a factory."""
    return isinstance(env, VectorEnv | EnvBase)
