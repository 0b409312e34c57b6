from __future__ import annotations

import io
import json
import math
import pickle
import struct
import zipfile
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
from tensordict import TensorDict

from kit.demonstrations import CARTPOLE, IMAGES, episode
from torchrl_lightning.demonstrations import Demonstration, read_demonstration, write_demonstration

ARRAYS = {
    "Observation": np.zeros((3, 4), np.float32),
    "Action": np.array([[0], [1], [1]], np.int8),
    "Reward": np.array([[0], [0], [1]], np.float16),
    "FrameSkip": np.array(2),
}


def npy(array, **changes) -> bytes:
    """The bytes of an array, whose header says what it is told to."""
    file = io.BytesIO()
    header = {**np.lib.format.header_data_from_array_1_0(array), **changes}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + array.tobytes()


def archive(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def members(**changes):
    return {f"{name}.npy": npy(array) for name, array in ARRAYS.items()} | changes


# -- PyTorchRL's form --------------------------------------------------------------------------------------------------
def test_file_of_pytorchrl_gets_the_keys_and_dtypes_of_the_environment(tmp_path):
    images = np.arange(2 * 75, dtype=np.float32).reshape(2, 3, 5, 5)
    rewards = np.array([[0], [2.5]], np.float16)
    np.savez(tmp_path / "a.npz", Observation=images, Action=np.array([[1], [2]], np.int8), Reward=rewards, FrameSkip=4)
    found = read_demonstration(tmp_path / "a.npz", IMAGES)
    found.fits(IMAGES, frame_skip=4)
    assert found.steps["observation"].dtype == torch.uint8
    assert torch.equal(found.steps["observation"], torch.from_numpy(images).byte())
    assert found.steps["action"].tolist() == [1, 2]
    assert (found.rewards.tolist(), found.rewards.dtype) == ([0.0, 2.5], torch.float32)
    assert (found.frame_skip, found.is_human, found.value, found.last_observation) == (4, False, -math.inf, None)
    assert str(tmp_path / "a.npz") in found.name


def test_npz_file_has_the_arrays_of_pytorchrl(tmp_path):
    written = episode(3, frame_skip=4)
    write_demonstration(tmp_path / "a.npz", written)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        shapes = {name: found[name].shape for name in found.files}
    assert shapes == {"Observation": (3, 4), "Action": (3, 1), "Reward": (3, 1), "FrameSkip": ()}
    read = read_demonstration(tmp_path / "a.npz", CARTPOLE)
    assert (read.steps == written.steps).all()
    assert read.frame_skip == 4


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f8", ">f4", ">i2", "<u2", "|b1"])
def test_arrays_of_any_layout_are_read_as_numpy_does(tmp_path, dtype, order):
    values = np.asarray(np.random.default_rng(0).integers(0, 2, (3, 4)), dtype, order=order)
    np.savez(tmp_path / "a.npz", **{**ARRAYS, "Observation": values})
    assert read_demonstration(tmp_path / "a.npz").steps["observation"].tolist() == values.tolist()


def test_dtypes_except_rewards_stay_without_specs(tmp_path):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    found = read_demonstration(tmp_path / "a.npz").steps
    assert (found["action"].dtype, found["action"].shape) == (torch.int8, (3, 1))
    assert found["next", "reward"].dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"Observation.npy": npy(np.zeros(3), descr="|O")}, "got pickled objects"),
        ({"Observation.npy": npy(np.zeros(3), shape=(1 << 40,))}, "declares shape"),
        ({"Observation.npy": npy(np.zeros(4), shape=(-2, -2))}, "declares shape"),
        ({"Observation.npy": npy(np.zeros(3, "V8"))}, "must have a numeric dtype"),
        ({"Observation.npy": npy(np.zeros(3, np.complex64))}, "must have a numeric dtype"),
        ({"Observation.npy": b""}, "not a complete .npz|magic"),
        ({"Observation.npy": b"\x93NUMPY\x01\x00\xff\x00" + b"(" * 255}, "was refused"),
        ({"More.npy": npy(np.zeros(3))}, "must contain only Observation, Action, Reward, FrameSkip .*'More.npy'"),
        ({"../../Observation.npy": npy(np.zeros(3))}, "must contain only .*'../../Observation.npy'"),
        ({"FrameSkip.npy": npy(np.zeros(2, int))}, "must be one integer"),
        ({"FrameSkip.npy": npy(np.array(0))}, "frame_skip must be a positive integer"),
        ({"Reward.npy": npy(np.full((3, 1), np.nan))}, "NaN"),
        ({"Reward.npy": npy(np.full((3, 1), 1e300))}, "infinity"),
        ({"Reward.npy": npy(np.zeros((2, 1)))}, "must have 2 rows"),
        ({"Reward.npy": npy(np.array(1.0))}, "expected"),
        ({f"{name}.npy": npy(np.zeros((0, 1))) for name in ("Observation", "Action", "Reward")}, "no steps"),
    ],
)
def test_hostile_or_foreign_archive_is_refused_by_name(tmp_path, changes, message):
    path = archive(tmp_path / "bad.npz", members(**changes))
    with pytest.raises(ValueError, match=message) as caught:
        read_demonstration(path, CARTPOLE)
    assert "bad.npz" in str(caught.value)


