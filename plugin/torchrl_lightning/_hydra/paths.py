"""Find the Hydra config tree in a checkout or an installed wheel. This module imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

_package_dir = Path(__file__).resolve().parents[1]
# A wheel has conf/ inside the package; a checkout has conf/ and plugin/ in the same folder.
CONF_DIR = next(path for path in (_package_dir / "conf", _package_dir.parents[1] / "conf") if path.is_dir())
EXPORT_DIR = CONF_DIR / "export"
BASE_DIR = CONF_DIR / "torchrl_lightning"  # files that options include; they are not options themselves
