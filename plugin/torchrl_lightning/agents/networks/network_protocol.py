"""The interface between agents and networks: settings that build an encoder of observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_lightning._core.validators import Check
from torchrl_lightning.agents.networks.trunks import Trunk


class Network(Protocol):
    """Settings from which agents build the layers in front of their heads; a subclass needs only ``encoder``.

    Actors and critics encode observations with ``encoder``, which never receives an action. Action critics (SAC, TD3)
    concatenate the action with the features, unless the network also defines ``action_encoder``.
    """

    recurrent: ClassVar[bool] = False
    """True if the trunk is a ``RecurrentTrunk``."""
    costly: ClassVar[bool] = False
    """True if the layers take longer than a module call; agents then never run them twice on the same step."""
    shared: bool = False
    """True if the actor and the critic of an on-policy agent share the encoder."""
    head_sizes: Sequence[int] = ()
    """Widths of the layers between the features and the last layer of each head."""
    activation: str = "relu"
    """Activation of the ``head_sizes`` layers."""

    def encoder(self, specs: Sequence[Any]) -> nn.Module:
        """Build a module that maps observation entries ``[*B, *F_i]`` to features ``[*B, H]``.

        The module has an integer attribute ``features``, H. The entries are sorted by key.
        """

    def action_encoder(self, specs: Sequence[Any], action: Any) -> nn.Module:
        """Build a module that maps observation entries and an action (in units of half its range) to features.

        This method is optional. With it, critics read observation and action in their first layer. A class that
        overrides only ``encoder`` does not have the method.
        """
        raise TypeError(f"{type(self).__name__} has no action_encoder; it must be defined beside encoder.")

    def trunk(self, keys: Sequence[Any], specs: Sequence[Any]) -> TensorDictModuleBase:
        """Build the TensorDict module that maps observation keys to features."""
        return Trunk(self.encoder(specs), keys)


class EncoderNetwork(Network):
    """Add the default settings of :class:`Network` to an object that defines only ``encoder(specs)``."""

    def __init__(self, described: Any) -> None:
        self.wrapped = described

    def encoder(self, specs: Sequence[Any]) -> nn.Module:
        """Build the object's encoder."""
        encoder: nn.Module = self.wrapped.encoder(specs)
        return encoder


def has_action_encoder(network: Network) -> bool:
    """Return whether ``action_encoder`` is usable; it is not if a subclass overrides only ``encoder``."""
    if "encoder" in getattr(network, "__dict__", ()):
        return False
    methods = {"encoder", "action_encoder"}
    defined_methods = (methods & vars(cls).keys() for cls in type(network).__mro__)
    return "action_encoder" in next(filter(None, defined_methods), ())


def network_check(default_factory: Callable[[], Network]) -> Check:
    """Return a check for settings that are networks; it replaces None by the result of ``default_factory``."""

    def check_network(value: Any, name: str) -> Network:
        if value is None:
            return default_factory()
        if isinstance(value, type) or not callable(getattr(value, "encoder", None)):
            got = f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r:.40}"
            raise TypeError(
                f"{name} must be a network configuration, such as MLPNetwork([64, 64]), or an object with the method "
                f"encoder(specs), got {got}."
            )
        settings = ("recurrent", "shared", "head_sizes", "activation", "trunk")
        network: Network = value if all(hasattr(value, setting) for setting in settings) else EncoderNetwork(value)
        return network

    return check_network
