"""States: exact, atomic, without pickle, and over files that outlive the process."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import RandomSampler

from kit.forks import killed_after
from torchrl_lightning import files
from torchrl_lightning.files import read_state, write_state
from torchrl_lightning.replay import (
    ExperienceBuffer,
    PrioritizedSampler,
    RingStorage,
    SequenceSampler,
    UniformSampler,
)

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


def test_the_generator_stays_the_users() -> None:
    generator = torch.Generator()
    one, other = filled(), buffer(generator=generator)
    other.load_state_dict(one.state_dict())
    assert other.generator is generator


def test_no_pickle_and_nothing_beside(tmp_path: Path) -> None:
    one = filled()
    for _ in range(3):
        one.dumps(tmp_path / "state")
    assert len(list(tmp_path.iterdir())) == 1
    names = sorted(path.suffix for path in (tmp_path / "state").iterdir())
    assert names == [".bin", ".json"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".state.0123456789abcdef.tmp").mkdir()
    one = filled()
    one.dumps(tmp_path / "state")
    (tmp_path / "state" / "state-0123456789abcdef.bin").touch()
    (tmp_path / "state" / ".state-0123456789abcdef.bin.0123456789abcdef.tmp").touch()
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


def edit(change: Callable[[dict[str, Any]], None], sign: bool = True) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        written = json.loads((folder / "state.json").read_text())
        change(written["content"])
        if sign:  # as a hostile author would
            written["crc32"] = zlib.crc32(json.dumps(written["content"]).encode())
        (folder / "state.json").write_text(json.dumps(written))

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


def plausible(content: dict) -> None:
    content["state"]["writer"]["write_count"] += 1


@pytest.mark.parametrize(
    "damage",
    [
        damage_size,
        damage_bytes,
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe\x00"),
        lambda folder: (folder / "state.json").write_text("[" * 100_000),
        *(edit(change) for change in (huge, negative, outside, short, foreign)),
        edit(plausible, sign=False),
    ],
)
def test_damaged_and_hostile_states_change_nothing(damage: object, tmp_path: Path) -> None:
    filled().dumps(tmp_path / "state")
    damage(tmp_path / "state")
    ours = filled(steps=2)
    with pytest.raises(ValueError, match=r"damaged or foreign|foreign"):
        ours.loads(tmp_path / "state")
    assert sorted(ours[:]["a"].tolist()) == list(range(6))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in below:
        yield from places(entry, (*path, key))


def test_every_edit_of_the_manifest_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, {"a": torch.arange(3), "b": {"c": (1, [2.5, "x"])}})
    whole = (tmp_path / "state.json").read_text()
    for path in places(json.loads(whole)["content"]):
        for wrong in (None, -1, 1 << 70, 0.5, [[1]], {"__tensor__": 1}, {"__tuple__": 3}) if path else ():

            def change(content: dict[str, Any], path: Any = path, wrong: Any = wrong) -> None:
                functools.reduce(lambda node, key: node[key], path[:-1], content)[path[-1]] = wrong

            (tmp_path / "state.json").write_text(whole)
            edit(change, sign=False)(tmp_path)
            with pytest.raises(ValueError, match="damaged or foreign"):
                read_state(tmp_path)
            edit(lambda content: None)(tmp_path)  # signs it: another state, or none
            with contextlib.suppress(ValueError):
                assert isinstance(read_state(tmp_path), dict)


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


# ---------------------------------------------------------------------- memory-mapped cells


def prioritized() -> PrioritizedSampler:
    return PrioritizedSampler(SIZE, alpha=1.0, beta=0.5)


@pytest.mark.parametrize("target", ["memory", "same folder", "another folder"])
@pytest.mark.parametrize("sampler", [RandomSampler, UniformSampler, prioritized, lambda: SequenceSampler(3)])
def test_a_state_knows_nothing_of_what_was_written_behind_it(target: str, sampler: Any, tmp_path: Path) -> None:
    one, twin = filled(tmp_path / "ring", sampler=sampler()), filled(sampler=sampler())
    one.generator.set_state(twin.generator.get_state())
    prefers = sampler is prioritized
    for ours in (one, twin) if prefers else ():
        ours.update_priority(torch.arange(SIZE), torch.arange(SIZE) % 5 + 1.0)
    one.dumps(tmp_path / "state")
    one.extend(rows(ENVS, 900))
    one.extend(rows(1, 950), env_ids=torch.tensor([1]))  # a process that dies between two saves
    if prefers:
        one.update_priority(torch.arange(SIZE), torch.ones(SIZE))
    folder = {"memory": None, "same folder": tmp_path / "ring", "another folder": tmp_path / "other"}[target]
    other = buffer(folder, sampler=sampler())
    other.loads(tmp_path / "state")
    assert len(other) == SIZE
    assert (other[:] == twin[:]).all()
    assert_same_future(twin, other)


def test_a_second_resume_drops_nothing(tmp_path: Path) -> None:
    one = filled(tmp_path / "ring")
    one.dumps(tmp_path / "state")
    for step in range(SIZE):  # a run that is lost for more than the length of the rings
        one.extend(rows(ENVS, 500 + step * ENVS))
    for again in range(2):
        other = buffer(tmp_path / "ring")
        other.loads(tmp_path / "state")
        other.extend(rows(ENVS, 30 + again * ENVS))
        other.dumps(tmp_path / "state")
    assert other.writer.filled.tolist() == [7] * ENVS
    assert sorted(other[:]["a"].tolist()) == list(range(36 - SIZE, 36))


def test_an_emptied_ring_takes_an_older_state(tmp_path: Path) -> None:
    one, twin = filled(tmp_path / "ring"), filled()
    one.dumps(tmp_path / "state")
    held = one.state_dict()
    for load in (lambda: one.loads(tmp_path / "state"), lambda: one.load_state_dict(held)):
        one.empty()
        one.extend(rows(ENVS, 900))
        load()
        assert (one[:] == twin[:]).all()
        assert one.writer.positions.tolist() == [10] * ENVS


def test_cells_on_disk_leave_no_names_and_meet_nobody(tmp_path: Path) -> None:
    one, other = filled(tmp_path / "ring"), filled(tmp_path / "ring", steps=2)
    assert (one[:] == filled()[:]).all()
    assert sorted(other[:]["a"].tolist()) == list(range(6))
    assert not list((tmp_path / "ring").iterdir())


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(not anonymous_bytes(), reason="the kernel does not tell")
def test_cells_on_disk_take_no_anonymous_memory(tmp_path: Path) -> None:
    size, width = 1 << 14, 1024  # 64 MiB
    one = ExperienceBuffer(storage=RingStorage(size, scratch_dir=tmp_path / "ring"), batch_size=256)
    data = TensorDict({"a": torch.rand(1024, width), "next": {"done": torch.zeros(1024, 1, dtype=torch.bool)}}, [1024])
    one.extend(data)
    before = anonymous_bytes()
    for _ in range(size // 1024):
        one.extend(data)
        one.sample()
    one.dumps(tmp_path / "state")
    other = ExperienceBuffer(storage=RingStorage(size, scratch_dir=tmp_path / "ring"), batch_size=256)
    other.loads(tmp_path / "state")
    other.sample()
    assert anonymous_bytes() - before < 16 << 20


def save_forever(folder: Path) -> Iterator[int]:
    ours = ExperienceBuffer(storage=RingStorage(40_000, scratch_dir=folder / "ring"), num_envs=2, batch_size=4)
    for number in range(10_000):
        value = torch.full((200, 2), float(number))
        ours.extend(TensorDict({"a": value, "b": value.clone()}, [200, 2]), time_dim=0)
        ours.dumps(folder / "state")
        yield number


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("saves", [1, 4, 7])
def test_killed_while_saving(saves: int, tmp_path: Path) -> None:
    saved = killed_after(0.003 * saves, save_forever, tmp_path, first=saves)
    ours = ExperienceBuffer(storage=RingStorage(40_000, scratch_dir=tmp_path / "ring"), num_envs=2)
    ours.loads(tmp_path / "state")
    number = int(ours.writer.positions[0]) // 200 - 1
    assert number in (saved[-1], saved[-1] + 1)
    cells = ours.writer.filled_cells()
    assert len(cells) == min((number + 1) * 400, 40_000)
    found = ours.storage.get(cells)
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["a"], (ours.writer.position_of(cells) // 200).float())
