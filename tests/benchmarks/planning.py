"""Compare the number of candidate steps per second of TorchRL's planner and of ours.

    python tests/benchmarks/planning.py

Both planners fit the same Gaussians to the same samples of one world model. "members alone" contains only the batched
matrix products and activations of the same number of rows. It is the minimum for any planner with this ensemble.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import compare, one_thread, say, table, write_json

one_thread()

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torchrl.data import Bounded, Composite, Unbounded  # noqa: E402
from torchrl.modules import CEMPlanner  # noqa: E402

from torchrl_lightning.agents import (  # noqa: E402
    CrossEntropyPlanner,
    GaussianEnsemble,
    RandomShootingPlanner,
    WorldModel,
    WorldModelEnvironment,
)
from torchrl_lightning.dynamics import DynamicsTargets  # noqa: E402

HORIZON, ITERATIONS, MEMBERS = 15, 4, 5
# Title, observations, actions, width, candidates, environments.
CASES = [
    ("Pendulum, 2 x 64 units, 150 candidates", 3, 1, 64, 150, 1),
    ("Pendulum, 2 x 64 units, 150 candidates, 10 environments", 3, 1, 64, 150, 10),
    ("HalfCheetah, 2 x 200 units, 500 candidates", 17, 6, 200, 500, 1),
]


def main(repetitions: int, json: Path | None) -> None:
    """Time every case."""
    torch.set_num_threads(1)
    results = {}
    for title, observations, actions, width, candidates, envs in CASES:
        torch.manual_seed(0)
        targets = DynamicsTargets(
            Composite(observation=Unbounded(observations)), Bounded(-torch.ones(actions), torch.ones(actions))
        )
        ensemble = GaussianEnsemble(MEMBERS, observations + actions, observations + 1, [width, width])
        env = WorldModelEnvironment(WorldModel(ensemble, targets))
        model, step = env.world_model, TensorDict({"observation": torch.randn(envs, observations)}, [envs])
        top = candidates // 10
        torchrl = CEMPlanner(env, HORIZON, ITERATIONS, candidates, top)
        ours = CrossEntropyPlanner(env, horizon=HORIZON, candidates=candidates, elites=top, iterations=ITERATIONS)
        shooting = RandomShootingPlanner(env, horizon=HORIZON, candidates=candidates * ITERATIONS)
        model.prepare()
        rows = torch.randn(MEMBERS, -(-candidates * envs // MEMBERS), observations + actions)

        def members_alone(rows: torch.Tensor = rows, model: WorldModel = model) -> None:
            for _ in range(HORIZON * ITERATIONS):
                model.predict(rows)

        with torch.no_grad():
            timings = compare(
                {
                    "TorchRL's CEMPlanner": lambda torchrl=torchrl, step=step: torchrl(step.clone()),
                    "CrossEntropyPlanner": lambda ours=ours, step=step: ours(step.clone()),
                    "RandomShootingPlanner": lambda shooting=shooting, step=step: shooting(step.clone()),
                    "members alone": members_alone,
                },
                repetitions=repetitions,
                seconds=0.1,
            )
        results[title] = timings
        say(table(title, timings, "CrossEntropyPlanner"))
        steps = envs * candidates * HORIZON * ITERATIONS
        least = next(timing.median for timing in timings if timing.name == "members alone")
        for timing in timings[:3]:
            rate, share = steps / timing.median, least / timing.median
            say(f"  {timing.name:<34}{rate:>8.2f} million candidate steps a second, {share:.0%} of it the members")
    if json is not None:
        write_json(json, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--json", type=Path)
    main(**vars(parser.parse_args()))
