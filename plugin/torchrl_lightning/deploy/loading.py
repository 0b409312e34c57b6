"""Load a trained policy without a trainer, and convert observations to the entries of the policy's specs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_lightning._core.checkpoint_reader import load_checkpoint
from torchrl_lightning._core.checksums import verify_checksums
from torchrl_lightning._core.keys import ACTION_MASK
from torchrl_lightning._core.protocols import LearnerApi
from torchrl_lightning._core.torch_defaults import float32_by_default
from torchrl_lightning._core.tree import join, path_of
from torchrl_lightning._core.trust import check_config, resolve_target, without_folders
from torchrl_lightning._core.untrusted import check_regular, printable_errors
from torchrl_lightning._hydra.compat import instantiate
from torchrl_lightning.deploy.weights import check_finite, check_weights
from torchrl_lightning.environments import EnvironmentRecipe
from torchrl_lightning.environments.masks import action_mask
from torchrl_lightning.environments.normalization import NormalizedPolicy, ObservationNormalizer
from torchrl_lightning.environments.observation_limits import check_magnitudes, magnitude_limits
from torchrl_lightning.environments.policy_calls import recurrent_states
from torchrl_lightning.environments.specs import EnvironmentSpecs, specs_from_state

CONFIG = "config"  # the checkpoint key of the run's config
_BASE_CLASSES = {"data": LightningDataModule, "model": LightningModule}
_TRAINING_ARGUMENT = re.compile(r"(\w+_)?optimizer|buffer|source")
_TRUST_REMEDY = "If you trust the author of the checkpoint, use"


class LoadedPolicy(TensorDictModuleBase):
    """A policy for inference: in evaluation mode, without gradients, on raw observations of the environment.

    Attributes:
        policy: The trained TensorDict module, including its observation normaliser if the training used one.
        specs: The specs of the training environment.
        deterministic: True uses the mode of the action distribution, False a sample.
        environment: The id or the recipe settings of the training environment, from the checkpoint.
        state: The recurrent states after the last call of :meth:`act`, ``[N, *S]`` each. Empty before the first call,
            and if the policy is not recurrent.
    """

    def __init__(
        self, policy: Any, specs: EnvironmentSpecs, *, deterministic: bool = True, environment: Any = None
    ) -> None:
        super().__init__()
        self.policy, self.specs, self.deterministic, self.environment = policy, specs, deterministic, environment
        self.in_keys, self.out_keys = list(policy.in_keys), list(policy.out_keys)
        self.state: dict[NestedKey, Tensor] = {}
        self._last_batch_size: int | None = None  # the batch size of the last call and of the recurrent states
        self._mask = action_mask(specs.observation, specs.action) if ACTION_MASK in self.in_keys else None
        self._limits = magnitude_limits(policy, specs.observation)
        self.requires_grad_(False)
        self.eval()

    @property
    def clip_actions(self) -> bool:
        """True if actions are clipped for the environment, as in the training run."""
        return self.specs.action_format.clip

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action, and the next recurrent states of a recurrent policy, into a TensorDict ``[N]``."""
        mode = ExplorationType.DETERMINISTIC if self.deterministic else ExplorationType.RANDOM
        with torch.no_grad(), set_exploration_type(mode):
            outputs: TensorDictBase = self.policy(tensordict)
        return outputs

    def act(
        self, observation: Any, *, starts: Any = False, state: Mapping[NestedKey, Tensor] | None = None
    ) -> NDArray[Any] | np.generic:
        """Return the action for an observation; both consist of NumPy arrays and numbers.

        A recurrent policy stores its states for the next call.

        Args:
            observation: One observation, as Gymnasium's ``reset`` and ``step`` return it, or the batch of a vector
                environment, ``[N, *F]`` for each entry.
            starts: True if the observation is the first of its episode; one bool, or ``[N]``. This resets the recurrent
                states. Without ``state``, the first call always resets these states.
            state: Recurrent states to continue from, taken from :attr:`state`; None uses the stored states.

        Returns:
            The action for ``step``, with the shape, dtype and numbering of the environment's action space. The actions
            for a batch are ``[N, *A]``.

        Raises:
            ValueError: The observation does not match the specs of the training environment. Or, for a recurrent
                policy, the number of environments differs from the last call or from ``state``, although not all
                environments start an episode.
            EnvironmentFault: A float64 number exceeds the float32 range of the networks. Or the ``action_mask`` of a
                single observation allows no action. A batch may contain empty masks, because the actions of ended
                episodes are ignored.

        Examples:
            >>> policy = load_policy("logs/run/checkpoints/best.ckpt")  # doctest: +SKIP
            >>> env.step(policy.act(observation))  # doctest: +SKIP
        """
        entries, count = observed_entries(self.specs.observation, observation)
        rows = count or 1
        if self._mask is not None and count is None:  # in a batch, ended episodes may have empty masks
            self._mask.check(entries[ACTION_MASK])
        check_magnitudes(entries, self._limits)
        is_init = torch.as_tensor(np.broadcast_to(np.asarray(starts, dtype=bool), rows).copy())[:, None]
        states = recurrent_states(self.policy, rows)
        stored_states = self.state if state is None else state
        last_rows = next(
            (len(stored_states[key]) for key in states if key in stored_states),
            self._last_batch_size if state is None else rows,
        )
        if last_rows == rows:
            states = {key: stored_states.get(key, value) for key, value in states.items()}
        elif not states or last_rows is None or is_init.all():
            is_init = torch.ones_like(is_init)
        else:
            raise ValueError(
                f"The observation must be of {last_rows} environments, as the recurrent states are, got {rows}. Pass "
                "starts=True if episodes begin, or load another policy for these environments"
            )
        step = self(TensorDict({**entries, **states, "is_init": is_init}, [rows]))
        self.state, self._last_batch_size = {key: step[unravel_key(("next", key))] for key in states}, rows
        action_format = self.specs.action_format
        action: NDArray[Any] = action_format.to_environment(step["action"]).numpy()
        return action_format.single(action) if count is None else action

    @printable_errors()
    def recipe(self, *, trusted: bool = False) -> EnvironmentRecipe:
        """Return the recipe of the training environment; a call of the recipe makes a new environment.

        Args:
            trusted: Allow classes and modules of other packages, such as your own, in the recipe. The checkpoint's
                author chooses them.

        Raises:
            ValueError: The checkpoint contains neither an environment id nor recipe settings. Or it contains class
                names of other packages, and ``trusted`` is False.
        """
        settings = self.environment if isinstance(self.environment, Mapping) else {"id": self.environment}
        if settings.get("id") is None:
            raise ValueError(
                "The checkpoint has no environment id and no recipe settings. Make the environment as in training"
            )
        try:
            check_config(
                {**settings, "_target_": "torchrl_lightning.EnvironmentRecipe"},
                where="the recipe in the checkpoint",
                trusted=trusted,
            )
        except ValueError as error:
            raise ValueError(f"{error}. {_TRUST_REMEDY} recipe(trusted=True)") from error
        try:
            return EnvironmentRecipe(**settings)
        except TypeError as error:
            raise ValueError(f"The environment in the checkpoint has invalid recipe settings: {error}") from error


