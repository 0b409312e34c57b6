"""Contracts for the underscored TorchRL and tensordict names behind ``_compat``; an upgrade must fail here first."""

from __future__ import annotations

import ast
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, RandomSampler, Sequence, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.writers import RoundRobinWriter, Writer
from torchrl.envs import GymEnv, SerialEnv
from torchrl.envs.transforms import UnsqueezeTransform

from kit.rings import ring
from kit.rollouts import make_rollout, torchrl_buffer
from kit.rows import numbered
from kit.runs import trainer
from kit.seeds import generator
from torchrl_lightning import DiscountedReturns, MinibatchSampler, RecentSampler
from torchrl_lightning._core import torchrl_compat
from torchrl_lightning._core.torchrl_compat import entries_of, logger_connector, new_tensordict
from torchrl_lightning.replay import PrioritizedSampler, RingStorage, SequenceSampler, UniformSampler

buffer = partial(torchrl_buffer, 4, time_dim=0, batch_size=2)
replay = partial(ring, 6, data=numbered(4), batch_size=2)


def rows(steps: int = 2) -> TensorDict:
    return make_rollout(steps).transpose(0, 1)


def test_new_tensordict_keeps_tensors_batch_names_and_device() -> None:
    leaf = torch.zeros(2, 3, 1)
    inner = new_tensordict({"b": leaf}, torch.Size([2, 3]))
    data = new_tensordict({"a": leaf, "c": inner}, torch.Size([2, 3]), ("time", None), torch.device("cpu"))
    assert data["a"] is data["c", "b"] is leaf
    assert data.batch_size == (2, 3)
    assert data.names == ["time", None]
    assert data.device == torch.device("cpu")
    assert data.to("cpu") is data
    data["d"] = leaf
    assert data.reshape(-1)["d"].shape == (6, 1)


def test_entries_of_equals_the_tensordict_items() -> None:
    data = TensorDict({"a": torch.zeros(2), "next": {"b": torch.ones(2)}}, [2])
    assert entries_of(data)["a"] is data["a"]
    assert entries_of(data)["next"] is data["next"]
    assert set(entries_of(torch.stack([data, data.clone()]))) == {"a", "next"}


def test_bump_revision_changes_the_revision() -> None:
    storage = RingStorage(3)
    before = storage._mutation_revision
    storage.bump_revision()
    assert storage._mutation_revision == before + 1


def test_writer_private_attributes() -> None:
    writer = RoundRobinWriter()
    assert writer._storage is None
    assert writer._write_count == 0
    ours = buffer()
    assert isinstance(ours.writer, Writer)
    assert ours.writer.storage is ours.writer._storage is ours.storage
    ours.extend(rows())
    assert ours.write_count == ours.writer._write_count == 2


def test_init_and_empty_hooks_are_called() -> None:
    ours = buffer()
    assert not ours.storage.initialized
    ours.extend(rows())
    assert ours.storage.initialized
    assert ours.storage.max_size == 12
    ours.sample()
    assert ours.sampler.remaining is not None
    ours.empty()
    assert len(ours) == ours.write_count == 0
    assert ours.sampler.remaining is None


def test_write_notifies_attached_entities() -> None:
    class Entity:
        cells = None

        def mark_update(self, index: torch.Tensor) -> None:
            self.cells = index

    ours, entity = buffer(), Entity()
    ours.storage.attach(entity)
    ours.extend(rows(1))
    assert entity.cells.tolist() == [[0, 0], [0, 1], [0, 2]]


def test_invert_runs_the_call_hook_of_a_transform() -> None:
    ours = buffer()
    ours.append_transform(DiscountedReturns(bootstrap=False, time_dim=0), invert=True)
    ours.extend(rows())
    assert ours[:]["value_target"].shape == (2, 3, 1)


