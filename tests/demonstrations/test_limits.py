"""A data set is compared with its limit and the free memory by the sizes that it declares, before it is unpacked."""

from __future__ import annotations

import io
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from kit.demonstrations import CARTPOLE
from torchrl_lightning import read_dataset, read_demonstration, write_demonstration
from torchrl_lightning.demonstrations import Demonstration, DemonstrationDirectory

GB = 1 << 30


def demonstration(length: int = 3) -> Demonstration:
    steps = TensorDict(
        {"observation": torch.zeros(length, 4), "action": torch.zeros(length, dtype=torch.int64)}, [length]
    )
    steps["next", "reward"] = torch.ones(length, 1)
    return Demonstration(steps)


def check_refused(action: Callable[[], Any], message: str) -> None:
    """Expect one line, within little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message) as raised:
        action()
    assert "\n" not in str(raised.value)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 150


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def bomb(path: Path, size: int, declared: int | None = None) -> Path:
    """Write an archive whose observation is ``size`` zeros, which takes a thousandth of them."""
    whole = {name: np.zeros((3, 1), np.float32) for name in ("Action", "Reward")} | {"FrameSkip": np.array(1)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in whole.items():
            file = io.BytesIO()
            np.save(file, value)
            archive.writestr(f"{name}.npy", file.getvalue())
        with archive.open("Observation.npy", "w", force_zip64=True) as entry:
            entry.write(header((size // 4 if declared is None else declared,)))
            for _ in range(size >> 20):
                entry.write(bytes(1 << 20))
    return path


def test_archive_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = bomb(tmp_path / "a.npz", 300 << 20)
    assert path.stat().st_size < 1 << 20
    check_refused(lambda: read_demonstration(path, limit=1 << 28), "more than the limit of 268435456")
    check_refused(lambda: read_dataset(path, "CartPole-v1", limit=1 << 28), "more than the limit of 268435456")
    declared = bomb(tmp_path / "b.npz", 1 << 20, declared=10**12)
    check_refused(lambda: read_demonstration(declared), "declares shape")


def test_archive_that_unpacks_to_more_than_is_free_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = bomb(tmp_path / "a.npz", 100 << 20)
    monkeypatch.setattr("torchrl_lightning._core.memory.free_bytes", lambda *_: 50 << 20)
    check_refused(lambda: read_demonstration(path), "only 50 MiB are free")


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<u2", "<f8", "|u1", "<i2"])
def test_array_of_several_pieces_is_read_as_numpy_reads_it(dtype: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("torchrl_lightning.demonstrations.io.npz.UNPACKED_AT_ONCE", 64)
    values = np.random.default_rng(0).integers(0, 200, (50, 4)).astype(dtype)
    arrays = {"Action": np.zeros((50, 1), np.int64), "Reward": np.ones((50, 1), np.float32), "FrameSkip": np.array(1)}
    np.savez_compressed(tmp_path / "a.npz", Observation=np.asfortranarray(values), **arrays)
    found = read_demonstration(tmp_path / "a.npz").steps["observation"]
    assert np.array_equal(found.numpy(), values.astype(values.dtype.newbyteorder("=")))


def test_limit_of_a_directory_is_that_of_all_its_files(tmp_path: Path, caplog: Any) -> None:
    for number in range(6):
        write_demonstration(tmp_path / f"{number}.npz", demonstration(1000))
    size = 1000 * (4 * 4 + 8 + 4)
    assert len(DemonstrationDirectory(tmp_path, CARTPOLE).initial) == 6
    assert not caplog.messages
    found = DemonstrationDirectory(tmp_path, CARTPOLE, limit=4 * size)
    assert len(found.initial) == 3  # headers and frame skips count as well
    assert len(caplog.messages) == 3
    assert all("limit" in message for message in caplog.messages)
    assert len(read_dataset(tmp_path, "CartPole-v1")) == 6
    assert len(read_dataset(tmp_path, "CartPole-v1", limit=4 * size)) == 3


# -- HDF5 ------------------------------------------------------------------------------------------------------------
def d4rl(path: Path, rows: int, **options: Any) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.create_dataset("observations", (rows, 4), "f4", **options)
        file.create_dataset("actions", (rows,), "i8", **options)
        for name in ("rewards", "terminals", "timeouts"):
            file.create_dataset(name, (rows,), "f4", **options)
    return path


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": True}])
def test_file_that_declares_more_than_it_holds_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    path = d4rl(tmp_path / "a.hdf5", 10**11, **options)
    assert path.stat().st_size < 1 << 20
    check_refused(lambda: read_dataset(path, "CartPole-v1"), "more than the limit of 1073741824")


def test_large_chunk_of_a_small_array_counts(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = d4rl(tmp_path / "a.hdf5", 3)
    with h5py.File(path, "a") as file:
        del file["rewards"]
        file.create_dataset("rewards", (3,), "f4", maxshape=(None,), chunks=(500_000_000,), compression="gzip")
    check_refused(lambda: read_dataset(path, "CartPole-v1"), "more than the limit of 1073741824")


@pytest.fixture
def minari_file(tmp_path: Path, monkeypatch: Any) -> Path:
    """A small data set of Minari."""
    pytest.importorskip("minari")
    from kit.minari_sets import write_cart_poles

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    write_cart_poles()
    return next(tmp_path.rglob("main_data.hdf5"))


@pytest.mark.parametrize("name", ["observations", "rewards", "infos/more"])
@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "chunks": (1000,)}])
def test_episode_that_declares_more_than_the_limit_is_refused(
    name: str, options: dict[str, Any], minari_file: Path
) -> None:
    h5py = pytest.importorskip("h5py")
    assert len(read_dataset("minari:cartpole/small-v0", "CartPole-v1")) == 2
    with h5py.File(minari_file, "a") as file:
        episode = file["episode_1"]
        if name in episode:
            del episode[name]
        episode.create_dataset(name, (10**10,), "f4", **options)
    check_refused(lambda: read_dataset("minari:cartpole/small-v0", "CartPole-v1"), "more than the limit of 4294967296")


def test_minari_data_set_is_read_within_its_limit(minari_file: Path) -> None:
    assert len(read_dataset("minari:cartpole/small-v0", "CartPole-v1", limit=1000)) == 2
    check_refused(
        lambda: read_dataset("minari:cartpole/small-v0", "CartPole-v1", limit=100), "more than the limit of 100"
    )
