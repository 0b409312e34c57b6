"""Contracts for the underscored TorchRL and tensordict names behind ``_compat``; an upgrade must fail here first."""

from __future__ import annotations

import ast
import inspect
import pickle
from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RandomSampler, ReplayBuffer, Sequence, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.data.replay_buffers.writers import RoundRobinWriter, Writer
from torchrl.envs.transforms import UnsqueezeTransform

from kit.rollouts import torchrl_buffer
from torchrl_lightning import MinibatchSampler, RolloutStorage, RolloutWriter, _compat
from torchrl_lightning._compat import entries_of, logger_connector, new_tensordict
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage, SequenceSampler, UniformSampler


def row(steps: int = 2, envs: int = 3) -> TensorDict:
    flag = torch.zeros(steps, envs, 1, dtype=torch.bool)
    following = {"reward": torch.ones(steps, envs, 1), "done": flag, "terminated": flag}
    return TensorDict({"action": torch.zeros(steps, envs), "next": following}, [steps, envs])


def test_new_unsafe_keeps_tensors_batch_and_names() -> None:
    leaf = torch.zeros(2, 3, 1)
    inner = new_tensordict({"b": leaf}, torch.Size([2, 3]))
    data = new_tensordict({"a": leaf, "c": inner}, torch.Size([2, 3]), ("time", None))
    assert data["a"] is leaf
    assert data["c", "b"] is leaf
    assert data.batch_size == (2, 3)
    assert data.names == ["time", None]
    data["d"] = leaf
    assert data.reshape(-1)["d"].shape == (6, 1)


def test_storage_private_attributes() -> None:
    storage = LazyTensorStorage(6)
    storage.set(range(3), TensorDict({"a": torch.zeros(3)}, [3]))
    assert storage._len == len(storage) == 3
    assert storage._storage.shape == (6,)
    assert storage.initialized
    revision = storage._mutation_revision
    storage._bump_mutation_revision()
    assert storage._mutation_revision == revision + 1
    storage._set_last_cursor(2)
    assert storage._last_cursor_index == 2
    storage._len = 1
    assert len(storage) == 1
    assert storage._attached_entities == list(storage._attached_entities_iter()) == []


def test_init_and_empty_hooks_are_called() -> None:
    ours = buffer()
    assert not ours.storage.initialized
    ours.extend(row())
    assert ours.storage.initialized
    assert ours.storage.max_size == 12
    ours.sample()
    assert ours.sampler.remaining is not None
    ours.empty()
    assert len(ours) == 0
    assert ours.write_count == 0
    assert ours.sampler.remaining is None


def test_writer_private_attributes() -> None:
    writer = RoundRobinWriter()
    assert writer._storage is None
    assert writer._write_count == 0
    ours = buffer()
    assert isinstance(ours.writer, Writer)
    assert ours.writer.storage is ours.writer._storage is ours.storage
    ours.extend(row())
    assert ours.write_count == ours.writer._write_count == 2


def test_a_write_notifies_attached_entities() -> None:
    class Entity:
        cells = None

        def mark_update(self, index: torch.Tensor) -> None:
            self.cells = index

    ours, entity = buffer(), Entity()
    ours.storage.attach(entity)
    ours.extend(row(1, 3))
    assert entity.cells.tolist() == [[0, 0], [0, 1], [0, 2]]


def test_sampler_private_attributes() -> None:
    theirs = ReplayBuffer(storage=LazyTensorStorage(4), sampler=SamplerWithoutReplacement(), batch_size=2)
    theirs.extend(torch.arange(4))
    theirs.sample()
    assert theirs.sampler._sample_list.shape == (2,)
    assert theirs.sampler._remaining_batches == 1
    assert theirs.sampler.len_storage == 4
    theirs.empty()
    assert theirs.sampler._sample_list is None


def test_the_buffer_hands_its_generator_to_the_sampler() -> None:
    generator = torch.Generator().manual_seed(1)
    ours = TensorDictReplayBuffer(
        storage=RolloutStorage(4),
        writer=RolloutWriter(0),
        sampler=MinibatchSampler(),
        dim_extend=0,
        generator=generator,
    )
    assert ours.sampler.generator is generator
    assert buffer().sampler.generator is not None


def test_invert_runs_the_call_hook_of_a_transform() -> None:
    from torchrl_lightning import DiscountedReturns

    ours = buffer()
    ours.append_transform(DiscountedReturns(bootstrap=False, time_dim=0), invert=True)
    ours.extend(row())
    assert ours[:]["value_target"].shape == (2, 3, 1)


# ---------------------------------------------------------------------- replay


buffer = partial(torchrl_buffer, 4, time_dim=0, batch_size=2)


def replay(**kwargs: object) -> ExperienceBuffer:
    ours = ExperienceBuffer(storage=RingStorage(6), **{"batch_size": 2, **kwargs})
    ours.extend(TensorDict({"a": torch.arange(4), "next": {"done": torch.zeros(4, 1, dtype=torch.bool)}}, [4]))
    return ours


