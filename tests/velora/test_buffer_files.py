"""We read Velora's files, Velora reads our files, and invalid files are rejected before anything changes."""

from __future__ import annotations

import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kit.documented import stored
from kit.golden import DATA, tensors
from torchrl_lightning.velora import buffer_files
from torchrl_lightning.velora.buffer_files import NAMES
from torchrl_lightning.velora.recurrent import RecurrentReplayBuffer

VELORA = DATA / "velora"  # both written by Velora 0.2.0; "run" was saved with the prefix "run.1_"


def metadata(name: str = "buffer_metadata", folder: Path = VELORA) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return content


def load(**changes: Any) -> RecurrentReplayBuffer:
    return RecurrentReplayBuffer.load(VELORA / "buffer_state.safetensors", {**metadata(), **changes})


@pytest.mark.parametrize("suffix", ["", ".safetensors"])
def test_full_velora_buffer_is_read(suffix: str) -> None:
    buffer = RecurrentReplayBuffer.load(f"{VELORA}/buffer_state{suffix}", metadata())
    assert (len(buffer), buffer.position) == (7, 3)
    golden = tensors("velora_wraparound")
    for name in NAMES:
        assert stored(buffer)[name].equal(golden[f"final_{name}"]), name
    buffer.add(torch.ones(3), torch.ones(2), 1.0, torch.ones(3), False, torch.ones(4))
    after = stored(buffer)["states"]
    assert after[3].tolist() == [1.0, 1.0, 1.0]
    assert after[4].equal(golden["final_states"][4])


@pytest.mark.parametrize("name", ["run", "run.safetensors", "run.1_state"])
def test_partly_filled_velora_buffer_with_shortened_name_is_read(name: str) -> None:
    buffer = RecurrentReplayBuffer.load(VELORA / name, metadata("run"))
    assert (len(buffer), buffer.position, str(buffer.device)) == (3, 3, "cpu")
    assert stored(buffer)["hiddens"].equal(tensors("velora_wraparound")["in_hiddens"][:3])


