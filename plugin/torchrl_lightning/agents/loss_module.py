"""LightningModule for any TorchRL loss."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule
from torchrl.objectives.utils import TargetNetUpdater

from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.settings import Fraction, setting
from torchrl_lightning._core.update_batches import UpdateBatches, updates_of
from torchrl_lightning.agents.base import AgentModule, OptimizerFactory
from torchrl_lightning.agents.networks.encoders import MLPNetwork
from torchrl_lightning.agents.networks.network_protocol import Network, network_check

STATE = "target_updater"
# Names of the acting network in TorchRL's losses, in order of preference.
_ACTING_NETWORKS = ("actor_network", "value_network", "local_value_network")
_CRITIC_NETWORKS = ("qvalue_network", "value_network")  # names of the critics in losses with an actor


class LossModuleAgent(AgentModule):
    """Train a TorchRL ``LossModule`` on the batches of a DataModule.

    Each batch is one update. It minimises the sum of the loss's entries ``loss_...`` (or the entry ``loss``), then
    updates the target networks. If the loss writes priorities (``td_error``), the buffer receives them. Some losses
    write squared errors or cross-entropies. Entries are logged under TorchRL's names. For example, the
    ``train/kl_approx`` of TorchRL's PPO losses is the ``train/kl_approx_k1`` of :class:`PPOModule`. The value estimator
    is built before a checkpoint is loaded. It uses ``gamma`` if set. Otherwise it has TorchRL's defaults, unless
    ``loss`` has already built an estimator.

    Args:
        loss: With ``networks``, a TorchRL loss class or its partial. Without ``networks``, a loss instance, or a
            callable that takes the environment's specs (``observation``, ``action``, ...), builds the networks and
            returns the loss.
        networks: For each network argument of the loss, a callable that takes specs and ``network`` and builds the
            network, such as :func:`build_critic`. Each critic of an ensemble is built separately, with its own initial
            weights. The loss also receives ``action_space``, ``action_spec`` and ``num_actions`` if it has these
            arguments.
        network: Network in front of the heads; ``MLPNetwork()`` by default.
        gamma: Discount of the value estimator and of the buffer; by default the discount of the loss.
        minimised: The entries to minimise; by default all ``loss_...``.
        policy: The acting policy: a TensorDict module, or a callable that takes the loss's own acting network and
            returns a module, e.g. the network followed by an exploration module. The default is the loss's acting
            network (``actor_network``, else ``value_network``, else ``local_value_network``).
        target_updater: A callable that takes the loss and returns a target updater, e.g.
            ``partial(torchrl.objectives.SoftUpdate, tau=0.005)``, for a loss with target networks.
        critic_optimizer: A separate optimizer for the critics if the loss also has an actor; optional.
        learning_rate: As in :class:`AgentModule`, like all arguments that are not listed here.

    Raises:
        TypeError: ``loss`` does not return a ``LossModule``, the networks do not fit the environment, or neither the
            loss nor ``policy`` provides an acting network.
        ValueError: ``minimised`` contains an entry that the loss does not write.

    Examples:
        >>> from types import SimpleNamespace
        >>> from torchrl.data import Categorical
        >>> from torchrl.modules import MLP, QValueActor
        >>> from torchrl.objectives import DQNLoss
        >>> def dqn(specs):
        ...     network = MLP(in_features=4, out_features=specs.action.n, num_cells=[8])
        ...     return DQNLoss(QValueActor(network, spec=specs.action), action_space=specs.action)
        >>> type(LossModuleAgent(dqn).build(SimpleNamespace(action=Categorical(2))).policy).__name__
        'QValueActor'
    """

    build_method = "build"
    loops_over_updates = True
    _policy: nn.Module | None = None  # set when the loss is built

    loss: LossModule | Callable[[Any], LossModule] = setting(kw_only=False)
    networks: Mapping[str, Callable[[Any, Network], nn.Module]] | None = None
    network: Annotated[Network, network_check(MLPNetwork)] = setting(default=None)
    gamma: Fraction | None = None
    minimised: Sequence[str] | None = None
    acting: nn.Module | Callable[[Any], nn.Module] | None = setting(default=None, alias="policy")
    target_updater: Callable[[LossModule], TargetNetUpdater] | None = None
    critic_optimizer: OptimizerFactory | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.networks is not None and self.network.recurrent:
            raise TypeError(
                f"network must not be recurrent with TorchRL's losses, got a {type(self.network).__name__}. Use an "
                "MLPNetwork or a CNNNetwork."
            )
        self.updater: TargetNetUpdater | None = None
        if isinstance(self.loss, LossModule):
            self._set_loss(self.loss)

    @property
    def is_built(self) -> bool:
        """True once the loss exists."""
        return isinstance(self.loss, LossModule)

    def build(self, specs: Any) -> Self:
        """Build the loss for an environment's specs and return the module; a second call does nothing."""
        if not isinstance(self.loss, LossModule):
            loss = self.loss(specs) if self.networks is None else self._build_loss(specs, self.networks)
            if not isinstance(loss, LossModule):
                raise TypeError(f"loss must return a LossModule of torchrl.objectives, got a {type(loss).__name__}.")
            self._set_loss(loss)
        return self

    def network_outputs(self, step: TensorDictBase) -> list[Tensor]:
        """Return the outputs of the loss's policy and critic; empty if ``policy`` is set."""
        if self.acting is not None:
            return []
        outputs = self.policy(step)
        if self.critic is not None:
            outputs = self.critic(outputs)
        return [value for value in outputs.values(True, True) if isinstance(value, Tensor)]

    def dry_run_networks(self, specs: Any, trainer: Any) -> None:
        """Run a copy of the networks forward and backward if ``networks`` is set; see :class:`AgentModule`."""
        if self.networks is not None:
            super().dry_run_networks(specs, trainer)

    def _build_loss(self, specs: Any, builders: Mapping[str, Callable[[Any, Network], nn.Module]]) -> Any:
        loss_factory: Any = self.loss
        loss_class, bound = (
            (loss_factory.func, loss_factory.keywords)
            if isinstance(loss_factory, partial)
            else (loss_factory, dict[str, Any]())
        )
        signature = inspect.signature(loss_class).parameters
        num_critics = bound.get(
            "num_qvalue_nets", signature["num_qvalue_nets"].default if "num_qvalue_nets" in signature else 2
        )
        try:
            networks = {
                name: [build(specs, self.network) for _ in range(num_critics)]
                if name == "qvalue_network"
                else build(specs, self.network)
                for name, build in builders.items()
            }
        except TypeError as error:
            raise TypeError(f"{loss_class.__name__} does not fit this environment: {error}") from error
        arguments = {"action_space": specs.action, "action_spec": specs.action}
        if "num_actions" in signature:
            arguments["num_actions"] = int(specs.action.space.n)
        if "gamma" in signature and signature["gamma"].default is inspect.Parameter.empty:
            arguments["gamma"] = 0.99 if self.gamma is None else self.gamma
        arguments = {name: value for name, value in arguments.items() if name in signature and name not in bound}
        with warnings.catch_warnings():  # some TorchRL losses lack annotations
            warnings.filterwarnings("ignore", "The name .* wasn't part of the annotations")
            return loss_factory(**networks, **arguments)

    def _set_loss(self, loss: LossModule) -> None:
        unknown = [name for name in self.minimised or () if name not in loss.out_keys]
        if unknown:
            raise ValueError(
                f"minimised={unknown} must be entries of {type(loss).__name__}, which are {loss.out_keys}."
            )
        # TorchRL's losses build value estimator and target entropy at first use. Loading a checkpoint requires
        # both.
        if self.gamma is not None and loss.default_value_estimator is not None:
            loss.make_value_estimator(gamma=self.gamma)
        elif loss.default_value_estimator is not None:
            _ = loss.value_estimator
        _ = getattr(loss, "target_entropy", None)
        network = _acting_network(loss)
        if network is None and not isinstance(self.acting, nn.Module):
            raise TypeError(
                f"policy must be set, because {type(loss).__name__} has none of {', '.join(_ACTING_NETWORKS)}."
            )
        if self.acting is not None and not isinstance(self.acting, nn.Module):
            self.acting = self.acting(network)
        # Do not register the networks, so that a state dict contains them only once, in the loss. A policy's additional
        # modules are registered with `acting`.
        set_unregistered(
            self, _policy=network if self.acting is None else self.acting, _critic=_find_network(loss, "critic_network")
        )
        # check_weights() builds the loss on the meta device, and a target updater needs real parameters.
        is_allocated = not any(parameter.is_meta for parameter in loss.parameters())
        self.updater = self.target_updater(loss) if self.target_updater is not None and is_allocated else None
        self.loss = loss

    @property
    def _built_loss(self) -> LossModule:
        return self.require_built(self.loss if isinstance(self.loss, LossModule) else None)

    @property
    def policy(self) -> Any:
        """The acting policy."""
        return self.require_built(self._policy)

    @property
    def critic(self) -> Any:
        """The loss's ``critic_network``, for a buffer that estimates values, or None."""
        self.require_built(self._policy)
        return self._critic

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return one optimizer of the loss's parameters, or two if the critics have a separate optimizer."""
        parameters = {
            name: parameter for name, parameter in self._built_loss.named_parameters() if parameter.requires_grad
        }
        critics = [
            parameter
            for name, parameter in parameters.items()
            if self.critic_optimizer and name.startswith(_CRITIC_NETWORKS)
        ]
        others = [parameter for parameter in parameters.values() if not any(parameter is critic for critic in critics)]
        return self.build_optimizers(others, critics, self.critic_optimizer)

    def unflattenable_parameters(self) -> set[nn.Parameter]:
        """Return all parameters, because TorchRL's losses and target updaters keep views of them."""
        return set(self.parameters())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the state of the target updater."""
        super().on_save_checkpoint(checkpoint)
        if self.updater is not None:
            checkpoint[STATE] = self.updater.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Validate the checkpoint, and restore the state of the target updater."""
        super().on_load_checkpoint(checkpoint)
        if self.updater is not None and STATE in checkpoint:
            self.updater.load_state_dict(checkpoint[STATE])

    def _is_selected(self, name: str) -> bool:
        return self.minimised is None or name in self.minimised or not name.startswith("loss")

    def training_step(self, batch: TensorDictBase | UpdateBatches, batch_idx: int) -> None:
        """Make one update on each batch of this step; the loss may write into the batches."""
        for number, minibatch in enumerate(updates_of(batch)):
            steps = minibatch.get("steps_to_next_obs", None)
            if steps is not None and steps.ndim == minibatch.ndim:  # TorchRL expects the shape of the reward
                minibatch.set("steps_to_next_obs", steps.unsqueeze(-1))
            outputs = self._built_loss(minibatch)
            scalars = {
                name: value
                for name, value in outputs.items()
                if isinstance(value, Tensor) and value.numel() == 1 and self._is_selected(name)
            }
            self.minimise(scalars, inner=number > 0)
            if self.updater is not None:
                self.updater.step()


def _find_network(loss: LossModule, *names: str) -> Any:
    """Return the first of these networks that the loss has, with its trained parameters, or None."""
    name = next((name for name in names if name in loss.__dict__ or name in dict(loss.named_children())), None)
    return None if name is None else loss.get_stateful_net(name)


def _acting_network(loss: LossModule) -> Any:
    """Return the acting network or None. For a functional loss, it is a copy that writes only the entries of a step."""
    # Random warm-up steps have neither distribution parameters nor the values of all actions, so the copy omits these
    # entries too.
    network, keys = _find_network(loss, *_ACTING_NETWORKS), loss.tensor_keys
    if network is not None and loss.functional:
        # On-policy losses read the action's log-probability; losses with a Q-network sample their own actions.
        on_policy = "qvalue_network" not in loss.__dict__
        wanted = {keys.action, getattr(keys, "sample_log_prob", None) if on_policy else None}
        written = [key for key in network.out_keys if key in wanted or (isinstance(key, tuple) and key[0] == "next")]
        if keys.action in written:
            network.select_out_keys(*written)
    return network
