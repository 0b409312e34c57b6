"""Hindsight experience replay: relabel sampled steps with goals achieved in the same episode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import DONE, NEXT, REWARD, TERMINATED, TRUNCATED
from torchrl_lightning._core.torchrl_compat import attached_entities
from torchrl_lightning._core.tree import (
    Path,
    entry_of,
    is_below,
    keys_below,
    nested_key,
    next_key,
    path_of,
    tensordict_of,
)
from torchrl_lightning._core.validators import Checked, boolean, fraction, one_of
from torchrl_lightning.environments.env_errors import EnvironmentFault
from torchrl_lightning.environments.goals import EnvironmentGoals, GoalFunction
from torchrl_lightning.episodic.episodic_return import EpisodicReturn
from torchrl_lightning.episodic.goal_functions import (
    DefaultReward,
    EnvironmentFunction,
    Goals,
    UserFunction,
    check_reproduced,
    default_reward_error,
    goal_spec,
)
from torchrl_lightning.episodic.time_steps import FIRST, LAST, MID, TIME_STEPS, TRANSITIONS
from torchrl_lightning.replay.episode_transform import EpisodeTransform

logger = logging.getLogger(__name__)
STRATEGIES = "future", "episode", "final"
UNCHANGED = 1000
"""Warn if this number of rows got a new goal, but all rewards stayed the same."""
ROUNDING = 1e-5
"""Tolerance for equal rewards, as a fraction of the largest reward."""
Function = EnvironmentFunction | UserFunction | DefaultReward
_Functions = tuple[Function, Function | None, dict[str, float]]
"""Function for rewards, function for termination flags (or None), and defaults of the stored returns by key."""


class HindsightRelabel(EpisodeTransform):
    """Replace goals of sampled steps by goals that were achieved in their episodes (Andrychowicz et al. 2017).

    Use it as ``transform=`` of an :class:`ExperienceBuffer` with a writer that tracks episodes. The transform changes
    sampled batches only and draws from the buffer's generator. It replaces the goal of some samples by the goal that
    was achieved after a step of the same episode, and recomputes the reward. The ``strategy`` selects this step among
    the stored steps of the episode. Samples are single steps ``[B]`` or windows ``[B, T]``. All steps of a window get
    the same goal. In windows, *future* selects the last step of the window or a later step. A window over two episodes
    keeps its goals.

    If the buffer has ``n_steps``, the transform reads the stored single steps of each return and recomputes their
    rewards. The return then ends at the step that ``compute_terminated`` marks. In a chain of transforms, this
    transform must be the first.

    The achieved goal is read under ``"next"``. Stored steps without this entry are time steps as in dm_env: their
    reward belongs to the previous step, and the achieved goal is read at the root.

    Rewards come from ``compute_reward`` of the environment or its wrappers. A DataModule passes this function with
    :meth:`use_environment`. Without a DataModule, pass ``compute_reward=env.unwrapped.compute_reward``. In batches 1,
    2, 4, 8 and so on, the transform checks that the function reproduces the stored rewards. It warns once if 1,000 rows
    got another goal and no reward has changed. The returns of relabelled steps are unknown, so a stored return
    (:class:`EpisodicReturn`) becomes ``default_return``.

    Args:
        her_proportion: probability of relabelling a sample.
        strategy: selects the step of the new goal. ``"future"`` draws uniformly from the sample's step to the last step
            of the episode, ``"episode"`` draws uniformly from the whole episode, and ``"final"`` takes the last step.
        skip_reached: keep the original goal of a sample if its new goal was already reached before the step. A goal is
            reached if the reward is at least the reward at the goal. For example, a block that is never touched is
            always at its achieved goal. Such samples would teach the policy not to touch the block (Manela and Biess
            2019).
        achieved_goal_key: key of the achieved goal.
        desired_goal_key: key of the desired goal. The goal under ``"next"`` is also replaced.
        reward_key: key of the reward; for time steps, the default is ``"reward"``.
        goal: converts achieved entries ``[n, ...]`` to goals, for example if the entries are complete observations.
        compute_reward: called as ``compute_reward(achieved, desired, info)`` with goals ``[n, ...]`` or
            ``[n, T, ...]``. A method of an environment gets arrays, or single steps if it is not vectorised. ``info``
            has the entries of the observation after the step. None uses the environment's method. Without this method,
            the reward is 0 within a distance of 0.05 and -1 otherwise. This default supports floating-point vectors
            and single numbers. Other goals, such as images, integers and nested entries, need a function.
        compute_terminated: a function with the same arguments for ``("next", "terminated")``. The transform also
            updates ``("next", "done")``. In time steps, it updates ``discount`` and ``step_type`` instead. None uses
            the environment's method if the method depends on goals. Otherwise, the stored flags remain. If episodes end
            at the goal, pass a function: with the stored flags, targets would bootstrap from a state after the goal.

    Raises:
        ValueError: ``her_proportion`` is not a probability, or the strategy is unknown. Sampling raises this error if
            the transform lacks a buffer, the writer does not track episodes, the single steps of n-step returns are not
            stored, a function returns a wrong number of values or does not reproduce the stored values, or the default
            reward cannot compare the goals.
        KeyError: a sampled batch or a stored step lacks an entry.

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
        functions = {"compute_reward": compute_reward, "compute_terminated": compute_terminated}
        self._user_functions = {name: _to_copyable(function) for name, function in functions.items()}
        self._environment: EnvironmentGoals | None = None
        self._functions: _Functions | None = None  # set on first use
        self._unchanged: list[int] = [0]  # [rows with a new goal and the same reward]; the check empties the list
        # [number of batches, number of the next batch to check]: a list, because setting a module's attribute is slow.
        self._batches = [0, 1]

    def incompatibility(self, specs: Any, learner: Any = None) -> str | None:
        """Return an error message if goals of an environment with these specs cannot be relabelled, else None."""
        available = specs.keys
        for name, key in (("achieved_goal_key", self.achieved_goal_key), ("desired_goal_key", self.desired_goal_key)):
            if not any(is_below(entry, key) for entry in available):
                return (
                    f"{name} must be an entry of the observations, {', '.join(map(str, available))}, got {key!r}. Use "
                    "an environment with goals, such as env=robotics, or other data, such as data=uniform."
                )
        keys = [self.desired_goal_key] if self.goal is not None else [self.achieved_goal_key, self.desired_goal_key]
        leaves = [specs.observation[key] if key in available else None for key in keys]
        error = default_reward_error(*(None if leaf is None else (leaf.shape, leaf.dtype) for leaf in leaves))
        if error is None or not self.her_proportion or self._find_function("compute_reward") is not None:
            return None
        return error

    def use_environment(self, goals: EnvironmentGoals) -> None:
        """Use an environment's functions in place of missing user functions; a DataModule calls this method."""
        self._environment, self._functions = goals, None

    def draw(self, count: int) -> Tensor:
        """Return ``count`` uniform random numbers in [0, 1).

        The transform first draws a number for each sample. Unless the strategy is ``"final"``, it then draws a number
        for each relabelled sample.
        """
        rng = self.storage.generator
        return torch.rand(count, dtype=torch.float64, generator=rng, device="cpu" if rng is None else rng.device).cpu()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Relabel a batch; it needs an entry ``index``, ``[B]`` or ``[B, T]``."""
        episodes = self.episodes
        is_folded = "steps_to_next_obs" in tensordict  # n-step returns
        index = self.cells_of(tensordict)
        cell_rows = index.numpy().reshape(len(tensordict), -1)
        (first_env, first), (env, last) = episodes.steps_of(cell_rows[:, 0]), episodes.steps_of(cell_rows[:, -1])
        begin, end = (bound.numpy() for bound in episodes.bounds(torch.from_numpy(env), torch.from_numpy(last)))
        is_one_episode = (first_env == env) & (begin <= first) & (first <= last)
        batches = self._batches
        batches[0] += 1
        if batches[0] == batches[1] and self.her_proportion:
            batches[1] *= 2
            steps = self._single_steps(tensordict, index).set("index", index) if is_folded else tensordict
            self._check_functions(steps)
        rows = np.flatnonzero((self.draw(len(cell_rows)).numpy() < self.her_proportion) & is_one_episode)
        if len(rows):
            env, goal_position = env[rows], end[rows]
            if self.strategy != "final":
                earliest = (last if self.strategy == "future" else begin)[rows]
                distance = goal_position - earliest
                drawn = np.minimum(self.draw(len(rows)).numpy() * (distance + 1), distance)
                goal_position = earliest + drawn.astype(np.int64)
            chosen_rows, goal_cells = torch.from_numpy(rows), torch.from_numpy(episodes.cells_of(env, goal_position))
            if self.skip_reached:
                is_new = ~self._already_reached(tensordict, chosen_rows, goal_cells)
                chosen_rows, goal_cells = chosen_rows[is_new], goal_cells[is_new]
            if len(chosen_rows):
                (self._relabel_folded if is_folded else self._relabel)(tensordict, chosen_rows, goal_cells)
        return tensordict

    def _already_reached(self, batch: TensorDictBase, rows: Tensor, cells: Tensor) -> Tensor:
        """Return a mask ``[n]`` of the samples that had already reached their new goal before the step."""
        key, *_ = self._read_layout(batch)
        goals = self._to_goals(_stored_goals(self.storage.leaves(key), key, cells))

        def select_first(entry: Tensor) -> Tensor:
            return _select_rows(entry, rows)[:, 0] if batch.ndim > 1 else _select_rows(entry, rows)

        def lookup(name: str) -> Tensor | None:
            entry = entry_of(batch, name)
            return None if entry is None else select_first(entry)

        achieved = self._to_goals(select_first(_get_entry(batch, self.achieved_goal_key)))
        reward, *_ = self._functions or self._select_functions(achieved, goals, 1)
        current_reward = torch.as_tensor(reward(achieved, goals, lookup, 1))
        goal_reward = torch.as_tensor(reward(goals, goals, lookup, 1))
        return (current_reward >= goal_reward).reshape(len(rows)).cpu()

    def _single_steps(self, batch: TensorDictBase, cells: Tensor) -> TensorDictBase:
        """Read the single steps of a batch of n-step returns."""
        single = self.storage.get(cells)
        if "steps_to_next_obs" in single or self._read_layout(batch)[1:] != (REWARD, False):
            raise ValueError(
                "HindsightRelabel needs the single steps of n-step rewards. Store transitions with "
                f"{REWARD!r} and set n_steps of the buffer, or sample with n_steps=1."
            )
        return single

    def _relabel_folded(self, batch: TensorDictBase, rows: Tensor, cells: Tensor) -> None:
        """Relabel all steps of n-step returns, and compute the returns again."""
        entries = self.cells_of(batch), batch["steps_to_next_obs"], batch["gamma"]
        index, steps, gamma = (_select_rows(entry, rows).flatten().cpu() for entry in entries)
        offsets, discount = torch.arange(int(steps.max())), gamma.double() ** (1 / steps)
        env, position = self.episodes.steps_of(index.numpy())
        positions = position[:, None] + torch.minimum(offsets, steps[:, None] - 1).numpy()
        single_steps = self._single_steps(batch, torch.from_numpy(self.episodes.cells_of(env[:, None], positions)))
        all_rows = torch.arange(len(index))
        self._relabel(single_steps, all_rows, cells.repeat_interleave(len(index) // len(rows)))
        if (terminated := entry_of(single_steps, TERMINATED)) is not None:
            terminations = terminated.reshape(*single_steps.shape, -1).any(-1).cpu()
            steps = torch.where(terminations.any(1), 1 + terminations.int().argmax(1), steps)
        first_step, last_step = single_steps[:, 0], single_steps[all_rows, steps - 1]
        rewards, weights = (
            single_steps[REWARD],
            torch.where(offsets < steps[:, None], discount[:, None] ** offsets, 0.0),
        )
        weights = weights.to(rewards.device).view(*weights.shape, *[1] * (rewards.ndim - 2))
        last_step.set(REWARD, (weights * rewards).sum(1).to(rewards.dtype))
        assert self._functions is not None  # set by _relabel
        for key in (self.desired_goal_key, *self._functions[2]):
            if entry_of(batch, key) is not None:
                _replace(batch, key, rows, entry_of(first_step, key))
        for key in keys_below(last_step, NEXT):
            _replace(batch, key, rows, entry_of(last_step, key))
        _replace(batch, "steps_to_next_obs", rows, steps)
        _replace(batch, "gamma", rows, discount**steps)

    def _relabel(self, batch: TensorDictBase, rows: Tensor, cells: Tensor) -> None:
        achieved_key, reward_key, time_steps = self._read_layout(batch)
        goals = self._to_goals(_stored_goals(self.storage.leaves(achieved_key), achieved_key, cells))
        achieved = self._to_goals(_select_rows(_get_entry(batch, achieved_key), rows))
        steps = achieved.shape[: batch.ndim]  # [n] or [n, T]
        if batch.ndim > 1:
            goals = goals.unsqueeze(1).expand(*steps, *goals.shape[1:])

        def lookup(name: str) -> Tensor | None:
            entry = entry_of(batch, name if time_steps else next_key(name))
            return None if entry is None else _select_rows(entry, rows)

        reward, terminated, default_returns = self._functions or self._select_functions(achieved, goals, len(steps))
        old_goals = old_rewards = None
        if self._unchanged:
            old_goals, old_rewards = entry_of(batch, self.desired_goal_key), entry_of(batch, reward_key)
        _replace(batch, self.desired_goal_key, rows, goals)
        if entry_of(batch, next_key(self.desired_goal_key)) is not None:
            _replace(batch, next_key(self.desired_goal_key), rows, goals)
        _replace(batch, reward_key, rows, reward(achieved, goals, lookup, len(steps)))
        if self._unchanged:
            assert old_rewards is not None
            self._count_unchanged(batch, rows, old_goals, old_rewards, reward_key)
        for key, value in default_returns.items():
            if (returns := entry_of(batch, key)) is not None:
                batch.set(key, returns.index_fill(0, rows.to(returns.device), value))
        if terminated is not None:
            terminations = torch.as_tensor(terminated(achieved, goals, lookup, len(steps)))
            (_end_time_steps if time_steps else _end_transitions)(batch, rows, terminations)

    def _count_unchanged(self, batch: TensorDictBase, rows: Tensor, goals: Goals, rewards: Tensor, key: Any) -> None:
        """Count rows with a new goal; warn once if many goals have changed, but no reward.

        Args:
            batch: the relabelled batch.
            rows: indices of the relabelled rows.
            goals: the goals before relabelling.
            rewards: the rewards before relabelling.
            key: the key of the rewards.
        """
        new_goals = _get_entry(batch, self.desired_goal_key)
        differs = _differing_rows(_select_rows(goals, rows), _select_rows(new_goals, rows))
        old, new = (_select_rows(entry, rows).double().cpu().reshape(len(rows), -1) for entry in (rewards, batch[key]))
        step_types = entry_of(batch, TIME_STEPS.done)
        if key == TIME_STEPS.reward and step_types is not None:  # the first time step has no reward
            is_first = (_select_rows(step_types, rows) == FIRST).cpu().reshape(len(rows), -1)
            if is_first.shape == old.shape:
                old = old.where(~is_first, new)
        # A recomputed reward may be rounded differently.
        largest = torch.cat([old, new]).abs().nan_to_num(0.0).max()
        if not torch.isclose(new, old, rtol=0.0, atol=float(ROUNDING * largest), equal_nan=True).all():
            self._unchanged.clear()
            return
        self._unchanged[0] += int(differs.sum())
        if self._unchanged[0] >= UNCHANGED:
            self._unchanged.clear()
            logger.warning(
                "HindsightRelabel gave %d rows another %r and no reward has changed. If the reward depends on a goal "
                "in another entry, for example in info, pass compute_reward= that reads the goal from its second "
                "argument.",
                UNCHANGED, self.desired_goal_key,
            )  # fmt: skip

    def _select_functions(self, achieved: Goals, desired: Goals, dims: int) -> _Functions:
        """Select the functions for rewards and flags: the user's, else the environment's.

        Raises:
            EnvironmentFault: only the default reward is available, and it cannot compare these goals.
        """
        reward, terminated = (self._find_function(name) for name in ("compute_reward", "compute_terminated"))
        if reward is None:
            reward = DefaultReward()
            if (error := default_reward_error(goal_spec(achieved, dims), goal_spec(desired, dims))) is not None:
                raise EnvironmentFault(error)
        writers = [part for part in attached_entities(self.storage) if isinstance(part, EpisodicReturn)]
        self._functions = reward, terminated, {writer.key: writer.default_return for writer in writers}
        return self._functions

    def _find_function(self, name: str) -> Function | None:
        user_function = self._user_functions[name]
        if user_function is not None and not isinstance(user_function, tuple):
            return UserFunction(user_function)
        goals, method_name = (self._environment, name) if user_function is None else user_function
        method = None if goals is None else goals.find(method_name)
        function = None if method is None else EnvironmentFunction(method)
        # Always use a function of the user, even if it ignores the goals.
        return function if function is None or user_function is not None or function.depends_on_goals() else None

    def _read_layout(self, batch: TensorDictBase) -> tuple[NestedKey, NestedKey, bool]:
        """Return the keys of achieved goals and rewards, and True if the rows are time steps."""
        next_achieved_key = next_key(self.achieved_goal_key)
        if entry_of(batch, next_achieved_key) is not None:
            return next_achieved_key, self.reward_key, False
        reward_key = self.reward_key if self.reward_key != TRANSITIONS.reward else TIME_STEPS.reward
        return self.achieved_goal_key, reward_key, True

    def _check_functions(self, batch: TensorDictBase) -> None:
        """Validate that the functions reproduce the stored rewards and flags; raise EnvironmentFault otherwise."""
        achieved_key, reward_key, time_steps = self._read_layout(batch)
        next_goals = entry_of(batch, next_key(self.desired_goal_key))  # the goals of the stored rewards
        goals = _get_entry(batch, self.desired_goal_key) if next_goals is None else next_goals
        achieved = self._to_goals(_get_entry(batch, achieved_key))

        def lookup(name: str) -> Tensor | None:
            return entry_of(batch, name if time_steps else next_key(name))

        env, position = self.episodes.steps_of(self.cells_of(batch).numpy().ravel())
        begin, _ = self.episodes.bounds(torch.from_numpy(env), torch.from_numpy(position), clip=False)
        # The reward of an episode's first time step belongs to no action.
        has_reward = torch.ones(len(env), dtype=torch.bool)
        if time_steps:
            has_reward = torch.from_numpy(begin.numpy() < position)
        reward, terminated, _ = self._functions or self._select_functions(achieved, goals, batch.ndim)
        checks = {"reward": (_get_entry(batch, reward_key), reward)}
        if terminated is not None:
            terminations = (
                _get_entry(batch, TIME_STEPS.terminated) == 0 if time_steps else _get_entry(batch, TERMINATED)
            )
            checks["terminated"] = terminations, terminated
        for quantity, (stored, function) in checks.items():
            computed = torch.as_tensor(function(achieved, goals, lookup, batch.ndim))
            if computed.numel() == stored.numel() == len(has_reward):
                expected = stored.flatten()[has_reward.to(stored.device)]
                check_reproduced(quantity, expected, computed.flatten().cpu()[has_reward])

    def _to_goals(self, achieved: Goals) -> Goals:
        return achieved if self.goal is None else self.goal(achieved)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_functions": None}


def _to_copyable(function: GoalFunction | None) -> Any:
    """Return an environment's method as a copyable pair (EnvironmentGoals, name); return other functions unchanged."""
    goals = None if function is None else EnvironmentGoals.of(function)
    return function if function is None or goals is None else (goals, function.__name__)


