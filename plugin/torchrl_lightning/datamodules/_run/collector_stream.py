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
from torchrl_lightning.environments.env_ids import EnvIdTracker, TrajectorySplitter


class EpisodeAccumulator(Protocol):
    """An object with running sums over unfinished episodes."""

    def forget_unfinished(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Reset the sums of some environments."""
        ...


class RolloutPart(NamedTuple):
    """Consecutive steps of a rollout; no trajectory is cut between these steps.

    Attributes:
        rollout: ``[N, t]``.
        cut_env_ids: Ids of environments with a trajectory that was cut before the first step; None without a cut.
        is_last: True for the last part of the rollout.
    """

    rollout: TensorDictBase
    cut_env_ids: Tensor | None
    is_last: bool


class CollectorStream:
    """Build the collector at the first rollout, draw its rollouts, and hold a restored state until the build.

    When the collector is built, the weights are already restored and on their device. The first draw also sets torch's
    generator to the state in the checkpoint, so that building the parts of a resumed run does not change this state.

    Args:
        *accumulators: Objects with sums over episodes; the sums of environments that the collector loses are reset.

    Attributes:
        collector: The collector, or None before it is built; ``api`` describes its abilities.
        trajectories: Finds trajectories that a user's collector cuts; None if flags mark the start of each trajectory.
    """

    def __init__(self, *accumulators: EpisodeAccumulator) -> None:
        self.collector: Any = None
        self.api = CollectorApi.of(None)
        self.trajectories: TrajectorySplitter | None = None
        self._accumulators = accumulators
        self._rollouts: Iterator[TensorDictBase] | None = None
        self._env_id_tracker = EnvIdTracker(1)
        self._exit_stack = ExitStack()
        self._is_resumed = False  # whether the next collector loads the saved state
        self._rng: Tensor | None = None  # generator state of a checkpoint, until the run continues
        self._saved_state: Mapping[str, Any] | None = (
            None  # the collector's state if the collector is closed or not built
        )
        self._unaccepted: tuple[dict[str, Any] | None, Tensor] | None = (
            None  # states before a rollout that is not accepted yet
        )

    def open(
        self,
        build: Callable[[], tuple[CollectorApi, Iterator[TensorDictBase]]],
        *,
        policy: Any = None,
        context: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Build the collector and restore it.

        Args:
            build: Returns the collector and its rollouts.
            policy: The policy, which the stream updates to the newest weights and sets to evaluation mode; None if the
                collector does both.
            context: A context manager that the stream enters before the build and exits when it closes.
        """
        rng = torch.get_rng_state() if self._is_resumed and self._rng is None else self._rng
        if context is not None:
            self._exit_stack.enter_context(context)
        self.trajectories = TrajectorySplitter()
        self.api, rollouts = build()
        self.collector = self.api.part
        if self.api.marks_trajectory_starts:
            self.trajectories = None
        self._rollouts = rollouts if policy is None else self._with_newest_weights(rollouts, policy)
        self._env_id_tracker = EnvIdTracker(self.api.num_workers)
        if self._is_resumed and self._saved_state is not None and self.api.load_state_dict is not None:
            self.api.load_state_dict(self._saved_state)
        self._saved_state, self._is_resumed, self._rng, self._unaccepted = None, False, None, None
        if rng is not None:
            torch.set_rng_state(rng)

    def skip_successor_checks(self, buffer: Any) -> None:
        """Switch off the buffer's comparison of rows with stored successors until the stream closes.

        The flags of our collectors mark all beginnings of episodes, so that the comparison is not needed.

        Args:
            buffer: An ``ExperienceBuffer`` that one of our collectors fills.
        """
        self.trajectories = None
        checks = buffer.writer.check_successors
        buffer.writer.check_successors = False

        def restore() -> None:
            buffer.writer.check_successors = checks

        self._exit_stack.callback(restore)

    def next(self) -> TensorDictBase | None:
        """Return the collector's next rollout, unchanged; None when the collector has ended."""
        assert self._rollouts is not None
        rollout = next(self._rollouts, None)
        if lost := self.api.lost_envs:
            self.forget_unfinished(torch.tensor(lost))
            lost.clear()
        return rollout

    def forget_unfinished(self, env_ids: Tensor) -> None:
        """Reset the episode sums of some environments."""
        for accumulator in self._accumulators:
            accumulator.forget_unfinished(env_ids)

    def split_at_cuts(self, rollout: TensorDictBase, env_ids: Tensor | None) -> list[RolloutPart]:
        """Split a rollout ``[N, T]`` at the steps at which trajectories are cut.

        Args:
            rollout: The collector's rollout.
            env_ids: Environment of each row, ``[N]``, -1 if unknown; None for all environments in order.
        """
        if self.trajectories is None or (env_ids is not None and int(env_ids.min()) < 0):
            return [RolloutPart(rollout, None, True)]
        length = rollout.shape[1]
        return [
            RolloutPart(rollout[:, begin:end], torch.tensor(cut) if cut else None, end == length)
            for begin, end, cut in self.trajectories.split(rollout, env_ids)
        ]

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Allow Ctrl-C to end a block that draws a rollout, if the block changes only the state of the collector.

        Until the rollout is accepted, checkpoints contain the earlier states of collector and generator.
        """
        if interrupts.between_steps and self.api.marks_trajectory_starts and not self.api.replays:
            self._unaccepted = self.collector_state, self.rng
            with interrupts.interruptible():
                yield
        else:
            yield
        interrupts.between_steps = False

    def accept(self) -> None:
        """Accept the last rollout after the run has stored it; later checkpoints contain the current states."""
        self._unaccepted = None

    def _with_newest_weights(self, rollouts: Iterator[TensorDictBase], policy: Any) -> Iterator[TensorDictBase]:
        """Draw rollouts with the newest weights, in evaluation mode; policies in other processes keep their mode."""
        mode, take_weights = EvaluationMode(policy), self.api.update_policy_weights_
        while True:
            if take_weights is not None:
                take_weights()
            with mode:
                rollout = next(rollouts, None)
            if rollout is None:
                return
            yield rollout

    def with_env_ids(self, rollout: TensorDictBase) -> TensorDictBase:
        """Return a rollout ``[N, T]`` with environment ids; also accepts ``[T]`` of one environment."""
        if rollout.ndim == 1:
            rollout = rollout.unsqueeze(0)
            rollout.names = [None, "time"]
        return self._env_id_tracker.with_env_ids(rollout)

    def save_state(self) -> None:
        """Keep the state of the collector before it is closed."""
        self._saved_state = self.collector_state

    def close(self) -> None:
        """Shut the collector down."""
        collector, self.collector, self._rollouts = self.collector, None, None
        self.api = CollectorApi.of(None)
        with self._exit_stack:
            if collector is not None:
                collector.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        """Return a state without the collector, which cannot be copied; a copied stream builds its own."""
        if self.collector is None:
            return dict(vars(self))
        initial = vars(type(self)(*self._accumulators))
        return {**initial, "_saved_state": self.collector_state, "_is_resumed": True, "_rng": self.rng}

    # ------------------------------------------------------------------ state

    @property
    def collector_state(self) -> dict[str, Any] | None:
        """The state of the collector; if it is closed or not built, its saved state or None."""
        if self._unaccepted is not None:
            return self._unaccepted[0]
        if self.collector is None:
            return None if self._saved_state is None else dict(self._saved_state)
        return None if self.api.load_state_dict is None else dict(self.collector.state_dict())

    @collector_state.setter
    def collector_state(self, state: Mapping[str, Any] | None) -> None:
        self._saved_state, self._is_resumed = state, True

    @property
    def rng(self) -> Tensor:
        """The state of torch's generator from which the run continues."""
        if self._unaccepted is not None:
            return self._unaccepted[1]
        return torch.get_rng_state() if self._rng is None else self._rng

    @rng.setter
    def rng(self, state: Tensor) -> None:
        self._rng = state

    def restore_rng(self) -> None:
        """Set torch's generator if a resumed run learns before it collects."""
        if self._rng is not None:
            torch.set_rng_state(self._rng)
            self._rng = None
