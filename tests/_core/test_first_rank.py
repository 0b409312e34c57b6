from __future__ import annotations

import subprocess
import sys

import pytest

_PARENT = """
import subprocess, sys
from torchrl_lightning._core.first_rank import become_first_rank
become_first_rank()
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), end="", flush=True)
"""
_CHILD = """
import os, sys, threading, time
from torchrl_lightning._core.first_rank import end_with_first_rank
parent = os.getppid()
end_with_first_rank({arguments})
end_with_first_rank({arguments})
watches = [thread for thread in threading.enumerate() if thread.name == "parent-watch"]
if {waits}:
    for watch in watches:
        watch.join()
os.dup2(2, 3)
print(sum(watch.is_alive() for watch in watches), flush=True)
while {lives}:
    time.sleep(0.01)
os.write(3, b"outlived")
"""
_GRANDPARENT = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


@pytest.mark.parametrize(
    ("child", "expected", "message"),
    [
        (
            [_CHILD.format(arguments="", waits=False, lives=True)],
            "1",
            "error: the first rank has ended, and this rank ends as well.\n",
        ),
        ([_CHILD.format(arguments="until=lambda: True", waits=True, lives="os.getppid() == parent")], "0", "outlived"),
        ([_GRANDPARENT, _CHILD.format(arguments="", waits=False, lives=False)], "0", "outlived"),
    ],
    ids=["watched", "connected", "started by another program"],
)
def test_process_ends_with_its_first_rank_while_it_is_watched(child: list[str], expected: str, message: str) -> None:
    # The child keeps stderr open, so that the call returns only after its end.
    done = subprocess.run([sys.executable, "-c", _PARENT, *child], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, expected, message)
