"""What a LightningModule has for our DataModules: a policy, and the methods of what else it says it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from torchrl_lightning.dynamics import DynamicsTargets
from torchrl_lightning.environments import EnvironmentSpecs
from torchrl_lightning.fitting import require_fit


class Learner(Protocol):
    """A module that acts by its ``policy``, is built for an environment, and learns from batches."""

    policy: Any
    """A TensorDict module that writes the action."""

    def build(self, specs: EnvironmentSpecs) -> Any:
        """Build the networks for an environment, once; a module may build them in its constructor instead."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Learn from a batch."""


@runtime_checkable
class BuildsNetworks(Protocol):
    """A learner whose ``configure_model`` builds its networks from the specs of an environment."""

    is_built: bool
    """Whether the networks exist."""

    def build(self, specs: EnvironmentSpecs) -> Any:
        """Build the networks, once."""

    def configure_model(self) -> None:
        """Build the networks from the specs of the trainer's DataModule."""


class Annotates(Protocol):
    """A learner that completes rollouts before their advantages are estimated, e.g. by intrinsic rewards."""

    def annotate(self, rollout: TensorDictBase) -> None:
        """Add entries to a time-major rollout ``[T, N]``."""


class ValuesWhatItDoes(Protocol):
    """A learner whose policy can say, as it acts, what its critic makes of each step."""

    valued_policy: Any
    """The policy; it writes the critic's values, too, where they cost little more than acting."""


class RewritesStates(Protocol):
    """A learner that rewrites entries of replayed batches, e.g. recurrent states, which are then stored."""

    def rewritten_keys(self, batch: TensorDictBase) -> Sequence[NestedKey]:
        """Return the entries of a batch that it has rewritten."""


class Imagines(Protocol):
    """A learner with a world model, for :class:`~torchrl_lightning.BranchedReplay`."""

    def fit_dynamics(self, training: TensorDictBase, validation: TensorDictBase) -> None:
        """Fit the world model to transitions ``[N]``, judged by others ``[V]``."""

    def imagine(self, start: TensorDictBase, length: int) -> TensorDictBase:
        """Return the transitions ``[N]`` of branches that begin at the observations of ``start`` ``[R]``."""


class Fits(Protocol):
    """A learner that is told when a fit of its model begins, and says when it is over."""

    fit_is_over: bool
    """Whether the fit ends with this epoch; decided at the end of each validation epoch, False at a fit's begin."""

    def begin_fit(self, targets: DynamicsTargets) -> None:
        """Take note that a fit begins: frames were collected, the scalers of ``targets`` fitted, the split extended."""


class ChecksTransitions(Protocol):
    """A learner that looks at what is stored when a fit begins."""

    def check_transitions(self, rows: TensorDictBase) -> None:
        """Look at all transitions ``[N]`` that are stored, before :meth:`Fits.begin_fit`."""


def build_learner(learner: Any, data: Any) -> None:
    """Build the networks of a trainer's module before callbacks are set up, some of which read its parameters there."""
    if not isinstance(learner, BuildsNetworks) or learner.is_built:
        return
    require_fit(learner, data)
    strategy, precision = data.trainer.strategy, data.trainer.precision_plugin
    with strategy.tensor_init_context(), strategy.model_sharded_context(), precision.module_init_context():
        learner.configure_model()


def acting(trainer: Any, owner: str) -> Any:
    """Return the module that a trainer fits; a RuntimeError if there is none, a TypeError without a policy."""
    module = trainer.lightning_module if trainer is not None else None
    if module is None:
        raise RuntimeError(
            f"{owner} acts with the policy of the LightningModule that is being fitted; "
            "iterate its loaders through Trainer.fit or Trainer.validate."
        )
    if getattr(module, "policy", None) is None:
        raise TypeError(
            f"{type(module).__name__} has no attribute `policy`. Give it the TensorDict module that writes the "
            "action, e.g. in configure_model: self.policy = build_actor(self.trainer.datamodule.specs)."
        )
    return module
