"""The plain on-policy buffer: one rollout, its Monte-Carlo returns and its mini-batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning.checks import check_transform
from torchrl_lightning.entries import keyed_leaves, nested_key, nested_keys, next_key, path_of, to_tensordict, under
from torchrl_lightning.estimators import discounted_returns, standardize
from torchrl_lightning.files import StateFiles
from torchrl_lightning.keys import (
    ADVANTAGE,
    CURRENT_LOG_PROB,
    INTRINSIC_ADVANTAGE,
    INTRINSIC_TARGET,
    NORMALIZED_REWARD,
    REPEATED,
    TARGET,
)
from torchrl_lightning.parts import OwnSignature, fresh_generator
from torchrl_lightning.ranges import Check, boolean, fraction, integer, optional
from torchrl_lightning.rollout.advantages import AdvantageTransform, DiscountedReturns
from torchrl_lightning.rollout.batches import pruned, sequences, split_epoch
from torchrl_lightning.rollout.intrinsic import IntrinsicReturns
from torchrl_lightning.rollout.minibatches import MinibatchSampler
from torchrl_lightning.rollout.names import DOCUMENTED
from torchrl_lightning.rollout.reads import EstimatedReads
from torchrl_lightning.rollout.storage import RolloutStorage, gather
from torchrl_lightning.rollout.values import RECURRENT_KEYS, fill_values, is_recurrent
from torchrl_lightning.rollout.verbs import DocumentedVerbs
from torchrl_lightning.rollout.writer import RolloutWriter
from torchrl_lightning.state import check_state, flag, generator, mapping

Values = Tensor | Mapping[str, Tensor]
PARTS = ("storage", "sampler", "writer")
RESULTS = (ADVANTAGE, TARGET, INTRINSIC_ADVANTAGE, INTRINSIC_TARGET, CURRENT_LOG_PROB)


class VanillaOnPolicyBuffer(StateFiles, OwnSignature, EstimatedReads, DocumentedVerbs):
    """On-policy buffer with Monte-Carlo returns, ``R[t] = r[t] + γ R[t+1]`` and ``A = R - V``, as PyTorchRL's.

    Write a rollout with ``insert_data_slice`` (or step by step with ``insert_transition``), compute values,
    ``advantage`` and ``value_target`` with ``before_gradients``, and read it with ``generate_batches``. With TorchRL's
    ``extend`` and ``sample`` alone the first read after a write computes them. All data is time-major.

    Args:
        size: capacity along time.
        device: device of the rollout.
        actor: TensorDict policy; may be assigned later.
        algorithm: any object with ``gamma``, optionally ``gamma_intrinsic``, ``num_mini_batch``, ``mini_batch_size``;
            read whenever they are needed.
        envs: environments with ``num_envs``, and optionally ``env_kwargs["frame_stack"]``.
        gamma: discount; overrides the algorithm's; 0.99 if there is neither.
        critic: writes ``value_key`` (nested for several critics) and ``intrinsic_state_value`` where there are
            intrinsic rewards; may be assigned later.
        intrinsic_critic: writes ``intrinsic_state_value`` when the critic does not.
        gamma_intrinsic: discount of the intrinsic stream; as ``gamma``, 0.99 by default.
        normalize_intrinsic: divide intrinsic rewards by their running deviation.
        intrinsic_direction: ``"forward"``, or ``"backward"`` as PyTorchRL does.
        standardize_advantages: scale to zero mean and unit (unbiased) deviation + 1e-5, over the whole rollout.
        recompute_values: run the critic even if the policy wrote values.
        bootstrap: use values where episodes are cut off; if False, no critic is needed and ``A = R``.
        value_key: values, or the parent of several critics' values.
        advantage_key: advantages.
        value_target_key: value targets.
        frame_stack: frames stacked along the channels of an observation; that of ``envs``, else 1.
        num_envs: number of environments; that of ``envs``, or of the first write, when ``None``.
        time_dim: which dimension of a written rollout is time; ``None`` reads the dimension names.
        recurrent: serve whole environments; ``None`` does so if a recurrent state is stored.
        recurrent_keys: root keys of recurrent states.
        batch_keys: entries of a mini-batch; ``None`` takes all but flags and successor values.
        batch_size: samples of ``sample``.
        generator: random generator; seeded from torch's global one when ``None``.
        transform: a TorchRL transform, applied on write (inverse) and on mini-batches.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> flag = torch.zeros(2, 3, 1, dtype=torch.bool)
        >>> following = {"reward": torch.ones(2, 3, 1), "done": flag, "terminated": flag}
        >>> rollout = TensorDict({"action": torch.zeros(2, 3), "next": following}, [2, 3], names=[None, "time"])
        >>> buffer = VanillaOnPolicyBuffer(3, gamma=0.5, bootstrap=False, standardize_advantages=False)
        >>> buffer.insert_data_slice(rollout)
        >>> buffer.before_gradients()
        >>> batch = next(buffer.generate_batches(1, shuffle=False))
        >>> batch["value_target"].flatten().tolist()
        [1.75, 1.75, 1.5, 1.5, 1.0, 1.0]
    """

    storage: RolloutStorage
    sampler: MinibatchSampler
    writer: RolloutWriter
    parameters: ClassVar[Mapping[str, Check]] = {
        "size": integer,
        "gamma": optional(fraction),
        "gamma_intrinsic": optional(fraction),
        **dict.fromkeys(("actor", "critic", "intrinsic_critic", "algorithm", "envs"), lambda value, name: value),
        **dict.fromkeys(("standardize_advantages", "recompute_values", "normalize_intrinsic"), boolean),
        "batch_keys": optional(lambda keys, name: nested_keys(keys)),
        "recurrent": optional(boolean),
        "frame_stack": integer,
    }

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        actor: Any = None,
        algorithm: Any = None,
        envs: Any = None,
        *,
        gamma: float | None = None,
        critic: TensorDictModuleBase | None = None,
        intrinsic_critic: TensorDictModuleBase | None = None,
        gamma_intrinsic: float | None = None,
        normalize_intrinsic: bool = True,
        intrinsic_direction: Literal["forward", "backward"] = "forward",
        standardize_advantages: bool = True,
        recompute_values: bool = False,
        bootstrap: bool = True,
        value_key: NestedKey = "state_value",
        advantage_key: NestedKey = "advantage",
        value_target_key: NestedKey = "value_target",
        frame_stack: int | None = None,
        num_envs: int | None = None,
        time_dim: int | None = None,
        recurrent: bool | None = None,
        recurrent_keys: tuple[NestedKey, ...] = RECURRENT_KEYS,
        batch_keys: Collection[NestedKey] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        transform: Any = None,
    ) -> None:
        self.generator = generator = fresh_generator() if generator is None else generator
        recurrent_keys = nested_keys(recurrent_keys)
        num_envs = getattr(envs, "num_envs", None) if num_envs is None else num_envs
        super().__init__(
            storage=RolloutStorage(size, num_envs=num_envs, device=device),
            sampler=MinibatchSampler(generator=generator),
            writer=RolloutWriter(time_dim, recurrent_keys=recurrent_keys),
            dim_extend=0,
            batch_size=batch_size,
            generator=generator,
            transform=transform,
        )
        self.recurrent = optional(boolean)(recurrent, "recurrent")
        self.recurrent_keys = recurrent_keys
        self.batch_keys = None if batch_keys is None else nested_keys(batch_keys)
        self._consumed = False
        self.actor, self.critic, self.intrinsic_critic = actor, critic, intrinsic_critic
        self.algorithm, self.envs = algorithm, envs
        self.gamma, self.gamma_intrinsic = gamma, gamma_intrinsic
        self.standardize_advantages = boolean(standardize_advantages, "standardize_advantages")
        self.recompute_values = boolean(recompute_values, "recompute_values")
        self.bootstrap = boolean(bootstrap, "bootstrap")
        self.normalize_intrinsic = boolean(normalize_intrinsic, "normalize_intrinsic")
        self.value_key, self.advantage_key = nested_key(value_key), nested_key(advantage_key)
        self.value_target_key = nested_key(value_target_key)
        told = (getattr(envs, "env_kwargs", None) or {}).get("frame_stack")
        self.frame_stack = integer(_first(frame_stack, told, getattr(envs, "frame_stack", None), 1), "frame_stack")
        self._intrinsic = IntrinsicReturns(self.gamma_intrinsic, direction=intrinsic_direction)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.set_rng(self.generator)  # a copy, too, has one for all its parts

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

    @property
    def is_recurrent(self) -> bool:
        """Whether mini-batches are whole environments: as configured, else if a recurrent state is stored."""
        if self.recurrent is not None:
            return self.recurrent
        return is_recurrent(self.storage.schema, self.recurrent_keys)

    # ---- discounts --------------------------------------------------------------------------------------------------

    @property
    def gamma(self) -> float:
        """Discount: the configured one, else the algorithm's current one, else 0.99."""
        return self._discount(self._gamma, "gamma")

    @gamma.setter
    def gamma(self, gamma: float | None) -> None:
        self._discount(gamma, "gamma")
        self._gamma = gamma

    @property
    def gamma_intrinsic(self) -> float:
        """Discount of the intrinsic stream; see :attr:`gamma`."""
        return self._discount(self._gamma_intrinsic, "gamma_intrinsic")

    @gamma_intrinsic.setter
    def gamma_intrinsic(self, gamma: float | None) -> None:
        self._discount(gamma, "gamma_intrinsic")
        self._gamma_intrinsic = gamma

    def _discount(self, given: float | None, name: str) -> float:
        return fraction(_first(given, getattr(self.algorithm, name, None), 0.99), name)

    @property
    def intrinsic(self) -> IntrinsicReturns:
        """The intrinsic stream, with the current discount."""
        stream = self._intrinsic
        stream.gamma = stream.normalizer.gamma = self.gamma_intrinsic
        return stream

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _write_slice(self, data: TensorDictBase, time_dim: int | None, copy: bool) -> None:
        data = self._without_results(data)
        if len(self.transform):
            data = self.transform.inv(data)
        rollout = self.writer.prepare(data, self.writer.time_dim if time_dim is None else time_dim, 0)
        self.empty()
        self.writer.write(rollout, copy=copy)

    def _without_results(self, data: TensorDictBase) -> TensorDictBase:
        """Drop what an estimate wrote: its results, and the values that it computed."""
        # Computed values come together with the successors' values and the results; given ones come alone. Once data
        # is stored, values are dropped if the stored data has none.
        schema = self.storage.schema
        drop = [key for key in self.result_keys if data.get(key, None) is not None]
        computed = self._values_in(data)
        if schema:
            drop += [key for key in computed if key not in schema]
        elif drop:
            roots = [key for key in computed if next_key(key) in computed]
            drop += [*roots, *(next_key(key) for key in roots)]
        return data.exclude(*drop) if drop else data

    def _values_in(self, data: TensorDictBase) -> list[NestedKey]:
        """Return the keys of the values in ``data``, the successors' included."""
        roots = [
            root for key in self.computed_keys for root in (key, next_key(key)) if data.get(root, None) is not None
        ]
        return [key for key, _ in keyed_leaves(data) if any(under(key, root) for root in roots)] if roots else []

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
        """Append a rollout (TorchRL's verb); ``insert_data_slice`` replaces."""
        if self._consumed:
            self.writer.prepare(tensordicts, self.writer.time_dim, 0)
            self.empty()
        index: torch.Tensor = super().extend(tensordicts, update_priority=update_priority)
        return index

    def empty(self, empty_write_count: bool = True) -> None:
        """Discard the stored steps; keep the step after the last, so that the next rollout can continue."""
        self._consumed = False
        super().empty(empty_write_count)

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _all_data(self) -> TensorDictBase:
        rollout, schema = self.estimated(), self.storage.schema
        given = [key for key in self._values_in(rollout) if key in schema and path_of(key)[0] != "next"]
        told = [key for key in (next_key(key) for key in given) if key not in schema]
        return rollout.exclude(*told).clone()

    def _batches(
        self, number: int | None, size: int | None, num_epochs: int, shuffle: bool, drop_last: bool
    ) -> Iterator[TensorDictBase]:
        rollout, whole = self.rollout, self.is_recurrent
        units = rollout.shape[1] if whole else rollout.numel()
        number, size = split_epoch(units, number, size, drop_last, whole=whole)
        self.estimated()
        hidden = [*REPEATED, *(next_key(key) for key in self.computed_keys)]
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

    # ---- estimates --------------------------------------------------------------------------------------------------

    def estimator(self) -> AdvantageTransform:
        """Return the transform that writes advantages and targets of the extrinsic stream."""
        return DiscountedReturns(self.gamma, bootstrap=self.bootstrap, **self._estimator_options())

    def _estimator_options(self) -> dict[str, Any]:
        names = ("value_key", "advantage_key", "value_target_key", "standardize_advantages")
        return {name: getattr(self, name) for name in names}

    @property
    def result_keys(self) -> list[NestedKey]:
        """Entries that the estimates write, by their configured names."""
        return [*RESULTS, NORMALIZED_REWARD, self.advantage_key, self.value_target_key]

    @property
    def documented_keys(self) -> Mapping[str, NestedKey]:
        """The keys of the documented names, as they are configured."""
        renamed = {"Value": self.value_key, "Advantage": self.advantage_key, "ExternalReturn": self.value_target_key}
        return {**DOCUMENTED, **renamed}

    @property
    def computed_keys(self) -> list[NestedKey]:
        """Values, by their configured names."""
        return [self.value_key, self.intrinsic.value_key]

    def before_gradients(self) -> None:
        """Write values, advantages and targets of every stream and critic over the filled steps.

        Raises:
            RuntimeError: nothing is stored, or a critic is needed and missing.
        """
        self.write_estimates()

    def write_estimates(self) -> None:
        """Write values, advantages and targets; the first read after a write does so."""
        self.fill_values()
        self.estimate()

    def fill_values(self, recompute: bool = False, unroll: bool = False) -> None:
        """Write values of all steps and their successors.

        Args:
            recompute: run the critic even if the policy wrote values.
            unroll: run a recurrent critic over whole sequences instead of from each stored state.
        """
        rollout, schema = self.rollout, self.storage.schema
        known = () if recompute or self.recompute_values else schema
        extrinsic: dict[NestedKey, bool] = {self.value_key: True} if self.bootstrap else {}
        intrinsic: dict[NestedKey, bool] = {self.intrinsic.value_key: False} if self.has_intrinsic else {}
        streams = [(self.critic, extrinsic), (self.intrinsic_critic, intrinsic)]
        if self.intrinsic_critic is None:
            streams = [(self.critic, {**extrinsic, **intrinsic})]
        for critic, roots in streams:
            fill_values(rollout, critic, roots, known=known, recurrent_keys=self.recurrent_keys, unroll=unroll)

    def estimate(self, estimator: AdvantageTransform | None = None) -> None:
        """Write advantages and targets from the present values, by :meth:`estimator` if no other is given."""
        rollout = self.rollout
        estimator = self.estimator() if estimator is None else estimator
        estimator.compute(rollout)
        if self.has_intrinsic:
            self.normalize_int_rewards()
            stream = self.intrinsic
            stream.lmbda, stream.standardize_advantages = estimator.lmbda, self.standardize_advantages
            stream.compute(rollout)

    @property
    def has_intrinsic(self) -> bool:
        """Whether the stored rollout has intrinsic rewards."""
        return self.storage.num_steps > 0 and self.rollout.get(self.intrinsic.reward_key, None) is not None

    def normalize_int_rewards(self) -> None:
        """Divide the intrinsic rewards by a running estimate of their returns' deviation, once per rollout.

        Raises:
            KeyError: the rollout has no intrinsic rewards.
        """
        if NORMALIZED_REWARD in self.rollout.keys(include_nested=True):
            return
        self.intrinsic.normalize = self.normalize_intrinsic
        self.intrinsic.normalize_rewards(self.rollout)

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Mark the rollout as used, so that the next write starts a new one; return ``info``. May be called often."""
        self._consumed = True
        return info

    def compute_returns(
        self,
        rewards: Tensor,
        returns: Values | None,
        values: Values,
        dones: Tensor,
        gamma: float,
        truncated: Tensor | None = None,
    ) -> Values:
        """Compute the returns of time-major tensors; fill ``returns`` in place if given.

        Args:
            rewards: ``[T, N, 1]``, or ``T + 1`` rows of which the last is ignored.
            returns: ``[T, N, 1]`` or ``[T + 1, N, 1]`` to write into, or ``None``; a dict for several critics.
            values: ``[T + 1, N, 1]``, the last row is the bootstrap; a dict for several critics.
            dones: terminated after each step, ``[T, N, 1]``; with ``T + 1`` rows, row ``t + 1`` belongs to step ``t``.
            gamma: discount.
            truncated: cut off after each step, like ``dones``.
        """
        if isinstance(values, Mapping):
            outs = cast("Mapping[str, Tensor]", returns or {})
            return {
                k: cast(Tensor, self.compute_returns(rewards, outs.get(k), v, dones, gamma, truncated))
                for k, v in values.items()
            }
        steps = values.shape[0] - 1
        if rewards.shape[0] not in (steps, steps + 1) or steps < 1:
            raise ValueError(f"values has {steps + 1} rows, so rewards needs {steps} rows, got {rewards.shape[0]}.")
        rewards = rewards[:steps].to(values.dtype)
        flags = [f if f.shape[0] == steps else f[1:] for f in (dones, dones if truncated is None else truncated)]
        terminated, cut = (f.bool().expand_as(rewards) for f in flags)
        result = self._returns(rewards, values, terminated, terminated | cut, gamma)
        if isinstance(returns, Tensor):
            returns[:steps].copy_(result)
            if returns.shape[0] == steps + 1:
                returns[-1].copy_(values[-1])
            return returns
        return result

    def _returns(self, rewards: Tensor, values: Tensor, terminated: Tensor, done: Tensor, gamma: float) -> Tensor:
        return discounted_returns(rewards, values[1:], terminated, done, gamma)

    def compute_advantages(self, returns: Values, values: Values) -> Values:
        """Compute transition advantages ``R - V``, standardised over all of them unless that is switched off.

        Args:
            returns: ``[T, N, 1]``, or ``T + 1`` rows of which the last is ignored; a dict for several critics.
            values: likewise; one row more than ``returns`` is ignored.
        """
        if isinstance(values, Mapping):
            targets = cast("Mapping[str, Tensor]", returns)
            return {k: cast(Tensor, self.compute_advantages(targets[k], v)) for k, v in values.items()}
        returns = cast(Tensor, returns)
        steps = values.shape[0] - 1 if returns.shape[0] == values.shape[0] else returns.shape[0]
        advantage = returns[:steps] - values[:steps]
        return standardize(advantage) if self.standardize_advantages else advantage

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return an exact copy of the buffer, tensors and scalars only (``torch.load(weights_only=True)`` reads it)."""
        return {
            "schema_version": 1,
            **{name: getattr(self, name).state_dict() for name in PARTS},
            "transforms": dict(self.transform.state_dict()),
            "generator": self.generator.get_state().clone(),
            "consumed": self._consumed,
            "intrinsic": self.intrinsic.get_extra_state(),
        }

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing."""
        schema = {
            **dict.fromkeys((*PARTS, "transforms", "intrinsic"), mapping),
            "generator": generator(self.generator.device),
            "consumed": flag,
        }
        check_state(state_dict, schema, "on-policy buffer", version=1)
        for name in PARTS:
            getattr(self, name).check_state(state_dict[name])
        check_transform(self.transform, state_dict["transforms"])
        self.intrinsic.normalizer.check_state(state_dict["intrinsic"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state; the buffer then yields the same next batches.

        Raises:
            ValueError: another version, capacity, number of environments or other data; names both.
        """
        self.check_state(state_dict)
        for name in PARTS:
            getattr(self, name).load_state_dict(state_dict[name])
        self.transform.load_state_dict(state_dict["transforms"])
        self.generator.set_state(state_dict["generator"].cpu())
        self._consumed = bool(state_dict["consumed"])
        self.intrinsic.set_extra_state(state_dict["intrinsic"])


def _first(*candidates: Any) -> Any:
    return next(candidate for candidate in candidates if candidate is not None)
