"""DataModules without environments: batches that are known in advance, a frame counter, finished episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from tensordict import TensorDict

from kit.seeds import generator
from kit.specs import TWO_CHOICES
from kit.transitions import sequences, transitions


class Loader:
    """A sized and re-iterable loader, like the loaders of our DataModules."""

    def __init__(self, length: int, make: Any) -> None:
        self.length, self.make = length, make

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TensorDict]:
        return self.make()


def exploration(module: Any) -> float:
    return float(getattr(module.policy, "amount", 0.0))


class FakeData(L.LightningDataModule):
    """Acts on random observations with random advantages. An epoch has 100 frames.

    Args:
        batches: The number of batches in an epoch.
        specs: The specs of the environments.
        total_frames: The end of the run.
        edit: Changes a batch before it is served.
        note: Returns a value of the module that is stored before each batch.

    Attributes:
        served: The batches, with the module's changes.
        noted: The values that ``note`` returned.
    """

    def __init__(
        self,
        batches: int = 3,
        *,
        specs: Any = TWO_CHOICES,
        total_frames: int = 400,
        edit: Callable[[TensorDict], Any] = lambda batch: None,
        note: Callable[[Any], Any] = exploration,
    ) -> None:
        super().__init__()
        self.batches, self.specs, self.total_frames, self.frames = batches, specs, total_frames, 0
        self.edit, self.note = edit, note
        self.served: list[TensorDict] = []
        self.noted: list[Any] = []

    def train_dataloader(self) -> Loader:
        return Loader(self.batches, self.epoch)

    def val_dataloader(self) -> Loader:
        episodes = {
            "episode_return": torch.tensor([1.0, 3.0]),
            "episode_length": torch.tensor([10, 20]),
            "success": torch.tensor([False, True]),
        }
        return Loader(1, lambda: iter([TensorDict(episodes, [2])]))

    def epoch(self) -> Iterator[TensorDict]:
        module = self.trainer.lightning_module
        torch.manual_seed(self.frames)
        for batch in self.make(module, generator(self.frames)):
            self.noted.append(self.note(module))
            self.edit(batch)
            yield batch

    def make(self, module: Any, rng: torch.Generator) -> Iterator[TensorDict]:
        """Yield the batches of an epoch, and count their frames."""
        self.frames += 100
        shape = (self.batches, 16)
        observation = torch.randn(*shape, 2, 4, generator=rng)
        rollout = TensorDict(
            {"observation": observation[..., 0, :], "next": {"observation": observation[..., 1, :]}}, shape
        )
        with torch.no_grad():
            module.policy(rollout)
            module.critic(rollout)
        module.annotate(rollout)
        for name in ("advantage", "value_target", "intrinsic_advantage", "intrinsic_value_target"):
            rollout[name] = torch.randn(*shape, 1, generator=rng)
        rollout["value_target"] += rollout["state_value"]
        yield from rollout.unbind(0)

    def on_after_batch_transfer(self, batch: TensorDict, dataloader_idx: int) -> TensorDict:
        if self.trainer.training:
            self.served.append(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"frames": self.frames}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frames = state["frames"]


class FakeReplay(FakeData):
    """Random transitions, or sequences if the module is recurrent. A batch has 10 frames."""

    def make(self, module: Any, rng: torch.Generator) -> Iterator[TensorDict]:
        for _ in range(self.batches):
            self.frames += 10
            yield self.batch(module, rng)

    def batch(self, module: Any, rng: torch.Generator) -> TensorDict:
        if getattr(module, "memory", None) is None:
            return transitions(self.specs, 16, generator=rng)
        return sequences(self.specs, module, 6, 5, rng)
