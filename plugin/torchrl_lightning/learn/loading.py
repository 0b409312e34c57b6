"""A trained policy in a script, without a trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lightning.collectors import EnvironmentRecipe
from torchrl_lightning.collectors.normalization import NormalizedPolicy, ObservationNormalizer
from torchrl_lightning.collectors.specs import EnvironmentSpecs, specs_from_state

CONFIG = "config"  # where a checkpoint holds the config of its run
# Of TorchRL, environments that a name selects, and transforms that are built from numbers and names: others load models
# from the net, or connect to other machines.
_OF_TORCHRL = (
    "GymEnv|DMControlEnv|ActionMask|BinarizeReward|CatFrames|CatTensors|CenterCrop|ClipTransform|Crop|"
    "DiscreteActionProjection|DoubleToFloat|DTypeCastTransform|EndOfLifeTransform|ExcludeTransform|FlattenObservation|"
    "GrayScale|NoopResetEnv|ObservationNorm|PermuteTransform|RenameTransform|Resize|RewardClipping|RewardScaling|"
    "RewardSum|SelectTransform|SignTransform|SqueezeTransform|StepCounter|TimeMaxPool|ToTensorImage|UnsqueezeTransform"
)
_OURS = re.compile(
    r"torchrl_lightning\.[A-Z]\w*|torch\.(optim|nn)\.[A-Z]\w*|gymnasium\.wrappers\.([a-z_]+\.)?(?!Record)[A-Z]\w*|"
    rf"torchrl\.envs\.([a-z_.]+\.)?({_OF_TORCHRL})"
)


class LoadedPolicy(TensorDictModuleBase):
    """A policy for acting alone: in evaluation mode, without gradients, on observations as the environment shows them.

    Attributes:
        policy: The trained TensorDict module, behind the normaliser of its observations if it was trained with one.
        specs: The specs of the environment that it was trained in.
        deterministic: Whether it takes the mode of its distribution instead of a sample.
        environment: By what the checkpoint knows that environment: its id, or the settings of its recipe.
    """

    def __init__(
        self, policy: Any, specs: EnvironmentSpecs, *, deterministic: bool = True, environment: Any = None
    ) -> None:
        super().__init__()
        self.policy, self.specs, self.deterministic, self.environment = policy, specs, deterministic, environment
        self.in_keys, self.out_keys = list(policy.in_keys), list(policy.out_keys)
        self.requires_grad_(False)
        self.eval()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action (and the next recurrent states, if there are any) into a TensorDict ``[N]``."""
        mode = ExplorationType.DETERMINISTIC if self.deterministic else ExplorationType.RANDOM
        with torch.no_grad(), set_exploration_type(mode):
            acted: TensorDictBase = self.policy(tensordict)
        return acted

    def recipe(self, *, trusted: bool = False) -> EnvironmentRecipe:
        """Return how the environment of training was made; called, it makes another one.

        Args:
            trusted: Whether the recipe may name classes of other packages, such as your own; whoever made the
                checkpoint says which.

        Raises:
            ValueError: The checkpoint does not say, or names such classes.
        """
        settings = self.environment if isinstance(self.environment, Mapping) else {"id": self.environment}
        if settings.get("id") is None:
            raise ValueError("the checkpoint does not say how its environment was made; make it as in training")
        foreign = _foreign(settings)
        if foreign and not trusted:
            raise ValueError(
                f"the environment was made by classes of other packages: {', '.join(foreign)}. If you trust whoever "
                "made the checkpoint, call recipe(trusted=True)"
            )
        return EnvironmentRecipe(**settings)


