"""What both collectors are made of: an environment's source, sizes, counters and the specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from gymnasium.vector import VectorEnv
from tensordict import TensorDict

from torchrl_lightning.environments.policies import Policy, check_policy, load_weights
from torchrl_lightning.environments.seeds import check_seed
from torchrl_lightning.environments.specs import EnvironmentSpecs, environment_specs
from torchrl_lightning.environments.vector_env import make_vector_env
from torchrl_lightning.ranges import integer
from torchrl_lightning.state import Check, check_state, flag, same, whole

_STATE_VERSION = 1


class CollectorBase:
    """A collector of ``frames_per_batch`` frames at a time, up to ``total_frames``; its subclasses collect them."""

    _sizes: tuple[str, ...] = ("num_envs", "frames_per_batch")  # on which two collectors of a state must agree
    _counters: tuple[str, ...] = ("frames", "_batches", "seed")  # that a state restores

    def __init__(
        self,
        source: Any,
        policy: Policy | None,
        num_envs: int,
        frames_per_batch: int,
        total_frames: int,
        seed: int | None,
        env_args: dict[str, Any],
    ) -> None:
        check_policy(policy)
        self.steps, left = divmod(integer(frames_per_batch, "frames_per_batch"), integer(num_envs, "num_envs"))
        if left:
            nearest = max(1, round(frames_per_batch / num_envs)) * num_envs
            raise ValueError(
                f"frames_per_batch={frames_per_batch} is not a multiple of num_envs={num_envs}; "
                f"the nearest is {nearest}."
            )
        if total_frames < 1 and total_frames != -1:
            raise ValueError(f"total_frames must be positive, or -1 for no end, got {total_frames}.")
        self._env_source, self._env_args = source, env_args
        self.policy, self.num_envs = policy, num_envs
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.seed = check_seed(seed)
        self.closed = False
        self.frames = 0
        self._batches = 0  # since the collector was seeded
        self._specs: EnvironmentSpecs | None = None

    @property
    def specs(self) -> EnvironmentSpecs:
        """The specs of the environments (of one worker); reading them starts no process."""
        if self._specs is None:
            if isinstance(self._env_source, VectorEnv):
                self._specs = environment_specs(self._env_source)
            else:
                args = {**self._env_args, "vectorization": "sync"}
                with closing(make_vector_env(self._env_source, 1, **args)) as env:
                    self._specs = replace(environment_specs(env), num_envs=self.num_envs)
        return self._specs

    def __len__(self) -> int:
        """Return the number of batches of a whole run; a RuntimeError if the collector never stops."""
        if self.total_frames < 0:
            raise RuntimeError("A collector with total_frames=-1 never stops, so it has no length.")
        return -(self.total_frames // -self.frames_per_batch)

    def __iter__(self) -> Iterator[TensorDict]:
        yield from self.iterator()

    def iterator(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are collected; an error or Ctrl-C shuts the collector down."""
        yield from self._until_spent(self.rollout)

    def _until_spent(self, collect: Callable[[], TensorDict]) -> Iterator[TensorDict]:
        while self.total_frames < 0 or self.frames < self.total_frames:
            try:
                batch = collect()
            except BaseException:
                self.shutdown(raise_on_error=False)
                raise
            yield batch

    def rollout(self) -> TensorDict:
        """Return the next batch, even beyond ``total_frames``."""
        raise NotImplementedError

    def reset(self) -> None:
        """Begin the next batch with a reset of every environment."""
        raise NotImplementedError

    def update_policy_weights_(self, policy_or_weights: object = None) -> None:
        """Copy weights into the policy; without an argument do nothing, because the policy itself acts.

        Args:
            policy_or_weights: A module, a state dict, or a TensorDict of parameters.
        """
        load_weights(self.policy, policy_or_weights)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close what is open; may be called any number of times. The arguments are those of TorchRL's collectors."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the seed: scalars only. Saving the policy's weights is up to the learner."""
        names = (*self._sizes, *self._counters)
        return {"schema_version": _STATE_VERSION, **{name.lstrip("_"): getattr(self, name) for name in names}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on behind the batch after which a ``state_dict`` was taken, with a reset (of all workers).

        Raises:
            ValueError: The state comes from a collector of other sizes, or from another version of this class.
        """
        check_state(state_dict, self._schema(), "collector", _STATE_VERSION)
        for name in self._counters:
            setattr(self, name, state_dict[name.lstrip("_")])
        self.reset()

    def _schema(self) -> dict[str, Check]:
        schema = {name: same(getattr(self, name), "collector") for name in self._sizes}
        for name in self._counters:
            schema[name.lstrip("_")] = flag if isinstance(getattr(self, name), bool) else whole()
        return schema

    def __repr__(self) -> str:
        sizes = "".join(f", {name}={getattr(self, name)}" for name in (*self._sizes, "frames", "total_frames"))
        return f"{type(self).__name__}(env={self._env_source}{sizes})"
