"""Train the experiments with Stable-Baselines3 at the same settings, and store their runs.

    python tests/benchmarks/zoo.py run NAME [--seeds 0 1 2 3 4]

``run`` trains ``experiment=NAME`` with Stable-Baselines3 for the same number of frames. The last model of each seed
plays the 100 unseen episodes that ``torchrl-lightning-evaluate`` plays. They begin in the same states, unless the
environment draws random numbers within an episode. The settings are ours, not those of Stable-Baselines3's zoo.

The runs are in ``examples/results/stable_baselines3/NAME``, in the format of ``run_logs.py``, without a curve.
``results.py table`` compares them with ours. The settings come from the experiment. A setting without a counterpart in
Stable-Baselines3 raises an error, unless ``LEFT_OUT`` of ``results.py`` has it. All runs use one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import one_thread

if __name__ == "__main__":
    one_thread(pin=False)

import numpy as np
import torch
import yaml
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from benchmarks import run_logs
from benchmarks.results import SEEDS, asked
from benchmarks.run_logs import EPISODES, PROJECT, ResultsError, RunLog, Score, log_path
from torchrl_lightning.cli.config.instantiate import build_part

Predict = Callable[[Any], np.ndarray[Any, Any]]
"""Maps observations of several environments, an array or a dict of arrays, to actions."""


class PeerPolicy(TensorDictModuleBase):
    """The policy of another library for our evaluation."""

    def __init__(self, predict: Predict, keys: list[str]) -> None:
        super().__init__()
        self.predict, self.in_keys, self.out_keys = predict, keys, ["action"]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the actions for all environments."""
        values = {key: tensordict[key].numpy() for key in self.in_keys}
        actions = self.predict(values["observation"] if len(values) == 1 else values)
        return tensordict.set("action", torch.as_tensor(actions))


def play(config: Any, predict: Predict, episodes: int = EPISODES) -> TensorDict:
    """Play the episodes of ``torchrl-lightning-evaluate`` with the policy of another library.

    ``predict`` receives the observations of the environments: it normalises them itself.
    """
    seed = yaml.safe_load((PROJECT / "conf" / "evaluate.yaml").read_text())["seed"]
    data = build_part(config, "data", seed=seed, normalize_observation=False)
    data.setup("validate")
    try:
        policy = PeerPolicy(predict, [*map(str, data.specs.observation.keys())])
        return data.evaluate(policy, episodes, deterministic=True)
    finally:
        data.close()


def record(path: Path, commit: str, twin: Any) -> RunLog:
    """Train the run of a log with Stable-Baselines3, and play the episodes of our evaluation."""
    name, seed = path.parent.name, int(path.stem.removeprefix("seed_"))
    versions = run_logs.versions(twin.config, "stable_baselines3")
    origin = (run_logs.config_digest(name), commit, versions, run_logs.processor(), torch.get_num_threads())
    predict, frames, minutes = twin.train(seed)
    episodes = play(twin.config, predict)
    returns = episodes["episode_return"].double()
    return RunLog(
        run_logs.command_of(path),
        *origin,
        seed,
        frames,
        minutes,
        Score(float(returns.mean()), float(returns.std(correction=0))),
        None,
        float(episodes["success"].double().mean()) if "success" in episodes else None,
        (),
    )


def main() -> None:
    """Run the twin of an experiment with each seed."""
    arguments = asked(__doc__, SEEDS, has_table=False)
    run_logs.composed(arguments.name)  # raises if the experiment does not exist
    from benchmarks.twin import Twin

    twin = Twin(arguments.name)
    for seed in arguments.seeds:
        path = log_path(arguments.name, seed, peer=True)
        record(path, run_logs.code_commit(), twin).write(path)


if __name__ == "__main__":
    try:
        main()
    except ResultsError as error:
        sys.exit(f"error: {error}")