@printable_errors()
def load_policy(
    path: str | Path, module: Any = None, *, deterministic: bool = True, trusted: bool = False
) -> LoadedPolicy:
    """Load a trained policy from a checkpoint file for inference on the CPU.

    A checkpoint of ``torchrl-lightning-train`` contains all settings. If you trained with your own trainer, pass the
    LightningModule, built with the same arguments as for the training.

    Args:
        path: The checkpoint, or a run's folder. A folder's best checkpoint is loaded, or without one, the last.
        module: The LightningModule to load, ours or your own. It needs a ``policy``, and its ``configure_model`` may
            read ``trainer.datamodule.specs``. None builds the module from the checkpoint's config.
        deterministic: True uses the mode of the action distribution, False a sample.
        trusted: Import and build classes of other packages, such as your own, if the checkpoint's config names these
            classes. The checkpoint's author has chosen them.

    Returns:
        The policy, with the environment's ``specs`` and ``recipe()``.

    Raises:
        ValueError: The checkpoint lacks the specs or the config, or its weights do not fit the module. Or its config
            does not consist of plain data, or contains class names of other packages and ``trusted`` is False.
        TypeError: The module does not have a ``policy``.

    Examples:
        >>> load_policy("logs/run/checkpoints/best.ckpt")  # doctest: +SKIP
    """
    path = checkpoint_of(path)
    return extract_policy(read_checkpoint(path), path, module, deterministic=deterministic, trusted=trusted)


