"""Replay demonstrations step by step in place of an environment's episodes."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning._core.state import Attribute, Child, Stateful, bounded_integer, check_state, mapping, sequence
from torchrl_lightning._core.validators import integer, one_of, optional
from torchrl_lightning.demonstrations.demo_sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.demo_storage import DemonstrationStorage
from torchrl_lightning.demonstrations.replay.playback import DemoPlayback, PlaybackBatch
from torchrl_lightning.demonstrations.serialization import from_state, to_state
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments import ReplayedRows

End = Literal["recorded", "terminated", "truncated"]
LogProb = Literal["deterministic", "current"]
_ENDS = {"recorded": None, "terminated": (True, False), "truncated": (False, True)}
Array = NDArray[Any]


class DemonstrationReplay(Stateful):
    """Replay demonstrations in collectors of Gymnasium environments; pass it as the collector's ``replay``.

    In a TorchRL environment, use a :class:`~torchrl_lightning.DemonstrationReplayTransform`.

    At the start of each episode the sampler draws a demonstration or None. If a demonstration leaves the storage during
    its replay, the replay continues to the end. Demonstrations must fit the environment, see
    :meth:`Demonstration.fits`.

    Args:
        storage: The storage of the demonstrations.
        sampler: The sampler that draws from the storage.
        num_envs: The number of environments.
        ends: The end of a demonstration. ``recorded`` uses :attr:`Demonstration.ends`, ``terminated`` always
            terminates, and ``truncated`` always truncates, so that the value of the next state counts.
        log_prob: The stored log-probability of the replayed actions. ``deterministic`` stores 0. ``current`` stores the
            log-probability under the policy. Use ``current`` for continuous actions, because the ratio of a density to
            1 is meaningless.
        frame_stack: The number of images that an :class:`~torchrl_lightning.EnvironmentRecipe` stacks. Demonstrations
            store single images.

    Raises:
        ValueError: ``num_envs`` or ``frame_stack`` is not positive, or an option has an unknown value.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import GymnasiumCollector
        >>> steps = TensorDict({"observation": torch.zeros(3, 4), "action": torch.tensor([0, 1, 1])}, [3])
        >>> steps["next", "reward"] = torch.tensor([[0.0], [0.0], [1.0]])
        >>> storage = DemonstrationStorage()
        >>> storage.replace([Demonstration(steps)], [])
        >>> replay = DemonstrationReplay(storage, DemonstrationSampler(rho=1.0, phi=0.0), num_envs=1)
        >>> rollout = GymnasiumCollector("CartPole-v1", frames_per_batch=6, replay=replay).rollout()
        >>> rollout["action"].tolist(), rollout["next", "reward"].flatten().tolist()
        ([[0, 1, 1, 0, 1, 1]], [0.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    """

    OWNER, VERSION = "demonstration replay", 1
    STATE = {
        "num_envs": Attribute(),
        "playing": Attribute(check_for=lambda replay: replay._read_playbacks, attribute="_playback_states"),
        "chosen": Attribute(
            check_for=lambda replay: replay._read_scheduled,
            attribute="_scheduled",
            to_saved=lambda scheduled: [*map(_scheduled_state, scheduled.items())],
        ),
        "sampler": Child(),
    }

    def __init__(
        self,
        storage: DemonstrationStorage,
        sampler: DemonstrationSampler,
        num_envs: int,
        *,
        ends: End = "recorded",
        log_prob: LogProb = "deterministic",
        frame_stack: int = 1,
    ) -> None:
        self.storage, self.sampler = storage, sampler
        self.num_envs = integer(num_envs, "num_envs")
        self.ends: End = one_of(ends, "ends", get_args(End))
        self.log_prob: LogProb = one_of(log_prob, "log_prob", get_args(LogProb))
        self.frame_stack = integer(frame_stack, "frame_stack")
        self._running: dict[int, DemoPlayback] = {}
        self._scheduled: dict[int, Demonstration | None] = {}  # drawn early; the keys are environments
        self._now = 0  # the number of the next call
        self._batch: PlaybackBatch | None = None
        self._next: ReplayedRows | None = None

    @property
    def playing(self) -> Array:
        """Mask ``[num_envs]`` of the environments with remaining steps of a demonstration."""
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[[*self._running]] = True
        return mask

    def __call__(self, starts: Array) -> ReplayedRows | None:
        """Draw demonstrations for the episodes that start (mask ``starts``, ``[num_envs]``), and return the next step.

        Raises:
            ValueError: ``starts`` has another number of environments.
        """
        self.begin(starts)
        rows = self.peek()
        if rows is not None:
            self._advance()
        return rows

    def choose(self, env: int) -> Demonstration | None:
        """Return a sampled demonstration for an environment's next episode, or None.

        The next episode in this process uses the result. Copies in worker processes draw their own demonstrations.

        Raises:
            ValueError: ``env`` is out of range.
        """
        if not 0 <= env < self.num_envs:
            raise ValueError(f"env_id must be between 0 and {self.num_envs - 1}, got {env}.")
        self._scheduled[env] = self.sampler.draw(self.storage)
        return self._scheduled[env]

    def begin(self, starts: Array) -> None:
        """End running replays in the environments of the mask ``starts``, ``[num_envs]``, and draw new demonstrations.

        Raises:
            ValueError: ``starts`` has another number of environments.
        """
        if len(starts) != self.num_envs:
            raise ValueError(f"starts must have {self.num_envs} entries, one for each environment, got {len(starts)}.")
        for env in np.flatnonzero(starts).tolist():
            interrupted = self._running.pop(env, None)
            drawn = self._scheduled.pop(env) if env in self._scheduled else self.sampler.draw(self.storage)
            if drawn is not None:
                self._running[env] = DemoPlayback(drawn, self.frame_stack, self._now)
            if interrupted is not None or drawn is not None:
                self._batch = None

    def peek(self) -> ReplayedRows | None:
        """Return the next step without advancing the replays."""
        if not self._running:
            return None
        if self._batch is None:
            log_prob = 0.0 if self.log_prob == "deterministic" else None
            self._batch = PlaybackBatch(self._running, self.playing, self._now, _ENDS[self.ends], log_prob)
            self._next = None
        if self._next is None:
            self._next = self._batch.next_rows()
        return self._next

    def advance(self, envs: Array) -> None:
        """Advance the replays by one step in the environments of the mask ``envs``, ``[num_envs]``."""
        for env, playback in self._running.items():
            if not envs[env]:
                playback.wait()
                self._batch = None
        self._advance()

    def _advance(self) -> None:
        self._now += 1
        self._next = None
        if self._batch is None or not self._batch.remaining:
            self._running = {env: playback for env, playback in self._running.items() if playback.remaining(self._now)}
            self._batch = None

    def for_worker(self, seed: int) -> DemonstrationReplay:
        """Return a copy for another process, with its own sampler and without running replays."""
        sampler = copy.deepcopy(self.sampler)
        sampler.generator.manual_seed(seed)
        options: dict[str, Any] = {"ends": self.ends, "log_prob": self.log_prob, "frame_stack": self.frame_stack}
        return type(self)(self.storage, sampler, self.num_envs, **options)

    def snapshot(self) -> _Contents:
        """Return the stored demonstrations and the options of the sampler."""
        storage, sampler = self.storage, self.sampler
        demos = storage.reward_demonstrations, storage.value_demonstrations
        return _Contents(*demos, storage.successes, storage.annealed, (sampler.rho, sampler.phi, sampler.alpha))

    def delta(self, since: _Contents) -> _Contents:
        """Return the contents to send to a copy with the contents ``since``; omit the steps of its demonstrations."""
        contents, known_demos = self.snapshot(), {demo.serial: demo for demo in (*since.reward, *since.value)}

        def entry_of(demo: Demonstration) -> Any:
            known_demo = known_demos.get(demo.serial)
            return demo if known_demo is None or known_demo.steps is not demo.steps else (demo.serial, demo.value)

        return contents._replace(
            reward=tuple(map(entry_of, contents.reward)), value=tuple(map(entry_of, contents.value))
        )

    def apply_delta(self, delta: _Contents) -> None:
        """Apply the result of :meth:`delta`. Running replays continue."""
        demos = {
            item.serial: item for item in (*self.storage.reward_demonstrations, *self.storage.value_demonstrations)
        }

        def resolve(item: Any) -> Demonstration:
            if not isinstance(item, tuple):
                return item
            serial, value = item
            return demos[serial].with_value(value=value, serial=serial)

        reward, value = ([*map(resolve, part)] for part in (delta.reward, delta.value))
        self.storage.replace(reward, value, delta.successes, delta.annealed)
        self.sampler.set_probabilities(*delta.probabilities)

    @property
    def _playback_states(self) -> list[dict[str, Any]]:
        """The state of the running replays, with their demonstrations, which may have left the storage."""
        return [
            {"env": env, "position": self._now - playback.start, "demonstration": to_state(playback.demonstration)}
            for env, playback in sorted(self._running.items())
        ]

    @_playback_states.setter
    def _playback_states(self, running: dict[int, DemoPlayback]) -> None:
        self._running, self._batch, self._now = running, None, 0

    def _read_playbacks(self, value: Any, name: str) -> dict[int, DemoPlayback]:
        running: dict[int, DemoPlayback] = {}
        schema = {"env": bounded_integer(0, self.num_envs - 1), "position": bounded_integer(), "demonstration": mapping}
        for entry in sequence(value, name):
            env, position, demonstration = check_state(entry, schema, self.OWNER).values()
            playback = running[env] = DemoPlayback(from_state(demonstration), self.frame_stack, -position)
            if playback.remaining(0) < 1:
                raise ValueError(
                    f"The {self.OWNER} state is at position {position} of demonstration "
                    f"{playback.demonstration.name!r}, which has {playback.length} steps."
                )
        for first, other in pairwise(running.values()):
            if other.shapes != first.shapes:
                raise ValueError(
                    f"The demonstrations of the {self.OWNER} state must have equal shapes, got {first.shapes} for "
                    f"{first.demonstration.name!r} and {other.shapes} for {other.demonstration.name!r}."
                )
        return running

    def _read_scheduled(self, value: Any, name: str) -> dict[int, Demonstration | None]:
        schema = {"env": bounded_integer(0, self.num_envs - 1), "demonstration": optional(mapping)}
        entries = (check_state(entry, schema, self.OWNER).values() for entry in sequence(value, name))
        return {env: state if state is None else from_state(state) for env, state in entries}

    def __repr__(self) -> str:
        options = f"ends={self.ends!r}, log_prob={self.log_prob!r}"
        return f"{type(self).__name__}({len(self._running)} of {self.num_envs} environments replay, {options})"


def _scheduled_state(item: tuple[int, Demonstration | None]) -> dict[str, Any]:
    env, demonstration = item
    return {"env": env, "demonstration": demonstration and to_state(demonstration)}


class _Contents(NamedTuple):
    """The demonstrations and sampler options. In a delta, a pair (serial, value) replaces a known demonstration."""

    reward: tuple[Any, ...]
    value: tuple[Any, ...]
    successes: int
    annealed: float
    probabilities: tuple[float, float, float]
