"""Q networks: values of all discrete actions (DQN), or the value of one continuous action (SAC, TD3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torch.func import functional_call
from torchrl.data import Categorical, OneHot
from torchrl.modules import DistributionalQValueActor, QValueActor, ValueOperator

from torchrl_lightning._core.keys import FEATURES
from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.validators import integer
from torchrl_lightning.agents.networks.action_heads import ActionScaling, action_name
from torchrl_lightning.agents.networks.actors import linear_head, observation_entries
from torchrl_lightning.agents.networks.encoders import MLPEncoder, MLPNetwork
from torchrl_lightning.agents.networks.network_protocol import Network, has_action_encoder
from torchrl_lightning.agents.networks.squashed import DEFAULT_NETWORK, action_range
from torchrl_lightning.agents.networks.trunks import feature_count
from torchrl_lightning.agents.transitions import Entries


class DuelingHead(nn.Module):
    r"""\(Q(s, a) = V(s) + A(s, a) - \mathrm{mean}_b A(s, b)\) with separate layers for V and A (Wang et al., 2016)."""

    def __init__(self, features: int, actions: int, network: Network) -> None:
        super().__init__()
        self.value, self.advantage = linear_head(network, features, 1), linear_head(network, features, actions)

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``[*B, H]`` to action values ``[*B, A]``."""
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(-1, keepdim=True)


class QNetwork(QValueActor):
    """A trunk and a head as TorchRL's ``QValueActor``; ``values`` computes the action values without a TensorDict."""

    def __init__(
        self, trunk: TensorDictModuleBase, head: nn.Module, spec: Categorical | OneHot, out_key: str = "action_value"
    ) -> None:
        values = TensorDictModule(head, in_keys=[FEATURES], out_keys=[out_key])
        space = "one_hot" if isinstance(spec, OneHot) else "categorical"
        super().__init__(TensorDictSequential(trunk, values), action_space=space, action_value_key=out_key)
        self.action_dtype = spec.dtype
        set_unregistered(self, trunk=trunk, head=head)

    def values(self, entries: Entries) -> Tensor:
        """Return the action values ``[*B, A]`` of observation entries."""
        return self.head(self.trunk.encoder(*entries))


def build_q_network(
    specs: Any, network: Network | None = None, *, dueling: bool = False, out_key: str = "action_value"
) -> QNetwork:
    """Build the Q network of DQN.

    Args:
        specs: As in :func:`build_actor`.
        network: As in :func:`build_actor`.
        dueling: Whether state values and advantages have separate heads.
        out_key: Key of the values of all actions.

    Raises:
        TypeError: The action space is not a single discrete choice.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> build_q_network(specs, dueling=True).values([torch.zeros(3, 4)]).shape
        torch.Size([3, 2])
    """
    spec, network = _check_single_choice(specs.action), network or MLPNetwork()
    trunk, actions = network.trunk(*observation_entries(specs)), int(spec.space.n)
    head = DuelingHead(trunk.features, actions, network) if dueling else linear_head(network, trunk.features, actions)
    return QNetwork(trunk, head, spec, out_key)


def _check_single_choice(spec: Any) -> Any:
    if isinstance(spec, OneHot) or (isinstance(spec, Categorical) and not spec.shape):
        return spec
    raise TypeError(
        f"the action space of learners such as DQN must be Discrete, got {action_name(spec)}. Use SAC or TD3 for a Box "
        "and PPO for any action space, or convert the actions by a wrapper, such as "
        "gymnasium.wrappers.DiscretizeAction."
    )


class _Atoms(nn.Module):
    """A head that returns the log-probabilities of the atoms, ``[*B, K, A]``."""

    def __init__(self, layers: nn.Module, atoms: int) -> None:
        super().__init__()
        self.layers, self.atoms = layers, atoms

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features).unflatten(-1, (self.atoms, -1)).log_softmax(-2)


class DistributionalQNetwork(DistributionalQValueActor):
    """A trunk and a head as TorchRL's ``DistributionalQValueActor``; ``values`` returns means without a TensorDict."""

    def __init__(
        self, trunk: TensorDictModuleBase, head: nn.Module, spec: Categorical | OneHot, support: Tensor
    ) -> None:
        module = TensorDictSequential(trunk, TensorDictModule(head, in_keys=[FEATURES], out_keys=["action_value"]))
        space = "one_hot" if isinstance(spec, OneHot) else "categorical"
        super().__init__(module, support, action_space=space, make_log_softmax=False)
        self.action_dtype = spec.dtype
        set_unregistered(self, trunk=trunk, head=head)

    def values(self, entries: Entries) -> Tensor:
        """Return the action values ``[*B, A]`` of observation entries."""
        probabilities = self.head(self.trunk.encoder(*entries)).exp()
        return (probabilities * self.support.unsqueeze(-1)).sum(-2)


def build_distributional_q_network(
    specs: Any, network: Network | None = None, *, atoms: int = 51, low: float = -10.0, high: float = 10.0
) -> DistributionalQNetwork:
    """Build the Q network of C51 (Bellemare et al., 2017).

    Args:
        specs: As in :func:`build_actor`.
        network: As in :func:`build_actor`.
        atoms: Number of atoms of the return distribution.
        low: Smallest atom.
        high: Largest atom.

    Raises:
        TypeError: The action space is not a single discrete choice.
        ValueError: ``atoms`` is below two, or ``low`` is not below ``high``.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> build_distributional_q_network(specs, low=0.0, high=100.0).values([torch.zeros(3, 4)]).shape
        torch.Size([3, 2])
    """
    if integer(atoms, "atoms", 2) and not low < high:
        raise ValueError(f"low must be below high, got low={low} and high={high}.")
    spec, network = _check_single_choice(specs.action), network or MLPNetwork()
    trunk = network.trunk(*observation_entries(specs))
    head = _Atoms(linear_head(network, trunk.features, atoms * int(spec.space.n)), atoms)
    return DistributionalQNetwork(trunk, head, spec, torch.linspace(low, high, atoms))