def test_pickle_is_never_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    np.savez(tmp_path / "a.npz", **{**ARRAYS, "Observation": np.array([Evil()], object)})
    (tmp_path / "b.npz").write_bytes(pickle.dumps(Evil()))
    for name in ("a.npz", "b.npz"):
        with pytest.raises(ValueError, match=f"{name}"):
            read_demonstration(tmp_path / name)


def test_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = archive(tmp_path / "bomb.npz", members(**{"Observation.npy": npy(np.zeros((1 << 20, 4), np.float32))}))
    assert path.stat().st_size < 1 << 17
    with (
        mock.patch.object(zipfile.ZipFile, "open", side_effect=AssertionError),
        pytest.raises(ValueError, match=r"arrays have \d+ bytes, more than the limit of 1048576"),
    ):
        read_demonstration(path, limit=1 << 20)


def test_bomb_with_a_false_size_is_unpacked_only_to_that_size(tmp_path):
    honest = npy(ARRAYS["Observation"])
    path = archive(tmp_path / "bomb.npz", members(**{"Observation.npy": honest + bytes(1 << 24)}))
    data = path.read_bytes()
    data = data.replace(struct.pack("<I", len(honest) + (1 << 24)), struct.pack("<I", len(honest)))
    path.write_bytes(data)
    asked = []
    read = zipfile.ZipExtFile._read1
    with (
        mock.patch.object(zipfile.ZipExtFile, "_read1", lambda stream, n: asked.append(n) or read(stream, n)),
        pytest.raises(ValueError, match=r"bomb.npz.*CRC"),
    ):
        read_demonstration(path)
    assert max(asked) <= 4096  # zip itself would unpack 2 GiB at once when it is asked for all that there is


