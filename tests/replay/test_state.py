"""States: exact, atomic, without pickle, and over files that outlive the process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import RandomSampler, SamplerWithoutReplacement, TensorDictReplayBuffer

from torchrl_lightning.replay import ExperienceBuffer, RingStorage, files

ENVS, SIZE = 3, 21


def rows(count: int, start: int = 0) -> TensorDict:
    value = torch.arange(start, start + count).float()
    return TensorDict({"a": value, "next": {"done": (value % 4 == 3).unsqueeze(-1), "b": value.bfloat16()}}, [count])


def buffer(scratch: Path | None = None, size: int = SIZE, envs: int = ENVS, **kwargs: object) -> ExperienceBuffer:
    return ExperienceBuffer(
        storage=RingStorage(size, scratch_dir=scratch), num_envs=envs, **{"batch_size": 4, **kwargs}
    )


def filled(scratch: Path | None = None, steps: int = 10, **kwargs: object) -> ExperienceBuffer:
    ours = buffer(scratch, **kwargs)
    for step in range(steps):
        ours.extend(rows(ENVS, step * ENVS))
    return ours


def assert_same_future(one: ExperienceBuffer, other: ExperienceBuffer, batches: int = 3) -> None:
    for start in (500, 600):
        for _ in range(batches):
            assert (one.sample() == other.sample()).all()
        for ours in (one, other):
            ours.extend(rows(ENVS, start))
    cells = one.writer.filled_cells()
    assert torch.equal(cells, other.writer.filled_cells())
    at = one.writer.env_of(cells), one.writer.position_of(cells)
    assert torch.equal(other.writer.position_of(cells), at[1])
    for name in ("begin", "end", "finished"):
        assert torch.equal(getattr(one.writer.index, name)(*at), getattr(other.writer.index, name)(*at))


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 17), way=st.sampled_from(["memory", "torch.save", "folder", "pickle"]))
def test_the_same_next_samples(steps: int, way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("state")
    one, other = filled(steps=steps), buffer(generator=torch.Generator().manual_seed(99))
    if way == "memory":
        other.load_state_dict(one.state_dict())
    elif way == "torch.save":
        torch.save(one.state_dict(), folder / "state.pt")
        other.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    elif way == "folder":
        one.dumps(folder / "state")
        other.loads(folder / "state")
    else:
        other = pickle.loads(pickle.dumps(one))
    assert_same_future(one, other)


def test_uneven_rings_come_back() -> None:
    one, other = filled(steps=3), buffer()
    one.extend(rows(2, 70), env_ids=torch.tensor([2, 0]))
    other.load_state_dict(one.state_dict())
    cells = one.writer.filled_cells()
    assert len(other) == len(cells) == 11
    assert torch.equal(other.writer.filled_cells(), cells)
    assert (other.storage.get(cells) == one.storage.get(cells)).all()
    assert len(one.state_dict()["storage"]["data"]["a"]) == 11


def test_a_state_is_a_copy_of_the_filled_part() -> None:
    one = filled(steps=2, size=30_000)
    state = one.state_dict()
    before = state["storage"]["data"]["a"].clone()
    assert len(before) == 2 * ENVS
    one.empty()
    one.extend(rows(ENVS, 900))
    assert torch.equal(state["storage"]["data"]["a"], before)
    assert state["writer"]["positions"].tolist() == [2] * ENVS


def test_an_empty_buffer_has_a_state(tmp_path: Path) -> None:
    one, other = buffer(), filled()
    one.dumps(tmp_path / "state")
    other.loads(tmp_path / "state")
    assert len(other) == 0
    assert other.extend(rows(ENVS)).tolist() == [0, 1, 2]


def test_prefetched_batches_and_epochs_come_back(tmp_path: Path) -> None:
    kwargs = {"prefetch": 2, "batch_size": 3}
    one = filled(sampler=SamplerWithoutReplacement(), **kwargs)
    other = buffer(sampler=SamplerWithoutReplacement(), **kwargs)
    one.sample()
    one.dumps(tmp_path / "state")
    other.loads(tmp_path / "state")
    for _ in range(9):
        assert torch.equal(one.sample()["a"], other.sample()["a"])
    with pytest.raises(ValueError, match="prefetch"):
        filled(sampler=SamplerWithoutReplacement(), batch_size=3).loads(tmp_path / "state")


def test_the_generator_stays_the_users() -> None:
    generator = torch.Generator()
    one, other = filled(), buffer(generator=generator)
    other.load_state_dict(one.state_dict())
    assert other.generator is generator


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"size": 42}, "max_size=21, this storage has max_size=42"),
        ({"envs": 1}, "num_envs=3, this writer has num_envs=1"),
        ({"sampler": SamplerWithoutReplacement()}, "RandomSampler, this buffer has a SamplerWithoutReplacement"),
    ],
)
def test_another_buffer_is_refused(other: dict, says: str, tmp_path: Path) -> None:
    filled().dumps(tmp_path / "state")
    ours = buffer(**other)
    with pytest.raises(ValueError, match=says):
        ours.loads(tmp_path / "state")
    assert len(ours) == 0
    assert not ours.storage.initialized


def test_another_schema_is_refused() -> None:
    state, ours = filled().state_dict(), buffer()
    ours.extend(rows(ENVS).exclude("a"))
    with pytest.raises(ValueError, match="'a' is new"):
        ours.load_state_dict(state)
    with pytest.raises(ValueError, match="schema version 7"):
        ours.load_state_dict({**state, "schema_version": 7})
    assert len(ours) == ENVS


def test_no_pickle_and_nothing_beside(tmp_path: Path) -> None:
    one = filled()
    for _ in range(3):
        one.dumps(tmp_path / "state")
    assert len(list(tmp_path.iterdir())) == 1
    names = sorted(path.suffix for path in (tmp_path / "state").iterdir())
    assert names == [".bin", ".json"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".state.0123456789abcdef").mkdir()
    one = filled()
    one.dumps(tmp_path / "state")
    (tmp_path / "state" / "state-0123456789abcdef.bin").touch()
    (tmp_path / "state" / ".state-0123456789abcdef.bin.json").touch()
    one.dumps(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert len(list((tmp_path / "state").iterdir())) == 2


def damage_size(folder: Path) -> None:
    (data,) = folder.glob("*.bin")
    os.truncate(data, data.stat().st_size - 1)


def damage_bytes(folder: Path) -> None:
    (data,) = folder.glob("*.bin")
    content = bytearray(data.read_bytes())
    content[3] ^= 255
    data.write_bytes(content)


def edit(change: object) -> object:
    def damage(folder: Path) -> None:
        content = json.loads((folder / "state.json").read_text())
        change(content)
        (folder / "state.json").write_text(json.dumps(content))

    return damage


def huge(content: dict) -> None:
    content["state"]["storage"]["data"]["a"]["__tensor__"]["shape"] = [1 << 40]


def negative(content: dict) -> None:
    content["state"]["storage"]["data"]["a"]["__tensor__"]["offset"] = -8


def outside(content: dict) -> None:
    content["file"] = "../../../etc/passwd"


def short(content: dict) -> None:
    del content["state"]["storage"]["count"]


def foreign(content: dict) -> None:
    content["state"] = [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        damage_size,
        damage_bytes,
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe\x00"),
        *(edit(change) for change in (huge, negative, outside, short, foreign)),
    ],
)
def test_damaged_and_hostile_states_change_nothing(damage: object, tmp_path: Path) -> None:
    filled().dumps(tmp_path / "state")
    damage(tmp_path / "state")
    ours = filled(steps=2)
    with pytest.raises(ValueError, match=r"damaged or foreign|foreign"):
        ours.loads(tmp_path / "state")
    assert sorted(ours[:]["a"].tolist()) == list(range(6))


def test_a_missing_state(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no saved state"):
        buffer().loads(tmp_path)


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_the_old_state(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = filled(steps=2)
    if exists:
        one.dumps(tmp_path / "state")
    calls = 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        raise OSError(28, "No space left on device")

    one.extend(rows(ENVS, 50))
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        one.dumps(tmp_path / "state")
    monkeypatch.undo()
    assert calls == 1
    assert [path.name for path in tmp_path.iterdir()] == (["state"] if exists else [])
    if exists:
        ours = buffer()
        ours.loads(tmp_path / "state")
        assert len(ours) == 2 * ENVS
        assert len(list((tmp_path / "state").iterdir())) == 2


def test_in_torchrls_buffer(tmp_path: Path) -> None:
    def theirs() -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=RingStorage(SIZE), sampler=RandomSampler(), generator=torch.Generator(), batch_size=4
        )

    one = theirs()
    one.extend(rows(30))
    one.dumps(tmp_path / "state")
    for other in (theirs(), theirs()):
        other.loads(tmp_path / "state")
        assert len(other) == SIZE
        assert other.storage.cursor == one.storage.cursor
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.sample()["a"], other.sample()["a"])


# ---------------------------------------------------------------------- memory-mapped cells


def test_cells_on_disk_are_used_again_without_a_copy(tmp_path: Path) -> None:
    one = filled(tmp_path / "ring")
    one.dumps(tmp_path / "ring")
    inode = (tmp_path / "ring" / "leaf_000.bin").stat().st_ino
    assert "leaf" not in "".join(path.name for path in (tmp_path / "ring").glob("state*"))
    other = ExperienceBuffer(storage=RingStorage.open(tmp_path / "ring"), num_envs=ENVS, batch_size=4)
    other.loads(tmp_path / "ring")
    assert other.writer.filled.tolist() == [7] * ENVS
    assert (other.sample() == one.sample()).all()
    other.extend(rows(ENVS, 800))
    assert one.storage.data["a"].max() == 800 + ENVS - 1  # the very same memory
    assert (tmp_path / "ring" / "leaf_000.bin").stat().st_ino == inode


def test_steps_overwritten_since_the_state_are_dropped(tmp_path: Path) -> None:
    one = filled(tmp_path / "ring")
    one.dumps(tmp_path / "state", copy=False)
    kept = {int(value) for value in one[:]["a"]}
    one.extend(rows(ENVS, 900))
    one.extend(rows(1, 950), env_ids=torch.tensor([1]))
    other = buffer(tmp_path / "ring")
    other.loads(tmp_path / "state")
    assert other.writer.positions.tolist() == [10] * ENVS
    assert other.writer.filled.tolist() == [6, 5, 6]
    cells = other.writer.filled_cells()
    assert {int(value) for value in other.storage.get(cells)["a"]} < kept
    begin = other.writer.index.begin(other.writer.env_of(cells), other.writer.position_of(cells))
    assert (begin >= other.writer.oldest[other.writer.env_of(cells)]).all()
    for step in range(7):
        other.extend(rows(ENVS, 100 + step * ENVS))
    assert other.writer.is_even
    assert sorted(other[:]["a"].tolist()) == list(range(100, 121))


def test_an_emptied_ring_on_disk_has_nothing_of_an_older_state(tmp_path: Path) -> None:
    one = filled(tmp_path / "ring")
    one.dumps(tmp_path / "state", copy=False)
    one.empty()
    one.extend(rows(ENVS, 900))
    other = buffer(tmp_path / "ring")
    other.loads(tmp_path / "state")
    assert len(other) == 0
    one.dumps(tmp_path / "state", copy=False)
    other = buffer(tmp_path / "ring")
    other.loads(tmp_path / "state")
    assert sorted(other[:]["a"].tolist()) == [900, 901, 902]


def test_copies_between_memory_and_disk(tmp_path: Path) -> None:
    one = filled(tmp_path / "ring")
    one.dumps(tmp_path / "whole")
    one.dumps(tmp_path / "place", copy=False)
    for name in ("whole", "place"):
        memory, disk = buffer(), buffer(tmp_path / f"copy_{name}")
        memory.loads(tmp_path / name)
        disk.loads(tmp_path / name)
        assert (memory[:] == one[:]).all()
        assert (disk[:] == one[:]).all()
    with pytest.raises(ValueError, match="in memory"):
        memory.dumps(tmp_path / "no", copy=False)
    with pytest.raises(ValueError, match="copy=False"):
        buffer().loads(tmp_path / "whole", copy=False)
    with pytest.raises(ValueError, match="scratch_dir"):
        buffer().loads(tmp_path / "place", copy=False)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda ring: os.truncate(ring / "leaf_000.bin", 8), ValueError),
        (lambda ring: (ring / "leaf_001.bin").unlink(), ValueError),
        (lambda ring: (ring / "ring.json").write_text("[]"), ValueError),
        (lambda ring: (ring / "ring.json").unlink(), FileNotFoundError),
        (lambda ring: os.truncate(ring / "written.bin", 8), ValueError),
    ],
)
def test_damaged_rings_are_refused(damage: object, error: type[Exception], tmp_path: Path) -> None:
    filled(tmp_path / "ring").dumps(tmp_path / "ring")
    damage(tmp_path / "ring")
    with pytest.raises(error):
        buffer(tmp_path / "ring").loads(tmp_path / "ring")


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(not anonymous_bytes(), reason="the kernel does not tell")
def test_cells_on_disk_take_no_anonymous_memory(tmp_path: Path) -> None:
    size, width = 1 << 16, 1024  # 256 MiB
    one = ExperienceBuffer(storage=RingStorage(size, scratch_dir=tmp_path / "ring"), batch_size=256)
    data = TensorDict({"a": torch.rand(1024, width), "next": {"done": torch.zeros(1024, 1, dtype=torch.bool)}}, [1024])
    one.extend(data)
    before = anonymous_bytes()
    for _ in range(size // 1024):
        one.extend(data)
        one.sample()
    one.dumps(tmp_path / "ring")
    other = ExperienceBuffer(storage=RingStorage.open(tmp_path / "ring"), batch_size=256)
    other.loads(tmp_path / "ring")
    other.sample()
    assert anonymous_bytes() - before < 32 << 20


KILLED = """
import sys, torch
from pathlib import Path
from tensordict import TensorDict
from torchrl_lightning.replay import ExperienceBuffer, RingStorage
folder, mapped = Path(sys.argv[1]), sys.argv[2] == "mapped"
storage = RingStorage(40_000, scratch_dir=folder / "ring" if mapped else None)
ours = ExperienceBuffer(storage=storage, num_envs=2, batch_size=4)
for number in range(10_000):
    value = torch.full((200, 2), float(number))
    ours.extend(TensorDict({"a": value, "b": value.clone()}, [200, 2]), time_dim=0)
    ours.dumps(folder / "state", copy=False if mapped else None)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("kind", ["memory", "mapped"])
def test_killed_while_saving(kind: str, tmp_path: Path) -> None:
    source = str(Path(files.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), kind],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    saved = [int(process.stdout.readline()) for _ in range(7)]
    process.kill()
    saved += [int(line) for line in process.stdout.read().split()]
    process.communicate()
    ours = ExperienceBuffer(
        storage=RingStorage(40_000, scratch_dir=tmp_path / "ring" if kind == "mapped" else None), num_envs=2
    )
    ours.loads(tmp_path / "state")
    number = int(ours.writer.positions[0]) // 200 - 1
    assert number in (saved[-1], saved[-1] + 1)
    cells = ours.writer.filled_cells()
    found = ours.storage.get(cells)
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["a"], (ours.writer.position_of(cells) // 200).float())
