"""Build the collector of a run for its first rollout, draw rollouts, and keep the collector's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lightning._core.interrupts import interrupts
from torchrl_lightning._core.modules import EvaluationMode
from torchrl_lightning._core.protocols import CollectorApi
from torchrl_lightning.environments.env_ids import EnvIdTracker, Trajectories


class EpisodeAccumulator(Protocol):
    """An object with running sums over unfinished episodes."""

    def forget_unfinished(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Reset the sums of some environments."""
        ...


class Part(NamedTuple):
    """Consecutive steps of a rollout without a cut trajectory between them.

    Attributes:
        rollout: ``[N, t]``.
        begun: Ids of environments with a cut before the first step; None if there are none.
        is_last: True for the last part of the rollout.
    """

    rollout: TensorDictBase
    begun: Tensor | None
    is_last: bool


class CollectorStream:
    """Build the collector as late as possible, draw its rollouts, and store its restored state until then.

    At the first rollout the weights are restored and on their device. The generator state of a checkpoint is set at
    the first draw, so that building the parts of a resumed run does not change it.

    Args:
        *sums: Objects with sums over episodes, which are reset if the collector loses environments.

    Attributes:
        collector: The collector, or None; its abilities are in ``api``.
        trajectories: Finds trajectories that a user's collector cuts; None if flags mark all beginnings.
    """

    def __init__(self, *sums: EpisodeAccumulator) -> None:
        self.collector: Any = None
        self.api = CollectorApi.of(None)
        self.trajectories: Trajectories | None = None
        self._sums = sums
        self._stream: Iterator[TensorDictBase] | None = None
        self._origins = EnvIdTracker(1)
        self._until_closed = ExitStack()
        self._is_resumed = False  # whether the next collector loads the kept state
        self._rng: Tensor | None = None  # generator state of a checkpoint, until the run continues
        self._kept: Mapping[str, Any] | None = None  # the collector's state if the collector is closed or not built
        self._before: tuple[dict[str, Any] | None, Tensor] | None = None  # states before a rollout that is not accepted

    def open(
        self,
        build: Callable[[], tuple[CollectorApi, Iterator[TensorDictBase]]],
        *,
        policy: Any = None,
        inside: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Build the collector and restore it.

        Args:
            build: Returns the collector and its rollouts.
            policy: The policy, to set its evaluation mode and newest weights; None if the collector does that.
            inside: A context manager to enter before the build; it exits when the feed closes.
        """
        rng = torch.get_rng_state() if self._is_resumed and self._rng is None else self._rng
        if inside is not None:
            self._until_closed.enter_context(inside)
        self.trajectories = Trajectories()
        self.api, stream = build()
        self.collector = self.api.part
        if self.api.flags_beginnings:
            self.trajectories = None
        self._stream = stream if policy is None else self._acting(stream, policy)
        self._origins = EnvIdTracker(self.api.num_workers)
        if self._is_resumed and self._kept is not None and self.api.load_state_dict is not None:
            self.api.load_state_dict(self._kept)
        self._kept, self._is_resumed, self._rng, self._before = None, False, None, None
        if rng is not None:
            torch.set_rng_state(rng)

    def trust_rows(self, buffer: Any) -> None:
        """Switch off the buffer's comparison of rows with stored successors until the feed closes.

        The flags of our collectors mark all beginnings of episodes, so that the comparison is not needed.

        Args:
            buffer: An ``ExperienceBuffer`` that one of our collectors fills.
        """
        self.trajectories = None
        checks = buffer.writer.check_successors
        buffer.writer.check_successors = False

        def restore() -> None:
            buffer.writer.check_successors = checks

        self._until_closed.callback(restore)

    def next(self) -> TensorDictBase | None:
        """Return the collector's next rollout, unchanged; None when the collector has ended."""
        assert self._stream is not None
        rollout = next(self._stream, None)
        if lost := self.api.lost_envs:
            self.forget_unfinished(torch.tensor(lost))
            lost.clear()
        return rollout

    def forget_unfinished(self, env_ids: Tensor) -> None:
        """Reset the episode sums of some environments."""
        for each in self._sums:
            each.forget_unfinished(env_ids)

    def in_parts(self, rollout: TensorDictBase, env_ids: Tensor | None) -> list[Part]:
        """Split a rollout ``[N, T]`` at the steps at which trajectories are cut.

        Args:
            rollout: The collector's rollout.
            env_ids: Environment of each row, ``[N]``, -1 if unknown; None for all environments in order.
        """
        if self.trajectories is None or (env_ids is not None and int(env_ids.min()) < 0):
            return [Part(rollout, None, True)]
        length = rollout.shape[1]
        return [
            Part(rollout[:, begin:end], torch.tensor(cut) if cut else None, end == length)
            for begin, end, cut in self.trajectories.split(rollout, env_ids)
        ]

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Allow Ctrl-C to end a block that draws a rollout, if the collector's state contains all changes of the block.

        Until the rollout is accepted, checkpoints contain the earlier states of collector and generator.
        """
        if interrupts.between_steps and self.api.flags_beginnings and not self.api.replays:
            self._before = self.kept, self.rng
            with interrupts.not_held():
                yield
        else:
            yield
        interrupts.between_steps = False

    def accept(self) -> None:
        """Accept the last rollout after the run has counted and stored it: checkpoints use the current states again."""
        self._before = None

    def _acting(self, stream: Iterator[TensorDictBase], policy: Any) -> Iterator[TensorDictBase]:
        """Draw with the newest weights and in evaluation mode; copies in other processes keep their mode."""
        mode, take_weights = EvaluationMode(policy), self.api.update_policy_weights_
        while True:
            if take_weights is not None:
                take_weights()
            with mode:
                rollout = next(stream, None)
            if rollout is None:
                return
            yield rollout

    def numbered(self, rollout: TensorDictBase) -> TensorDictBase:
        """Return a rollout ``[N, T]`` with environment ids; also accepts ``[T]`` of one environment."""
        if rollout.ndim == 1:
            rollout = rollout.unsqueeze(0)
            rollout.names = [None, "time"]
        return self._origins.numbered(rollout)

    def keep(self) -> None:
        """Keep the state of the collector before it is closed."""
        self._kept = self.kept

    def close(self) -> None:
        """Shut the collector down."""
        collector, self.collector, self._stream = self.collector, None, None
        self.api = CollectorApi.of(None)
        with self._until_closed:
            if collector is not None:
                collector.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a resumed run: collectors cannot be copied, so a copy builds a new one from the state."""
        if self.collector is None:
            return dict(vars(self))
        fresh = vars(type(self)(*self._sums))
        return {**fresh, "_kept": self.kept, "_is_resumed": True, "_rng": self.rng}

    # ------------------------------------------------------------------ state

    @property
    def kept(self) -> dict[str, Any] | None:
        """The state of the collector, or None; without a collector, the kept state of the next or the last one."""
        if self._before is not None:
            return self._before[0]
        if self.collector is None:
            return None if self._kept is None else dict(self._kept)
        return None if self.api.load_state_dict is None else dict(self.collector.state_dict())

    @kept.setter
    def kept(self, state: Mapping[str, Any] | None) -> None:
        self._kept, self._is_resumed = state, True

    @property
    def rng(self) -> Tensor:
        """The state of torch's generator from which the run continues."""
        if self._before is not None:
            return self._before[1]
        return torch.get_rng_state() if self._rng is None else self._rng

    @rng.setter
    def rng(self, state: Tensor) -> None:
        self._rng = state

    def restore_rng(self) -> None:
        """Set torch's generator if a resumed run learns before it collects."""
        if self._rng is not None:
            torch.set_rng_state(self._rng)
            self._rng = None
