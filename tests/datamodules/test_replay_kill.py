from __future__ import annotations

import os

import pytest

from datamodules.kill_run import kill


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_process_killed_while_it_saves_leaves_a_whole_state(tmp_path):
    """Six random moments here; fifty by `python tests/datamodules/kill_run.py FOLDER`."""
    assert kill(tmp_path, 6, seed=0) > 0