@pytest.mark.parametrize("rows", [buffer_files.CHUNK, 2])
@pytest.mark.parametrize(("name", "state"), [("buffer_metadata", "buffer_state"), ("run", "run")])
def test_written_file_differs_from_veloras_file_only_in_its_header(
    name: str, state: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_files, "CHUNK", rows)  # rows per write
    RecurrentReplayBuffer.load(VELORA / state, metadata(name)).save(tmp_path)
    ours, theirs = tmp_path / "buffer_state.safetensors", VELORA / f"{state}.safetensors"
    assert {**metadata(folder=tmp_path), "device": None} == {**metadata(name), "device": None}
    one, other = (path.read_bytes() for path in (ours, theirs))
    assert one[8 + struct.unpack("<Q", one[:8])[0] :] == other[8 + struct.unpack("<Q", other[:8])[0] :]
    found, expected = load_file(ours), load_file(theirs)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    with safe_open(ours, "pt") as file:
        assert file.metadata() == {name: str(metadata(folder=tmp_path)[name]) for name in ("position", "size")}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"capacity": 2**60, "position": 7}, "does not fit its metadata"),
        ({"hidden_dim": 2**40}, "does not fit its metadata"),
        ({"state_dim": 4}, r"'next_states' is .*\[7, 3\].*\[7, 4\]"),
        ({"capacity": -7}, "'capacity' is -7, expected an integer of at least 1"),
        ({"capacity": 7.0}, r"'capacity' is 7\.0"),
        ({"size": 8}, "size=8"),
        ({"position": 7}, "position=7"),
        ({"size": 5}, "position=3 and size=5"),
        ({"device": "warp"}, "device='warp'"),
        ({"device": 3.5}, "device=3.5"),
        ({"device": "hpu:3"}, "'cpu'"),
    ],
)
def test_impossible_metadata_is_refused_without_allocating(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(**changes)


def test_invalid_metadata_is_named() -> None:
    known = ["capacity", "state_dim", "position", "size", "device"]
    lacking = [({key: value for key, value in metadata().items() if key != name}, f"lacks {name};") for name in known]
    for content, match in (*lacking, ([], "list")):
        with pytest.raises(ValueError, match=match):
            RecurrentReplayBuffer.load(VELORA / "buffer_state", content)


def test_missing_file_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tried"):
        RecurrentReplayBuffer.load(tmp_path / "buffer_state.safetensors", metadata())


def _damaged(content: bytes) -> dict[str, bytes]:
    size = struct.unpack("<Q", content[:8])[0]
    huge = json.dumps({"states": {"dtype": "F32", "shape": [2**40, 3], "data_offsets": [0, 12 * 2**40]}}).encode()
    return {
        "empty": b"",
        "cut in the length": content[:5],
        "cut in the header": content[:60],
        "cut in the data": content[:-1],
        "longer": content + b"\0",
        "no json": content[:8] + b"x" * size + content[8 + size :],
        "huge header": struct.pack("<Q", 2**62) + content[8:],
        "huge tensor": struct.pack("<Q", len(huge)) + huge,
        "pickle": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    }


@pytest.mark.parametrize("kind", sorted(_damaged((VELORA / "run.safetensors").read_bytes())))
def test_damaged_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "buffer_state.safetensors"
    path.write_bytes(_damaged((VELORA / "buffer_state.safetensors").read_bytes())[kind])
    with pytest.raises(ValueError, match=r"buffer_state\.safetensors"):
        RecurrentReplayBuffer.load(path, metadata())


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    good = load_file(VELORA / "buffer_state.safetensors")
    path = tmp_path / "buffer_state.safetensors"
    for foreign, match in (
        ({"weight": torch.zeros(3)}, "'weight' is"),
        ({**good, "extra": torch.zeros(1)}, "'extra' is"),
        ({name: value for name, value in good.items() if name != "dones"}, "'dones' is None"),
        ({**good, "states": good["states"].half()}, "F16"),
        ({**good, "dones": good["dones"] + 0.25}, "dones must be 0 or 1"),
    ):
        save_file(foreign, path)
        with pytest.raises(ValueError, match=match):
            RecurrentReplayBuffer.load(path, metadata())


def test_sparse_file_larger_than_memory_is_refused_before_allocating(tmp_path: Path) -> None:
    capacity = 2**38
    header, start = {}, 0
    for name in sorted(NAMES):
        header[name] = {"dtype": "F32", "shape": [capacity, 1], "data_offsets": [start, start + 4 * capacity]}
        start += 4 * capacity
    text = json.dumps(header).encode()
    path = tmp_path / "buffer_state.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    try:
        os.truncate(path, 8 + len(text) + start)
    except OSError:
        pytest.skip("this file system has no files of that size")
    content = dict.fromkeys(("state_dim", "action_dim", "hidden_dim"), 1) | {"capacity": capacity, "device": None}
    with pytest.raises(ValueError, match=r"needs .* free"):
        RecurrentReplayBuffer.load(path, {**content, "position": 0, "size": capacity})


def test_failure_in_the_second_file_keeps_both_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = load()
    buffer.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    buffer.add(torch.ones(3), torch.ones(2), 1.0, torch.ones(3), False, torch.ones(4))

    def full(*args: object, **kwargs: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(buffer_files.json, "dumps", full)
    with pytest.raises(OSError, match="No space"):
        buffer.save(tmp_path)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.write_text("mine")
    for name in ("buffer_state.safetensors", "buffer_metadata.json"):
        (folder / name).symlink_to(other)
        (folder / f".{name}.tmp").symlink_to(other)
    load().save(folder)
    assert other.read_text() == "mine"
    assert len(RecurrentReplayBuffer.load(folder / "buffer_state", metadata(folder=folder))) == 7


def test_tensors_newer_than_their_metadata_file_have_their_position(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = load()
    buffer.save(tmp_path)
    old = (tmp_path / "buffer_metadata.json").read_bytes()
    buffer.add(torch.ones(3), torch.ones(2), 1.0, torch.ones(3), False, torch.ones(4))
    buffer.save(tmp_path)
    (tmp_path / "buffer_metadata.json").write_bytes(old)
    with caplog.at_level(logging.WARNING):
        restored = RecurrentReplayBuffer.load(tmp_path / "buffer_state", metadata(folder=tmp_path))
    assert restored.position == buffer.position == 4
    assert "newer than its metadata" in caplog.text