@pytest.mark.parametrize(
    ("make", "build"),
    [
        (buffer, MinibatchSampler),
        (replay, UniformSampler),
        (replay, lambda: PrioritizedSampler(6, 1.0, 1.0)),
        (replay, lambda: SequenceSampler(1)),
    ],
)
def test_torchrl_sets_the_generator_and_calls_clear_hooks(make: Any, build: Callable[[], Any]) -> None:
    mine, sampler, cleared = generator(1), build(), []
    assert sampler._rng is sampler.generator is not mine
    ours = make(sampler=sampler, generator=mine)
    assert sampler.generator is mine
    sampler._rng = None
    assert sampler.generator is mine
    sampler.clear = lambda: cleared.append(1)
    ours.empty()
    assert cleared == [1]


def test_torchrl_draws_through_our_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replay(sampler=RandomSampler())
    monkeypatch.setattr(RingStorage, "draw", lambda self, count: torch.full((count,), 3))
    assert ours.sample()["index"].tolist() == [3, 3]


def test_torchrl_calls_the_check_of_the_last_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(RingStorage, "check_last_cursor", lambda self: asked.append(1))
    ours = replay(sample_unit=Sequence(length=2))
    ours.sample()
    assert asked
    assert ours.storage.cursor == ours.storage._last_cursor_index == 3


def test_torchrls_prioritized_sampler_builds_its_trees_in_init() -> None:
    assert "_init" in vars(TorchRLPrioritizedSampler)
    sampler = PrioritizedSampler(6, 1.0, 1.0)
    sampler.mark_update(torch.arange(3))
    sampler._init()
    assert sampler.table.count == 0


def test_plain_buffers_are_recognised() -> None:
    assert replay().can_skip_torchrl_path(2)
    unit = Sequence(length=2)
    for settings in ({"prefetch": 1}, {"pin_memory": True}, {"sample_unit": unit}, {"collate_fn": lambda batch: batch}):
        assert not replay(**settings).can_skip_torchrl_path(2), settings


def test_transforms_are_detected() -> None:
    ours, transform = replay(), UnsqueezeTransform(-1, in_keys=["a"])
    assert not ours.transforms
    ours.append_transform(transform)
    assert list(ours.transforms) == [transform]


def test_shut_down_buffer_yields_no_prefetched_batches() -> None:
    ours = replay()
    ours.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        ours.sample()


def test_prefetched_batches_can_be_paused_and_restored() -> None:
    ours = replay(prefetch=2)
    ours.sample()
    with ours.paused() as batches:
        assert len(batches) == 2
    ours.set_prefetched(batches[1:])
    assert torch.equal(ours.sample()["a"], batches[1][0]["a"])


def test_prefetched_batches_come_in_the_order_they_were_drawn() -> None:
    ours = replay(prefetch=3)
    for buffer in (ours, pickle.loads(pickle.dumps(ours))):
        assert buffer._prefetch_executor._max_workers == 1
        assert buffer.sample().shape == (2,)


def private_names(name: str) -> set[str]:
    """Return the underscored attributes that a class of ``_compat`` reads or sets, without its own."""
    source = ast.parse(inspect.getsource(getattr(torchrl_compat, name)))
    assigned = {node.id for node in ast.walk(source) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    aliases = [node for node in ast.walk(source) if isinstance(node, ast.Call) and ast.unparse(node.func) == "alias"]
    names |= {private.value for alias in aliases for private in alias.args if isinstance(private, ast.Constant)}
    return {attr for attr in names - assigned if attr.startswith("_") and not attr.startswith("__")}


def test_private_names_exist_in_torchrl() -> None:
    sampler = SamplerWithoutReplacement()
    theirs = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler, batch_size=2, prefetch=2)
    theirs.extend(numbered(4))
    theirs.sample()
    parts = {
        "StorageBase": [theirs.storage],
        "WriterBase": [theirs._writer, theirs.storage],
        "SamplerBase": [theirs.sampler],
        "BufferBase": [theirs, theirs.sampler, theirs.transform],
    }
    for name, live in parts.items():
        assert private_names(name), name
        assert not [attr for attr in private_names(name) if not any(hasattr(part, attr) for part in live)], name


