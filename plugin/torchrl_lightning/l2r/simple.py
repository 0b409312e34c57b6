"""Simple replay buffer with l2r-lab's interface: store single steps, sample random batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from omegaconf import MISSING
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from torchrl_lightning._core.tree import check_tensordict
from torchrl_lightning._core.validators import integer, optional
from torchrl_lightning.l2r.schema import Configurable
from torchrl_lightning.l2r.step_fields import COLUMNS, step_to_row, to_l2r_batch
from torchrl_lightning.replay.builders import check_single_steps
from torchrl_lightning.replay.replay_buffer import ExperienceBuffer
from torchrl_lightning.replay.ring_storage import RingStorage
from torchrl_lightning.replay.uniform import UniformSampler


@dataclass
class SimpleReplayBufferSchema:
    """Documented parameters of :class:`SimpleReplayBuffer`."""

    obs_dim: int = MISSING
    act_dim: int = MISSING
    size: int = MISSING
    batch_size: int = MISSING


class SimpleReplayBuffer(Configurable, ExperienceBuffer):
    """FIFO replay buffer as in l2r-lab; the steps of a batch are distinct.

    Steps are stored under this package's keys, so ``extend``, ``sample`` and all other TorchRL methods work together
    with ``store`` and ``sample_batch``.

    Args:
        obs_dim: length of an observation; ``None`` takes it from the first step.
        act_dim: length of an action; ``None`` takes it from the first step.
        size: capacity in steps; new steps replace the oldest.
        batch_size: steps in a batch.
        device: device of the steps and batches.
        scratch_dir: folder for memory-mapped steps; ``None`` keeps them in memory.
        sampler: any sampler; ``None`` means a :class:`UniformSampler` without replacement.
        writer: this and the following arguments are described in :class:`ExperienceBuffer`.

    Raises:
        ValueError: a number is not a positive integer.

    Source:
        https://github.com/learn-to-race/l2r-lab

    Examples:
        >>> from types import SimpleNamespace
        >>> buffer = SimpleReplayBuffer(obs_dim=2, act_dim=1, size=100, batch_size=1)
        >>> act = SimpleNamespace(action=[0.5])
        >>> buffer.store({"obs": [0.0, 0.0], "next_obs": [1.0, 1.0], "act": act, "rew": 1.0, "done": False})
        >>> batch = buffer.sample_batch()
        >>> batch["obs2"], batch["done"]
        (tensor([[1., 1.]]), tensor([0.]))
    """

    RUNTIME_ARGUMENTS: ClassVar[tuple[str, ...]] = ("generator", "num_envs", "shared")

    schema: ClassVar[type] = SimpleReplayBufferSchema

    def __init__(
        self,
        obs_dim: int | None = None,
        act_dim: int | None = None,
        size: int = 100_000,
        batch_size: int = 256,
        *,
        device: torch.device | str = "cpu",
        scratch_dir: str | Path | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        num_envs: int | None = None,
        generator: torch.Generator | None = None,
        priority_key: NestedKey = "td_error",
        transform: Transform | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        shared: bool = False,
        time_dim: int | None = None,
    ) -> None:
        for name, number in (("obs_dim", obs_dim), ("act_dim", act_dim)):
            optional(integer)(number, name)
        integer(size, "size")
        integer(batch_size, "batch_size")
        super().__init__(
            storage=RingStorage(size, device=device, scratch_dir=scratch_dir),
            writer=writer,
            sampler=UniformSampler(with_replacement=False) if sampler is None else sampler,
            num_envs=num_envs,
            generator=generator,
            batch_size=batch_size,
            priority_key=priority_key,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
            shared=shared,
            time_dim=time_dim,
        )
        self.obs_dim, self.act_dim, self.max_size = obs_dim, act_dim, size
        self.weights: Tensor | None = None

    def incompatibility(self, specs: Any, learner: Any) -> str | None:
        """Return an error text if ``obs_dim`` or ``act_dim`` differs from the environment's size, or None."""
        observation, action = dict(specs.observation.items(True, True)).get("observation"), specs.action
        for name, declared, spec in (("obs_dim", self.obs_dim, observation), ("act_dim", self.act_dim, action)):
            width = None if spec is None else spec.shape.numel()
            if declared is not None and width not in (None, declared):
                return f"{name} must be {width}, the size in the environment, got {declared}. Correct it, or pass None."
        return None

    @property
    def size(self) -> int:
        """Number of stored steps."""
        return len(self)

    @property
    def ptr(self) -> int:
        """Index of the cell for the next step."""
        return int(self.writer.positions[0]) % self.writer.length * self.writer.num_envs

    def store(self, buffer_dict: Mapping[str, Any] | SimpleReplayBuffer) -> None:
        """Store one step, or all steps of another buffer, oldest first.

        Args:
            buffer_dict: a buffer, or one step with ``obs``, ``next_obs``, ``act`` (an object with ``action``, or the
                action itself), ``rew``, ``done`` (``next_obs`` is terminal), and optionally ``truncated`` (the episode
                was cut after the step).

        Raises:
            KeyError: an entry is missing.
            TypeError: ``buffer_dict`` is not a mapping, or an entry does not hold numbers.
            ValueError: a size differs from the declared size, or a number is not finite; nothing is stored.
        """
        if isinstance(buffer_dict, SimpleReplayBuffer):
            writer = buffer_dict.writer
            steps = torch.arange(int(writer.oldest.min()), int(writer.positions.max()))
            if not len(buffer_dict):
                return
            cells = writer.cell(torch.arange(writer.num_envs), steps[:, None]).flatten()
            self.extend(buffer_dict.storage.get(cells[writer.rings.is_filled(cells)]))
            return
        required = ("obs", "next_obs", "act", "rew", "done")
        self.extend(step_to_row(buffer_dict, required, (), self.obs_dim, self.act_dim, self.storage.device))

    def extend(self, data: TensorDictBase, *args: Any, **kwargs: Any) -> Tensor:
        """Write a TensorDict with this package's keys; see :meth:`ExperienceBuffer.extend`.

        Raises:
            TypeError: ``data`` is not a TensorDict.
            ValueError: the size of an observation or action differs from the declared size.
        """
        check_tensordict(data)
        dims: dict[str, int | None] = {"obs_dim": self.obs_dim, "act_dim": self.act_dim}
        for (name, expected), key in zip(dims.items(), ("observation", "action"), strict=True):
            entry = data.get(key, None)
            if isinstance(entry, Tensor):
                dims[name] = width = int(entry.shape[data.ndim :].numel())
                if expected not in (None, width):
                    raise ValueError(f"{key!r} must have {name}={expected} numbers, got {width}; nothing was written.")
        index: Tensor = super().extend(data, *args, **kwargs)
        self.obs_dim, self.act_dim = dims.values()
        return index

    def finish_path(self, action_obj: Any = None) -> None:
        """Do nothing; the method exists because a runner may call it on every buffer.

        Args:
            action_obj: not used.
        """

    def sample_batch(self) -> dict[str, Tensor]:
        """Sample ``batch_size`` distinct steps, and set the attribute ``weights``.

        The weights are the sampler's importance weights. Without importance weights, they are 1.

        Returns:
            Float32 entries: ``obs`` and ``obs2`` ``[B, obs_dim]``, ``act`` ``[B, act_dim]``, ``rew`` and ``done``
            ``[B]``.

        Raises:
            ValueError: fewer steps are stored than ``batch_size``, or the sampler draws windows of steps, which only
                ``sample`` returns.
        """
        check_single_steps(self.sampler, "sample")
        if self.batch_size > len(self):
            raise ValueError(
                f"batch_size must be at most {len(self)}, the stored steps, got {self.batch_size}. Store more steps "
                "first, or lower batch_size."
            )
        data = self.sample()
        weight = data.get("priority_weight", None)
        self.weights = torch.ones(len(data), dtype=torch.float32, device=data.device) if weight is None else weight
        return to_l2r_batch({name: data.get(COLUMNS[name]) for name in ("obs", "obs2", "act", "rew", "done")})
