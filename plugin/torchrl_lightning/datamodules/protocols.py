"""What the DataModules ask of modules, collectors and buffers that may be anybody's.

What a part must have is named by :func:`missing`. What it may have besides is a protocol that can be asked for by
``isinstance``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning.replay import ExperienceBuffer
from torchrl_lightning.rollout import VanillaOnPolicyBuffer


@runtime_checkable
class Learner(Protocol):
    """The LightningModule of every stream."""

    @property
    def policy(self) -> Any:
        """The TensorDict module that writes the action."""


@runtime_checkable
class ValueLearner(Protocol):
    """A module that estimates values, for buffers that need them."""

    @property
    def critic(self) -> Any:
        """The TensorDict module that writes them."""


@runtime_checkable
class AnnotatingLearner(Protocol):
    """A module that adds to each rollout, for example intrinsic rewards."""

    def annotate(self, rollout: TensorDictBase) -> None:
        """Write into a rollout before advantages are estimated."""


@runtime_checkable
class RewritingLearner(Protocol):
    """A module that rewrites entries of replayed batches, for example recurrent states."""

    def rewritten_keys(self, batch: TensorDictBase) -> Sequence[NestedKey]:
        """Return the entries of a batch that its buffer is to store."""


@runtime_checkable
class ResumableCollector(Protocol):
    """A collector with a state."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what a resumed run needs."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from it."""


@runtime_checkable
class CopyingCollector(Protocol):
    """A collector that acts with a copy of the policy."""

    def update_policy_weights_(self) -> None:
        """Copy the weights anew."""


@runtime_checkable
class VersionedCollector(Protocol):
    """A collector that counts the policies it has acted with."""

    @property
    def policy_version(self) -> Any:
        """The policy of the last rollout."""


@runtime_checkable
class RowCollector(Protocol):
    """A collector that can deliver its steps in the layout of rings, in memory that it reuses."""

    def reused_rows(self, excluded: Sequence[str]) -> Iterator[TensorDictBase]:
        """Return such a stream, without these entries."""


class ReplayBufferFactory(Protocol):
    """A callable that takes ``num_envs`` and returns the replay buffer."""

    def __call__(self, *, num_envs: int) -> ExperienceBuffer:
        """Build the buffer."""
        ...


class RolloutBufferFactory(Protocol):
    """A callable that takes ``size``, the time steps of a rollout, and returns the buffer."""

    def __call__(self, *, size: int) -> VanillaOnPolicyBuffer:
        """Build the buffer."""
        ...


@runtime_checkable
class ReplaySource(Protocol):
    """What replayed batches are drawn from: a buffer, or several."""

    def draw(self, batch_size: int) -> TensorDictBase:
        """Return a batch."""

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Take the priorities that a loss wrote into a batch."""

    def write_back(self, batch: TensorDictBase, keys: Sequence[NestedKey]) -> Any:
        """Store rewritten entries of a batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from it."""


def missing(part: Any, protocol: type) -> list[str]:
    """Return the members of a protocol that a part does not have.

    Example:
        >>> missing(object(), Learner), missing(object(), ReplaySource)[:2]
        (['policy'], ['draw', 'update_tensordict_priority'])
    """
    return [name for name in vars(protocol) if not name.startswith("_") and not hasattr(part, name)]
