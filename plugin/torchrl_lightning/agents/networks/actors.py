"""Build actors (TorchRL's ``ProbabilisticActor`` with a fast forward) and critics (``ValueOperator``) from specs.

:class:`ActorWithValues` runs an actor and a critic on one shared trunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, TensorDictModuleBase, TensorDictSequential
from tensordict.nn.probabilistic import interaction_type
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch import distributions as D
from torchrl.data import Composite, TensorSpec
from torchrl.modules import ProbabilisticActor, ValueOperator

from torchrl_lightning._core.keys import ACTION_MASK, BOOKKEEPING, FEATURES
from torchrl_lightning._core.modules import set_unregistered
from torchrl_lightning._core.torch_defaults import check_default_dtype
from torchrl_lightning._core.tree import path_of
from torchrl_lightning.agents.analytic import compiled_call, compiled_values
from torchrl_lightning.agents.networks.action_heads import ActionHead, Parameters, build_head
from torchrl_lightning.agents.networks.encoders import MLPNetwork, mlp, orthogonal
from torchrl_lightning.agents.networks.network_protocol import Network
from torchrl_lightning.environments.masks import action_mask, allowed_values
from torchrl_lightning.environments.policy_calls import fast_call, policy_outputs

_DETERMINISTIC = {InteractionType.RANDOM: False, InteractionType.DETERMINISTIC: True}


def is_deterministic_mode() -> bool | None:
    """Return True if ``interaction_type()`` selects the mode, False if it selects a sample, None for other types."""
    return _DETERMINISTIC.get(interaction_type() or InteractionType.RANDOM)


class Actor(ProbabilisticActor):
    """A trunk and an action head as a ``ProbabilisticActor`` that writes ``action`` and ``action_log_prob``.

    It calls network and distribution directly. The values and random numbers are the same as on TorchRL's generic path
    (``generic_forward``). For a few rows, the direct calls take less than half the time. Rollouts contain only the
    ``out_keys``, without intermediate results. Recurrent actors also write ``("next", "recurrent_state")``.

    Args:
        trunk: The module that maps observations to features.
        head: The module that maps features to distribution parameters.
        spec: The unbatched action spec.
        masked: Read ``action_mask`` and give forbidden actions probability zero in all results.
    """

    def __init__(
        self,
        trunk: TensorDictModuleBase,
        head: ActionHead,
        spec: TensorSpec | None = None,
        masked: bool = False,
    ) -> None:
        modules = [trunk, TensorDictModule(head, in_keys=[FEATURES], out_keys=head.parameter_keys)]
        if masked:
            keys = head.parameter_keys
            modules.append(TensorDictModule(allowed_values, in_keys=[*keys, ACTION_MASK], out_keys=keys))
        super().__init__(
            TensorDictSequential(*modules),
            in_keys=head.parameter_keys,
            out_keys=["action"],
            spec=None if spec is None else Composite(action=spec),
            distribution_class=head.distribution_class,
            distribution_kwargs=head.distribution_kwargs,
            return_log_prob=True,
            log_prob_key="action_log_prob",
            default_interaction_type=InteractionType.RANDOM,
        )
        # Set plain attributes for speed; super().__init__ has registered the modules.
        set_unregistered(self, trunk=trunk, head=head)
        self.masked = masked
        self.out_keys = ["action", "action_log_prob", *(key for key in trunk.out_keys if key != FEATURES)]
        self._output_keys = list(self.out_keys)

    def apply_mask(self, parameters: Parameters, step: TensorDictBase) -> Parameters:
        """Apply the action mask of a step ``[*B]`` to the distribution's parameters, if ``masked``."""
        return (allowed_values(parameters[0], step.get(ACTION_MASK)),) if self.masked else parameters

    def compute_step(self, step: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return the outputs of ``forward`` without writing them; collectors call it on each step."""
        deterministic = is_deterministic_mode()
        if deterministic is None:
            output = self.generic_forward(step.copy())
            return {key: output.get(key) for key in self.out_keys}
        features, states = self.trunk.step(step)
        return self.select_action(features, states, step, deterministic)

    def select_action(
        self, features: Tensor, states: Sequence[Tensor], step: TensorDictBase, deterministic: bool
    ) -> dict[NestedKey, Tensor]:
        """Return the outputs of ``forward`` from the trunk's features, without writing them."""
        outputs = self.head.sample(self.apply_mask(self.head.sampling_parameters(features), step), deterministic)
        return self._to_outputs((*outputs, *states))

    def _to_outputs(self, values: Sequence[Tensor]) -> dict[NestedKey, Tensor]:
        outputs = dict(zip(self._output_keys, values, strict=True))
        keys: list[NestedKey] = self.out_keys  # fewer keys after select_out_keys()
        return outputs if len(keys) == len(outputs) else {key: outputs[key] for key in keys}

    def bind_inputs(self, step: TensorDictBase) -> Callable[[], dict[NestedKey, Tensor]]:
        """Return a function that runs :meth:`compute_step` on a CPU step ``[N]``; the caller overwrites its tensors."""
        return compiled_call(self, step) or (lambda: self.compute_step(step))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Write the action, its log-probability and, for recurrent actors, the next recurrent state."""
        if len(args) != 1 or kwargs or not isinstance(args[0], TensorDictBase):
            return super().forward(*args, **kwargs)
        for key, value in self.compute_step(args[0]).items():
            args[0].set(key, value)
        return args[0]

    def generic_forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the same outputs with TorchRL's own forward, which supports any interaction type."""
        return tensordict.update(super().forward(tensordict.copy()).select(*self.out_keys))

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> D.Distribution:
        """Return the distribution over actions without writing to the TensorDict."""
        return self.head.distribution(self.apply_mask(self.head(self.trunk.encode(tensordict)), tensordict))


def build_actor(
    specs: Any, network: Network | None = None, *, distribution: str = "auto", initial_std: float = 1.0
) -> Actor:
    """Build an actor for an environment's specs.

    Args:
        specs: ``EnvironmentSpecs``, or anything with an unbatched ``observation`` (Composite) and ``action``.
        network: Network in front of the head; ``MLPNetwork()`` by default.
        distribution: Distribution of continuous actions: ``"normal"`` (clipped; the default) or ``"tanh_normal"``.
        initial_std: Initial standard deviation of continuous actions, in units of half the action range. Actions
            without bounds have their own units. ``TanhNormal`` applies it before the tanh.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> td = build_actor(specs)(specs.observation.zero([3]))
        >>> td["action"].shape, td["action_log_prob"].shape
        (torch.Size([3]), torch.Size([3]))
    """
    trunk, hidden, features = trunk_and_layers(specs, network or MLPNetwork())
    head = build_head(specs.action, features, distribution, initial_std, hidden)
    return Actor(trunk, head, specs.action, masked=action_mask(specs.observation, specs.action) is not None)


def trunk_and_layers(specs: Any, network: Network) -> tuple[Any, nn.Module | None, int]:
    """Return an actor's trunk, the hidden layers of its head or None, and the input width of the head's last layer."""
    trunk = network.trunk(*observation_entries(specs))
    return trunk, *head_layers(network, trunk.features)


def head_layers(network: Network, features: int, sizes: Sequence[int] | None = None) -> tuple[nn.Module | None, int]:
    """Return a head's own hidden layers, or None, and the input width of the head's last layer.

    The default sizes are ``head_sizes`` of the network.
    """
    sizes = network.head_sizes if sizes is None else sizes
    if not sizes:
        return None, features
    initialization = getattr(network, "initialization", "orthogonal")  # only perceptrons have the setting
    return mlp(features, sizes, network.activation, initialization), int(sizes[-1])


def linear_head(network: Network, features: int, size: int, sizes: Sequence[int] | None = None) -> nn.Module:
    """Return a value head: the optional hidden layers of :func:`head_layers`, and a linear layer."""
    hidden, features = head_layers(network, features, sizes)
    output_layer = orthogonal(nn.Linear(features, size), 1.0)
    return output_layer if hidden is None else nn.Sequential(hidden, output_layer)


def observation_entries(specs: Any) -> tuple[list[Any], list[TensorSpec]]:
    """Return the sorted keys and leaf specs of the network inputs; raise ValueError without inputs.

    Bookkeeping entries and action masks are excluded. Torch's default dtype is validated here, because all network
    builders call this function.
    """
    check_default_dtype()
    leaves = dict(specs.observation.items(include_nested=True, leaves_only=True))
    keys = sorted((key for key in leaves if path_of(key)[0] not in (*BOOKKEEPING, ACTION_MASK)), key=str)
    if not keys:
        raise ValueError(f"the observation spec must contain an entry for the network, got {specs.observation}")
    return keys, [leaves[key] for key in keys]


class Critic(ValueOperator):
    """One value head for each key, on separate trunks or on the actor's trunk.

    Only the actor registers a shared trunk, so that a state dict contains its parameters once. The critic writes only
    values, so that the recurrent states in a rollout stay unchanged.

    Args:
        heads: For each key, a module that maps features to ``[*B, 1]``.
        out_keys: Output keys of the heads.
        trunks: One trunk for all heads, or one trunk for each head.
        shared: True if the trunk belongs to an actor.
    """

    def __init__(
        self,
        heads: Sequence[nn.Module],
        out_keys: Sequence[NestedKey],
        trunks: Sequence[TensorDictModuleBase],
        shared: bool = False,
    ) -> None:
        super().__init__(module=nn.ModuleList(heads), in_keys=list(trunks[0].in_keys), out_keys=list(out_keys))
        self.is_shared = shared
        if not shared:
            self.owned_trunks = nn.ModuleList(trunks)
        # Only the actor may register a borrowed trunk. This plain list lets evaluation mode reach the trunk.
        self.trunks = list(trunks)
        self.borrowed = self.trunks if shared else []

    def values_of(self, features: Tensor) -> list[Tensor]:
        """Return each head's values ``[*B, 1]`` for the features of a single trunk."""
        return [head(features) for head in self.module]

    def values(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return each head's values ``[*B, 1]`` without writing them."""
        if (values := compiled_values(self, tensordict)) is not None:
            return values
        if len(self.trunks) == 1:
            return self.values_of(self.trunks[0].encode(tensordict))
        return [head(trunk.encode(tensordict)) for head, trunk in zip(self.module, self.trunks, strict=True)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the values."""
        for key, value in zip(self.out_keys, self.values(tensordict), strict=True):
            tensordict.set(key, value)
        return tensordict


def build_critic(
    specs: Any,
    network: Network | None = None,
    *,
    out_keys: Sequence[NestedKey] = ("state_value",),
    actor: Actor | None = None,
    separate: bool = False,
) -> Critic:
    """Build a critic for an environment's specs.

    Args:
        specs: ``EnvironmentSpecs``, or anything with an unbatched ``observation`` (Composite).
        network: Network in front of the heads; ``MLPNetwork()`` by default.
        out_keys: The value keys, each with its own head. Keys of several critics are ``("state_value", name)``.
        actor: Actor that provides the trunk if the network is shared.
        separate: Give each head its own trunk.

    Raises:
        ValueError: The network is shared, but ``actor`` is missing or ``separate`` is set.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 1))
        >>> critic = build_critic(specs, out_keys=["state_value", "intrinsic_state_value"])
        >>> critic(specs.observation.zero([3]))["intrinsic_state_value"].shape
        torch.Size([3, 1])
    """
    network = network or MLPNetwork()
    if network.shared:
        if actor is None:
            raise ValueError(
                f"actor must be given to build_critic, because {type(network).__name__} is shared by actor and critic, "
                "got None. Pass the actor, or set shared=False on the network."
            )
        if separate:
            raise ValueError(
                "separate must be False if actor and critic share the network, got True. Set shared=False on the "
                "network for critics with separate trunks."
            )
        trunks = [actor.trunk]
    else:
        entries = observation_entries(specs)
        trunks = [network.trunk(*entries) for _ in range(len(out_keys) if separate else 1)]
    heads = [linear_head(network, trunks[0].features, 1) for _ in out_keys]
    return Critic(heads, out_keys, trunks, shared=network.shared)


class ActorWithValues(TensorDictModuleBase):
    """An actor that also writes the values of a critic; their shared trunk runs once.

    The rollout then contains the value of each step. Advantage estimation computes only the values of the final next
    observations.

    Args:
        actor: The actor.
        critic: A critic on the actor's trunk.
    """

    def __init__(self, actor: Actor, critic: Critic) -> None:
        super().__init__()
        self.actor, self.critic = actor, critic
        self.in_keys, self.out_keys = list(actor.in_keys), [*actor.out_keys, *critic.out_keys]

    def compute_step(self, step: TensorDictBase) -> dict[NestedKey, Tensor]:
        """Return the outputs of ``forward`` without writing them."""
        actor, critic, deterministic = self.actor, self.critic, is_deterministic_mode()
        if deterministic is None or fast_call(actor) is None:
            outputs, values = policy_outputs(actor, step.copy()), critic.values(step)
        else:
            features, states = actor.trunk.step(step)
            outputs = actor.select_action(features, states, step, deterministic)
            values = critic.values_of(features)
        return {**outputs, **dict(zip(critic.out_keys, values, strict=True))}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the actor's outputs and the values."""
        for key, value in self.compute_step(tensordict).items():
            tensordict.set(key, value)
        return tensordict

    def get_dist(self, tensordict: TensorDictBase) -> D.Distribution:
        """Return the actor's distribution over actions without writing to the TensorDict."""
        distribution: Any = self.actor.get_dist(tensordict)
        return distribution
