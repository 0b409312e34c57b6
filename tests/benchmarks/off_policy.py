"""Compare one update of DQN, SAC and TD3 with TorchRL's losses. Both sides use a fused Adam.

    python tests/benchmarks/off_policy.py [--json timings.json]

``lightning_share.py`` measures Lightning's share of an update.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Contender, Timing, compare, one_thread, say, table, write_json

if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")

import torch
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.objectives import DQNLoss, SACLoss, SoftUpdate, TD3Loss, ValueEstimators

from kit.transitions import transitions
from torchrl_lightning.agents import DQNModule, MLPNetwork, OffPolicyModule, SACModule, TD3Module
from torchrl_lightning.agents.networks.q_networks import build_action_critic
from torchrl_lightning.agents.transitions import read_transitions

OBSERVATION = Composite(observation=Unbounded(4))
DISCRETE = SimpleNamespace(observation=OBSERVATION, action=Categorical(3))
BOX = SimpleNamespace(observation=OBSERVATION, action=Bounded(-torch.ones(2), torch.ones(2)))
BATCH, WIDTH, GRAD_NORM = 128, 64, 10.0


def direct_update(module: OffPolicyModule, batch: Any) -> Contender:
    """Return an update of the module without Lightning."""
    (optimizer,), (optimized,) = module.configure_optimizers(), module._groups.values()

    def update() -> None:
        optimized.clear()
        terms, _ = module.compute(read_transitions(batch, ["observation"], module.gamma))
        sum(value for name, value in terms.items() if name.startswith("loss_")).backward()
        optimized.gather()
        optimized.clip(GRAD_NORM)
        optimizer.step()
        module.targets.soft_update(module.tau)

    return update


def torchrls_loss(module: OffPolicyModule, specs: Any) -> Any:
    """Return TorchRL's loss with networks of the same sizes."""
    if isinstance(module, DQNModule):
        loss: Any = DQNLoss(module.q_network, delay_value=True, double_dqn=True, action_space="categorical")
    else:
        critics = [build_action_critic(specs, module.network) for _ in range(2)]
        more = {} if isinstance(module, SACModule) else {"action_spec": specs.action}
        loss = (SACLoss if isinstance(module, SACModule) else TD3Loss)(module.actor_network, critics, **more)
    loss.make_value_estimator(ValueEstimators.TD0, gamma=module.gamma)
    return loss


def torchrl_update(module: OffPolicyModule, specs: Any, batch: Any) -> Contender:
    """Return the same update with TorchRL's forward pass, its target updater and a fused Adam."""
    loss = torchrls_loss(module, specs)
    parameters = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    optimizer, updater = torch.optim.Adam(parameters, lr=1e-4, fused=True), SoftUpdate(loss, tau=0.005)

    def update() -> None:
        optimizer.zero_grad()
        out = loss(batch)
        sum(value for name, value in out.items() if name.startswith("loss")).backward()
        nn.utils.clip_grad_norm_(parameters, GRAD_NORM)
        optimizer.step()
        updater.step()

    return update


def updates() -> dict[str, list[Timing]]:
    """Time whole updates: forward, backward, clipping, Adam and target networks."""
    results = {}
    for cls, specs in ((DQNModule, DISCRETE), (SACModule, BOX), (TD3Module, BOX)):
        batch = transitions(specs, BATCH)
        modules = [cls(MLPNetwork([WIDTH, WIDTH], "relu")).build(specs) for _ in range(2)]
        title = f"{cls.__name__}, one update, batch {BATCH}, {WIDTH} x {WIDTH}"
        results[title] = compare(
            {"ours": direct_update(modules[0], batch), "TorchRL": torchrl_update(modules[1], specs, batch)},
            repetitions=9,
        )
    return results


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = updates()
    for title, timings in results.items():
        say(table(title, timings, "ours") + "\n")
    if arguments.json:
        write_json(arguments.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