def test_entries_are_those_of_the_tensordict() -> None:
    data = TensorDict({"a": torch.zeros(2), "next": {"b": torch.ones(2)}}, [2])
    assert entries_of(data)["a"] is data["a"]
    assert entries_of(data)["next"] is data["next"]
    stacked = torch.stack([data, data.clone()])
    assert set(entries_of(stacked)) == {"a", "next"}


def test_new_unsafe_knows_its_device() -> None:
    data = new_tensordict({"a": torch.zeros(2)}, torch.Size([2]), None, torch.device("cpu"))
    assert data.device == torch.device("cpu")
    assert data.to("cpu") is data


def test_touching_moves_the_revision() -> None:
    storage = RingStorage(3)
    before = storage._mutation_revision
    storage.touch()
    assert storage._mutation_revision == before + 1


def test_torchrl_draws_through_our_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replay(sampler=RandomSampler())
    monkeypatch.setattr(RingStorage, "draw", lambda self, count: torch.full((count,), 3))
    assert ours.sample()["index"].tolist() == [3, 3]


def test_torchrl_asks_for_the_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(RingStorage, "check_seam", lambda self: asked.append(1))
    ours = replay(sample_unit=Sequence(length=2))
    ours.sample()
    assert asked
    assert ours.storage.cursor == ours.storage._last_cursor_index == 3


def test_plain_buffers_are_recognised() -> None:
    assert replay().is_plain(2)
    for kwargs in (
        {"prefetch": 1},
        {"pin_memory": True},
        {"sample_unit": Sequence(length=2)},
        {"collate_fn": lambda batch: batch},
    ):
        assert not replay(**kwargs).is_plain(2), kwargs


def test_transforms_are_seen() -> None:
    ours = replay()
    assert not ours.has_transform
    transform = UnsqueezeTransform(-1, in_keys=["a"])
    ours.append_transform(transform)
    assert ours.has_transform
    assert list(ours.transforms) == [transform]
    ours = replay()
    ours.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        ours.sample()


def test_prefetched_batches_can_be_held_and_put_back() -> None:
    ours = replay(prefetch=2)
    ours.sample()
    with ours.at_rest() as batches:
        assert len(batches) == 2
    ours.drop_prefetched()
    ours.put_prefetched(batches[1:])
    assert torch.equal(ours.sample()["a"], batches[1][0]["a"])


def test_prefetched_batches_come_in_the_order_they_were_drawn() -> None:
    ours = replay(prefetch=3)
    assert ours._prefetch_executor._max_workers == 1
    copied = pickle.loads(pickle.dumps(ours))
    assert copied._prefetch_executor._max_workers == 1
    assert copied.sample().shape == (2,)


@pytest.mark.parametrize("build", [UniformSampler, lambda: PrioritizedSampler(6, 1.0, 1.0), lambda: SequenceSampler(1)])
def test_torchrl_hands_over_its_generator_and_empties_through_our_hooks(build: object) -> None:
    generator, sampler = torch.Generator().manual_seed(1), build()
    assert sampler._rng is sampler.generator is not generator
    ours, cleared = replay(sampler=sampler, generator=generator), []
    assert sampler.generator is generator
    sampler._rng = None
    assert sampler.generator is generator
    sampler.clear = lambda: cleared.append(1)
    ours.empty()
    assert cleared == [1]


def test_torchrls_prioritized_sampler_builds_its_trees_in_init() -> None:
    assert "_init" in vars(TorchRLPrioritizedSampler)
    sampler = PrioritizedSampler(6, 1.0, 1.0)
    sampler.mark_update(torch.arange(3))
    sampler._init()
    assert sampler.table.count == 0


def _touched(name: str) -> set[str]:
    """Underscored attributes that a class of ``_compat`` reads or sets, but for those that are its own."""
    source = ast.parse(inspect.getsource(getattr(_compat, name)))
    own = {node.id for node in ast.walk(source) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    ours = {"_own_rng", "_order_prefetch"}
    return {attr for attr in found - own - ours if attr.startswith("_") and not attr.startswith("__")}


def test_every_underscored_name_is_one_that_torchrl_has() -> None:
    theirs = TensorDictReplayBuffer(
        storage=LazyTensorStorage(4), sampler=SamplerWithoutReplacement(), batch_size=2, prefetch=2
    )
    theirs.extend(TensorDict({"a": torch.arange(4)}, [4]))
    theirs.sample()
    parts = {
        "StorageBase": [theirs.storage],
        "WriterBase": [theirs._writer, theirs.storage],
        "SamplerBase": [theirs.sampler],
        "BufferBase": [theirs, theirs.sampler, theirs.transform],
    }
    for name, live in parts.items():
        touched = _touched(name)
        assert touched, name
        assert not [attr for attr in touched if not any(hasattr(part, attr) for part in live)], name


def test_a_trainer_writes_its_rows_by_one_method() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False)
    connector = logger_connector(trainer)
    assert list(inspect.signature(connector.log_metrics).parameters) == ["metrics", "step"]
    assert "log_metrics" not in vars(connector)