def checkpoint_of(run: str | Path) -> Path:
    """Return the best (or else the last) checkpoint of a run folder; return the path of a file unchanged.

    Raises:
        ValueError: The folder has neither checkpoint.
    """
    path = Path(run)
    if not path.is_dir():
        return path
    candidates = [path / "checkpoints" / name for name in ("best.ckpt", "last.ckpt")]
    checkpoint = next((candidate for candidate in candidates if candidate.is_file()), None)
    if checkpoint is None:
        raise ValueError(
            f"{run} has neither checkpoints/best.ckpt nor checkpoints/last.ckpt. Use a run, or a checkpoint"
        )
    return checkpoint


@printable_errors()
def read_checkpoint(path: str | Path, *, mapped: bool = False, verify: bool = True) -> dict[str, Any]:
    """Return the content of a checkpoint, restricted to plain values and tensors.

    With ``mapped``, the tensors are memory-mapped and only read on access. With ``verify``, the checksums are compared,
    which reads all tensors. A checkpoint without checksums is accepted.

    Raises:
        OSError: The file does not exist.
        ValueError: The file is damaged, is not a checkpoint, contains other objects than plain values and tensors, or
            exceeds the limits of :mod:`torchrl_lightning._core.file_limits`.
    """
    check_regular(path)
    try:
        stored = load_checkpoint(path, mapped=mapped)
    except ValueError as error:
        raise ValueError(
            f"{path} is not a complete checkpoint of plain data: {error}. Use a checkpoint of a run, such as "
            "RUN/checkpoints/best.ckpt"
        ) from error
    if not isinstance(stored, dict):
        raise ValueError(f"{path} must contain a dict, got a {type(stored).__name__}. Use a checkpoint of a run")
    if verify:
        verify_checksums(stored, str(path))
    return stored


