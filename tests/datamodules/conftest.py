from __future__ import annotations

import pytest

from kit.demonstrated_runs import shown
from kit.demonstrations import saved


@pytest.fixture
def human(tmp_path):
    """Return a folder with one demonstration."""
    return saved(tmp_path / "human", shown(7))
