"""Store one rollout, estimate its advantages, and serve mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import InitVar
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, overload

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.data import TensorDictReplayBuffer

from torchrl_lightning._core.files import read_state_folder, write_state_folder
from torchrl_lightning._core.keys import CURRENT_LOG_PROB, INTRINSIC_REWARD, NORMALIZED_REWARD, REPEATED
from torchrl_lightning._core.mixins import SignatureDescriptor, make_generator
from torchrl_lightning._core.protocols import EnvsApi
from torchrl_lightning._core.settings import (
    Boolean,
    Fraction,
    PositiveInt,
    Settings,
    computed,
    default_factory,
    setting,
)
from torchrl_lightning._core.state import Attribute, Child, Stateful, any_value, flag
from torchrl_lightning._core.tree import Keys, keys_below, next_key, path_of, to_tensordict
from torchrl_lightning._core.tree_checks import TorchRLState
from torchrl_lightning._core.validators import Check, fraction
from torchrl_lightning.environments.replay_source import ReplaySource
from torchrl_lightning.estimators import IntrinsicRewardNormalizer
from torchrl_lightning.rollout.batch_sizes import select_entries, sequences, split_epoch
from torchrl_lightning.rollout.estimates import GAE, INTRINSIC, Estimator, RewardKeys
from torchrl_lightning.rollout.hooks import RolloutHooks
from torchrl_lightning.rollout.intrinsic import has_intrinsic, write_normalized
from torchrl_lightning.rollout.minibatches import MinibatchSampler
from torchrl_lightning.rollout.pytorchrl_api import PyTorchRLInterface
from torchrl_lightning.rollout.pytorchrl_names import DOCUMENTED
from torchrl_lightning.rollout.rollout_storage import RolloutStorage, gather
from torchrl_lightning.rollout.rollout_writer import RolloutWriter
from torchrl_lightning.rollout.values import RECURRENT_KEYS, fill_values


class RolloutBuffer(Settings, Stateful, TensorDictReplayBuffer, PyTorchRLInterface):
    """Buffer of one rollout ``[T, N]`` with advantages, value targets and mini-batches.

    Every read computes missing advantages first. Without advantages, a TorchRL loss would estimate them from shuffled
    samples, which gives noise.

    Args:
        size: capacity along time.
        estimator: computes advantages from rewards and values; :class:`GAE` by default.
        device: device of the rollout.
        actor: TensorDict policy for V-trace; :meth:`before_gradients` can override actor and critic.
        critic: writes the values, and ``intrinsic_state_value`` if the rollout has intrinsic rewards.
        intrinsic_critic: writes ``intrinsic_state_value`` if the critic does not.
        algorithm: any object with ``gamma`` and optionally ``gamma_intrinsic``, ``num_mini_batch`` and
            ``mini_batch_size``. The buffer reads these attributes at each use.
        envs: environments with ``num_envs``.
        gamma: discount; ``None`` uses the discount of ``algorithm``, or 0.99 if the algorithm does not have one.
        gamma_intrinsic: discount of the intrinsic rewards; ``None`` uses the value of ``algorithm``, or 0.99.
        normalize_intrinsic: divide intrinsic rewards by their running standard deviation.
        intrinsic_direction: ``"forward"`` or ``"backward"``, see :class:`IntrinsicReturns`. PyTorchRL uses the latter.
        recompute_values: run the critic even if the policy wrote values.
        stream: keys of rewards, values, advantages and targets; the standard keys by default.
        hooks: called around each rollout, for example to replay demonstrations; the default does nothing.
        num_envs: number of environments; ``None`` uses the number in ``envs`` or in the first write.
        time_dim: time dimension of a written rollout; ``None`` reads the dimension names.
        recurrent: True for mini-batches of whole environments; ``None`` means True if a recurrent state is stored.
        recurrent_keys: root keys of recurrent states.
        batch_keys: entries of a mini-batch; ``None`` selects all except flags and successor values.
        batch_size: default batch size of ``sample``.
        generator: random generator; ``None`` seeds a new one from torch's global generator.
        transform: a TorchRL transform of mini-batches; a write applies its inverse.

    Examples:
        >>> flag = torch.zeros(2, 1, 1, dtype=torch.bool)
        >>> following = {"reward": torch.ones(2, 1, 1), "done": flag, "terminated": ~flag, "state_value": 0.0 * flag}
        >>> rollout = TensorDict({"state_value": 0.5 * ~flag, "next": following}, [2, 1])
        >>> buffer = RolloutBuffer(2, GAE(lmbda=0.9), time_dim=0)
        >>> index = buffer.extend(rollout)
        >>> buffer[:]["advantage"].flatten().tolist()
        [0.5, 0.5]
    """

    __signature__ = SignatureDescriptor()
    OWNER, VERSION = "on-policy buffer", 1
    STATE = {
        "storage": Child(),
        "sampler": Child(),
        "transforms": Child(attribute="_transform_state"),
        "consumed": Attribute(flag, "_consumed"),
        "intrinsic": Child(attribute="normalizer"),
    }
    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = (
        *("size", "actor", "algorithm", "envs", "critic", "intrinsic_critic"),
        *("num_envs", "time_dim", "batch_size", "generator"),
    )
    mutable_settings: ClassVar[tuple[str, ...]] = (
        *("size", "gamma", "gamma_intrinsic", "actor", "critic", "intrinsic_critic", "algorithm", "envs"),
        *("recompute_values", "normalize_intrinsic", "batch_keys", "recurrent"),
    )
    """Names of the settings that :meth:`update_storage_parameter` can change."""

    _size: InitVar[PositiveInt] = setting(alias="size", kw_only=False)
    _estimator: Annotated[Estimator, default_factory(GAE)] = setting(alias="estimator", default=None, kw_only=False)
    _device: InitVar[torch.device | str] = setting(alias="device", default="cpu")
    actor: Any = None
    critic: TensorDictModuleBase | None = None
    intrinsic_critic: TensorDictModuleBase | None = None
    algorithm: Any = None
    envs: InitVar[Any] = None
    _gamma: Fraction | None = setting(alias="gamma", default=None)
    _gamma_intrinsic: Fraction | None = setting(alias="gamma_intrinsic", default=None)
    normalize_intrinsic: Boolean = True
    intrinsic_direction: Literal["forward", "backward"] = "forward"
    recompute_values: Boolean = False
    stream: Annotated[RewardKeys, default_factory(RewardKeys)] = setting(default=None)
    hooks: Annotated[RolloutHooks, default_factory(RolloutHooks)] = setting(default=None)
    _num_envs: InitVar[PositiveInt | None] = setting(alias="num_envs", default=None)
    time_dim: InitVar[int | None] = None
    recurrent: Boolean | None = None
    recurrent_keys: InitVar[Keys] = RECURRENT_KEYS
    batch_keys: Keys | None = None
    batch_size: InitVar[PositiveInt | None] = None
    generator: InitVar[torch.Generator | None] = None
    transform: InitVar[Any] = None

    storage: RolloutStorage = computed()
    sampler: MinibatchSampler = computed()
    writer: RolloutWriter = computed()

    def _init_bases(  # type: ignore[override]  # the arguments are the init variables
        self,
        *,
        size: int,
        device: torch.device | str,
        envs: Any,
        num_envs: int | None,
        time_dim: int | None,
        recurrent_keys: tuple[NestedKey, ...],
        generator: torch.Generator | None,
        **options: Any,
    ) -> None:
        self.generator = generator = make_generator() if generator is None else generator
        self.envs, self.recurrent_keys = envs, recurrent_keys
        num_envs = EnvsApi.of(envs).num_envs if num_envs is None else num_envs
        super()._init_bases(
            storage=RolloutStorage(size, num_envs=num_envs, device=device),
            sampler=MinibatchSampler(generator=generator),
            writer=RolloutWriter(time_dim, recurrent_keys=recurrent_keys),
            dim_extend=0,
            generator=generator,
            **options,
        )

    def __post_init__(self) -> None:  # type: ignore[override]  # init variables go to the base's constructor
        super().__post_init__()
        self._discount("gamma", self._gamma)
        self._normalizer = IntrinsicRewardNormalizer(self.gamma_intrinsic, self.intrinsic_direction)
        self._consumed = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.set_rng(self.generator)  # all parts of a copy also share one generator

    def share(self, shared: bool = True) -> Self:
        """Raise ValueError, because a rollout has only one writer; ``shared=False`` returns the buffer itself."""
        if shared:
            raise ValueError(f"A {type(self).__name__} has one writer only. Share an ExperienceBuffer instead.")
        return super().share(False)

    @property
    def size(self) -> int:
        """Capacity along time."""
        return self.storage.size

    @property
    def num_envs(self) -> int | None:
        """Number of environments; ``None`` before the first write."""
        return self.storage.num_envs

    @property
    def device(self) -> torch.device:
        """Device of the rollout."""
        return torch.device(self.storage.device)

    @property
    def step(self) -> int:
        """Number of stored steps."""
        return self.storage.num_steps

    used_capacity = step
    """Number of stored steps, under PyTorchRL's name."""

    def dumps(self, path: str | Path) -> None:
        """Write the state to a folder atomically, in chunks and without pickle."""
        write_state_folder(Path(path), self.state_dict(copy=False))

    def loads(self, path: str | Path) -> None:
        """Read the state from a folder; a damaged or incompatible state changes nothing."""
        self.load_state_dict(read_state_folder(Path(path)))

    @property
    def _parameters(self) -> Mapping[str, Check]:
        """Validator of each setting that :meth:`update_storage_parameter` can change."""
        return {name: self.settings_of_class[name].check or any_value for name in self.mutable_settings}

    @property
    def _documented_keys(self) -> Mapping[str, NestedKey]:
        """The configured key of each documented name."""
        stream = self.stream
        renamed = {"Value": stream.value, "Advantage": stream.advantage, "ExternalReturn": stream.target}
        return {**DOCUMENTED, **renamed}

    @property
    def is_recurrent(self) -> bool:
        """Whether mini-batches have whole environments; by default, True if a recurrent state is stored."""
        return self.storage.layout.has_entries(self.recurrent_keys) if self.recurrent is None else self.recurrent

    @property
    def estimator(self) -> Estimator:
        """The advantage estimator with the current settings."""
        return self._estimator

    @property
    def gamma(self) -> float:
        """Discount: the configured value, else the algorithm's current value, else 0.99."""
        return self._discount("gamma", self._gamma)

    @gamma.setter
    def gamma(self, gamma: float | None) -> None:
        self._gamma = gamma

    @property
    def gamma_intrinsic(self) -> float:
        """Discount of the intrinsic rewards; see :attr:`gamma`."""
        return self._discount("gamma_intrinsic", self._gamma_intrinsic)

    @gamma_intrinsic.setter
    def gamma_intrinsic(self, gamma: float | None) -> None:
        self._gamma_intrinsic = gamma

    def _discount(self, name: str, configured: float | None) -> float:
        discount = getattr(self.algorithm, name, None) if configured is None else configured
        return 0.99 if discount is None else fraction(discount, name)

    @property
    def _transform_state(self) -> TorchRLState:
        return TorchRLState("transforms", self.transform, self.storage)

    @property
    def normalizer(self) -> IntrinsicRewardNormalizer:
        """Normalizer of the intrinsic rewards, with the current discount."""
        if self._normalizer.gamma != (gamma := self.gamma_intrinsic):
            self._normalizer = self._normalizer.discounted_by(gamma)
        return self._normalizer

    @property
    def required_keys(self) -> list[NestedKey]:
        """Entries that the policy must write."""
        return [*self.estimator.required_keys]

    @property
    def uses_policy_values(self) -> bool:
        """Whether the buffer uses the policy's values instead of calling the critic again."""
        return self.stream.bootstrap and not (self.recompute_values or self.estimator.follows_policy)

    @property
    def _estimate_keys(self) -> list[NestedKey]:
        """Keys of the entries that an estimate writes."""
        keys = self.stream
        return [keys.advantage, keys.target, INTRINSIC.advantage, INTRINSIC.target, NORMALIZED_REWARD, CURRENT_LOG_PROB]

    @property
    def _value_roots(self) -> list[NestedKey]:
        """Keys of the extrinsic and intrinsic values."""
        return [self.stream.value, INTRINSIC.value]

    def _write_slice(self, data: TensorDictBase, time_dim: int | None, copy: bool) -> None:
        data = self._without_estimates(data)
        if len(self.transform):
            data = self.transform.inv(data)
        rollout = self.writer.prepare(data, self.writer.time_dim if time_dim is None else time_dim, 0)
        self.empty()
        self.writer.write(rollout, copy=copy)

    def _without_estimates(self, data: TensorDictBase) -> TensorDictBase:
        """Return the data without the values and results that an earlier estimate computed."""
        # Data with computed values also have successor values and results; the policy's values have neither. If steps
        # are stored, the schema lists the results and values that were written with the steps.
        schema = self.storage.schema
        drop = [key for key in self._estimate_keys if data.get(key, None) is not None]
        value_keys = self._value_keys_in(data)
        if schema:
            drop = [key for key in drop + value_keys if key not in schema]
            drop = [key for key in drop if schema.keys().isdisjoint(keys_below(data, key))]
        elif drop:
            roots = [key for key in value_keys if next_key(key) in value_keys]
            drop += [*roots, *(next_key(key) for key in roots)]
        return data.exclude(*drop) if drop else data

    def _value_keys_in(self, data: TensorDictBase) -> list[NestedKey]:
        """Return the keys of all values in ``data``, including successor values."""
        roots = [root for key in self._value_roots for root in (key, next_key(key))]
        return [key for root in roots for key in keys_below(data, root)]

    def _reserve(self, step: TensorDictBase) -> None:
        if self.storage.num_steps:
            raise ValueError(f"init_tensors needs an empty buffer, got {self.storage.num_steps} steps. Call reset().")
        self.storage.allocate(self.writer.complete(self._without_estimates(step)))

    def _resize(self, size: int) -> None:
        self.storage.resize(size)

    def _write_step(self, step: TensorDictBase) -> None:
        step = self.writer.complete(self._without_estimates(step))
        if self._consumed:
            self.writer.prepare(step.unsqueeze(0), 0, 0)
            self.empty()
        self.writer.add(step)
        self.sampler.clear()

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        """Append a rollout with all entries, including advantages; use ``insert_data_slice`` to replace the data."""
        if self._consumed:
            self.writer.prepare(tensordicts, self.writer.time_dim, 0)
            self.empty()
        index: torch.Tensor = super().extend(tensordicts, update_priority=update_priority)
        return index

    def empty(self, empty_write_count: bool = True) -> None:
        """Discard the stored steps, but keep the bootstrap step so that the next rollout can continue."""
        self._consumed = False
        self.hooks.discard()
        super().empty(empty_write_count)

    @property
    def rollout(self) -> TensorDict:
        """A live view ``[T, N]`` of the stored rollout; mini-batches include new entries until the next write."""
        return self.storage.rollout

    @property
    def _needs_estimates(self) -> bool:
        """Whether a rollout is stored without advantages."""
        return self.storage.num_steps > 0 and self.storage.rollout.get(self.stream.advantage, None) is None

    def _ensure_estimated(self) -> TensorDict:
        """Return a live view of the stored rollout; compute advantages and targets if they are missing.

        Raises:
            RuntimeError: nothing is stored, a required critic is missing, or the actor for V-trace is missing.
        """
        if self._needs_estimates:
            self._write_estimates()
        return self.storage.rollout

    def before_gradients(self, actor: Any = None, critic: TensorDictModuleBase | None = None) -> None:
        """Write values, advantages and targets of all stored steps, for extrinsic and intrinsic rewards.

        Args:
            actor: the current policy; None uses the buffer's actor.
            critic: the value network; None uses the buffer's critic.

        Raises:
            RuntimeError: nothing is stored, a required critic is missing, or the actor for V-trace is missing.
            KeyError: the behaviour policy's log-probabilities are missing for V-trace.
        """
        self._write_estimates(None, actor, critic)
        self.hooks.on_estimated(self.storage.rollout, self.stream.value)

    def before_epoch(self, actor: Any = None, critic: TensorDictModuleBase | None = None) -> None:
        """Estimate again before another pass over the data, if the estimator depends on the current policy.

        DataModules call this hook. It takes the arguments of :meth:`before_gradients`.
        """
        if self.estimator.follows_policy:
            self._write_estimates(None, actor, critic)

    def _write_estimates(
        self, estimator: Estimator | None = None, actor: Any = None, critic: TensorDictModuleBase | None = None
    ) -> None:
        """Write values, advantages and targets; None uses the buffer's estimator, actor or critic."""
        estimator, rollout = self.estimator if estimator is None else estimator, self.storage.rollout
        self._write_inputs(estimator, actor, critic)
        estimator.compute(rollout, self.gamma, self.stream)
        if has_intrinsic(rollout):
            self.normalize_int_rewards()
            estimator.compute(rollout, self.gamma_intrinsic, INTRINSIC)

    def _write_inputs(self, estimator: Estimator, actor: Any = None, critic: Any = None) -> None:
        """Write the inputs of an estimator: values and, if required, current log-probabilities."""
        rollout, recurrent_keys, follows_policy = self.storage.rollout, self.recurrent_keys, estimator.follows_policy
        log_probs = estimator.current_log_probs(rollout, self.actor if actor is None else actor, recurrent_keys)
        known = () if follows_policy or self.recompute_values else self.storage.schema
        extrinsic: dict[NestedKey, bool] = {self.stream.value: True} if self.stream.bootstrap else {}
        intrinsic: dict[NestedKey, bool] = {INTRINSIC.value: False} if has_intrinsic(rollout) else {}
        if self.intrinsic_critic is None:
            extrinsic, intrinsic = {**extrinsic, **intrinsic}, {}
        main_critic = self.critic if critic is None else critic
        for module, roots in ((main_critic, extrinsic), (self.intrinsic_critic, intrinsic)):
            if roots:
                fill_values(rollout, module, roots, known=known, recurrent_keys=recurrent_keys, unroll=follows_policy)
        for key, value in log_probs.items():
            rollout.set(key, value)

    def normalize_int_rewards(self) -> None:
        """Divide the intrinsic rewards by the running standard deviation of their returns, once per rollout.

        Raises:
            KeyError: the rollout has no intrinsic rewards.
        """
        rollout = self.rollout
        if rollout.get(NORMALIZED_REWARD, None) is None:
            write_normalized(rollout, INTRINSIC_REWARD, self.normalizer if self.normalize_intrinsic else None)

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Return ``info``, and mark the rollout as used so that the next write replaces it."""
        self._consumed = True
        return info

    @overload
    def sample(self, batch_size: int | None = None) -> TensorDictBase: ...
    @overload
    def sample(self, batch_size: int | None = ..., return_info: bool = ..., include_info: bool | None = ...) -> Any: ...
    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Sample the next batch of this epoch; compute missing advantages first."""
        if self.storage.num_steps:
            self._ensure_estimated()
        return super().sample(batch_size, return_info, include_info)

    def __getitem__(self, index: Any) -> Any:
        if self.storage.num_steps:
            self._ensure_estimated()
        return super().__getitem__(index)

    def _all_data(self) -> TensorDictBase:
        rollout, schema = self._ensure_estimated(), self.storage.schema
        given_values = [key for key in self._value_keys_in(rollout) if key in schema and path_of(key)[0] != "next"]
        computed_next_values = [key for key in (next_key(key) for key in given_values) if key not in schema]
        return rollout.exclude(*computed_next_values).clone()

    def _batches(
        self, num_batches: int | None, batch_size: int | None, num_epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[TensorDictBase]:
        rollout, whole_envs = self.storage.rollout, self.is_recurrent
        units = rollout.shape[1] if whole_envs else rollout.numel()
        num_batches, batch_size = split_epoch(units, num_batches, batch_size, drop_last, whole_envs=whole_envs)
        self._ensure_estimated()
        hidden = [*REPEATED, *(next_key(key) for key in self._value_roots)]
        tree = select_entries(rollout, self.batch_keys, hidden, flat=not whole_envs)
        source = to_tensordict(tree, rollout.batch_size) if whole_envs else None

        def batches() -> Iterator[TensorDictBase]:
            for _ in range(num_epochs):
                for index in self.sampler.epoch(
                    units, batch_size, shuffle=shuffle, drop_last=drop_last, num_batches=num_batches, device=self.device
                ):
                    batch = gather(tree, index) if source is None else sequences(source, index, self.recurrent_keys)
                    yield self.transform(batch) if len(self.transform) else batch

        return batches()

    @property
    def replay(self) -> ReplaySource | None:
        """Source of the steps that a collector replays in some environments, or None."""
        return self.hooks.replay

    def attach(self, env: Any, num_envs: int) -> None:
        """Prepare to collect from ``num_envs`` environments.

        Args:
            env: an environment id, a factory, or an environment, as in a DataModule.
            num_envs: number of parallel environments.
        """
        self.hooks.attach(env, num_envs)

    def wrap_env(self, env: Any) -> Any:
        """Return the wrapped environment for collection."""
        return self.hooks.wrap_env(env)

    def wrap_policy(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        """Return the policy, wrapped for the environment from :meth:`wrap_env`."""
        return self.hooks.wrap_policy(policy)

    def metrics(self, policy_version: int | None = None) -> dict[str, float]:
        """Return metrics to log, from the hooks and the estimator.

        Args:
            policy_version: version of the current policy, needed for the policy lag.
        """
        estimator, rollout = self.estimator, self.storage.rollout if self.storage.num_steps else None
        metrics = self.hooks.metrics(rollout)
        if rollout is not None and estimator.follows_policy:
            metrics |= estimator.metrics(rollout, policy_version)
        return metrics
