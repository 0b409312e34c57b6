from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.fake_ray import FakeRay, fake_ray

# Processes that wait for an actor have imported what it needs.
READY = {"preload_python_modules": [f"torchrl_lightning.ray.{name}" for name in ("_actor", "_service_actor")]}


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A cluster of this machine, which this process has joined: its address.

    Ray ends it at the exit of the process. A call of ``ray.shutdown`` here would come before the report of the last
    test, and it waits for Ray's threads without a limit: if one of them hangs, the test run never ends.
    """
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        options = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 2**27}
        ray.init(address="local", **options, logging_level="error", log_to_driver=False, _system_config=READY)
        yield ray.get_runtime_context().gcs_address


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """A cluster in this process, whose dead shards are asked again immediately."""
    monkeypatch.setattr("torchrl_lightning.ray._service_writer._RETRY_INTERVAL", 0.0)
    monkeypatch.setattr("torchrl_lightning.ray._service_writer._WAIT_CHECK_DELAY", 0.02)
    with fake_ray() as fake:
        yield fake
