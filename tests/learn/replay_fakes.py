"""Batches and a DataModule as a replay buffer would give them, without environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, OneHot, Unbounded

from learn.fakes import FakeData
from torchrl_lightning.learn import DQNModule, SACModule, TD3Module
from torchrl_lightning.learn.transitions import Transitions, read_transitions

OBSERVATION = Composite(observation=Unbounded(4))
DISCRETE = SimpleNamespace(observation=OBSERVATION, action=Categorical(3), num_envs=2)
ONE_HOT = SimpleNamespace(observation=OBSERVATION, action=OneHot(3), num_envs=2)
BOX = SimpleNamespace(
    observation=OBSERVATION, action=Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])), num_envs=2
)
AGENTS: dict[str, Any] = {"dqn": (DQNModule, DISCRETE), "sac": (SACModule, BOX), "td3": (TD3Module, BOX)}


def transitions(specs: Any, *shape: int, generator: torch.Generator | None = None) -> TensorDict:
    """Return random transitions; a fifth ends an episode, half of those by truncation."""

    def flags(share: float) -> torch.Tensor:
        return torch.rand(*shape, 1, generator=generator) < share

    observation = torch.randn(*shape, 2, 4, generator=generator)
    terminated, truncated = flags(0.1), flags(0.1)
    if isinstance(specs.action, Bounded):
        low, high = specs.action.space.low, specs.action.space.high
        action = low + (high - low) * torch.rand(*shape, len(low), generator=generator)
    else:
        action = torch.randint(3, shape, generator=generator)
        if isinstance(specs.action, OneHot):
            action = torch.nn.functional.one_hot(action, 3).bool()
    after = {
        "observation": observation[..., 1, :],
        "reward": torch.randn(*shape, 1, generator=generator),
        "terminated": terminated,
        "truncated": truncated & ~terminated,
        "done": terminated | truncated,
    }
    return TensorDict(
        {"observation": observation[..., 0, :], "action": action, "is_init": flags(0.0), "next": after}, shape
    )


def sequences(specs: Any, module: Any, rows: int, steps: int, generator: torch.Generator | None = None) -> TensorDict:
    """Return sequences `[rows, steps]` with episode ends inside, and stored states for a recurrent module."""
    batch = transitions(specs, rows, steps, generator=generator)
    batch.names = [None, "time"]
    done = batch["next", "done"]
    batch["is_init"][:, 1:] = done[:, :-1]
    observation, after = batch["observation"], batch["next", "observation"]
    # Inside an episode the successor is the step that follows.
    after[:, :-1] = torch.where(done[:, :-1], after[:, :-1], observation[:, 1:])
    network = module.network
    shape = (rows, steps, network.num_layers, network.hidden_size)
    if network.cell == "gru":
        batch["recurrent_state"] = torch.randn(shape, generator=generator)
    else:
        state = {name: torch.randn(shape, generator=generator) for name in "hc"}
        batch["recurrent_state"] = TensorDict(state, [rows, steps])
    return batch


def read(module: Any, batch: TensorDict, gamma: float = 0.9) -> Transitions:
    """Return what a recurrent module reads of a batch."""
    return read_transitions(batch, ["observation"], gamma, module.memory.state_keys)


def shake_targets(module: Any) -> None:
    """Move the target networks away from those that they follow."""
    with torch.no_grad():
        for name, parameter in module.targets.named_parameters():
            if "weight" in name:
                parameter += 0.1 * torch.randn_like(parameter)


class FakeReplay(FakeData):
    """Random batches, the same for the same number of frames; keeps what the module wrote into them."""

    def __init__(
        self, specs: Any, make: Callable[[torch.Generator], TensorDict], batches: int = 3, total_frames: int = 400
    ) -> None:
        super().__init__(total_frames, batches)
        self.specs, self.make = specs, make
        self.served: list[TensorDict] = []
        self.exploration: list[float] = []

    def epoch(self) -> Iterator[TensorDict]:
        generator = torch.Generator().manual_seed(self.frames)
        torch.manual_seed(self.frames)
        for _ in range(self.batches):
            self.exploration.append(float(getattr(self.trainer.lightning_module.policy, "amount", 0.0)))
            self.frames += 10
            yield self.make(generator)

    def on_after_batch_transfer(self, batch: TensorDict, dataloader_idx: int) -> TensorDict:
        if self.trainer.training:
            self.served.append(batch)
        return batch
