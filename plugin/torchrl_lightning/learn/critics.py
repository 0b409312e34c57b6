"""Critics: TorchRL's ``ValueOperator`` built from specs, with any number of value heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torchrl.modules import ValueOperator

from torchrl_lightning.learn.actors import Actor, linear_head, observation_entries
from torchrl_lightning.learn.networks import MLPNetwork, Network


class Critic(ValueOperator):
    """One value head for each key, over a trunk of its own or the actor's.

    A shared trunk stays registered with the actor alone, so that a state dict holds its parameters once. The
    critic writes values only: called on a rollout, it leaves the recorded recurrent states as they are.

    Args:
        heads: One module from features to ``[*B, 1]`` for each key.
        out_keys: What the heads write.
        trunks: One trunk for all heads, or one for each.
        shared: Whether the trunk belongs to an actor.
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
        # Put into evaluation mode together with the critic, without being registered here.
        self.__dict__["borrowed"] = list(trunks) if shared else []
        self.__dict__["trunks"] = list(trunks)

    @property
    def is_recurrent(self) -> bool:
        """Whether the critic reads a recurrent state."""
        return bool(self.trunks[0].recurrent)

    def values_of(self, features: Tensor) -> list[Tensor]:
        """Return each head's values ``[*B, 1]`` for features of a single trunk."""
        return [head(features) for head in self.module]

    def values(self, tensordict: TensorDictBase) -> list[Tensor]:
        """Return each head's values ``[*B, 1]``, writing nothing."""
        if len(self.trunks) == 1:
            return self.values_of(self.trunks[0].read(tensordict))
        return [head(trunk.read(tensordict)) for head, trunk in zip(self.module, self.trunks, strict=True)]

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
        out_keys: The value keys, one head for each; for several critics ``("state_value", name)``.
        actor: Actor whose trunk is used if the network is shared.
        separate: Give each head its own trunk.

    Raises:
        ValueError: The network is shared but no actor is given, or should be both shared and separate.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Composite, Unbounded
        >>> specs = SimpleNamespace(observation=Composite(observation=Unbounded(4)))
        >>> critic = build_critic(specs, out_keys=["state_value", "intrinsic_state_value"])
        >>> critic(TensorDict(observation=torch.zeros(3, 4), batch_size=3))["intrinsic_state_value"].shape
        torch.Size([3, 1])
    """
    network = network or MLPNetwork()
    if network.shared:
        if actor is None:
            raise ValueError(f"{type(network).__name__} is shared by actor and critic; give build_critic the actor")
        if separate:
            raise ValueError(
                "critics can't have separate trunks and share the actor's; set shared: false on the network"
            )
        trunks = [actor.trunk]
    else:
        entries = observation_entries(specs)
        trunks = [network.trunk(*entries) for _ in range(len(out_keys) if separate else 1)]
    heads = [linear_head(network, trunks[0].features, 1) for _ in out_keys]
    return Critic(heads, out_keys, trunks, shared=network.shared)