def test_truncated_file_is_refused_wherever_it_ends(tmp_path):
    write_demonstration(tmp_path / "a.npz", episode())
    write_demonstration(tmp_path / "a.safetensors", episode())
    for name in ("a.npz", "a.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for end in {0, 1, 7, 8, 20, len(whole) // 2, len(whole) - 1}:
            (tmp_path / name).write_bytes(whole[:end])
            with pytest.raises(ValueError, match=f"{name}"):
                read_demonstration(tmp_path / name)


def test_files_above_the_limit_and_other_suffixes_are_refused(tmp_path):
    write_demonstration(tmp_path / "a.safetensors", episode())
    with pytest.raises(ValueError, match="more than the limit of 100 bytes"):
        read_demonstration(tmp_path / "a.safetensors", limit=100)
    with pytest.raises(ValueError, match=r"ends in '\.pt', expected '\.npz' or '\.safetensors'"):
        read_demonstration(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"ends in '\.pt'"):
        write_demonstration(tmp_path / "a.pt", episode())
    with pytest.raises(FileNotFoundError, match=r"none\.npz is not a file"):
        read_demonstration(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("dtype", "low", "fits"),
    [("f4", 255, True), ("f4", 256, False), ("f4", 0.5, False), ("i2", -1, False), ("i1", -1, False), ("f8", 7, True)],
)
def test_dtypes_are_converted_only_where_no_value_changes(tmp_path, dtype, low, fits):
    observation = np.full((3, 3, 5, 5), low, dtype)
    np.savez(tmp_path / "a.npz", **{**ARRAYS, "Observation": observation})
    if fits:
        assert read_demonstration(tmp_path / "a.npz", IMAGES).steps["observation"].unique().tolist() == [low]
    else:
        with pytest.raises(ValueError, match="'observation'"):
            read_demonstration(tmp_path / "a.npz", IMAGES)


# -- our own form ------------------------------------------------------------------------------------------------------
def test_safetensors_file_stores_all_fields(tmp_path):
    steps = TensorDict({"action": torch.randn(2, 3, dtype=torch.float64)}, [2])
    steps["seen", "a/b~c"] = torch.randint(0, 255, (2, 5, 5, 3), dtype=torch.uint8)
    steps["seen", "x.y"] = torch.randn(4, 2).T  # not in one piece
    steps["flag"] = torch.tensor([True, False])
    steps["next", "reward"] = torch.tensor([[0.1], [-3.0]])
    last = steps[1].select("seen", "flag").clone()
    metadata = {"environment": "Some-v0", "frame_stack": 4, "success": True, "score": 0.25}
    known = {"is_human": True, "value": 1.5, "frame_skip": 4, "terminated": False, "truncated": True}
    written = Demonstration(steps, last, name="x", metadata=metadata, **known)
    write_demonstration(tmp_path / "a.safetensors", written)
    found = read_demonstration(tmp_path / "a.safetensors")
    assert (found.steps == written.steps).all()
    assert found.steps["seen", "a/b~c"].dtype == torch.uint8
    assert (found.last_observation == last).all()
    assert {name: getattr(found, name) for name in known} == known
    assert found.metadata == metadata
    header = safetensors.safe_open(tmp_path / "a.safetensors", "pt").metadata()
    assert json.loads(header["demonstration"])["return"] == pytest.approx(-2.9)


FIRST = {"schema_version": 1, "frame_skip": 1, "is_human": False, "value": None, "metadata": {}}
GOOD = {**FIRST, "schema_version": 2, "terminated": None, "truncated": None}
TENSORS = {
    "steps/observation": torch.zeros(1, 4),
    "steps/action": torch.zeros(1),
    "steps/next/reward": torch.ones(1, 1),
}


@pytest.mark.parametrize(("metadata", "ends"), [({}, (None, None)), ({"terminated": False}, (False, True))])
def test_file_of_the_first_version_is_read_as_before(tmp_path, metadata, ends):
    header = {"demonstration": json.dumps({**FIRST, "metadata": metadata})}
    (tmp_path / "a.safetensors").write_bytes(safetensors.torch.save(TENSORS, header))
    found = read_demonstration(tmp_path / "a.safetensors")
    assert (found.metadata, found.terminated, found.truncated) == (metadata, *ends)
    assert (found.value, found.last_observation) == (-math.inf, None)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "its metadata must contain 'demonstration'"),
        ("[" * 100000, "was refused"),
        ("[]", "must be a dict"),
        ({"schema_version": 3}, "schema version 3, this release reads version 2"),
        ({"frame_skip": 0}, "'frame_skip' is 0"),
        ({"is_human": 1}, "'is_human' is 1"),
        ({"terminated": 1, "truncated": 0}, "'terminated' is 1"),
        ({"truncated": True}, "terminated=None and truncated=True"),
        ({"value": "1"}, "value must be a number or null, got '1'"),
        ({"value": math.nan}, "value must be a finite number"),
        ({"metadata": {"a": [1]}}, r"'metadata'\['a'\] is a list"),
    ],
)
def test_foreign_header_is_refused_by_name(tmp_path, header, message):
    text = json.dumps({**GOOD, **header}) if isinstance(header, dict) else header
    data = safetensors.torch.save(TENSORS, {} if text is None else {"demonstration": text})
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_demonstration(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)


def test_flipped_bit_is_detected(tmp_path):
    path = tmp_path / "a.safetensors"
    write_demonstration(path, episode(5, frame_skip=4, value=1.5, metadata={"score": 0.25}))
    whole, written = path.read_bytes(), read_demonstration(path)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for place in torch.randint(len(whole) * 8, (200,), generator=generator).tolist():
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            found = read_demonstration(path)
        except ValueError:
            refused += 1
        else:
            assert (found.steps == written.steps).all()
            assert (found.frame_skip, found.value, found.metadata) == (4, 1.5, {"score": 0.25})
    assert refused > 150


def test_foreign_tensors_are_refused(tmp_path):
    foreign = dict.fromkeys(("weights", "steps", "steps/action/more", "other/action"), "")
    deep = {"steps" + "/x" * depth: "levels, more than 16" for depth in (500, 800, 3000)}
    for name, says in {**foreign, **deep}.items():
        data = safetensors.torch.save({**TENSORS, name: torch.zeros(1)}, {"demonstration": json.dumps(GOOD)})
        (tmp_path / "bad.safetensors").write_bytes(data)
        with pytest.raises(ValueError, match=rf"bad\.safetensors.*{says}"):
            read_demonstration(tmp_path / "bad.safetensors")


def test_several_observation_entries_need_safetensors(tmp_path):
    steps = TensorDict({"a": torch.zeros(1, 2), "b": torch.zeros(1), "action": torch.zeros(1)}, [1])
    steps["next", "reward"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"an \.npz file can store only one\. Write a \.safetensors file"):
        write_demonstration(tmp_path / "a.npz", Demonstration(steps))
    assert list(tmp_path.iterdir()) == []