def _end_transitions(batch: TensorDictBase, rows: Tensor, terminations: Tensor) -> None:
    terminated, done = (_select_rows(_get_entry(batch, key), rows) for key in (TERMINATED, DONE))
    truncated = entry_of(batch, TRUNCATED)
    other_ends = done & ~terminated if truncated is None else _select_rows(truncated, rows)
    _replace(batch, TERMINATED, rows, terminations)
    _replace(batch, DONE, rows, _select_rows(_get_entry(batch, TERMINATED), rows) | other_ends)


def _end_time_steps(batch: TensorDictBase, rows: Tensor, terminations: Tensor) -> None:
    """Write LAST and discount 0 to terminated steps, and MID and discount 1 to steps that no longer terminate."""
    keys = TIME_STEPS.terminated, TIME_STEPS.done
    discount, step_type = (_select_rows(_get_entry(batch, key), rows) for key in keys)
    is_first = step_type == FIRST
    was_terminated = discount == 0
    is_terminated = terminations.to(step_type.device).bool().view(step_type.shape) & ~is_first
    new_discount = torch.where(is_terminated.view(discount.shape), 0.0, torch.where(was_terminated, 1.0, discount))
    other_step_type = torch.where((step_type == LAST) & was_terminated.view(step_type.shape), MID, step_type)
    _replace(batch, TIME_STEPS.terminated, rows, torch.where(is_first.view(discount.shape), discount, new_discount))
    _replace(batch, TIME_STEPS.done, rows, torch.where(is_terminated, LAST, other_step_type))


