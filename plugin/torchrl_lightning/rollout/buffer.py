"""A buffer of one rollout: a storage, a writer, an estimator of advantages, and mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import InitVar
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, overload

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.data import TensorDictReplayBuffer

from torchrl_lightning.checks import TorchRLState
from torchrl_lightning.entries import Keys, keys_below, next_key, path_of, to_tensordict
from torchrl_lightning.environments.played import ReplaySource
from torchrl_lightning.estimators import IntrinsicRewardNormalizer
from torchrl_lightning.files import read_state, write_state
from torchrl_lightning.keys import CURRENT_LOG_PROB, INTRINSIC_REWARD, NORMALIZED_REWARD, REPEATED
from torchrl_lightning.parts import ConstructorSignature, fresh_generator
from torchrl_lightning.protocols import EnvsApi
from torchrl_lightning.ranges import Check, fraction
from torchrl_lightning.rollout.batches import MinibatchSampler, pruned, sequences, split_epoch
from torchrl_lightning.rollout.estimates import GAE, INTRINSIC, Estimator, Stream
from torchrl_lightning.rollout.hooks import RolloutHooks
from torchrl_lightning.rollout.intrinsic import has_intrinsic, write_normalized
from torchrl_lightning.rollout.names import DOCUMENTED
from torchrl_lightning.rollout.storage import RolloutStorage, gather
from torchrl_lightning.rollout.values import RECURRENT_KEYS, fill_values
from torchrl_lightning.rollout.verbs import DocumentedVerbs
from torchrl_lightning.rollout.writer import RolloutWriter
from torchrl_lightning.settings import Count, Fraction, Settings, Switch, derived, otherwise, setting
from torchrl_lightning.state import Attribute, Child, Stated, flag


class RolloutBuffer(Settings, Stated, TensorDictReplayBuffer, DocumentedVerbs):
    """One rollout ``[T, N]``, its advantages and value targets, and its mini-batches.

    Any read of it, by TorchRL's verbs as by any other, first computes what is due: a loss that finds no advantages
    estimates some itself, over samples in any order, which is noise.

    Args:
        size: capacity along time.
        estimator: how advantages follow from rewards and values; :class:`GAE` by default.
        device: device of the rollout.
        actor: TensorDict policy, which V-trace asks, unless it is given when estimates are.
        critic: writes the values, and ``intrinsic_state_value`` where there are intrinsic rewards, unless it is given
            when estimates are.
        intrinsic_critic: writes ``intrinsic_state_value`` when the critic does not.
        algorithm: any object with ``gamma``, optionally ``gamma_intrinsic``, ``num_mini_batch``, ``mini_batch_size``;
            read whenever they are needed.
        envs: environments with ``num_envs``.
        gamma: discount; overrides the algorithm's; 0.99 if there is neither.
        gamma_intrinsic: discount of the intrinsic stream; as ``gamma``, 0.99 by default.
        normalize_intrinsic: divide intrinsic rewards by their running deviation.
        intrinsic_direction: ``"forward"``, or ``"backward"`` as PyTorchRL does.
        recompute_values: run the critic even if the policy wrote values.
        stream: the keys of rewards, values, advantages and targets; the usual ones by default.
        hooks: called around each rollout, for example to replay demonstrations; they do nothing by default.
        num_envs: number of environments; that of ``envs``, or of the first write, when ``None``.
        time_dim: which dimension of a written rollout is time; ``None`` reads the dimension names.
        recurrent: serve whole environments; ``None`` does so if a recurrent state is stored.
        recurrent_keys: root keys of recurrent states.
        batch_keys: entries of a mini-batch; ``None`` takes all but flags and successor values.
        batch_size: samples of ``sample``.
        generator: random generator; seeded from torch's global one when ``None``.
        transform: a TorchRL transform, applied on write (inverse) and on mini-batches.

    Examples:
        >>> flag = torch.zeros(2, 1, 1, dtype=torch.bool)
        >>> following = {"reward": torch.ones(2, 1, 1), "done": flag, "terminated": ~flag, "state_value": 0.0 * flag}
        >>> rollout = TensorDict({"state_value": 0.5 * ~flag, "next": following}, [2, 1])
        >>> buffer = RolloutBuffer(2, GAE(lmbda=0.9), time_dim=0)
        >>> index = buffer.extend(rollout)
        >>> buffer[:]["advantage"].flatten().tolist()
        [0.5, 0.5]
    """

    __signature__ = ConstructorSignature()
    OWNER, VERSION = "on-policy buffer", 1
    STATE = {
        "storage": Child(),
        "sampler": Child(),
        "transforms": Child(at="_transform_state"),
        "consumed": Attribute(flag, "_consumed"),
        "intrinsic": Child(at="normalizer"),
    }
    HANDED_OVER: ClassVar[tuple[str, ...]] = (
        *("size", "actor", "algorithm", "envs", "critic", "intrinsic_critic"),
        *("num_envs", "time_dim", "batch_size", "generator"),
    )
    changeable: ClassVar[tuple[str, ...]] = (
        *("size", "gamma", "gamma_intrinsic", "actor", "critic", "intrinsic_critic", "algorithm", "envs"),
        *("recompute_values", "normalize_intrinsic", "batch_keys", "recurrent"),
    )
    """The settings that :meth:`update_storage_parameter` may change."""

    _size: InitVar[Count] = setting(alias="size", kw_only=False)
    _estimator: Annotated[Estimator, otherwise(GAE)] = setting(alias="estimator", default=None, kw_only=False)
    _device: InitVar[torch.device | str] = setting(alias="device", default="cpu")
    actor: Any = None
    critic: TensorDictModuleBase | None = None
    intrinsic_critic: TensorDictModuleBase | None = None
    algorithm: Any = None
    envs: InitVar[Any] = None
    _gamma: Fraction | None = setting(alias="gamma", default=None)
    _gamma_intrinsic: Fraction | None = setting(alias="gamma_intrinsic", default=None)
    normalize_intrinsic: Switch = True
    intrinsic_direction: Literal["forward", "backward"] = "forward"
    recompute_values: Switch = False
    stream: Annotated[Stream, otherwise(Stream)] = setting(default=None)
    hooks: Annotated[RolloutHooks, otherwise(RolloutHooks)] = setting(default=None)
    _num_envs: InitVar[Count | None] = setting(alias="num_envs", default=None)
    time_dim: InitVar[int | None] = None
    recurrent: Switch | None = None
    recurrent_keys: InitVar[Keys] = RECURRENT_KEYS
    batch_keys: Keys | None = None
    batch_size: InitVar[Count | None] = None
    generator: InitVar[torch.Generator | None] = None
    transform: InitVar[Any] = None

    storage: RolloutStorage = derived()
    sampler: MinibatchSampler = derived()
    writer: RolloutWriter = derived()

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
        self.generator = generator = fresh_generator() if generator is None else generator
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
        self.set_rng(self.generator)  # a copy, too, has one for all its parts

    # ---- the storage ------------------------------------------------------------------------------------------------

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
        """Steps stored."""
        return self.storage.num_steps

    used_capacity = step
    """Steps stored, under another documented name."""

    def dumps(self, path: str | Path) -> None:
        """Write the state to a folder: streamed, atomic, without pickle."""
        write_state(Path(path), self.state_dict(copy=False))

    def loads(self, path: str | Path) -> None:
        """Read the state from a folder; one that is damaged or does not fit changes nothing."""
        self.load_state_dict(read_state(Path(path)))

    # ---- the settings that may change -------------------------------------------------------------------------------

    @property
    def _parameters(self) -> Mapping[str, Check]:
        """What :meth:`update_storage_parameter` may change, and the check of the new value."""
        return {name: self.settings_of_class[name].check or (lambda value, name: value) for name in self.changeable}

    @property
    def _documented_keys(self) -> Mapping[str, NestedKey]:
        """The keys of the documented names, as they are configured."""
        stream = self.stream
        renamed = {"Value": stream.value, "Advantage": stream.advantage, "ExternalReturn": stream.target}
        return {**DOCUMENTED, **renamed}

    @property
    def is_recurrent(self) -> bool:
        """Whether mini-batches are whole environments: as configured, else if a recurrent state is stored."""
        return self.storage.layout.holds(self.recurrent_keys) if self.recurrent is None else self.recurrent

    # ---- what is estimated ------------------------------------------------------------------------------------------

    @property
    def estimator(self) -> Estimator:
        """How advantages are estimated by now."""
        return self._estimator

    @property
    def gamma(self) -> float:
        """Discount: the configured one, else the algorithm's current one, else 0.99."""
        return self._discount("gamma", self._gamma)

    @gamma.setter
    def gamma(self, gamma: float | None) -> None:
        self._gamma = gamma

    @property
    def gamma_intrinsic(self) -> float:
        """Discount of the intrinsic stream; see :attr:`gamma`."""
        return self._discount("gamma_intrinsic", self._gamma_intrinsic)

    @gamma_intrinsic.setter
    def gamma_intrinsic(self, gamma: float | None) -> None:
        self._gamma_intrinsic = gamma

    def _discount(self, name: str, given: float | None) -> float:
        discount = getattr(self.algorithm, name, None) if given is None else given
        return 0.99 if discount is None else fraction(discount, name)

    @property
    def _transform_state(self) -> TorchRLState:
        return TorchRLState("transforms", self.transform, self.storage)

    @property
    def normalizer(self) -> IntrinsicRewardNormalizer:
        """The running deviation of the intrinsic rewards, with the current discount."""
        if self._normalizer.gamma != (gamma := self.gamma_intrinsic):
            self._normalizer = self._normalizer.discounted_by(gamma)
        return self._normalizer

    @property
    def required_keys(self) -> list[NestedKey]:
        """Entries that the policy must write."""
        return [*self.estimator.required_keys]

    @property
    def keeps_values(self) -> bool:
        """Whether values stand that the policy has written, so that no critic is asked again."""
        return self.stream.bootstrap and not (self.recompute_values or self.estimator.follows_policy)

    @property
    def _result_keys(self) -> list[NestedKey]:
        """Entries that the estimates write, by their configured names."""
        own, inner = self.stream, INTRINSIC
        return [own.advantage, own.target, inner.advantage, inner.target, NORMALIZED_REWARD, CURRENT_LOG_PROB]

    @property
    def _computed_keys(self) -> list[NestedKey]:
        """Values, by their configured names."""
        return [self.stream.value, INTRINSIC.value]

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _write_slice(self, data: TensorDictBase, time_dim: int | None, copy: bool) -> None:
        data = self._without_results(data)
        if len(self.transform):
            data = self.transform.inv(data)
        rollout = self.writer.prepare(data, self.writer.time_dim if time_dim is None else time_dim, 0)
        self.empty()
        self.writer.write(rollout, copy=copy)

    def _without_results(self, data: TensorDictBase) -> TensorDictBase:
        """Leave out the results of an estimate, and the values that it computed."""
        # Computed values come together with the successors' values and the results; given ones come alone. Once data
        # is stored, its entries decide: they hold results and values only if a writer was given them.
        schema = self.storage.schema
        drop = [key for key in self._result_keys if data.get(key, None) is not None]
        computed = self._values_in(data)
        if schema:
            drop = [k for k in drop + computed if k not in schema and schema.keys().isdisjoint(keys_below(data, k))]
        elif drop:
            roots = [key for key in computed if next_key(key) in computed]
            drop += [*roots, *(next_key(key) for key in roots)]
        return data.exclude(*drop) if drop else data

    def _values_in(self, data: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the values in ``data``, the successors' included."""
        return [
            found for key in self._computed_keys for root in (key, next_key(key)) for found in keys_below(data, root)
        ]

    def _reserve(self, step: TensorDictBase) -> None:
        if self.storage.num_steps:
            raise ValueError(f"{self.storage.num_steps} steps are stored; call reset() before init_tensors.")
        self.storage.allocate(self.writer.complete(self._without_results(step)))

    def _resize(self, size: int) -> None:
        self.storage.resize(size)

    def _write_step(self, step: TensorDictBase) -> None:
        step = self.writer.complete(self._without_results(step))
        if self._consumed:
            self.writer.prepare(step.unsqueeze(0), 0, 0)
            self.empty()
        self.writer.add(step)
        self.sampler.clear()

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> torch.Tensor:
        """Append a rollout with all its entries, also advantages (TorchRL's verb); ``insert_data_slice`` replaces."""
        if self._consumed:
            self.writer.prepare(tensordicts, self.writer.time_dim, 0)
            self.empty()
        index: torch.Tensor = super().extend(tensordicts, update_priority=update_priority)
        return index

    def empty(self, empty_write_count: bool = True) -> None:
        """Discard the stored steps; keep the step after the last, so that the next rollout can continue."""
        self._consumed = False
        self.hooks.discard()
        super().empty(empty_write_count)

    # ---- estimates --------------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> TensorDict:
        """The stored rollout, ``[T, N]``, live: entries set on it go into mini-batches until the next write."""
        return self.storage.rollout

    @property
    def _is_due(self) -> bool:
        """Whether the stored rollout has no advantages yet: neither brought nor computed since the last write."""
        return self.storage.num_steps > 0 and self.storage.rollout.get(self.stream.advantage, None) is None

    def _estimated(self) -> TensorDict:
        """Return the stored rollout, live, with advantages and targets; compute them if they are due.

        Raises:
            RuntimeError: nothing is stored, or a critic (for V-trace, an actor) is needed and missing.
        """
        if self._is_due:
            self._write_estimates()
        return self.storage.rollout

    def before_gradients(self, actor: Any = None, critic: TensorDictModuleBase | None = None) -> None:
        """Write values, advantages and targets of every stream and critic over the filled steps.

        Args:
            actor: the policy that learns; the buffer's if None.
            critic: what writes its values; the buffer's if None.

        Raises:
            RuntimeError: nothing is stored, or a critic (for V-trace, an actor) is needed and missing.
            KeyError: V-trace misses the log-probabilities of the policy that acted.
        """
        self._write_estimates(None, actor, critic)
        self.hooks.note_estimated(self.storage.rollout, self.stream.value)

    def before_epoch(self, actor: Any = None, critic: TensorDictModuleBase | None = None) -> None:
        """Prepare another pass over the same data: correct for the updates of the previous pass, where that is meant.

        A hook for DataModules; the arguments are those of :meth:`before_gradients`.
        """
        if self.estimator.follows_policy:
            self._write_estimates(None, actor, critic)

    def _write_estimates(
        self, estimator: Estimator | None = None, actor: Any = None, critic: TensorDictModuleBase | None = None
    ) -> None:
        """Write values, advantages and targets; None stands for the buffer's own estimator, actor or critic."""
        estimator, rollout = self.estimator if estimator is None else estimator, self.storage.rollout
        self._write_inputs(estimator, actor, critic)
        estimator.compute(rollout, self.gamma, self.stream)
        if has_intrinsic(rollout):
            self.normalize_int_rewards()
            estimator.compute(rollout, self.gamma_intrinsic, INTRINSIC)

    def _write_inputs(self, estimator: Estimator, actor: Any = None, critic: Any = None) -> None:
        """Write the entries that an estimator reads: values, and the log-probabilities if it follows the policy."""
        rollout, keys, now = self.storage.rollout, self.recurrent_keys, estimator.follows_policy
        said = estimator.of_policy(rollout, self.actor if actor is None else actor, keys)
        known = () if now or self.recompute_values else self.storage.schema
        extrinsic: dict[NestedKey, bool] = {self.stream.value: True} if self.stream.bootstrap else {}
        intrinsic: dict[NestedKey, bool] = {INTRINSIC.value: False} if has_intrinsic(rollout) else {}
        if self.intrinsic_critic is None:
            extrinsic, intrinsic = {**extrinsic, **intrinsic}, {}
        own = self.critic if critic is None else critic
        for module, roots in ((own, extrinsic), (self.intrinsic_critic, intrinsic)):
            if roots:
                fill_values(rollout, module, roots, known=known, recurrent_keys=keys, unroll=now)
        for key, value in said.items():
            rollout.set(key, value)

    def normalize_int_rewards(self) -> None:
        """Divide the intrinsic rewards by a running estimate of their returns' deviation, once per rollout.

        Raises:
            KeyError: the rollout has no intrinsic rewards.
        """
        rollout = self.rollout
        if rollout.get(NORMALIZED_REWARD, None) is None:
            write_normalized(rollout, INTRINSIC_REWARD, self.normalizer if self.normalize_intrinsic else None)

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Mark the rollout as used, so that the next write starts a new one; return ``info``. May be called often."""
        self._consumed = True
        return info

    # ---- reading ----------------------------------------------------------------------------------------------------

    @overload
    def sample(self, batch_size: int | None = None) -> TensorDictBase: ...
    @overload
    def sample(self, batch_size: int | None = ..., return_info: bool = ..., include_info: bool | None = ...) -> Any: ...
    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Sample the next batch of this epoch (TorchRL's verb); compute what is due before."""
        if self.storage.num_steps:
            self._estimated()
        return super().sample(batch_size, return_info, include_info)

    def __getitem__(self, index: Any) -> Any:
        if self.storage.num_steps:
            self._estimated()
        return super().__getitem__(index)

    def _all_data(self) -> TensorDictBase:
        rollout, schema = self._estimated(), self.storage.schema
        given = [key for key in self._values_in(rollout) if key in schema and path_of(key)[0] != "next"]
        told = [key for key in (next_key(key) for key in given) if key not in schema]
        return rollout.exclude(*told).clone()

    def _batches(
        self, number: int | None, size: int | None, num_epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[TensorDictBase]:
        rollout, whole = self.storage.rollout, self.is_recurrent
        units = rollout.shape[1] if whole else rollout.numel()
        number, size = split_epoch(units, number, size, drop_last, whole=whole)
        self._estimated()
        hidden = [*REPEATED, *(next_key(key) for key in self._computed_keys)]
        tree = pruned(rollout, self.batch_keys, hidden, flat=not whole)
        source = to_tensordict(tree, rollout.batch_size) if whole else None

        def batches() -> Iterator[TensorDictBase]:
            for _ in range(num_epochs):
                for index in self.sampler.epoch(
                    units, size, shuffle=shuffle, drop_last=drop_last, num_batches=number, device=self.device
                ):
                    batch = gather(tree, index) if source is None else sequences(source, index, self.recurrent_keys)
                    yield self.transform(batch) if len(self.transform) else batch

        return batches()

    # ---- around a rollout: what a DataModule calls ------------------------------------------------------------------

    @property
    def replay(self) -> ReplaySource | None:
        """Source of the steps that a collector replays in some environments; None without one."""
        return self.hooks.replay

    def attach(self, env: Any, num_envs: int) -> None:
        """Prepare for ``num_envs`` environments that are collected from.

        Args:
            env: an id, a factory or a ready environment, as a DataModule takes it.
            num_envs: how many are stepped side by side.
        """
        self.hooks.attach(env, num_envs)

    def wrap_env(self, env: Any) -> Any:
        """Return the environment to collect from."""
        return self.hooks.wrap_env(env)

    def wrap_policy(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        """Return the policy to collect with, in what :meth:`wrap_env` returned."""
        return self.hooks.wrap_policy(policy)

    def metrics(self, policy_version: int | None = None) -> dict[str, float]:
        """Return metrics to log, from the hooks and the estimator.

        Args:
            policy_version: version of the learning policy, for the policy lag.
        """
        estimator, rollout = self.estimator, self.storage.rollout if self.storage.num_steps else None
        figures = self.hooks.metrics(rollout)
        if rollout is not None and estimator.follows_policy:
            figures |= estimator.metrics(rollout, policy_version)
        return figures
