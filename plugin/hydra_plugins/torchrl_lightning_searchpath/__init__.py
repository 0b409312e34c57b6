"""Let every Hydra application compose ``data=gae`` and the other DataModules over documented buffers.

Hydra imports this module in every application of the environment, so it must stay light: no torch, no TorchRL.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from torchrl_lightning._hydra.compat import config_dir
from torchrl_lightning._hydra.paths import EXPORT_DIR
from torchrl_lightning._hydra.schemas import register_schemas

PROVIDER = "torchrl-lightning"


class TorchrlLightningSearchPath(SearchPathPlugin):
    """Append ``conf/export`` to the search path, so that the user's own ``data`` group always wins over ours."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the exported configs and store the schemas that they are checked against."""
        register_schemas()
        search_path.append(provider=PROVIDER, path=f"file://{EXPORT_DIR}")
        if (folder := config_dir.get()) is not None:
            search_path.append(provider="command-line", path=f"file://{folder}")
