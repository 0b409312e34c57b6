"""Import an actor's libraries first, but without the modules that these libraries rarely use."""

from __future__ import annotations

import sys
from pathlib import Path

from torchrl_lightning._core.import_stubs import COLLECTING, import_libraries

if Path(sys.argv[0]).name == "default_worker.py":  # a process that Ray started, before any other code
    import_libraries(COLLECTING)
