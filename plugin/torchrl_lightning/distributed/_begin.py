"""Imported first in the process of an actor: its libraries, without what they would import and hardly ever use."""

from __future__ import annotations

import sys
from pathlib import Path

from torchrl_lightning.import_stubs import COLLECTING, import_libraries

if Path(sys.argv[0]).name == "default_worker.py":  # Ray's, which nobody else's code has used yet
    import_libraries(COLLECTING)
