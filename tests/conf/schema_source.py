"""The command of ``tests/wiring.py`` by its former name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wiring import main

if __name__ == "__main__":
    main()
