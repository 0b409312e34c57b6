"""Import the libraries of an actor's process first, without their rarely used imports."""

from __future__ import annotations

import sys
from pathlib import Path

from torchrl_lightning._core.import_stubs import COLLECTING, import_libraries

if Path(sys.argv[0]).name == "default_worker.py":  # Ray's own process, before any other code
    import_libraries(COLLECTING)