@float32_by_default()
def extract_policy(
    stored: dict[str, Any], path: str | Path, module: Any = None, *, deterministic: bool, trusted: bool = False
) -> LoadedPolicy:
    """Return the policy of a checkpoint that is already in memory; see :func:`load_policy`."""
    state, specs, normalizer = _read_environment(stored, path)
    # Stubs of DataModule and trainer, with all attributes that a module reads without a fit.
    data = SimpleNamespace(specs=specs if normalizer is None else normalizer.specs)
    trainer = SimpleNamespace(datamodule=data, precision="32-true", precision_plugin=None, world_size=1, global_rank=0)
    if module is None:
        module = _build_module(stored, path, trainer, trusted=trusted)
    module.trainer = trainer
    try:
        module.configure_model()
        check_finite(module, stored["state_dict"])
        module.on_load_checkpoint(stored)
        module.load_state_dict(stored["state_dict"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise ValueError(
            f"The weights in {path} do not fit this {type(module).__name__}. Build it with the arguments of the "
            f"training. {error}"
        ) from error
    finally:
        module.trainer = None
    if not callable(LearnerApi.of(module).policy):
        raise TypeError(f"{type(module).__name__} must have an attribute `policy`, the TensorDict module of the policy")
    policy = module.policy if normalizer is None else NormalizedPolicy(module.policy, normalizer)
    return LoadedPolicy(policy, specs, deterministic=deterministic, environment=state["fingerprint"]["environment"])


def extract_statistics(stored: Mapping[str, Any], path: str | Path) -> Mapping[str, Any]:
    """Return the normalization state of the DataModule in a checkpoint.

    Raises:
        ValueError: The run of the checkpoint did not use one of our DataModules.
    """
    statistics: Mapping[str, Any] = _read_environment(stored, path)[0]["normalization"]
    return statistics


def _read_environment(
    stored: Mapping[str, Any], path: str | Path
) -> tuple[Mapping[str, Any], EnvironmentSpecs, ObservationNormalizer | None]:
    """Return the state of a checkpoint's DataModule, the specs, and the normaliser (or None)."""
    states = (state for state in stored.values() if isinstance(state, Mapping) and "specs" in state)
    if (state := next(states, None)) is None:
        raise ValueError(f"{path} contains no environment specs: its run did not use one of our DataModules")
    if "normalization" not in state:
        raise ValueError(f"{path} was written by an earlier development version. Train again")
    if not isinstance(stored.get("state_dict"), Mapping):
        raise ValueError(f"{path} contains no weights (state_dict)")
    try:
        specs, moments = specs_from_state(state["specs"]), state["normalization"]["observation"]
        normalizer = ObservationNormalizer.from_state(specs, moments) if moments else None
        state["fingerprint"]["environment"]
    except Exception as error:  # invalid data can raise any exception in specs and tensors
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{path} contains invalid environment specs: {reason}") from error
    return state, specs, normalizer


def _build_module(stored: Mapping[str, Any], path: str | Path, trainer: Any, *, trusted: bool) -> Any:
    """Build the module from a checkpoint's config, after checking its network sizes against the weights."""
    try:
        config = extract_config(stored, path, "model", trusted=trusted)["model"]
    except ValueError as error:
        raise ValueError(
            f"{error}. {_TRUST_REMEDY} trusted=True, or build the module yourself and pass it: "
            "load_policy(path, module=MyModule(...))"
        ) from error

    def build() -> Any:
        module = instantiate(config)
        module.trainer = trainer
        module.configure_model()
        module.on_load_checkpoint(stored)
        return module

    try:
        check_weights(build, stored, own=trusted)
    except ValueError as error:
        raise ValueError(f"The config in {path} does not fit its weights: {error}") from error
    return instantiate(config)


def extract_config(stored: Mapping[str, Any], path: str | Path, *groups: str, trusted: bool = False) -> dict[str, Any]:
    """Return the given groups of a checkpoint's config, without folders and training-only parts.

    Raises:
        ValueError: The checkpoint does not have a config, or :func:`~torchrl_lightning._core.trust.check_config`
            rejects it.
    """
    config, source = stored.get(CONFIG), f"the config in {path}"
    if not isinstance(config, Mapping) or any(not isinstance(config.get(group), dict) for group in groups):
        raise ValueError(f"{path} contains no config. Use a checkpoint of torchrl-lightning-train")
    configs = {group: config[group] for group in groups}
    check_config(configs, where=source, trusted=trusted, folders=False)
    for group, node in configs.items():
        target = resolve_target(node.get("_target_", ""))
        if target is not None and not (isinstance(target, type) and issubclass(target, _BASE_CLASSES[group])):
            raise ValueError(
                f"{source} has {group}._target_={node['_target_']}, which is not a {_BASE_CLASSES[group].__name__}"
            )
    return {group: without_training(without_folders(node)) for group, node in configs.items()}


def without_training(node: dict[str, Any]) -> dict[str, Any]:
    """Return the config of one of our models or DataModules without the training-only parts.

    A loaded policy needs no optimizer, buffer or data source, so these are neither built nor allocated.
    """
    target = resolve_target(node.get("_target_", ""))
    if target is None:
        return node
    remaining = {key: value for key, value in node.items() if not _TRAINING_ARGUMENT.fullmatch(str(key))}
    parameters = inspect.signature(target).parameters
    required = {key for key in node if key in parameters and parameters[key].default is inspect.Parameter.empty}
    if "buffer" in required:  # a required argument needs a placeholder, which is never called
        remaining["buffer"] = {"_target_": "torchrl_lightning.ExperienceBuffer", "_partial_": True}
    return remaining


def observed_entries(specs: Composite, observation: Any) -> tuple[dict[NestedKey, Tensor], int | None]:
    """Return the entries ``[N, *F]`` of one observation or of a batch.

    Args:
        specs: One spec for each observation key, without the batch dimension.
        observation: An array, a number, a tensor, or a dict of these, as the environment returns it. Entries of a
            vector environment are ``[N, *F]``.

    Returns:
        The entries, and ``N`` for a batch. A single observation has entries ``[1, *F]`` and None instead of ``N``.

    Raises:
        ValueError: An entry is missing, or has another shape or dtype than its spec; the message names the entry.

    Examples:
        >>> from torchrl.data import Unbounded
        >>> entries, count = observed_entries(Composite(observation=Unbounded((4,))), np.zeros((2, 4)))
        >>> entries["observation"].shape, entries["observation"].dtype, count
        (torch.Size([2, 4]), torch.float32, 2)
    """
    observations = observation if isinstance(observation, Mapping) else {"observation": observation}
    values = {key: _read_entry(key, spec, observations) for key, spec in _spec_leaves(specs)}
    batch_sizes = {key: _batch_size_of(key, spec, values[key]) for key, spec in _spec_leaves(specs)}
    counts = set(batch_sizes.values())
    if counts == {None, 1} and all(values[key].shape == (1,) for key, size in batch_sizes.items() if size is None):
        counts = {1}  # the shape [1] of a number fits one observation and one environment
    if len(counts) != 1:
        raise ValueError(
            f"All entries of the observation must have the same batch size, got {batch_sizes} (None without a batch)"
        )
    count = counts.pop()
    return {key: values[key].reshape(count or 1, *spec.shape) for key, spec in _spec_leaves(specs)}, count


def _spec_leaves(specs: Composite) -> Iterator[tuple[NestedKey, TensorSpec]]:
    yield from specs.items(include_nested=True, leaves_only=True)


def _read_entry(key: NestedKey, spec: TensorSpec, observations: Mapping[str, Any]) -> Tensor:
    value: Any = observations
    path = path_of(key)
    if path[0] not in observations and path[0] == "observation" and "state" in observations:
        path = ("state", *path[1:])  # TorchRL's specs call a single "state" entry "observation"
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            raise ValueError(f"The observation has no entry {join((), path)!r} of shape {list(spec.shape)}")
        value = value[name]
    tensor = torch.as_tensor(value if isinstance(value, Tensor) else np.asarray(value))
    if tensor.dtype != spec.dtype and not torch.can_cast(tensor.dtype, spec.dtype):
        raise ValueError(f"observation {key!r} has dtype {tensor.dtype}, expected {spec.dtype}")
    return tensor.to(spec.device or "cpu", spec.dtype)


def _batch_size_of(key: NestedKey, spec: TensorSpec, value: Tensor) -> int | None:
    scalar = spec.shape == (1,)  # TorchRL's spec of a number has shape (1,)
    if value.shape == spec.shape or (scalar and not value.ndim):
        return None
    if value.ndim and (value.shape[1:] == spec.shape or (scalar and value.ndim == 1)):
        return len(value)
    expected = f"expected {list(spec.shape)}, or {['N', *spec.shape]} of N environments".replace("'", "")
    raise ValueError(f"observation {key!r} has shape {list(value.shape)}, {expected}")
