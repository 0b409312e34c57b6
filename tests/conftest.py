from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Each of several workers takes its share of the cores: threads that wait for a core work twice as long. Said before
# TorchRL is imported, which notes the number and goes back to it.
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))

# A process keeps the mode of its first cluster of Ray, and with tokens takes nothing from those without: here all are
# without, whichever test or example of a docstring is the first.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

TESTS = Path(__file__).parent

# Every run draws the same examples and ignores the clock, so that each machine gets the same result.
# `--hypothesis-profile=explore` draws other examples in each run and prints how to repeat a failure.
SLOW_MACHINES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **SLOW_MACHINES)
settings.register_profile("explore", derandomize=False, print_blob=True, **SLOW_MACHINES)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs unless ``-m cuda`` asks for their tests: a process that has used one cannot fork, as tests do."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked ``cuda`` where no GPU is seen."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and -m cuda")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Looks for doctests in the package alone: helpers and scripts among the tests are no modules to import."""
    inside = TESTS in collection_path.parents and collection_path.suffix == ".py"
    return True if inside and not collection_path.name.startswith("test_") else None


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Fails a test that leaves another number of torch's threads: sums of others would differ in their last bits."""
    before = torch.get_num_threads()
    yield
    behind = torch.get_num_threads()
    torch.set_num_threads(before)
    assert behind == before, f"the test leaves {behind} threads, expected the {before} that it found"


@pytest.fixture(autouse=True)
def same_imports() -> Iterator[None]:
    """Restores the import path: commands put the working directory last, which here is that of the tests."""
    path, finders = sys.path[:], sys.meta_path[:]
    yield
    sys.path[:], sys.meta_path[:] = path, finders


@pytest.fixture
def three_threads(same_threads: None) -> Iterator[None]:
    """Takes three threads, as a script does at its beginning."""
    from torchrl_lightning.environments.workers.threads import preserve_num_threads

    with preserve_num_threads():
        torch.set_num_threads(3)
        yield


@pytest.fixture
def forked() -> Iterator[None]:
    """Forks the processes of collectors and vector environments: a spawned one imports for seconds."""
    from kit.forks import forked_workers

    with forked_workers():
        yield
