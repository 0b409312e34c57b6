"""The LightningModule around an off-policy loss: networks from specs, updates, target networks, exploration."""

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

from torchrl_lightning._modules import hold
from torchrl_lightning.entries import path_of
from torchrl_lightning.environments.masks import action_mask
from torchrl_lightning.keys import REMEMBERED
from torchrl_lightning.learn.actors import observation_entries
from torchrl_lightning.learn.agents import OptimizerFactory, TermsModule
from torchrl_lightning.learn.exploration import ExploringPolicy
from torchrl_lightning.learn.memory import refreshed_states, remember
from torchrl_lightning.learn.network_protocol import Network, described_network
from torchrl_lightning.learn.networks import MLPNetwork
from torchrl_lightning.learn.reports import train_names
from torchrl_lightning.learn.target_networks import TargetNetworks
from torchrl_lightning.learn.transitions import Entries, Transitions, read_transitions
from torchrl_lightning.learn.trunks import RecurrentTrunk
from torchrl_lightning.protocols import UpdateBatches, updates_of
from torchrl_lightning.settings import Count, Fraction, Share, setting

STATE = "off_policy"
# Input of networks behind a memory; not ``features``, which their own trunks write.
Terms = dict[str, Tensor]


class OffPolicyModule(TermsModule):
    """An agent that learns from the batches of a replay buffer.

    The networks are built in ``configure_model`` from ``trainer.datamodule.specs``, or by ``build(specs)`` without a
    trainer; those named in ``followed`` are followed by the copies in ``targets``. Each batch gets its absolute TD
    errors under ``td_error``; its ``priority_weight``, ``mask``, ``gamma`` and ``steps_to_next_obs`` are honoured. With
    a ``RecurrentNetwork`` batches are sequences ``[B, T]`` with stored recurrent states. Subclasses build the networks,
    and say in ``terms`` what they minimise, in functions of :mod:`torchrl_lightning.learn.losses`. Where the networks
    of our agents are perceptrons on one CPU, their gradients are computed without autograd, equal to float error.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        gamma: Discount of one step.
        critic_optimizer: A separate optimizer for the critics' parameters; optional.
        tau: Fraction by which the target networks move towards the online ones at each of their updates.
        target_interval: Updates between two updates of the target networks.
        refresh_states: Recompute the recurrent states of each batch with the current ``RecurrentNetwork``;
            ``ReplayDataModule`` then replaces the stored ones, so that they do not grow stale.
        compile: Compute the loss by ``torch.compile``. On one CPU core that took 0.88 of the time for DQN, but 1.25 for
            SAC and 1.29 for TD3.
        learning_rate: As in :class:`AgentModule`, like everything that is not named here.

    Raises:
        ValueError: An interval is below 1, ``tau`` is not in (0, 1], or there are no states to refresh.
    """

    CONFIG_NAME: ClassVar[str | None] = None
    dry_run_of = "build_networks"
    learns_from = "replay"
    training_metrics = (*TermsModule.training_metrics, *train_names("exploration", "updates"))
    loops_over_updates = True
    stream_for_it = "data=uniform (ReplayDataModule)"
    followed: ClassVar[Sequence[str]]
    _policy: ExploringPolicy | None = None  # until it is built

    network: Annotated[Network, described_network(lambda: MLPNetwork([256, 256], "relu"))] = setting(
        default=None, kw_only=False
    )
    gamma: Fraction = 0.99
    critic_optimizer: OptimizerFactory | None = None
    tau: Share = 0.005
    target_interval: Count = 1
    refresh_states: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refresh_states and not self.network.recurrent:
            raise ValueError(
                f"refresh_states=True needs a RecurrentNetwork, but the network is a {type(self.network).__name__}, "
                "which has no states; leave it out"
            )
        if getattr(self.network, "shared", False) and not getattr(type(self.network), "shared", True):
            raise ValueError(
                f"shared must be False in the network of {type(self).__name__}, got True: only on-policy modules share "
                "the layers of actor and critic. Leave it out."
            )
        self.updates = 0
        self.masked = False  # whether the environment says which actions it allows
        self.memory: RecurrentTrunk | None = None
        self.targets: TargetNetworks | None = None
        self._keys: list[NestedKey] = []
        self._state_keys: list[NestedKey] = []
        self._rewritten: tuple[TensorDictBase | None, list[NestedKey]] = None, []

    @abstractmethod
    def build_networks(self, specs: Any, network: Network) -> ExploringPolicy:
        """Build the networks as attributes of the module; return the policy that explores with them."""

    @abstractmethod
    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of ``actor`` (if any), ``critic`` and other learnt parts."""

    def memory_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the memory, if there is one; the critics' loss trains them."""
        return [] if self.memory is None else list(self.memory.parameters())

    def exploration(self, frames: int) -> float:
        """Return the policy's amount of exploration after ``frames`` frames."""
        return 0.0

    # -- networks ---------------------------------------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        """Whether the networks exist."""
        return self.targets is not None

    def build(self, specs: Any) -> Self:
        """Build networks and targets for an environment's specs, once; return the module.

        Actions that the algorithm does not support are a TypeError.
        """
        if self.targets is None:
            keys, entries = observation_entries(specs)
            self.masked = action_mask(specs.observation, specs.action) is not None
            self._keys, network = list(keys), self.network
            if network.recurrent:
                memory: Any = network.trunk(keys, entries)
                self.memory, self._state_keys = memory, list(memory.state_keys)
                # Behind the memory everything is built as for an environment whose observations are its features.
                shown = Composite({REMEMBERED: Unbounded(memory.features)})
                specs = SimpleNamespace(observation=shown, action=specs.action)
                network = MLPNetwork(list(network.head_sizes), network.activation)
            policy = self.build_networks(specs, network)
            # Not registered: a state dict holds the networks once, here.
            hold(self, _policy=policy)
            names = [*self.followed, *(["memory"] if self.memory is not None else [])]
            self.targets = TargetNetworks({name: getattr(self, name) for name in names})
            policy.amount.fill_(self.exploration(0))
        return self

    @property
    def policy(self) -> ExploringPolicy:
        """The policy: exploring, or exploiting under ``ExplorationType.DETERMINISTIC``."""
        return self.require_built(self._policy)

    def observed(self, step: TensorDictBase) -> Entries:
        """Return the input of actor and critics for observations ``[B]``: entries, or the features of the memory."""
        entries = [step.get(key) for key in self._keys]
        if self.memory is None:
            return entries
        is_init, states = step.get("is_init"), [step.get(key) for key in self._state_keys]
        sequence = [entry.unsqueeze(0) for entry in entries]
        return [self.memory.run(sequence, is_init.reshape(1, -1), [state[:1] for state in states]).squeeze(0)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The unregistered policy moves with the module, also outside of a fit.
        super()._apply(fn, recurse)
        policy = self._policy
        if policy is not None:
            policy._apply(fn, recurse)
        return self

    # -- optimizers and schedules -----------------------------------------------------------------------------------

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer, or a second one for the critics' parameters."""
        groups = self.parameter_groups()
        critic = groups.pop("critic")
        others = [parameter for group in groups.values() for parameter in group]
        return self.build_optimizers(others, critic, self.critic_optimizer)

    def follow_schedules(self) -> None:
        """Set learning rates and exploration from the frames, so that a resumed run has the same."""
        super().follow_schedules()
        self.explore()

    def explore(self) -> None:
        """Set the policy's amount of exploration from the frames collected so far."""
        assert self._policy is not None
        self._policy.amount.fill_(self.exploration(self.frames))

    # -- learning ---------------------------------------------------------------------------------------------------

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> None:
        """Make an update on each batch of this step, and write the TD errors into it."""
        for number, part in enumerate(updates_of(batch)):
            transitions = read_transitions(part, self._keys, self.gamma, self._state_keys, masked=self.masked)
            terms, errors = self._update(transitions) or self.compute(transitions)
            states = None
            if self.memory is not None and self.refresh_states:
                states = refreshed_states(transitions, self.memory)
            self.minimise(terms, inner=number > 0)
            self.updates += 1
            if self.updates % self.target_interval == 0 and self.targets is not None:
                self.targets.follow(self.tau)
            part.set("td_error", errors)
            if states is not None:
                self._rewrite(part, states)
            self.explore()

    def _rewrite(self, batch: TensorDictBase, states: tuple[Entries, Entries]) -> None:
        """Write refreshed states into a batch; states after each step only where it holds them, one step ahead."""
        written: list[NestedKey] = []
        levels: list[tuple[str, ...]] = [()] if "steps_to_next_obs" in batch else [(), ("next",)]
        for prefix, values in zip(levels, states, strict=False):
            for key, value in zip(self._state_keys, values, strict=True):
                path = (*prefix, *path_of(key))
                stored = batch.get(path, None)
                if stored is not None:
                    batch.set(path, value.to(stored.dtype))
                    written.append(path)
        self._rewritten = batch, written

    def rewritten_keys(self, batch: TensorDictBase) -> list[NestedKey]:
        """Return the entries of a batch that the training step has rewritten, which its buffer is to store."""
        rewritten, keys = self._rewritten
        return keys if batch is rewritten else []

    def compute(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return ``terms`` of a batch as it was read: behind the memory, if there is one, and compiled if asked for."""
        targets = self.require_built(self.targets)
        with targets.evaluation:
            if self.memory is not None:
                batch = remember(batch, self.memory, targets.memory)
            computed: tuple[Terms, Tensor] = super().compute(batch)
            return computed

    @abstractmethod
    def terms(self, batch: Transitions) -> tuple[Terms, Tensor]:
        """Return the parts of the loss (``loss_...``) and diagnostics, scalars, and the absolute errors ``[*B]``."""

    def report(self) -> dict[str, float]:
        """Return learning rate and exploration."""
        return {**super().report(), "exploration": float(self.policy.amount), "updates": float(self.updates)}

    # -- state ------------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the count of updates, on which delays and target networks depend, and the exploration."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[STATE] = {"updates": self.updates, "exploration": float(self.policy.amount)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them; refuse the checkpoint of another environment, or, by a KeyError, of another kind of module."""
        super().on_load_checkpoint(checkpoint)
        if STATE not in checkpoint:
            raise KeyError(f"the checkpoint has no {STATE!r}: it was not written by an off-policy module")
        state = checkpoint[STATE]
        self.policy.amount.fill_(state["exploration"])
        self.updates = int(state["updates"])
