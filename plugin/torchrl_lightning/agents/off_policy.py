"""The base LightningModule of off-policy agents: networks, updates, target networks and exploration."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded

from torchrl_lightning._core.keys import MEMORY_FEATURES
from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.settings import Fraction, PositiveFraction, PositiveInt, setting
from torchrl_lightning._core.tree import path_of
from torchrl_lightning._core.update_batches import UpdateBatches, updates_of
from torchrl_lightning.agents.base import LossTermsModule, OptimizerFactory
from torchrl_lightning.agents.metrics import train_names
from torchrl_lightning.agents.networks.actors import observation_entries
from torchrl_lightning.agents.networks.encoders import MLPNetwork
from torchrl_lightning.agents.networks.exploration import ExploringPolicy
from torchrl_lightning.agents.networks.network_protocol import Network, network_check
from torchrl_lightning.agents.networks.target_networks import TargetNetworks
from torchrl_lightning.agents.networks.trunks import RecurrentTrunk
from torchrl_lightning.agents.recurrent import encode_sequence, recompute_states
from torchrl_lightning.agents.transitions import Entries, Transitions, read_transitions
from torchrl_lightning.environments.masks import action_mask

STATE = "off_policy"
LossTerms = dict[str, Tensor]


class OffPolicyModule(LossTermsModule):
    """An agent that learns from the batches of a replay buffer.

    ``configure_model`` builds the networks from ``trainer.datamodule.specs``. Without a trainer, call ``build(specs)``.
    ``targets`` holds a target network for each name in ``target_names``. A training step reads the entries
    ``priority_weight``, ``mask``, ``gamma`` and ``steps_to_next_obs``, and writes the absolute TD errors into the batch
    as ``td_error``. With a ``RecurrentNetwork``, batches are sequences ``[B, T]`` with stored recurrent states.
    Subclasses build the networks and return the loss in ``losses``, with the functions of
    :mod:`torchrl_lightning.agents.loss_functions`. If the networks are perceptrons on one CPU, the agents of this
    package compute the gradients without autograd. The results are equal up to float error.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        gamma: Discount factor of one step.
        critic_optimizer: A separate optimizer for the critics' parameters; optional.
        tau: Step size of the soft update from the online to the target networks.
        target_interval: Number of updates between two updates of the target networks.
        refresh_states: Recompute the recurrent states of each batch with the current ``RecurrentNetwork``.
            ``ReplayDataModule`` then replaces the stored states, so that they do not become stale.
        compile: Compile the loss with ``torch.compile``. On one CPU core this multiplied the time by 0.88 for DQN, 1.25
            for SAC and 1.29 for TD3.
        learning_rate: See :class:`AgentModule`, also for all arguments that are not listed here.

    Raises:
        ValueError: An interval is below 1, ``tau`` is not in (0, 1], or ``refresh_states`` is set without a
            ``RecurrentNetwork``.
    """

    CONFIG_NAME: ClassVar[str | None] = None
    build_method = "build_networks"
    stream_kind = "replay"
    training_metrics = (*LossTermsModule.training_metrics, *train_names("exploration", "updates"))
    loops_over_updates = True
    suggested_data = "data=uniform (ReplayDataModule)"
    target_names: ClassVar[Sequence[str]]
    _policy: ExploringPolicy | None = None  # set by build

    network: Annotated[Network, network_check(lambda: MLPNetwork([256, 256], "relu"))] = setting(
        default=None, kw_only=False
    )
    gamma: Fraction = 0.99
    critic_optimizer: OptimizerFactory | None = None
    tau: PositiveFraction = 0.005
    target_interval: PositiveInt = 1
    refresh_states: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh_states and not self.network.recurrent:
            raise ValueError(
                f"refresh_states must be False without a RecurrentNetwork, got True with a "
                f"{type(self.network).__name__}. Leave it out."
            )
        if getattr(self.network, "shared", False) and not getattr(type(self.network), "shared", True):
            raise ValueError(
                f"shared must be False in the network of {type(self).__name__}, got True: only on-policy modules share "
                "the layers of actor and critic. Leave it out."
            )
        self.updates = 0
        self.masked = False  # True if observations have an action_mask
        self.memory: RecurrentTrunk | None = None
        self.targets: TargetNetworks | None = None
        self._keys: list[NestedKey] = []
        self._state_keys: list[NestedKey] = []
        self._rewritten_entries: tuple[TensorDictBase | None, list[NestedKey]] = None, []

    @abstractmethod
    def build_networks(self, specs: Any, network: Network) -> ExploringPolicy:
        """Build the networks as attributes of the module and return the exploring policy."""

    @abstractmethod
    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by name: ``critic``, and ``actor`` and other learnt parts if they exist."""

    def memory_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the memory, if any; the critics' loss trains them."""
        return [] if self.memory is None else list(self.memory.parameters())

    def exploration(self, frames: int) -> float:
        """Return the amount of exploration after ``frames`` frames."""
        return 0.0

    # -- networks ---------------------------------------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        """True after the networks are built."""
        return self.targets is not None

    def build(self, specs: Any) -> Self:
        """Build networks and targets for an environment's specs and return the module; later calls change nothing.

        Raise a TypeError if the algorithm does not support the action space.
        """
        if self.targets is None:
            keys, entries = observation_entries(specs)
            self.masked = action_mask(specs.observation, specs.action) is not None
            self._keys, network = list(keys), self.network
            if network.recurrent:
                memory: Any = network.trunk(keys, entries)
                self.memory, self._state_keys = memory, list(memory.state_keys)
                # The agent's own networks read the memory's features as if they were the environment's observations.
                features_spec = Composite({MEMORY_FEATURES: Unbounded(memory.features)})
                specs = SimpleNamespace(observation=features_spec, action=specs.action)
                network = MLPNetwork(list(network.head_sizes), network.activation)
            policy = self.build_networks(specs, network)
            # Do not register the policy, because the state dict already contains its networks as attributes of this
            # module.
            set_unregistered(self, _policy=policy)
            names = [*self.target_names, *(["memory"] if self.memory is not None else [])]
            self.targets = TargetNetworks({name: getattr(self, name) for name in names})
            policy.amount.fill_(self.exploration(0))
        return self

    @property
    def policy(self) -> ExploringPolicy:
        """The policy. It explores, except under ``ExplorationType.DETERMINISTIC``."""
        return self.require_built(self._policy)

    def network_inputs(self, step: TensorDictBase) -> Entries:
        """Return the input of actor and critics: the observation entries ``[B]``, or features of the memory."""
        entries = [step.get(key) for key in self._keys]
        if self.memory is None:
            return entries
        is_init, states = step.get("is_init"), [step.get(key) for key in self._state_keys]
        sequence = [entry.unsqueeze(0) for entry in entries]
        return [
            self.memory.encode_sequences(sequence, is_init.reshape(1, -1), [state[:1] for state in states]).squeeze(0)
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The policy is not registered, so nn.Module does not move it.
        super()._apply(fn, recurse)
        policy = self._policy
        if policy is not None:
            policy._apply(fn, recurse)
        return self

    # -- optimizers and schedules -----------------------------------------------------------------------------------

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer, or two if the critics have a separate optimizer."""
        groups = self.parameter_groups()
        critic = groups.pop("critic")
        others = [parameter for group in groups.values() for parameter in group]
        return self.build_optimizers(others, critic, self.critic_optimizer)

    def apply_schedules(self) -> None:
        """Set learning rates and exploration from the frames, so that a resumed run has the same values."""
        super().apply_schedules()
        self.update_exploration()

    def update_exploration(self) -> None:
        """Set the policy's amount of exploration from the number of collected frames."""
        assert self._policy is not None
        self._policy.amount.fill_(self.exploration(self.frames))

    # -- learning ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> None:
        """Update on each batch of this step and write the TD errors into it."""
        for number, minibatch in enumerate(updates_of(batch)):
            transitions = read_transitions(minibatch, self._keys, self.gamma, self._state_keys, masked=self.masked)
            terms, errors = self._analytic_update(transitions) or self.compute(transitions)
            states = None
            if self.memory is not None and self.refresh_states:
                states = recompute_states(transitions, self.memory)
            self.minimise(terms, inner=number > 0)
            self.updates += 1
            if self.updates % self.target_interval == 0 and self.targets is not None:
                self.targets.soft_update(self.tau)
            minibatch.set("td_error", errors)
            if states is not None:
                self._write_states(minibatch, states)
            self.update_exploration()

    def _write_states(self, batch: TensorDictBase, states: tuple[Entries, Entries]) -> None:
        """Write refreshed states into a batch; write next states only for stored keys and one-step transitions."""
        written_keys: list[NestedKey] = []
        levels: list[tuple[str, ...]] = [()] if "steps_to_next_obs" in batch else [(), ("next",)]
        for prefix, values in zip(levels, states, strict=False):
            for key, value in zip(self._state_keys, values, strict=True):
                path = (*prefix, *path_of(key))
                stored = batch.get(path, None)
                if stored is not None:
                    batch.set(path, value.to(stored.dtype))
                    written_keys.append(path)
        self._rewritten_entries = batch, written_keys

    def rewritten_keys(self, batch: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the entries that the training step has rewritten and that the buffer must store."""
        rewritten_batch, keys = self._rewritten_entries
        return keys if batch is rewritten_batch else []

    def compute(self, batch: Transitions) -> tuple[LossTerms, Tensor]:
        """Return ``losses`` of a batch, compiled if configured. Features of the memory replace the observations."""
        targets = self.require_built(self.targets)
        with targets.evaluation:
            if self.memory is not None:
                batch = encode_sequence(batch, self.memory, targets.memory)
            outputs: tuple[LossTerms, Tensor] = super().compute(batch)
            return outputs

    @abstractmethod
    def losses(self, batch: Transitions) -> tuple[LossTerms, Tensor]:
        """Return scalar losses (``loss_...``) and diagnostics, and the absolute errors ``[*B]``."""

    def epoch_metrics(self) -> dict[str, float]:
        """Return the base metrics, the exploration and the number of updates."""
        return {**super().epoch_metrics(), "exploration": float(self.policy.amount), "updates": float(self.updates)}

    # -- state ------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the exploration and the number of updates, which determines when delayed updates are due."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[STATE] = {"updates": self.updates, "exploration": float(self.policy.amount)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state; raise an error for another environment, and a KeyError for another kind of module."""
        super().on_load_checkpoint(checkpoint)
        if STATE not in checkpoint:
            raise KeyError(f"the checkpoint has no entry {STATE!r}, because an off-policy module did not write it")
        state = checkpoint[STATE]
        self.policy.amount.fill_(state["exploration"])
        self.updates = int(state["updates"])
