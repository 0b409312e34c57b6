"""The fixtures of the commands, which the tests of pictures run."""

from __future__ import annotations

from cli.conftest import figures as figures
from cli.conftest import run as run
from cli.conftest import trained as trained
