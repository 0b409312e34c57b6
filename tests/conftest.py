from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Each test worker uses its share of the cores, because threads that wait for a core take twice the time. The number
# is set before the import of TorchRL, which stores it and restores it later.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))

# A process keeps the authentication mode of its first Ray cluster. With tokens it rejects a cluster without tokens.
# Therefore all tests and docstring examples use clusters without tokens.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

TESTS = Path(__file__).parent

# Every run draws the same examples and ignores the clock, so that each machine gets the same result.
# `--hypothesis-profile=explore` draws other examples in each run and prints instructions to repeat a failure.
SLOW_MACHINES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **SLOW_MACHINES)
settings.register_profile("explore", derandomize=False, print_blob=True, **SLOW_MACHINES)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs unless ``-m cuda`` selects their tests: a process that has used a GPU cannot fork as other tests do."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests with the mark ``cuda`` if torch finds no GPU."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and -m cuda")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Restrict doctests to the package: pytest must not import the helpers and scripts among the tests."""
    inside = TESTS in collection_path.parents and collection_path.suffix == ".py"
    return True if inside and not collection_path.name.startswith("test_") else None


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Fail a test that changes the number of torch's threads, because later sums would differ in their last bits."""
    before = torch.get_num_threads()
    yield
    behind = torch.get_num_threads()
    torch.set_num_threads(before)
    assert behind == before, f"the test leaves {behind} threads, expected the {before} that it found"


@pytest.fixture(autouse=True)
def same_imports() -> Iterator[None]:
    """Restore the import path, because commands append the working directory, which is the tests' own here."""
    path, finders = sys.path[:], sys.meta_path[:]
    yield
    sys.path[:], sys.meta_path[:] = path, finders


@pytest.fixture
def three_threads(same_threads: None) -> Iterator[None]:
    """Use three threads, as a script does at its start."""
    from torchrl_lightning.environments.workers.threads import preserve_num_threads

    with preserve_num_threads():
        torch.set_num_threads(3)
        yield


@pytest.fixture
def forked() -> Iterator[None]:
    """Fork the processes of collectors and vector environments, because a spawned one imports for seconds."""
    from kit.forks import forked_workers

    with forked_workers():
        yield
