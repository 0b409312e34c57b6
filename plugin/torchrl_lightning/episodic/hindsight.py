"""Hindsight: some of what is sampled aims at a goal that was reached in the same episode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._compat import attached
from torchrl_lightning.entries import (
    Path,
    entry_of,
    keys_below,
    nested_key,
    next_key,
    path_of,
    tensordict_of,
    under,
)
from torchrl_lightning.environments.faults import EnvironmentFault
from torchrl_lightning.environments.goals import EnvironmentGoals, GoalFunction
from torchrl_lightning.episodic.goal_functions import (
    DefaultReward,
    EnvironmentFunction,
    GivenFunction,
    Goals,
    check_recomputed,
    default_reward_error,
    form_of,
)
from torchrl_lightning.episodic.returns import EpisodicReturn
from torchrl_lightning.episodic.steps import FIRST, LAST, MID, TIME_STEPS, TRANSITIONS
from torchrl_lightning.keys import DONE, NEXT, REWARD, TERMINATED, TRUNCATED
from torchrl_lightning.ranges import Checked, boolean, fraction, one_of
from torchrl_lightning.replay.episode_transform import EpisodeTransform

logger = logging.getLogger(__name__)
STRATEGIES = "future", "episode", "final"
UNCHANGED = 1000
"""Rows with another goal after which rewards that never changed are reported."""
ROUNDING = 1e-5
"""Difference of two rewards, as a fraction of the largest one, up to which they count as the same."""
Function = EnvironmentFunction | GivenFunction | DefaultReward
_Functions = tuple[Function, Function | None, dict[str, float]]
"""Of rewards and of flags, and the returns of other goals by their names."""


class HindsightRelabel(EpisodeTransform):
    """Replace goals of sampled steps by goals that were achieved in their episodes (Andrychowicz et al. 2017).

    A transform on read, for the ``transform=`` of an :class:`ExperienceBuffer` whose writer tracks episodes: what is
    stored never changes, and random numbers come from the buffer's generator. A share of the samples gets as its goal
    what was achieved after one of the steps of its episode, which the ``strategy`` chooses; its reward is computed
    anew. Of an episode that goes on, or lost its first steps, those count that are stored. Samples are single steps
    ``[B]`` or windows ``[B, T]``. A window gets one goal, with *future* achieved after its last step or later; one that
    straddles the end of an episode keeps its own.

    With ``n_steps`` of the buffer, all rewards of a step's return are computed anew for its one goal, from the single
    steps that are stored, and the return ends where ``compute_terminated`` ends the episode. Of several transforms,
    this one is then the first.

    What is achieved after a step is read under ``"next"``; where the stored steps have no such entry, they are time
    steps as of dm_env, whose reward is that of the step before, and what is achieved stands beside the goal.

    Rewards come from the environment's own ``compute_reward``, its wrappers' included, which a DataModule hands over
    (:meth:`use_environment`) or ``compute_reward=env.unwrapped.compute_reward`` gives. The steps of the first batches,
    and of ever fewer later ones, must have the rewards that it gives for their own goals. A warning reports once that
    1,000 rows got another goal and no reward has changed. Where goals are another, a stored return
    (:class:`EpisodicReturn`) is unknown: it is ``default_return``.

    Args:
        her_proportion: probability with which a sample is relabelled.
        strategy: of which step a goal is what was achieved after it: ``"future"``, of one from the sample's own to the
            last of its episode, each equally likely; ``"episode"``, of any of its episode, each equally likely;
            ``"final"``, of the last one.
        skip_reached: leave those samples their own goal that show theirs as reached already: whose reward, for what
            was achieved before the step, is that for the goal itself. A block that nobody moves is where it was all
            along, and such samples teach not to touch it (Manela and Biess 2019).
        achieved_goal_key: what a goal is read from.
        desired_goal_key: the goal, replaced also under ``"next"``.
        reward_key: the reward; of time steps ``"reward"``, unless another is given.
        goal: makes goals of achieved entries ``[n, ...]``, where these are, for instance, whole observations.
        compute_reward: called as ``compute_reward(achieved, desired, info)`` with goals ``[n, ...]`` or
            ``[n, T, ...]``; a method of an environment gets arrays, and single steps if it takes no other. ``info`` has
            the observations after the step by name. If None, that of the environment; if it has none, 0 within a
            distance of 0.05 and -1 elsewhere, which compares floating-point vectors and single numbers. Goals of other
            kinds, such as images, integers and nested entries, need a function.
        compute_terminated: the same for ``("next", "terminated")``, with which ``("next", "done")`` is made again (of
            time steps, ``discount`` and ``step_type``). If None, that of the environment, if it depends on goals; else
            flags stay as they are stored: right where an episode goes on at the goal, or ends for reasons of its own.
            Where it ends at the goal, give it, else a value is bootstrapped from behind the goal.

    Raises:
        ValueError: ``her_proportion`` is no probability, or there is no such strategy; when sampling: it is in no
            buffer, nothing tracks episodes, the single steps of n-step returns are not stored, a function gives another
            number of values than there are steps, or other numbers for stored steps than they have, or the default
            reward cannot compare the goals.
        KeyError: when sampling: an entry is missing.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import ExperienceBuffer
        >>> buffer = ExperienceBuffer(transform=HindsightRelabel(1.0))
        >>> place, done = torch.arange(4.0).unsqueeze(-1), torch.tensor([0, 0, 0, 1], dtype=torch.bool).unsqueeze(-1)
        >>> step = {"achieved_goal": place, "desired_goal": torch.full((4, 1), 9.0)}
        >>> after = {"achieved_goal": place + 1, "reward": torch.full((4, 1), -1.0), "done": done}
        >>> _ = buffer.extend(TensorDict({**step, "next": after}, [4]))
        >>> batch = buffer.sample(64)
        >>> bool((batch["desired_goal"] > batch["achieved_goal"]).all()), float(batch["desired_goal"].max())
        (True, 4.0)
        >>> bool((batch["next", "reward"] == 0).eq(batch["next", "achieved_goal"] == batch["desired_goal"]).all())
        True
    """

    her_proportion = Checked(fraction)
    strategy = Checked(lambda value, name: one_of(value, name, STRATEGIES))
    skip_reached = Checked(boolean)

    def __init__(
        self,
        her_proportion: float = 0.8,
        *,
        strategy: str = "future",
        skip_reached: bool = False,
        achieved_goal_key: NestedKey = "achieved_goal",
        desired_goal_key: NestedKey = "desired_goal",
        reward_key: NestedKey = ("next", "reward"),
        goal: Callable[[Tensor], Tensor] | None = None,
        compute_reward: GoalFunction | None = None,
        compute_terminated: GoalFunction | None = None,
    ) -> None:
        super().__init__()
        self.her_proportion, self.strategy, self.skip_reached = her_proportion, strategy, skip_reached
        self.achieved_goal_key, self.desired_goal_key = nested_key(achieved_goal_key), nested_key(desired_goal_key)
        self.reward_key = nested_key(reward_key)
        self.goal = goal
        self._given = {"compute_reward": _apart(compute_reward), "compute_terminated": _apart(compute_terminated)}
        self._environment: EnvironmentGoals | None = None
        self._functions: _Functions | None = None  # once they are needed
        self._unchanged: list[int] = [0]  # rows with another goal, and no other reward; empty once this is decided
        self._batches = [0, 1]  # how many there were, and which is checked next; a list, as a module's attributes cost

    def misfit(self, specs: Any, learner: Any = None) -> str | None:
        """Return why an environment of these specs has no goals that can be relabelled; None if it has."""
        shown = specs.keys
        for name, key in (("achieved_goal_key", self.achieved_goal_key), ("desired_goal_key", self.desired_goal_key)):
            if not any(under(entry, key) for entry in shown):
                return (
                    f"{name} names nothing that the environment shows, which is {', '.join(map(str, shown))}. Take one "
                    "with goals, such as env=robotics, or another stream, such as data=uniform."
                )
        keys = [self.desired_goal_key] if self.goal is not None else [self.achieved_goal_key, self.desired_goal_key]
        forms = [(specs.observation[key].shape, specs.observation[key].dtype) if key in shown else None for key in keys]
        error = default_reward_error(*forms)
        if error is None or not self.her_proportion or self._function("compute_reward") is not None:
            return None
        return error

    def use_environment(self, goals: EnvironmentGoals) -> None:
        """Compute by an environment's functions what is not given; a DataModule hands over those of its own."""
        self._environment, self._functions = goals, None

    def draw(self, count: int) -> Tensor:
        """Draw uniform numbers from [0, 1): one for each sample, then one for each that is relabelled, if need be."""
        rng = self.storage.generator
        return torch.rand(count, dtype=torch.float64, generator=rng, device="cpu" if rng is None else rng.device).cpu()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabel a batch, which has an entry ``index``, ``[B]`` or ``[B, T]``."""
        episodes = self.episodes
        is_folded = "steps_to_next_obs" in tensordict
        index = self.cells_of(tensordict)
        places = index.numpy().reshape(len(tensordict), -1)
        (first_env, first), (env, last) = episodes.steps_of(places[:, 0]), episodes.steps_of(places[:, -1])
        begin, end = (each.numpy() for each in episodes.bounds(torch.from_numpy(env), torch.from_numpy(last)))
        is_whole = (first_env == env) & (begin <= first) & (first <= last)
        batches = self._batches
        batches[0] += 1
        if batches[0] == batches[1] and self.her_proportion:
            batches[1] *= 2
            self._check(self._single_steps(tensordict, index).set("index", index) if is_folded else tensordict)
        rows = np.flatnonzero((self.draw(len(places)).numpy() < self.her_proportion) & is_whole)
        if len(rows):
            env, goal = env[rows], end[rows]
            if self.strategy != "final":
                low = (last if self.strategy == "future" else begin)[rows]
                left = goal - low
                goal = low + np.minimum(self.draw(len(rows)).numpy() * (left + 1), left).astype(np.int64)
            chosen, cells = torch.from_numpy(rows), torch.from_numpy(episodes.cells_of(env, goal))
            if self.skip_reached:
                missed = ~self._reached(tensordict, chosen, cells)
                chosen, cells = chosen[missed], cells[missed]
            if len(chosen):
                (self._relabel_folded if is_folded else self._relabel)(tensordict, chosen, cells)
        return tensordict

    def _reached(self, batch: TensorDictBase, rows: Tensor, cells: Tensor) -> Tensor:
        """Return which samples show the goals that they are to get as reached, ``[n]``."""
        key, *_ = self._layout(batch)
        goals = self._goals(_stored_goals(self.storage.leaves(key), key, cells))

        def first(entry: Tensor) -> Tensor:
            return _rows(entry, rows)[:, 0] if batch.ndim > 1 else _rows(entry, rows)

        def seen(name: str) -> Tensor | None:
            entry = entry_of(batch, name)
            return None if entry is None else first(entry)

        shown = self._goals(first(_require(batch, self.achieved_goal_key)))
        reward, *_ = self._functions or self._computing(shown, goals, 1)
        found, most = (torch.as_tensor(reward(each, goals, seen, 1)) for each in (shown, goals))
        return (found >= most).reshape(len(rows)).cpu()

    def _single_steps(self, batch: TensorDictBase, cells: Tensor) -> TensorDictBase:
        """Read the steps of which a batch has n-step returns."""
        single = self.storage.get(cells)
        if "steps_to_next_obs" in single or self._layout(batch)[1:] != (REWARD, False):
            raise ValueError(
                "HindsightRelabel cannot relabel folded rewards whose single steps are not stored: store transitions "
                f"with {REWARD!r}, and let the buffer fold them by n_steps=, or sample with n_steps=1."
            )
        return single

    def _relabel_folded(self, batch: TensorDictBase, rows: Tensor, cells: Tensor) -> None:
        """Relabel each step of n-step returns, and fold them again."""
        folded = self.cells_of(batch), batch["steps_to_next_obs"], batch["gamma"]
        index, steps, gamma = (_rows(entry, rows).flatten().cpu() for entry in folded)
        ahead, discount = torch.arange(int(steps.max())), gamma.double() ** (1 / steps)
        env, position = self.episodes.steps_of(index.numpy())
        following = position[:, None] + torch.minimum(ahead, steps[:, None] - 1).numpy()
        single = self._single_steps(batch, torch.from_numpy(self.episodes.cells_of(env[:, None], following)))
        every = torch.arange(len(index))
        self._relabel(single, every, cells.repeat_interleave(len(index) // len(rows)))
        if (terminated := entry_of(single, TERMINATED)) is not None:
            ends = terminated.reshape(*single.shape, -1).any(-1).cpu()
            steps = torch.where(ends.any(1), 1 + ends.int().argmax(1), steps)
        first, last = single[:, 0], single[every, steps - 1]
        rewards, weights = single[REWARD], torch.where(ahead < steps[:, None], discount[:, None] ** ahead, 0.0)
        weights = weights.to(rewards.device).view(*weights.shape, *[1] * (rewards.ndim - 2))
        last.set(REWARD, (weights * rewards).sum(1).to(rewards.dtype))
        assert self._functions is not None  # they were needed to relabel
        for key in (self.desired_goal_key, *self._functions[2]):
            if entry_of(batch, key) is not None:
                _replace(batch, key, rows, entry_of(first, key))
        for key in keys_below(last, NEXT):
            _replace(batch, key, rows, entry_of(last, key))
        _replace(batch, "steps_to_next_obs", rows, steps)
        _replace(batch, "gamma", rows, discount**steps)

    def _relabel(self, batch: TensorDictBase, rows: Tensor, cells: Tensor) -> None:
        achieved_key, reward_key, time_steps = self._layout(batch)
        goals = self._goals(_stored_goals(self.storage.leaves(achieved_key), achieved_key, cells))
        achieved = self._goals(_rows(_require(batch, achieved_key), rows))
        steps = achieved.shape[: batch.ndim]  # [n] or [n, T]
        if batch.ndim > 1:
            goals = goals.unsqueeze(1).expand(*steps, *goals.shape[1:])

        def seen(name: str) -> Tensor | None:
            entry = entry_of(batch, name if time_steps else next_key(name))
            return None if entry is None else _rows(entry, rows)

        reward, terminated, unknown = self._functions or self._computing(achieved, goals, len(steps))
        own = before = None
        if self._unchanged:
            own, before = entry_of(batch, self.desired_goal_key), entry_of(batch, reward_key)
        _replace(batch, self.desired_goal_key, rows, goals)
        if entry_of(batch, next_key(self.desired_goal_key)) is not None:
            _replace(batch, next_key(self.desired_goal_key), rows, goals)
        _replace(batch, reward_key, rows, reward(achieved, goals, seen, len(steps)))
        if self._unchanged:
            assert before is not None
            self._note_unchanged(batch, rows, own, before, reward_key)
        for key, value in unknown.items():
            if (returns := entry_of(batch, key)) is not None:
                batch.set(key, returns.index_fill(0, rows.to(returns.device), value))
        if terminated is not None:
            ends = torch.as_tensor(terminated(achieved, goals, seen, len(steps)))
            (_end_time_steps if time_steps else _end_transitions)(batch, rows, ends)

    def _note_unchanged(self, batch: TensorDictBase, rows: Tensor, goals: Goals, rewards: Tensor, key: Any) -> None:
        """Count rows with another goal; warn if there are many and no reward has changed, and count no more then.

        Args:
            batch: the batch, relabelled.
            rows: which of its rows are relabelled.
            goals: the entry of the goals before.
            rewards: the entry of the rewards before.
            key: the key of the rewards.
        """
        differs = _differ(_rows(goals, rows), _rows(_require(batch, self.desired_goal_key), rows))
        old, new = (_rows(entry, rows).double().cpu().reshape(len(rows), -1) for entry in (rewards, batch[key]))
        kinds = entry_of(batch, TIME_STEPS.done)
        if key == TIME_STEPS.reward and kinds is not None:  # the first time step has earned no reward
            began = (_rows(kinds, rows) == FIRST).cpu().reshape(len(rows), -1)
            if began.shape == old.shape:
                old = old.where(~began, new)
        # A reward that is computed again for the same goal may be rounded differently.
        largest = torch.cat([old, new]).abs().nan_to_num(0.0).max()
        if not torch.isclose(new, old, rtol=0.0, atol=float(ROUNDING * largest), equal_nan=True).all():
            self._unchanged.clear()
            return
        self._unchanged[0] += int(differs.sum())
        if self._unchanged[0] >= UNCHANGED:
            self._unchanged.clear()
            logger.warning(
                "HindsightRelabel gave %d rows another %r and no reward has changed. If the reward depends on a goal "
                "in another entry, such as one in info, give HindsightRelabel a compute_reward= that reads the goal "
                "from its second argument.",
                UNCHANGED, self.desired_goal_key,
            )  # fmt: skip

    def _computing(self, achieved: Goals, desired: Goals, dims: int) -> _Functions:
        """Find what gives rewards and, if it does, flags: what is given, or the environment's own.

        Raises:
            EnvironmentFault: only the default reward is left, and it cannot compare such goals.
        """
        reward, terminated = (self._function(name) for name in ("compute_reward", "compute_terminated"))
        if reward is None:
            reward = DefaultReward()
            if (error := default_reward_error(form_of(achieved, dims), form_of(desired, dims))) is not None:
                raise EnvironmentFault(error)
        returns = {each.key: each.default_return for each in attached(self.storage) if isinstance(each, EpisodicReturn)}
        self._functions = reward, terminated, returns
        return self._functions

    def _function(self, name: str) -> Function | None:
        given = self._given[name]
        if given is not None and not isinstance(given, tuple):
            return GivenFunction(given)
        goals, called = (self._environment, name) if given is None else given
        method = None if goals is None else goals.find(called)
        function = None if method is None else EnvironmentFunction(method)
        # What is given is meant, whatever it looks at.
        return function if function is None or given is not None or function.depends_on_goals() else None

    def _layout(self, batch: TensorDictBase) -> tuple[NestedKey, NestedKey, bool]:
        """Return where achieved goals and rewards are, and whether the rows are time steps."""
        after = next_key(self.achieved_goal_key)
        if entry_of(batch, after) is not None:
            return after, self.reward_key, False
        own = self.reward_key if self.reward_key != TRANSITIONS.reward else TIME_STEPS.reward
        return self.achieved_goal_key, own, True

    def _check(self, batch: TensorDictBase) -> None:
        """Refuse functions that do not give stored steps what they have."""
        achieved_key, reward_key, time_steps = self._layout(batch)
        after = entry_of(batch, next_key(self.desired_goal_key))  # by which the environment has rewarded
        goals = _require(batch, self.desired_goal_key) if after is None else after
        achieved = self._goals(_require(batch, achieved_key))

        def seen(name: str) -> Tensor | None:
            return entry_of(batch, name if time_steps else next_key(name))

        env, position = self.episodes.steps_of(self.cells_of(batch).numpy().ravel())
        begin, _ = self.episodes.bounds(torch.from_numpy(env), torch.from_numpy(position), clip=False)
        # What a time step begins with was not earned.
        counts = torch.from_numpy(begin.numpy() < position) if time_steps else torch.ones(len(env), dtype=torch.bool)
        reward, terminated, _ = self._functions or self._computing(achieved, goals, batch.ndim)
        found = {"reward": (_require(batch, reward_key), reward)}
        if terminated is not None:
            ends = _require(batch, TIME_STEPS.terminated) == 0 if time_steps else _require(batch, TERMINATED)
            found["terminated"] = ends, terminated
        for what, (stored, function) in found.items():
            given = torch.as_tensor(function(achieved, goals, seen, batch.ndim))
            if given.numel() == stored.numel() == len(counts):
                check_recomputed(what, stored.flatten()[counts.to(stored.device)], given.flatten().cpu()[counts])

    def _goals(self, achieved: Goals) -> Goals:
        return achieved if self.goal is None else self.goal(achieved)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_functions": None}


def _apart(function: GoalFunction | None) -> Any:
    """Return a method of an environment as its name and what makes the environment, which copies can take along."""
    goals = None if function is None else EnvironmentGoals.of(function)
    return function if function is None or goals is None else (goals, function.__name__)


def _end_transitions(batch: TensorDictBase, rows: Tensor, ends: Tensor) -> None:
    terminated, done = (_rows(_require(batch, key), rows) for key in (TERMINATED, DONE))
    truncated = entry_of(batch, TRUNCATED)
    other = done & ~terminated if truncated is None else _rows(truncated, rows)
    _replace(batch, TERMINATED, rows, ends)
    _replace(batch, DONE, rows, _rows(_require(batch, TERMINATED), rows) | other)


def _end_time_steps(batch: TensorDictBase, rows: Tensor, ends: Tensor) -> None:
    """Let time steps end an episode where they terminate, and go on where they did and do not any more."""
    discount, kind = (_rows(_require(batch, key), rows) for key in (TIME_STEPS.terminated, TIME_STEPS.done))
    began = kind == FIRST
    ended = discount == 0
    now = ends.to(kind.device).bool().view(kind.shape) & ~began
    value = torch.where(now.view(discount.shape), 0.0, torch.where(ended, 1.0, discount))
    goes_on = torch.where((kind == LAST) & ended.view(kind.shape), MID, kind)
    _replace(batch, TIME_STEPS.terminated, rows, torch.where(began.view(discount.shape), discount, value))
    _replace(batch, TIME_STEPS.done, rows, torch.where(now, LAST, goes_on))


def _rows(entry: Any, rows: Tensor) -> Any:
    if isinstance(entry, Tensor):
        return entry.index_select(0, rows.to(entry.device))
    return entry[rows if entry.device is None else rows.to(entry.device)]


def _stored_goals(leaves: list[tuple[Path, Tensor]], key: NestedKey, cells: Tensor) -> Goals:
    """Read the goals of stored steps, a tensor or a TensorDict, from the leaves of their entry."""
    (path, leaf), *others = leaves
    if not others and (path[-1] == key or path == key):
        return leaf.index_select(0, cells.to(leaf.device))
    depth = len(path_of(key))
    return tensordict_of({path[depth:]: _rows(leaf, cells) for path, leaf in leaves}, cells.shape)


def _differ(own: Goals, goals: Goals) -> Tensor:
    """Return which rows have another goal, ``[n]``."""
    if isinstance(own, Tensor):
        differs = own.cpu() != goals.reshape(own.shape).to(own).cpu()
        return differs.reshape(len(own), -1).any(1)
    return torch.stack([_differ(own.get(key), goals.get(key)) for key in own.keys()]).any(0)  # noqa: SIM118


def _require(batch: TensorDictBase, key: NestedKey) -> Any:
    value = entry_of(batch, key)
    if value is None:
        raise KeyError(f"HindsightRelabel needs the entry {key!r}; the batch has {sorted(map(str, batch.keys(True)))}.")
    return value


def _replace(batch: TensorDictBase, key: NestedKey, rows: Tensor, values: Any) -> None:
    entry = _require(batch, key)
    if not isinstance(entry, Tensor):
        for name in keys_below(batch, key):
            _replace(batch, name, rows, entry_of(values, path_of(name)[len(path_of(key)) :]))
        return
    found = torch.as_tensor(values)
    shape = torch.Size([len(rows), *entry.shape[1:]])
    if found.numel() != shape.numel():
        raise ValueError(f"Entry {key!r} of the relabelled steps is {list(shape)}, got {list(found.shape)}.")
    # Another tensor, because a batch made by hand may be what is stored.
    batch.set(key, entry.index_copy(0, rows.to(entry.device), found.reshape(shape).to(entry)))
