"""States are exact, atomic and free of pickle, also if the cells are files that outlive the process."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Compose

from kit.forks import killed_after
from kit.rings import ring
from kit.rows import numbered
from kit.states import GONE, changed, differences, entries
from torchrl_lightning import DynamicsTargets
from torchrl_lightning._core import files
from torchrl_lightning._core.files import read_state_folder, write_state_folder
from torchrl_lightning.replay import ExperienceBuffer, PrioritizedSampler, RingStorage

ENVS, SIZE = 3, 21
buffer = partial(ring, SIZE // ENVS, ENVS, batch_size=4)
filled = partial(buffer, filled=10)


def test_state_has_only_filled_cells() -> None:
    one = ring(10_000, ENVS, filled=2)
    one.extend(numbered(2, 70), env_ids=torch.tensor([2, 0]))
    state = one.state_dict()
    assert state["storage"]["data"]["a"].sort().values.tolist() == [0, 1, 2, 3, 4, 5, 70, 71]
    assert state["writer"]["positions"].tolist() == [3, 2, 3]


def test_state_does_not_change_with_its_buffer() -> None:
    observed, transform = Composite(a=Unbounded(1)), Compose()
    transform.append(DynamicsTargets(observed, Unbounded(1), action_key="a", reward=lambda *_: torch.zeros(())))
    after = {"a": torch.ones(4, 1), "done": torch.zeros(4, 1, dtype=torch.bool)}
    one = ring(4, transform=transform, prefetch=2, batch_size=4)
    one.extend(rows := TensorDict({"a": torch.arange(4.0).unsqueeze(1), "next": after}, [4]))
    one.sample()
    with one.paused() as ahead:
        state = one.state_dict()
        before = copy.deepcopy(state)
        for batch, info in ahead:
            batch["a"] += 7
            info["index"] += 7
    transform[0].fit(rows)
    assert ahead
    assert not differences(state, before)


def test_loaded_generator_stays_the_same_object() -> None:
    generator = torch.Generator()
    one, other = filled(), buffer(generator=generator)
    other.load_state_dict(one.state_dict())
    assert other.generator is generator


def test_state_folder_has_no_pickle_and_no_other_files(tmp_path: Path) -> None:
    one = filled()
    for _ in range(3):
        one.dumps(tmp_path / "state")
    assert sorted(path.suffix for path in tmp_path.rglob("*")) == ["", ".bin", ".json"]


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
        if sign:  # an attacker would also update the checksum
            written["crc32"] = zlib.crc32(json.dumps(written["content"]).encode())
        (folder / "state.json").write_text(json.dumps(written))

    return damage


def put(*path: str, value: Any = GONE) -> Callable[[Path], None]:
    """Set a value in the manifest, or remove it."""
    return edit(lambda content: content.update(changed(content, path, value)))


CELLS = ("state", "storage", "data", "a", "__tensor__")
DAMAGES = {
    "shorter": damage_size,
    "other bytes": damage_bytes,
    "half a manifest": lambda folder: (folder / "state.json").write_text("{"),
    "no text": lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe\x00"),
    "deep": lambda folder: (folder / "state.json").write_text("[" * 100_000),
    "huge": put(*CELLS, "shape", value=[1 << 40]),
    "before the file": put(*CELLS, "offset", value=-8),
    "another file": put("file", value="../../../etc/passwd"),
    "without a count": put("state", "storage", "count"),
    "a list": put("state", value=[1, 2]),
    "unsigned": edit(lambda content: content["state"]["writer"].update(write_count=11), sign=False),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_and_hostile_states_change_nothing(damage: object, tmp_path: Path) -> None:
    filled().dumps(tmp_path / "state")
    damage(tmp_path / "state")
    ours = buffer(filled=2)
    with pytest.raises(ValueError, match=r"damaged or foreign|foreign"):
        ours.loads(tmp_path / "state")
    assert sorted(ours[:]["a"].tolist()) == list(range(6))


def test_edited_manifest_is_rejected(tmp_path: Path) -> None:
    write_state_folder(tmp_path, {"a": torch.arange(3), "b": {"c": (1, [2.5, "x"])}})
    whole = (tmp_path / "state.json").read_text()
    for path, _ in entries(json.loads(whole)["content"]):
        for wrong in (None, -1, 1 << 70, 0.5, [[1]], {"__tensor__": 1}, {"__tuple__": 3}):

            def change(content: dict[str, Any], path: Any = path, wrong: Any = wrong) -> None:
                functools.reduce(lambda node, key: node[key], path[:-1], content)[path[-1]] = wrong

            (tmp_path / "state.json").write_text(whole)
            edit(change, sign=False)(tmp_path)
            with pytest.raises(ValueError, match="damaged or foreign"):
                read_state_folder(tmp_path)
            edit(lambda content: None)(tmp_path)  # with a valid checksum, the read returns a state or raises
            with contextlib.suppress(ValueError):
                assert isinstance(read_state_folder(tmp_path), dict)


@pytest.mark.parametrize("exists", [False, True])
def test_full_disk_leaves_the_old_state(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = buffer(filled=2)
    if exists:
        one.dumps(tmp_path / "state")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    one.extend(numbered(ENVS, 50))
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        one.dumps(tmp_path / "state")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == (["state"] if exists else [])
    if exists:
        ours = buffer()
        ours.loads(tmp_path / "state")
        assert len(ours) == 2 * ENVS
        assert len(list((tmp_path / "state").iterdir())) == 2


# ---------------------------------------------------------------------- memory-mapped cells


def test_loaded_state_ignores_later_writes(tmp_path: Path) -> None:
    one = filled(scratch_dir=tmp_path / "ring", sampler=PrioritizedSampler(SIZE, alpha=1.0, beta=0.5))
    one.update_priority(torch.arange(SIZE), torch.arange(SIZE) % 5 + 1.0)
    held = one.state_dict()
    one.dumps(tmp_path / "state")
    one.extend(numbered(ENVS, 900))
    one.extend(numbered(1, 950), env_ids=torch.tensor([1]))  # as from a process that dies between two saves
    one.update_priority(torch.arange(SIZE), torch.ones(SIZE))
    for folder in (None, tmp_path / "ring", tmp_path / "other"):
        other = buffer(scratch_dir=folder, sampler=PrioritizedSampler(SIZE, alpha=1.0, beta=0.5))
        other.loads(tmp_path / "state")
        assert not differences(other.state_dict(), held)
        assert (other[:] == filled()[:]).all()


def test_second_resume_keeps_all_steps(tmp_path: Path) -> None:
    one = filled(scratch_dir=tmp_path / "ring")
    one.dumps(tmp_path / "state")
    for step in range(SIZE):  # unsaved steps that exceed the length of the rings
        one.extend(numbered(ENVS, 500 + step * ENVS))
    for again in range(2):
        other = buffer(scratch_dir=tmp_path / "ring")
        other.loads(tmp_path / "state")
        other.extend(numbered(ENVS, 30 + again * ENVS))
        other.dumps(tmp_path / "state")
    assert other.writer.filled.tolist() == [7] * ENVS
    assert sorted(other[:]["a"].tolist()) == list(range(36 - SIZE, 36))


def test_emptied_ring_loads_an_older_state(tmp_path: Path) -> None:
    one, twin = filled(scratch_dir=tmp_path / "ring"), filled()
    one.dumps(tmp_path / "state")
    held = one.state_dict()
    for load in (lambda: one.loads(tmp_path / "state"), lambda: one.load_state_dict(held)):
        one.empty()
        one.extend(numbered(ENVS, 900))
        load()
        assert (one[:] == twin[:]).all()
        assert one.writer.positions.tolist() == [10] * ENVS


def test_mapped_files_have_no_names_and_are_separate(tmp_path: Path) -> None:
    one, other = filled(scratch_dir=tmp_path / "ring"), buffer(scratch_dir=tmp_path / "ring", filled=2)
    assert (one[:] == filled()[:]).all()
    assert sorted(other[:]["a"].tolist()) == list(range(6))
    assert not list((tmp_path / "ring").iterdir())


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(not anonymous_bytes(), reason="the kernel does not tell")
def test_mapped_cells_use_no_anonymous_memory(tmp_path: Path) -> None:
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
def test_kill_while_saving_keeps_the_old_state(saves: int, tmp_path: Path) -> None:
    saved = killed_after(0.003 * saves, save_forever, tmp_path, first=saves)
    ours = ExperienceBuffer(storage=RingStorage(40_000, scratch_dir=tmp_path / "ring"), num_envs=2)
    ours.loads(tmp_path / "state")
    number = int(ours.writer.positions[0]) // 200 - 1
    assert number in (saved[-1], saved[-1] + 1)
    cells = ours.writer.rings.filled_cells()
    assert len(cells) == min((number + 1) * 400, 40_000)
    found = ours.storage.get(cells)
    assert torch.equal(found["a"], found["b"])
    assert torch.equal(found["a"], (ours.writer.rings.position_of(cells) // 200).float())
