"""Off-policy experience: updates drawn from a replay buffer, new frames in a fixed ratio to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs import MultiStepTransform

from torchrl_lightning.datamodules.base import ExperienceDataModule
from torchrl_lightning.datamodules.episodes import EpisodeTracker
from torchrl_lightning.datamodules.snapshots import BufferSnapshots
from torchrl_lightning.replay import ExperienceBuffer

logger = logging.getLogger(__name__)

CHECKPOINTS = ("inside", "beside", "none")


class ReplayDataModule(ExperienceDataModule):
    """Serves ``updates_per_epoch`` batches a Lightning epoch from a replay buffer that grows in step with them.

    Before update ``u`` (counted from 0 over the whole run) the environments have been stepped for at least
    ``warmup_frames + u * frames_per_update`` frames; the ratio is kept through a resume, because both counters travel
    in the checkpoint. After each update the priorities that the loss wrote into the batch are taken back.

    Args:
        env: see :class:`ExperienceDataModule`, as all arguments that are not named here.
        buffer: a callable that takes ``num_envs`` and ``generator`` and gives the replay buffer.
        batch_size: samples (or sequences) in a batch.
        updates_per_epoch: batches of one epoch.
        frames_per_update: new frames for each update, over all environments of this rank; may be below 1.
        warmup_frames: frames collected with random actions before the first update.
        n_steps: length of the returns that TorchRL's ``MultiStepTransform`` folds each transition into.
        gamma: their discount.
        write_back: keys that the module may rewrite in a batch, e.g. recurrent states, and that then replace what is
            stored.
        checkpoint_buffer: ``"inside"`` the checkpoint; ``"beside"`` it, in ``buffer_dir``, written once for each state;
            or ``"none"``: a resumed run then fills its buffer anew, with a warning.
        buffer_dir: where ``"beside"`` writes; ``buffer`` below the trainer's root folder if None.

    Raises:
        ValueError: if a number is out of range or ``checkpoint_buffer`` is unknown.
    """

    def __init__(
        self,
        env: Any,
        *,
        buffer: Callable[..., ExperienceBuffer],
        batch_size: int = 256,
        updates_per_epoch: int = 1000,
        frames_per_update: float = 1.0,
        warmup_frames: int = 1000,
        n_steps: int = 1,
        gamma: float = 0.99,
        write_back: Sequence[NestedKey] = (),
        checkpoint_buffer: str = "inside",
        buffer_dir: str | Path | None = None,
        frames_per_batch: int | None = None,
        num_envs: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            env, num_envs=num_envs, frames_per_batch=num_envs if frames_per_batch is None else frames_per_batch, **kwargs
        )
        for name, value in (("batch_size", batch_size), ("updates_per_epoch", updates_per_epoch), ("n_steps", n_steps)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if frames_per_update <= 0:
            raise ValueError(f"frames_per_update is {frames_per_update}; it must be above 0.")
        if warmup_frames < 0:
            raise ValueError(f"warmup_frames is {warmup_frames}; it must not be negative.")
        if checkpoint_buffer not in CHECKPOINTS:
            raise ValueError(f"checkpoint_buffer is {checkpoint_buffer!r}; expected one of {', '.join(CHECKPOINTS)}.")
        self.batch_size = batch_size
        self.updates_per_epoch = updates_per_epoch
        self.frames_per_update = frames_per_update
        self.warmup_frames = warmup_frames
        self.n_steps, self.gamma = n_steps, gamma
        self.write_back = list(write_back)
        self.checkpoint_buffer = checkpoint_buffer
        self.buffer_dir = buffer_dir
        self.updates = 0
        self.buffer: ExperienceBuffer | None = None
        self._make_buffer = buffer
        self._served: TensorDictBase | None = None
        self._tracker = EpisodeTracker(self.num_envs)
        self._metrics: dict[str, float] = {}
        self._returns: list[float] = []

    @property
    def batches_per_epoch(self) -> int:
        """``updates_per_epoch``, the same on every rank."""
        return self.updates_per_epoch

    def metrics(self) -> dict[str, float]:
        """Figures of the last epoch.

        ``train/return`` and ``train/length`` are means over the episodes that ended in it and absent if none did;
        ``time/collect`` and ``time/sample`` are seconds; ``replay/size`` is what the buffer holds.
        """
        size = {} if self.buffer is None else {"replay/size": float(len(self.buffer))}
        return {**super().metrics(), "updates": float(self.updates), **size, **self._metrics}

    def setup(self, stage: str) -> None:
        """Builds environment and buffer, once."""
        super().setup(stage)
        if stage == "fit" and self.buffer is None:
            self.buffer = self._build_buffer()
        if stage == "fit" and not len(self._require_buffer()):
            self._require_buffer().generator.manual_seed(self._rank_seed)

    def _build_buffer(self) -> ExperienceBuffer:
        buffer = self._make_buffer(num_envs=self.num_envs)
        if self.n_steps > 1:
            buffer.append_transform(MultiStepTransform(n_steps=self.n_steps, gamma=self.gamma))
        return buffer

    # ------------------------------------------------------------------ the stream

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keeps the batch that the module learns from: its loss writes the new priorities into it."""
        trainer = self.trainer
        if trainer is not None and trainer.training:
            self._served = batch
        return batch

    def _epoch(self) -> Iterator[TensorDictBase]:
        module, buffer = self._module(), self._require_buffer()
        # A buffer whose documented `sample` gives something else says here how to sample TensorDicts.
        sample = getattr(buffer, "sample_tensordict", buffer.sample)
        self._metrics, collected, sampled = {}, 0.0, 0.0
        finished: list[tuple[float, float]] = []
        for left in range(self.updates_per_epoch, 0, -1):
            # The batch before, also when it was the last of the epoch before: nothing runs behind the last yield.
            self._take_back()
            began = time.perf_counter()
            if not self._collect_frames(module, buffer, finished):
                return
            collected += time.perf_counter() - began
            began = time.perf_counter()
            batch = sample(self.batch_size)
            sampled += time.perf_counter() - began
            self.updates += 1
            if left == 1:
                self._measure(finished, collected, sampled)
                self._stop_at_total_frames()
            yield batch

    def _collect_frames(self, module: Any, buffer: ExperienceBuffer, finished: list[tuple[float, float]]) -> bool:
        """Steps the environments until the next update may be made; False when the collector has ended."""
        wanted = self.warmup_frames + self.updates * self.frames_per_update
        while self.frames / self.world_size < wanted or len(buffer) == 0:
            rollout = self._collect(module.policy)
            if rollout is None:
                return False
            if rollout.ndim == 1:
                rollout = rollout.unsqueeze(0)
                rollout.names = [None, "time"]
            reward, done = rollout["next", "reward"], rollout["next", "done"]
            returns, lengths = self._tracker.update(
                reward.flatten(2).sum(-1).transpose(0, 1), done.flatten(2).any(-1).transpose(0, 1)
            )
            finished.extend(zip(returns.tolist(), lengths.tolist(), strict=True))
            # What repeats the step before or only serves bookkeeping is not worth its memory.
            buffer.extend(rollout.exclude("collector", "done", "terminated", "truncated"))
        return True

    def _take_back(self) -> None:
        """Hands priorities and rewritten entries of the last served batch to the buffer, once."""
        batch, self._served = self._served, None
        buffer = self.buffer
        if batch is None or buffer is None:
            return
        buffer.update_tensordict_priority(batch)
        if self.write_back:
            buffer.write_back(batch, self.write_back)

    def _measure(self, finished: list[tuple[float, float]], collected: float, sampled: float) -> None:
        self._metrics = {"time/collect": collected, "time/sample": sampled}
        if finished:
            returns, lengths = zip(*finished, strict=True)
            self._metrics["train/return"] = sum(returns) / len(returns)
            self._metrics["train/length"] = sum(lengths) / len(lengths)
            self._metrics["train/episodes"] = float(len(returns))

    def _require_buffer(self) -> ExperienceBuffer:
        if self.buffer is None:
            raise RuntimeError("the buffer is built in setup('fit'); iterate the loader through Trainer.fit.")
        return self.buffer

    def _collector_options(self) -> dict[str, Any]:
        return {**super()._collector_options(), "init_random_frames": self.warmup_frames}

    # ------------------------------------------------------------------ state

    def fingerprint(self) -> dict[str, Any]:
        """Adds the kind of buffer."""
        if self.buffer is None:
            self.buffer = self._build_buffer()
        buffer = self.buffer
        return {
            **super().fingerprint(),
            "buffer": type(buffer).__name__,
            "capacity": int(buffer.storage.max_size),
            "n_steps": self.n_steps,
        }

    def _rank_state(self) -> dict[str, Any]:
        self._take_back()
        state = {**super()._rank_state(), "updates": self.updates, "episodes": self._tracker.state_dict()}
        if self.buffer is not None and self.checkpoint_buffer == "inside":
            state["buffer"] = self.buffer.state_dict()
        elif self.buffer is not None and self.checkpoint_buffer == "beside":
            state["snapshot"] = self._snapshots.save(self.buffer, self.updates)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores counters, generators and, if it was kept, the buffer; the collector follows at the first update."""
        super().load_state_dict(state)
        own = self._restored
        if own is None or self.buffer is None:
            return
        self.updates = int(own["updates"])
        if self.reset_at_each_batch:
            self._tracker.load_state_dict(own["episodes"])
        if "buffer" in own:
            self.buffer.load_state_dict(own.pop("buffer"))
        elif "snapshot" in own:
            self._snapshots.load(self.buffer, own["snapshot"])
        else:
            logger.warning(
                "the checkpoint holds no replay buffer (checkpoint_buffer='none'): updates go on from what is collected "
                "from now on. Resume with checkpoint_buffer='inside' or 'beside' to keep it."
            )

    @property
    def _snapshots(self) -> BufferSnapshots:
        trainer = self.trainer
        root = Path(self.buffer_dir or Path(trainer.default_root_dir if trainer is not None else ".") / "buffer")
        return BufferSnapshots(root / f"rank_{trainer.global_rank if trainer is not None else 0}")
