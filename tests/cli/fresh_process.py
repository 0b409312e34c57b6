"""Record the imports and output of a fresh process for ``test_startup``.

One process serves all tests, because imports take seconds. It prints a JSON object and exits with the status of a
command with a wrong setting.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

# TorchRL's configs conflict with files of the same groups. The other modules cost time and memory.
SPARED = ("torchrl.trainers", "torchrl_lightning.configs", "torchrl.collectors", "numba", "tensorboard", "hydra.main")
# A complete run does not import these modules either.
NEVER = (
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "torchmetrics.utilities.plot",
    "pandas",
    "ray",
    "mujoco",
    "minari",
)


def imported_by_all_names() -> list[str]:
    from torchrl_lightning._core.import_stubs import DEFERRED, import_libraries

    import_libraries()
    import torchrl_lightning
    import torchrl_lightning.cli.evaluate
    import torchrl_lightning.cli.train
    from torchrl_lightning.cli.command import silence_libraries  # noqa: F401

    for name in torchrl_lightning.__all__:
        getattr(torchrl_lightning, name)
    return [name for name in (*SPARED, *NEVER, *DEFERRED, "matplotlib") if name in sys.modules]


def imported_by_a_run() -> list[str]:
    from torchrl_lightning.cli.train import main

    sys.argv[1:] = [
        *("experiment=dqn_cartpole", "data.total_frames=32", "data.warmup_frames=16", "data.updates_per_epoch=16"),
        *("data.batch_size=8", "data.eval_episodes=1", "eval_episodes=1", "logger=none", "hydra.run.dir=short"),
    ]
    main()
    return [name for name in (*NEVER, "matplotlib") if name in sys.modules]


def status_of_a_mistake() -> Any:
    from torchrl_lightning.cli.train import main

    sys.argv[1:] = ["data.env=Nope-v0", "hydra.run.dir=run"]
    try:
        return main()
    except SystemExit as end:
        return end.code


def app_beside_torchrls_groups(folder: str) -> Any:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchRL warns about its own deprecated functions
        import torchrl_lightning.configs  # noqa: F401

        with initialize_config_dir(folder, version_base="1.3"):
            return OmegaConf.to_container(compose("config"), resolve=False)


def stubs_that_are_left() -> list[str]:
    """Import the stubbed modules and use torch.compile; return the names of the remaining stubs."""
    import torch
    from lightning.fabric.wrappers import OptimizedModule

    from torchrl_lightning._core.import_stubs import DEFERRED

    for name in (name for name in DEFERRED if find_spec(name) is not None):
        import_module(name)
    compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    assert compiled(torch.ones(2)).shape == (1,)
    assert isinstance(compiled, OptimizedModule)
    return [name for name, module in sys.modules.items() if type(module).__name__ == "StubModule"]


if __name__ == "__main__":
    app = sys.argv[1]
    imported = imported_by_all_names()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        imported += imported_by_a_run()
    status = status_of_a_mistake()
    stubs = stubs_that_are_left()
    json.dump({"imported": imported, "stubs": stubs, "app": app_beside_torchrls_groups(app)}, sys.stdout)
    sys.exit(status)
