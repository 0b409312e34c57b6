"""Demonstrations that stand in for episodes of environments, a step at a time."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from torchrl_lightning.demonstrations.players import Cast, Player
from torchrl_lightning.demonstrations.sampler import DemonstrationSampler
from torchrl_lightning.demonstrations.states import from_state, state_of
from torchrl_lightning.demonstrations.storage import DemonstrationStorage
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.environments import ReplayedRows
from torchrl_lightning.ranges import integer, one_of, optional
from torchrl_lightning.state import Attribute, Child, Stated, check_state, mapping, sequence, whole

End = Literal["recorded", "terminated", "truncated"]
LogProb = Literal["deterministic", "current"]
_ENDS = {"recorded": None, "terminated": (True, False), "truncated": (False, True)}
Array = NDArray[Any]


class DemonstrationReplay(Stated):
    """Replay demonstrations in the collectors of Gymnasium's environments, as their ``replay``.

    In a TorchRL environment, a :class:`~torchrl_lightning.DemonstrationReplayTransform` replays them.

    Where an episode begins, the sampler draws whether a demonstration is played in its place, and which. One that gives
    way to another meanwhile is played to its end. Demonstrations must fit the environment, see
    :meth:`Demonstration.fits`.

    Args:
        storage: Where demonstrations are kept.
        sampler: What draws them.
        num_envs: The number of environments.
        ends: How a demonstration ends: as it was ``recorded`` (:attr:`Demonstration.ends`); always ``terminated``; or
            ``truncated``, so that the value of what follows counts.
        log_prob: What is stored as the log-probability of its actions: ``deterministic`` is 0, as if whoever showed
            them had no choice; ``current`` is that of the policy. Of continuous actions the policy tells a density,
            whose ratio to 1 has no meaning of its own: take ``current`` for these.
        frame_stack: How many images the environment shows as one, as an :class:`~torchrl_lightning.EnvironmentRecipe`
            stacks them; demonstrations hold single ones.

    Raises:
        ValueError: ``num_envs`` or ``frame_stack`` is not positive, or an option has no such value.

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
        "playing": Attribute(of=lambda replay: replay._read_positions, at="_positions"),
        "chosen": Attribute(
            of=lambda replay: replay._read_chosen, at="_chosen", form=lambda chosen: [*map(_choice, chosen.items())]
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
        self._running: dict[int, Player] = {}
        self._chosen: dict[int, Demonstration | None] = {}  # what was drawn before its episode begins
        self._now = 0  # the number of the next call
        self._cast: Cast | None = None
        self._next: ReplayedRows | None = None

    @property
    def playing(self) -> Array:
        """Where steps of a demonstration are left, ``[num_envs]`` bool."""
        mask = np.zeros(self.num_envs, dtype=bool)
        mask[[*self._running]] = True
        return mask

    def __call__(self, starts: Array) -> ReplayedRows | None:
        """Draw what is replayed where an episode begins (``starts``, ``[num_envs]`` bool), and return the next step.

        Raises:
            ValueError: ``starts`` is of another number of environments.
        """
        self.begin(starts)
        rows = self.peek()
        if rows is not None:
            self._go_on()
        return rows

    def choose(self, env: int) -> Demonstration | None:
        """Draw now what is replayed in the next episode of an environment, and return it; None if it plays itself.

        It is taken where that episode begins in this process; copies for workers draw by themselves.

        Raises:
            ValueError: There is no such environment.
        """
        if not 0 <= env < self.num_envs:
            raise ValueError(f"env_id={env} must be between 0 and {self.num_envs - 1}.")
        self._chosen[env] = self.sampler.draw(self.storage)
        return self._chosen[env]

    def begin(self, starts: Array) -> None:
        """Draw what is replayed where an episode begins (``starts``, ``[num_envs]`` bool); what was there is over.

        Raises:
            ValueError: ``starts`` is of another number of environments.
        """
        if len(starts) != self.num_envs:
            raise ValueError(f"This replay is for {self.num_envs} environments, asked for the steps of {len(starts)}.")
        for env in np.flatnonzero(starts).tolist():
            before = self._running.pop(env, None)
            drawn = self._chosen.pop(env) if env in self._chosen else self.sampler.draw(self.storage)
            if drawn is not None:
                self._running[env] = Player(drawn, self.frame_stack, self._now)
            if before is not None or drawn is not None:
                self._cast = None

    def peek(self) -> ReplayedRows | None:
        """Return the next step, and stay before it."""
        if not self._running:
            return None
        if self._cast is None:
            log_prob = 0.0 if self.log_prob == "deterministic" else None
            self._cast = Cast(self._running, self.playing, self._now, _ENDS[self.ends], log_prob)
            self._next = None
        if self._next is None:
            self._next = self._cast.next_rows()
        return self._next

    def advance(self, envs: Array) -> None:
        """Go on by one step in some of the environments (``[num_envs]`` bool) that replay."""
        for env, player in self._running.items():
            if not envs[env]:
                player.wait()
                self._cast = None
        self._go_on()

    def _go_on(self) -> None:
        self._now += 1
        self._next = None
        if self._cast is None or not self._cast.left:
            self._running = {env: player for env, player in self._running.items() if player.left(self._now)}
            self._cast = None

    def for_worker(self, seed: int) -> DemonstrationReplay:
        """Return a copy for another process, which plays nothing yet, with a sampler of its own."""
        sampler = copy.deepcopy(self.sampler)
        sampler.generator.manual_seed(seed)
        options: dict[str, Any] = {"ends": self.ends, "log_prob": self.log_prob, "frame_stack": self.frame_stack}
        return type(self)(self.storage, sampler, self.num_envs, **options)

    def contents(self) -> _Contents:
        """Return what the storage keeps, and the options of the sampler."""
        storage, sampler = self.storage, self.sampler
        kept = storage.reward_demonstrations, storage.value_demonstrations
        return _Contents(*kept, storage.successes, storage.annealed, (sampler.rho, sampler.phi, sampler.alpha))

    def news(self, since: _Contents) -> _Contents:
        """Return the contents for a copy that has those of before; what it has is told without its steps."""
        now, known = self.contents(), {each.serial: each for each in (*since.reward, *since.value)}

        def told(each: Demonstration) -> Any:
            before = known.get(each.serial)
            return each if before is None or before.steps is not each.steps else (each.serial, each.value)

        return now._replace(reward=tuple(map(told, now.reward)), value=tuple(map(told, now.value)))

    def follow(self, news: _Contents) -> None:
        """Take over the contents of the original; what is being played goes on."""
        kept = {each.serial: each for each in (*self.storage.reward_demonstrations, *self.storage.value_demonstrations)}

        def found(each: Any) -> Demonstration:
            if not isinstance(each, tuple):
                return each
            serial, value = each
            return kept[serial].labelled(value=value, serial=serial)

        reward, value = ([*map(found, part)] for part in (news.reward, news.value))
        self.storage.replace(reward, value, news.successes, news.annealed)
        self.sampler.set_probabilities(*news.probabilities)

    @property
    def _positions(self) -> list[dict[str, Any]]:
        """What is being played and where, as states hold it; it may not be kept in the storage any more."""
        return [
            {"env": env, "position": self._now - player.began, "demonstration": state_of(player.demonstration)}
            for env, player in sorted(self._running.items())
        ]

    @_positions.setter
    def _positions(self, running: dict[int, Player]) -> None:
        self._running, self._cast, self._now = running, None, 0

    def _read_positions(self, value: Any, name: str) -> dict[int, Player]:
        running: dict[int, Player] = {}
        schema = {"env": whole(0, self.num_envs - 1), "position": whole(), "demonstration": mapping}
        for entry in sequence(value, name):
            env, position, demonstration = check_state(entry, schema, self.OWNER).values()
            player = running[env] = Player(from_state(demonstration), self.frame_stack, -position)
            if player.left(0) < 1:
                raise ValueError(
                    f"The {self.OWNER} state is at position {position} of demonstration "
                    f"{player.demonstration.name!r}, which has {player.length} steps."
                )
        for first, other in pairwise(running.values()):
            if other.shapes != first.shapes:
                raise ValueError(
                    f"The {self.OWNER} state plays {other.demonstration.name!r}, whose steps are {other.shapes}, "
                    f"beside {first.demonstration.name!r}, whose steps are {first.shapes}."
                )
        return running

    def _read_chosen(self, value: Any, name: str) -> dict[int, Demonstration | None]:
        schema = {"env": whole(0, self.num_envs - 1), "demonstration": optional(mapping)}
        chosen = (check_state(entry, schema, self.OWNER).values() for entry in sequence(value, name))
        return {env: state if state is None else from_state(state) for env, state in chosen}

    def __repr__(self) -> str:
        options = f"ends={self.ends!r}, log_prob={self.log_prob!r}"
        return f"{type(self).__name__}({len(self._running)} of {self.num_envs} environments replay, {options})"


def _choice(chosen: tuple[int, Demonstration | None]) -> dict[str, Any]:
    env, demonstration = chosen
    return {"env": env, "demonstration": demonstration and state_of(demonstration)}


class _Contents(NamedTuple):
    """What is replayed from; as news, known demonstrations are told by their numbers and values."""

    reward: tuple[Any, ...]
    value: tuple[Any, ...]
    successes: int
    annealed: float
    probabilities: tuple[float, float, float]