def _select_rows(entry: Any, rows: Tensor) -> Any:
    if isinstance(entry, Tensor):
        return entry.index_select(0, rows.to(entry.device))
    return entry[rows if entry.device is None else rows.to(entry.device)]


def _stored_goals(leaves: list[tuple[Path, Tensor]], key: NestedKey, cells: Tensor) -> Goals:
    """Return the goals of stored steps as a tensor or, if nested, as a TensorDict."""
    (path, leaf), *others = leaves
    if not others and (path[-1] == key or path == key):
        return leaf.index_select(0, cells.to(leaf.device))
    depth = len(path_of(key))
    return tensordict_of({path[depth:]: _select_rows(leaf, cells) for path, leaf in leaves}, cells.shape)


def _differing_rows(old: Goals, new: Goals) -> Tensor:
    """Return a mask of the rows with different goals, ``[n]``."""
    if isinstance(old, Tensor):
        differs = old.cpu() != new.reshape(old.shape).to(old).cpu()
        return differs.reshape(len(old), -1).any(1)
    return torch.stack([_differing_rows(old.get(key), new.get(key)) for key in old.keys()]).any(0)  # noqa: SIM118


def _get_entry(batch: TensorDictBase, key: NestedKey) -> Any:
    value = entry_of(batch, key)
    if value is None:
        raise KeyError(f"The batch must have the entry {key!r}, got {sorted(map(str, batch.keys(True)))}.")
    return value


def _replace(batch: TensorDictBase, key: NestedKey, rows: Tensor, values: Any) -> None:
    entry = _get_entry(batch, key)
    if not isinstance(entry, Tensor):
        for name in keys_below(batch, key):
            _replace(batch, name, rows, entry_of(values, path_of(name)[len(path_of(key)) :]))
        return
    new_values = torch.as_tensor(values)
    shape = torch.Size([len(rows), *entry.shape[1:]])
    if new_values.numel() != shape.numel():
        raise ValueError(f"The new values of {key!r} must have the shape {list(shape)}, got {list(new_values.shape)}.")
    # Write to a new tensor, because a batch built by hand may share memory with the storage.
    batch.set(key, entry.index_copy(0, rows.to(entry.device), new_values.reshape(shape).to(entry)))