class ActionValue(ActionScaling):
    """Compute Q(s, a) from observation entries and an action, which is scaled to units of its range.

    A network with ``action_encoder`` reads both in its first layer. Other networks encode only the observation. Layers
    of ``head_sizes`` (by default one layer as wide as the features) then read the features and the action.
    """

    def __init__(self, specs: Any, network: Network, outputs: int = 1) -> None:
        super().__init__()
        self.observation_keys, entries = observation_entries(specs)
        self.set_scaling(*action_range(specs.action))
        self.encodes_action = has_action_encoder(network)
        if self.encodes_action:
            self.encoder = network.action_encoder(entries, specs.action)
            self.last = linear_head(network, feature_count(self.encoder), outputs)
        else:
            self.encoder = network.encoder(entries)
            features = feature_count(self.encoder)
            sizes = network.head_sizes or [features]
            self.last = linear_head(network, features + specs.action.shape.numel(), outputs, sizes)

    def forward(self, *entries: Tensor) -> Tensor:
        """Map observation entries and the action, ``[*B, *F_i]``, to the value ``[*B, 1]``."""
        observation, action = entries[:-1], (entries[-1] - self.center) / self.half_range
        if self.encodes_action:
            return self.last(self.encoder(*observation, action))
        features = self.encoder(*observation)
        return self.last(torch.cat([features, action.to(features.dtype)], -1))


def build_action_critic(specs: Any, network: Network | None = None, *, quantiles: int = 1) -> ValueOperator:
    """Build one critic of SAC or TD3 with output ``state_action_value``; arguments as in :func:`build_squashed_actor`.

    With several ``quantiles`` it is a critic of TQC with output ``[*B, quantiles]``.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> build_action_critic(specs).in_keys
        ['observation', 'action']
    """
    keys, _ = observation_entries(specs)
    module = ActionValue(specs, network or DEFAULT_NETWORK, integer(quantiles, "quantiles"))
    return ValueOperator(module, in_keys=[*keys, "action"], out_keys=["state_action_value"])


class CriticEnsemble(ActionScaling):
    """Several critics with the same architecture and different initial weights, as one module.

    Perceptrons run as batched matrix products over stacked weights. Other encoders run one after another.
    """

    critics: nn.ModuleList | None

    def __init__(self, critics: Sequence[ActionValue]) -> None:
        super().__init__()
        self.size = len(critics)
        first = critics[0]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self._layers: list[Any] = []
        if not first.encodes_action or type(first.encoder) is not MLPEncoder:
            self.critics = nn.ModuleList(critics)
            return
        self.critics, self.flat = None, first.encoder.flat
        self.set_scaling(first.center, first.half_range)
        for layers in zip(*(_layers_in_order(critic) for critic in critics), strict=True):
            if isinstance(layers[0], nn.Linear):
                # In the layout [N, in, out], matrix products and gradients need no copies.
                self.weights.append(nn.Parameter(torch.stack([layer.weight.detach().mT for layer in layers])))
                self.biases.append(nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]).unsqueeze(1)))
                self._layers.append((self.weights[-1], self.biases[-1]))
            else:
                self._layers.append(layers[0])

    def forward(self, entries: Entries, action: Tensor) -> Tensor:
        """Return the values ``[N, *B]``."""
        if self.critics is None:
            return self._batched_forward(entries, action, self._layers, self.size)
        return torch.stack([critic(*entries, action) for critic in self.critics]).squeeze(-1)

    def q_values(self, entries: Entries, action: Tensor, count: int | None = None) -> Tensor:
        """Return the values ``[N, *B]`` of all critics or the first ``count``, without gradients of the critics."""
        count = self.size if count is None else count
        if self.critics is None:
            detached = [
                tuple(tensor[:count].detach() for tensor in layer) if isinstance(layer, tuple) else layer
                for layer in self._layers
            ]
            return self._batched_forward(entries, action, detached, count)
        values = [
            functional_call(
                critic, {name: value.detach() for name, value in critic.named_parameters()}, (*entries, action)
            )
            for critic in list(self.critics)[:count]
        ]
        return torch.stack(values).squeeze(-1)

    def _batched_forward(self, entries: Entries, action: Tensor, layers: list[Any], count: int) -> Tensor:
        x = self.flat(*entries, (action - self.center) / self.half_range, dtype=layers[0][0].dtype)
        shape = x.shape[:-1]
        x = x.reshape(1, -1, x.shape[-1]).expand(count, -1, -1)
        for layer in layers:
            if isinstance(layer, tuple):
                weight, bias = layer
                # With one output, a batched matrix product takes three times as long as the equivalent sum.
                has_one_output = weight.shape[-1] == 1
                x = (x * weight.mT).sum(-1, keepdim=True) + bias if has_one_output else torch.baddbmm(bias, x, weight)
            else:
                x = layer(x)
        return x.reshape(count, *shape)


def _layers_in_order(critic: ActionValue) -> list[nn.Module]:
    """Return the linear layers and activations of a perceptron in execution order."""
    modules = [*critic.encoder.modules(), *critic.last.modules()]
    return [module for module in modules if not isinstance(module, nn.Sequential | MLPEncoder)]
