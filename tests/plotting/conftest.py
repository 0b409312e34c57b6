"""Import the fixtures of the command tests, which the tests of plots use."""

from __future__ import annotations

from cli.conftest import figures as figures
from cli.conftest import run as run
from cli.conftest import trained as trained