def test_alias_reads_and_sets_a_private_attribute() -> None:
    ours, lock = replay(), object()
    assert (ours.thread_lock, ours.sample_path_settings[1:3], ours.batch_sizes) == (
        ours._replay_lock,
        (False, False),
        (2, False),
    )
    ours.write_lock = lock
    assert ours._write_lock is lock


def test_hooks_and_buffers_of_a_module() -> None:
    layer = torch.nn.BatchNorm1d(2)
    layer.register_buffer("passing", torch.zeros(1), persistent=False)
    assert not any(torchrl_compat.forward_hooks(layer))
    layer.register_forward_hook(lambda *_: None)
    assert [len(hooks) for hooks in torchrl_compat.forward_hooks(layer)] == [1, 0]
    assert torchrl_compat.buffers_of(layer)["running_mean"] is layer.running_mean
    assert torchrl_compat.persistent_buffers(layer) == {"running_mean", "running_var", "num_batches_tracked"}


def test_hooks_of_all_modules_are_found() -> None:
    assert not torchrl_compat.has_global_hooks()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert torchrl_compat.has_global_hooks()
    handle.remove()


def test_tensors_move_towards_others() -> None:
    tensors = [torch.zeros(2)]
    torchrl_compat.foreach_lerp_(tensors, [torch.ones(2)], 0.25)
    assert tensors[0].tolist() == [0.25, 0.25]


def test_vector_environments_return_their_arrays() -> None:
    env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    env.reset(seed=0)
    expected, rewards, *_ = env.step(env.action_space.sample())
    observations, stored, terminated, truncated = torchrl_compat.vector_arrays(env)
    assert observations is torchrl_compat.env_observations(env)
    assert np.stack(observations).tolist() == expected.tolist()
    assert (stored.tolist(), terminated.any(), truncated.any()) == (rewards.tolist(), False, False)
    assert torchrl_compat.info_adder(env)({}, {"a": 1}, 1)["a"].tolist() == [0, 1]
    env.close()


def test_serial_environments_are_found() -> None:
    env = SerialEnv(2, partial(GymEnv, "CartPole-v1"))
    env.reset()
    assert [type(env_of_batch) for env_of_batch in torchrl_compat.serial_envs(env)] == [GymEnv, GymEnv]
    env.close()


def test_modules_take_plain_tensors_within_a_block() -> None:
    module = TensorDictModule(lambda x: x + 1, ["a"], ["b"])
    for dispatches, argument in ((True, torch.zeros(1)), (False, TensorDict(a=torch.zeros(1)))):
        with torchrl_compat.set_module_dispatch(dispatches):
            result = module(argument)
        assert (result if dispatches else result["b"]).tolist() == [1]


def test_trainer_writes_its_rows_by_one_method() -> None:
    connector = logger_connector(trainer())
    assert list(inspect.signature(connector.log_metrics).parameters) == ["metrics", "step"]
    assert "log_metrics" not in vars(connector)


def samplers(kind: Any = Sampler) -> set[Any]:
    """Return all sampler classes of the package."""
    classes = {cls for subclass in kind.__subclasses__() for cls in samplers(subclass)}
    return classes | ({kind} if kind.__module__.startswith("torchrl_lightning.") else set())


@pytest.mark.parametrize("kind", sorted(samplers(), key=lambda kind: kind.__name__))
@pytest.mark.parametrize("value", [True, False])
def test_samplers_reject_the_argument_replacement(kind: Any, value: bool) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no argument replacement, got .* with_replacement"):
        kind(replacement=value)
    assert isinstance(RandomSampler(replacement=False), SamplerWithoutReplacement)


@pytest.mark.parametrize("kind", [UniformSampler, RecentSampler])
def test_error_names_the_argument_instead_of_replacement(kind: Any) -> None:
    with pytest.raises(TypeError, match=r"Write with_replacement=False\.$"):
        kind(replacement=False)
    assert not kind(with_replacement=False).with_replacement