def load_policy(path: str | Path, module: Any = None, *, deterministic: bool = True) -> LoadedPolicy:
    """Load a trained policy from a checkpoint, which may lie anywhere, to act with it on the CPU.

    A checkpoint of the command ``torchrl-lightning-train`` holds all that is needed. With a trainer of your own, pass
    the LightningModule, built with the arguments that it was trained with.

    Args:
        path: The checkpoint.
        module: The LightningModule to load, ours or your own: its ``configure_model`` may read
            ``trainer.datamodule.specs``, and it has a ``policy``. None builds the one of the checkpoint's config.
        deterministic: Whether the policy takes the mode of its distribution instead of a sample.

    Returns:
        The policy, with the environment's ``specs`` and ``recipe()``.

    Raises:
        ValueError: The checkpoint holds no specs or no config, its config names classes of other packages, or its
            weights do not fit the module.
        TypeError: The module has no ``policy``.

    Example:
        >>> load_policy("logs/run/checkpoints/best.ckpt")  # doctest: +SKIP
    """
    stored = torch.load(path, weights_only=True, map_location="cpu")
    return policy_in(stored, path, module, deterministic=deterministic)


def policy_in(stored: dict[str, Any], path: str | Path, module: Any = None, *, deterministic: bool) -> LoadedPolicy:
    """Return the policy of a checkpoint that was read already; see :func:`load_policy`."""
    states = (state for state in stored.values() if isinstance(state, Mapping) and "specs" in state)
    if (state := next(states, None)) is None:
        raise ValueError(f"{path} holds no environment specs: it was not written through one of our DataModules")
    if "normalization" not in state:
        raise ValueError(f"{path} was written by an earlier development version; train anew")
    specs, normalizer = specs_from_state(state["specs"]), None
    if state["normalization"]["observation"]:
        normalizer = ObservationNormalizer.from_state(specs, state["normalization"]["observation"])
    if module is None:
        from hydra.utils import instantiate

        module = instantiate(config_in(stored, path, "model")["model"])
    # All that a module reads of its trainer before there is anything to fit.
    data = SimpleNamespace(specs=specs if normalizer is None else normalizer.specs)
    module.trainer = SimpleNamespace(datamodule=data, precision="32-true", world_size=1, global_rank=0)
    try:
        module.configure_model()
        module.on_load_checkpoint(stored)
        module.load_state_dict(stored["state_dict"])
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {path} do not fit this {type(module).__name__}; build it with the arguments that it was "
            f"trained with. {error}"
        ) from error
    finally:
        module.trainer = None
    if not callable(getattr(module, "policy", None)):
        raise TypeError(f"{type(module).__name__} has no attribute `policy`, the TensorDict module that acts")
    policy = module.policy if normalizer is None else NormalizedPolicy(module.policy, normalizer)
    environment = state["fingerprint"]["environment"]
    return LoadedPolicy(policy, specs, deterministic=deterministic, environment=environment)


def config_in(stored: Mapping[str, Any], path: str | Path, *groups: str) -> dict[str, Any]:
    """Return these groups of the config of the run that wrote a checkpoint; raise ValueError where it holds none.

    Whoever made the file says in it which classes are built, so that only ours and PyTorch's are.
    """
    config = stored.get(CONFIG)
    if not isinstance(config, Mapping) or any(group not in config for group in groups):
        raise ValueError(
            f"{path} holds no config, as a run of torchrl-lightning-train writes it; pass the module: "
            "load_policy(path, module=MyModule(...))"
        )
    chosen = {group: config[group] for group in groups}
    if foreign := _foreign(chosen):
        raise ValueError(
            f"the config in {path} names classes of other packages: {', '.join(foreign)}. Build the module yourself "
            "and pass it: load_policy(path, module=MyModule(...))"
        )
    return chosen


def _foreign(node: Any) -> list[str]:
    """Return the classes that a config names and that are neither ours nor among those that we know."""
    return sorted(target for target in _targets(node) if not _OURS.fullmatch(target))


def _targets(node: Any) -> set[str]:
    if isinstance(node, Mapping):
        own = {str(node["_target_"])} if "_target_" in node else set()
        return own.union(*map(_targets, node.values()))
    return set().union(*map(_targets, node)) if isinstance(node, list) else set()
