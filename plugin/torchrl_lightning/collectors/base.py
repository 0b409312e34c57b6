"""Base class of the collectors: environment source, sizes, counters and specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from gymnasium.vector import VectorEnv
from tensordict import TensorDict
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from torchrl_lightning._core.state import Attribute, Stateful, bounded_integer, check_state, tensor
from torchrl_lightning._core.torch_defaults import check_default_device
from torchrl_lightning._core.trust import StartsProcesses
from torchrl_lightning._core.validators import Checked, boolean, budget, check_defaults, frames, integer
from torchrl_lightning.environments.backends.vector_env import make_vector_env
from torchrl_lightning.environments.policy_calls import Policy, check_policy, dotted_name, load_weights
from torchrl_lightning.environments.replay_source import ReplaySource
from torchrl_lightning.environments.seeds import check_seed
from torchrl_lightning.environments.specs import EnvironmentSpecs, environment_specs


def _by_dotted_name(states: Mapping[NestedKey, Tensor]) -> dict[str, Tensor]:
    return {dotted_name(key): value for key, value in states.items()}


RECURRENT_STATES = Attribute(
    check_for=lambda collector: collector._check_states,
    attribute="_states",
    to_saved=_by_dotted_name,
    exists_if="_has_replay",
)
"""Entry of the saved state: recurrent states of the environments that replay recorded steps."""


def check_random_frames(value: Any, policy: object) -> int:
    """Validate and return ``init_random_frames``, an integer or a float such as 1e5; without a policy it must be 0."""
    number = frames(value, "init_random_frames")
    if policy is None:
        check_defaults("without a policy", "give a policy", init_random_frames=(number, 0))
    return number


def check_exploration(policy: object, exploration_type: ExplorationType | None, **switches: bool) -> None:
    """Validate the exploration type and named boolean switches; exploration needs a policy."""
    if exploration_type is not None and not isinstance(exploration_type, ExplorationType):
        raise TypeError(f"exploration_type must be an ExplorationType, got {exploration_type!r}.")
    if policy is None:
        default = ExplorationType.RANDOM
        check_defaults("without a policy", "give a policy", exploration_type=(exploration_type, default))
    for name, value in switches.items():
        boolean(value, name)


def check_replay(replay: ReplaySource | None, num_envs: int, owner: str) -> None:
    """Validate that the number of environments of a replay equals ``num_envs``."""
    playing = getattr(replay, "playing", None)  # a plain function can also be a replay
    if playing is not None and len(playing) != num_envs:
        raise ValueError(
            f"replay must have num_envs={num_envs}, as {owner} has, got {len(playing)}. Build it with this number."
        )


class CollectorBase(Stateful, StartsProcesses):
    """Base class of collectors that yield ``frames_per_batch`` frames at a time, up to ``total_frames``."""

    OWNER, VERSION = "collector", 1
    STATE = {
        "num_envs": Attribute(),
        "frames_per_batch": Attribute(),
        "frames": Attribute(bounded_integer()),
        "batches": Attribute(bounded_integer(), "_batches"),
        "seed": Attribute(bounded_integer()),
    }
    marks_trajectory_starts = True
    """Whether ``is_init`` and ``done`` mark the start of each trajectory."""
    _has_replay = False  # True if a replay is given; a restored collector continues the replay
    _states: Mapping[NestedKey, Tensor]  # recurrent states of running episodes

    @property
    def replays(self) -> bool:
        """Whether the collector replays recorded steps in some environments."""
        return self._has_replay

    total_frames = Checked(budget)
    clip_actions = False
    """Whether actions are clipped to their Box for the environment."""

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
        check_default_device()
        self.steps, remainder = divmod(integer(frames_per_batch, "frames_per_batch"), integer(num_envs, "num_envs"))
        if remainder:
            nearest = max(1, round(frames_per_batch / num_envs)) * num_envs
            raise ValueError(
                f"frames_per_batch must be a multiple of num_envs={num_envs}, got {frames_per_batch}. "
                f"The nearest multiple is {nearest}."
            )
        self._env_source, self._env_args = source, env_args
        self.policy, self.num_envs = policy, num_envs
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.seed = check_seed(seed)
        self.closed = False
        self.frames = 0
        self._batches = 0  # number of batches since the collector was seeded
        self._specs: EnvironmentSpecs | None = None

    @property
    def specs(self) -> EnvironmentSpecs:
        """Specs of the environments, or of one worker's environments; no process is started to read them."""
        if self._specs is None:
            if isinstance(self._env_source, VectorEnv):
                specs = environment_specs(self._env_source)
            else:
                args = {**self._env_args, "vectorization": "sync"}
                with closing(make_vector_env(self._env_source, 1, **args)) as env:
                    specs = replace(environment_specs(env), num_envs=self.num_envs)
            self._specs = specs.with_clipping(self.clip_actions)
        return self._specs

    def __len__(self) -> int:
        """Return the number of batches of a whole run; raise RuntimeError without a frame limit."""
        if self.total_frames < 0:
            raise RuntimeError("A collector with total_frames=-1 never stops, so it has no length.")
        return -(self.total_frames // -self.frames_per_batch)

    def __iter__(self) -> Iterator[TensorDict]:
        yield from self.iterator()

    def iterator(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` are collected; an error or Ctrl-C shuts the collector down."""
        yield from self._collect_until_limit(self.rollout)

    def _collect_until_limit(self, collect: Callable[[], TensorDict]) -> Iterator[TensorDict]:
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
        """Copy weights into the policy. Without an argument do nothing: the collector calls the policy object itself.

        Args:
            policy_or_weights: A module, a state dict, or a TensorDict of parameters.
        """
        load_weights(self.policy, policy_or_weights)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Close the environments; repeated calls are allowed. TorchRL's collectors define the arguments."""
        raise NotImplementedError

    def apply_state(self, values: Mapping[str, Any]) -> None:
        """Continue after the last batch before the save; reset all environments (and workers) first."""
        self.reset()
        super().apply_state(values)

    def _check_states(self, value: Any, name: str) -> dict[NestedKey, Tensor]:
        schema = {dotted_name(key): tensor(state.dtype, *state.shape) for key, state in self._states.items()}
        states = check_state(value, schema, f"collector's {name}")
        return {key: states[dotted_name(key)] for key in self._states}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(env={self._env_source}, num_envs={self.num_envs}, "
            f"frames_per_batch={self.frames_per_batch}, frames={self.frames}, total_frames={self.total_frames})"
        )
