"""Base of all on-policy buffers: hold one rollout, serve it in mini-batches, save and restore itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, overload

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.data import TensorDictReplayBuffer

from torchrl_lightning._compat import OwnSignature, new_tensordict
from torchrl_lightning.entries import keyed_leaves, nested_keys, next_key, path_of, under
from torchrl_lightning.files import StateFiles
from torchrl_lightning.ranges import boolean, integer, optional
from torchrl_lightning.replay.checks import check_transform
from torchrl_lightning.rollout.batches import index_batches, pruned, split_epoch
from torchrl_lightning.rollout.minibatches import MinibatchSampler
from torchrl_lightning.rollout.names import DOCUMENTED, from_documented, to_documented
from torchrl_lightning.rollout.sequences import sequences
from torchrl_lightning.rollout.storage import RolloutStorage, gather
from torchrl_lightning.rollout.values import RECURRENT_KEYS
from torchrl_lightning.rollout.writer import RolloutWriter
from torchrl_lightning.state import check_state, flag, generator, mapping

HIDDEN: tuple[NestedKey, ...] = ("collector", "done", "terminated", "truncated")
RESULTS: tuple[NestedKey, ...] = (
    "advantage",
    "value_target",
    "intrinsic_advantage",
    "intrinsic_value_target",
    "current_action_log_prob",
    ("next", "normalized_intrinsic_reward"),
)


class OnPolicyBuffer(StateFiles, OwnSignature, TensorDictReplayBuffer):
    """One time-major rollout with TorchRL's verbs and the documented ones; see :class:`VanillaOnPolicyBuffer`."""

    storage: RolloutStorage
    sampler: MinibatchSampler
    writer: RolloutWriter

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        *,
        num_envs: int | None = None,
        time_dim: int | None = None,
        recurrent: bool | None = None,
        recurrent_keys: tuple[NestedKey, ...] = RECURRENT_KEYS,
        batch_keys: Collection[NestedKey] | None = None,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
        transform: Any = None,
    ) -> None:
        if generator is None:
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        self.generator = generator
        recurrent_keys = nested_keys(recurrent_keys)
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
    def rollout(self) -> TensorDict:
        """The stored rollout, ``[T, N]``, live: entries set on it go into mini-batches until the next write."""
        return self.storage.rollout

    @property
    def is_recurrent(self) -> bool:
        """Whether mini-batches are whole environments: as configured, else if a recurrent state is stored."""
        if self.recurrent is not None:
            return self.recurrent
        return any(under(key, state) for key in self.storage.schema for state in self.recurrent_keys)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def insert_data_slice(
        self, new_data: TensorDictBase | Mapping[str, Any], time_dim: int | None = None, *, copy: bool = True
    ) -> None:
        """Replace the stored data by a rollout.

        Args:
            new_data: ``[N, T]`` with a dimension named ``"time"``, or any order with ``time_dim``; or a dict with the
                documented names, time-major ``[T, N, ...]``. Results of an earlier estimate in it are left out.
            time_dim: which dimension is time.
            copy: if False, the buffer may keep the memory itself, where it is time-major and fills the buffer; then
                nobody else may write to it.
        """
        if not isinstance(new_data, TensorDictBase):
            new_data, time_dim = from_documented(new_data, 2, self.documented_keys), 0
        data = self._without_results(new_data)
        if len(self.transform):
            data = self.transform.inv(data)
        rollout = self.writer.prepare(data, self.writer.time_dim if time_dim is None else time_dim, 0)
        self.empty()
        self.writer.write(rollout, copy=copy)
        self.sampler.restart()

    def _without_results(self, data: TensorDictBase) -> TensorDictBase:
        """Drop what an estimate wrote: its results, and the values that it computed.

        Computed values come together with the successors' values and the results; given ones come alone. Once data is
        stored, values are dropped if the stored data has none.
        """
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

    @property
    def documented_keys(self) -> Mapping[str, NestedKey]:
        """The keys of the documented names."""
        return DOCUMENTED

    @property
    def result_keys(self) -> list[NestedKey]:
        """Entries that the estimates write; dropped from data that is inserted."""
        return list(RESULTS)

    @property
    def computed_keys(self) -> list[NestedKey]:
        """Values, which the policy may have written or the buffer may have computed."""
        return ["state_value", "intrinsic_state_value"]

    def insert_transition(self, sample: TensorDictBase | Mapping[str, Any]) -> None:
        """Append one step of all environments.

        Observation, recurrent state and ``is_init`` may be omitted if they follow from the previous step or rollout:
        they are carried over from the step after the last one. A new episode's first observation does not follow from
        the episode before it.

        Args:
            sample: TensorDict ``[N]`` with our keys, or a dict with the documented names. Results of an earlier
                estimate in it are left out.

        Raises:
            KeyError: an entry is missing and cannot be carried over.
        """
        if not isinstance(sample, TensorDictBase):
            sample = from_documented(sample, 1, self.documented_keys)
        step = self._carried(self._without_results(sample).copy())
        if self._consumed:
            self.writer.prepare(step.unsqueeze(0), 0, 0)
            self.empty()
        self.writer.add(step)
        self.sampler.restart()

    def _carried(self, data: TensorDictBase) -> TensorDictBase:
        tail, schema = self.storage.tail, self.storage.schema
        following = data.get("next", None)
        if tail is not None and tail.shape == data.shape:
            present = set(data.keys(include_nested=True))
            absent = {key: value for key, value in keyed_leaves(tail) if key in schema and key not in present}
            self._check_new_episodes(tail.get("is_init"), absent)
            for key, value in absent.items():
                data.set(key, value)
        elif following is not None:
            self._check_first(data, following)
        if data.get("is_init", None) is None and (not schema or "is_init" in schema):
            data.set("is_init", torch.ones(*data.shape, 1, dtype=torch.bool, device=data.device))
        return data

    def _check_new_episodes(self, ended: torch.Tensor, absent: Collection[NestedKey]) -> None:
        names = [key for key in absent if key != "is_init" and not any(under(key, k) for k in self.recurrent_keys)]
        if names and bool(ended.any()):
            rows = ended.flatten(1).any(-1).nonzero().flatten().tolist()
            raise KeyError(
                f"The step has no {names}, and in environments {rows} the step before ended an episode: what was "
                "stored last is the old episode's. Pass what the new episode begins with."
            )

    def _check_first(self, data: TensorDictBase, following: TensorDictBase) -> None:
        other = ("reward", "done", "terminated", "truncated")
        names = [name for name in following.keys() if name not in other and not name.endswith(("_reward", "_value"))]  # noqa: SIM118
        for name in names:
            if name in self.recurrent_keys and data.get(name, None) is None:
                data.set(name, following.get(name).clone().zero_())
        if names and not any(data.get(name, None) is not None for name in names if name not in self.recurrent_keys):
            raise KeyError(f"The first step has none of {names}, and nothing was stored before it to carry them over.")

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

    def reset(self) -> None:
        """Set all counters to zero and discard the stored data (documented verb for ``empty``)."""
        self.empty()

    # ---- reading ----------------------------------------------------------------------------------------------------

    @overload
    def get_all_buffer_data(
        self, data_to_cpu: bool = False, documented_names: Literal[False] = False
    ) -> TensorDict: ...

    @overload
    def get_all_buffer_data(self, data_to_cpu: bool = False, *, documented_names: bool) -> Any: ...

    def get_all_buffer_data(self, data_to_cpu: bool = False, documented_names: bool = False) -> Any:
        """Return a copy of the filled part, ``[T, N]`` named ``("time", None)``, results included.

        The result can be passed to :meth:`insert_data_slice`, also of another buffer: values that came with the data
        stay data, and values that this buffer computed are recomputed. To tell them apart, successors' values are
        included only with computed values.

        Args:
            data_to_cpu: move the copy to the CPU.
            documented_names: return a dict with the documented names instead, time-major.
        """
        schema = self.storage.schema
        given = [key for key in self._values_in(self.rollout) if key in schema and path_of(key)[0] != "next"]
        told = [key for key in (next_key(key) for key in given) if key not in schema]
        data = self.rollout.exclude(*told).clone()
        data = data.cpu() if data_to_cpu else data
        return to_documented(data, self.documented_keys) if documented_names else data

    @overload
    def generate_batches(
        self,
        num_mini_batch: int | None = None,
        mini_batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        documented_names: Literal[False] = False,
    ) -> Iterator[TensorDictBase]: ...

    @overload
    def generate_batches(
        self,
        num_mini_batch: int | None = None,
        mini_batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        *,
        documented_names: bool,
    ) -> Iterator[Any]: ...

    def generate_batches(
        self,
        num_mini_batch: int | None = None,
        mini_batch_size: int | None = None,
        num_epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        documented_names: bool = False,
    ) -> Iterator[Any]:
        """Iterate over mini-batches; each sample comes exactly once per epoch unless the numbers limit it.

        Steps are flat, ``[B]``; a recurrent buffer yields whole environments ``[B, T]`` named ``(None, "time")``, and
        sizes count environments. ``batch_keys`` selects the entries; the default is all but the ``collector`` subtree,
        the flags at the root, and the values of successors.

        Args:
            num_mini_batch: mini-batches per epoch; alone, their sizes are as even as possible.
            mini_batch_size: samples in each; alone, the last one may be short. With both, exactly that many batches
                of that size.
            num_epochs: passes over the data.
            shuffle: a new order for each epoch.
            drop_last: drop the remainder, so that all mini-batches have the same size.
            documented_names: yield dicts with the documented names instead of TensorDicts.

        Raises:
            RuntimeError: nothing is stored.
            ValueError: there are fewer samples than requested, or environments do not divide evenly.
        """
        rollout, whole = self.rollout, self.is_recurrent
        if num_mini_batch is None and mini_batch_size is None:
            num_mini_batch, mini_batch_size = self._default_split()
        units = rollout.shape[1] if whole else rollout.numel()
        integer(num_epochs, "num_epochs")
        number, size = split_epoch(units, num_mini_batch, mini_batch_size, drop_last, whole=whole)
        hidden = [*HIDDEN, *(next_key(key) for key in self.computed_keys)]
        tree = pruned(rollout, self.batch_keys, hidden, flat=not whole)
        source = _as_tensordict(tree, rollout.batch_size) if whole else None

        def batches() -> Iterator[Any]:
            for _ in range(num_epochs):
                for index in index_batches(
                    self.sampler, units, number, size, shuffle=shuffle, drop_last=drop_last, device=self.device
                ):
                    batch = gather(tree, index) if source is None else sequences(source, index, self.recurrent_keys)
                    batch = self.transform(batch) if len(self.transform) else batch
                    yield to_documented(batch, self.documented_keys) if documented_names else batch

        return batches()

    def _default_split(self) -> tuple[int | None, int | None]:
        return None, None

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return an exact copy of the buffer, tensors and scalars only (``torch.load(weights_only=True)`` reads it)."""
        return {
            "schema_version": 1,
            "storage": self.storage.state_dict(),
            "sampler": self.sampler.state_dict(),
            "writer": self.writer.state_dict(),
            "transforms": dict(self.transform.state_dict()),
            "generator": self.generator.get_state().clone(),
            "consumed": self._consumed,
        }

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that :meth:`load_state_dict` cannot take; change nothing."""
        schema = {
            **dict.fromkeys(("storage", "sampler", "writer", "transforms"), mapping),
            "generator": generator(self.generator.device),
            "consumed": flag,
        }
        check_state(state_dict, schema, "on-policy buffer", version=1)
        self.storage.check_state(state_dict["storage"])
        self.sampler.check_state(state_dict["sampler"])
        self.writer.check_state(state_dict["writer"])
        check_transform(self.transform, state_dict["transforms"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state; the buffer then yields the same next batches.

        Raises:
            ValueError: another version, capacity, number of environments or other data; names both.
        """
        self.check_state(state_dict)
        self.storage.load_state_dict(state_dict["storage"])
        self.sampler.load_state_dict(state_dict["sampler"])
        self.writer.load_state_dict(state_dict["writer"])
        self.transform.load_state_dict(state_dict["transforms"])
        self.generator.set_state(state_dict["generator"].cpu())
        self._consumed = bool(state_dict["consumed"])

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def wrap_env(self, env: Any) -> Any:
        """Return the environment to collect from; a hook for DataModules."""
        return env

    def wrap_policy(self, policy: TensorDictModuleBase) -> TensorDictModuleBase:
        """Return the policy to collect with; a hook for DataModules."""
        return policy

    def before_epoch(self) -> None:
        """Prepare another pass over the same rollout; a hook for DataModules."""

    def metrics(self) -> dict[str, float]:
        """Return metrics to log; a hook for DataModules."""
        return {}

    @property
    def required_keys(self) -> list[NestedKey]:
        """Entries that the policy must write."""
        return ["action"]


def _as_tensordict(tree: dict[str, Any], batch: torch.Size) -> TensorDict:
    entries = {k: _as_tensordict(v, batch) if isinstance(v, dict) else v for k, v in tree.items()}
    return new_tensordict(entries, batch)
