from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Looks for doctests in the package alone: helpers and scripts among the tests are no modules to import."""
    inside = TESTS in collection_path.parents and collection_path.suffix == ".py"
    return True if inside and not collection_path.name.startswith("test_") else None
