"""Random operations on a replay buffer and on plain lists of its steps.

The lists store the borders of trajectories independently. After each operation everything that the buffer derives is
compared with them: episodes, n-step returns, episodic returns, stacks, goals, windows, priorities.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from kit.replay_settings import DEFAULT, GAMMA, NO_GOAL, STACK, Lane, Settings, Step, picture
from torchrl_lightning.replay import sequences


class Twin:
    """A buffer and plain lists of its steps. Each operation is applied to both.

    Args:
        settings: The settings of the buffer.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.rng = settings, random.Random(f"operations {settings.seed}")
        self.buffer = settings.build()
        self.lanes = [Lane() for _ in range(settings.num_envs)]
        self.trajectories = self.labels = self.serial = 0
        self.has_matched = False  # True if a successor that differs means a cut
        self.late: list[tuple[TensorDictBase, list[tuple[int, int, int]]]] = []  # batches, and their steps
        self.highest = 1.0

    # ------------------------------------------------------------------ episodes, by looking

    def borders(self, lane: Lane) -> list[int]:
        """Return the positions at which episodes begin."""
        found = [0]
        for p in range(1, len(lane.steps)):
            before, step = lane.steps[p - 1], lane.steps[p]
            by_id = self.settings.seams == "ids" and before.label != step.label and p > lane.oldest
            if before.done or step.init or step.cut or by_id:
                found.append(p)
        return found

    def episode(self, lane: Lane, p: int) -> tuple[int, int]:
        """Return the first and last position of the episode of a step."""
        borders = self.borders(lane)
        begin = max(border for border in borders if border <= p)
        return begin, min([border for border in borders if border > p] + [len(lane.steps)]) - 1

    # ------------------------------------------------------------------ operations

    def restart(self, lane: Lane, *, from_zero: bool = False) -> None:
        """Begin another trajectory."""
        lane.trajectory, lane.time = self.trajectories, 0
        self.trajectories += 1
        if from_zero and lane.steps:
            lane.label = lane.steps[-1].label  # a new collector starts to count again
        else:
            self.labels += 1
            lane.label = self.labels

    def write(self) -> None:
        """Write steps of some environments. Some environments restart first, or between the steps."""
        settings, rng = self.settings, self.rng
        envs = sorted(rng.sample(range(settings.num_envs), rng.randint(1, settings.num_envs)))
        count, rows, written = rng.choice((1, 1, 2, 3, 5)), [], {env: [] for env in envs}
        for t in range(count):
            for env in envs:
                lane = self.lanes[env]
                begins = lane.trajectory < 0 or (bool(lane.steps or t) and lane.time == 0)
                may_cut = t == 0 or settings.seams != "successor"
                if lane.trajectory < 0 or (may_cut and lane.time and rng.random() < 0.15):
                    self.restart(lane, from_zero=lane.reloaded and t == 0)
                    begins = True
                ended = rng.choice(("no", "no", "no", "terminated", "truncated"))
                reward = -1.0 if settings.extra == "hindsight" else float(rng.randint(-3, 3))
                init = settings.seams == "init" and begins
                self.serial += 1
                step = Step(
                    lane.trajectory, lane.time, reward, ended != "no", ended == "terminated", init, lane.label,
                    serial=self.serial,
                )  # fmt: skip
                lane.time += 1
                written[env].append(step)
                rows.append(step)
                if step.done:
                    self.restart(lane)
        self.append(written)
        self.buffer.extend(self.rows(rows).view(count, len(envs)), torch.tensor(envs), time_dim=0)

    def append(self, written: dict[int, list[Step]]) -> None:
        """Add steps to the lists, with the cuts that the writer has to find."""
        by_successor = self.settings.seams == "successor"
        pairs = [(a, b) for steps in written.values() for a, b in pairwise(steps) if not a.done]
        joined = [a.trajectory == b.trajectory for a, b in pairs if not b.init]
        inside = self.has_matched or (bool(joined) and self.settings.seams != "init")
        boundary = False
        for env, steps in written.items():
            lane, first = self.lanes[env], steps[0]
            if lane.stored and not lane.steps[-1].done and not lane.pending_cut and not first.init:
                continues = lane.steps[-1].trajectory == first.trajectory
                boundary |= continues
                first.cut = by_successor and inside and not continues
                if self.settings.seams == "ids" and lane.reloaded and inside:
                    first.cut = not continues
            first.cut |= lane.pending_cut and not first.init  # the flag replaces a cut
            lane.pending_cut = lane.reloaded = False
            for step in steps:
                step.priority = max(1.0, self.highest)
                lane.steps.append(step)
            lane.oldest = max(lane.oldest, len(lane.steps) - self.settings.length)
        self.has_matched = inside or (by_successor and boundary)

    def cut(self) -> None:
        """End the running episodes of some environments."""
        env = self.rng.randrange(self.settings.num_envs)
        self.buffer.writer.cut(torch.tensor([env]))
        lane = self.lanes[env]
        if lane.steps and not lane.steps[-1].done:
            lane.pending_cut = True
        if self.rng.random() < 0.7:
            self.restart(lane)

    def drop(self) -> None:
        """Remove some or all steps of some environments."""
        envs = sorted(self.rng.sample(range(self.settings.num_envs), self.rng.randint(1, self.settings.num_envs)))
        most = min(len(self.lanes[env].stored) for env in envs)
        count = self.rng.randint(1, most) if most and self.rng.random() < 0.8 else None
        self.buffer.writer.drop(count, torch.tensor(envs))
        for env in envs:
            lane = self.lanes[env]
            lane.oldest = len(lane.steps) if count is None else lane.oldest + count
            if count is None:
                self.buffer.writer.cut(torch.tensor([env]))
                lane.pending_cut = bool(lane.steps) and not lane.steps[-1].done

    def empty(self) -> None:
        """Empty the buffer and the lists."""
        self.buffer.empty()
        self.lanes = [Lane() for _ in self.lanes]
        self.highest, self.late = 1.0, []

    def load(self) -> None:
        """Load the state into another buffer, compare the next samples of both, and continue with it."""
        other = self.settings.build()
        other.load_state_dict(self.buffer.state_dict())
        if len(self.buffer):
            batches = []
            for buffer in (self.buffer, other):
                try:
                    batches.append(buffer.sample(8))
                except (RuntimeError, ValueError) as error:
                    batches.append(str(error))
            one, two = batches
            assert one == two if isinstance(one, str) else (one == two).all()
        self.buffer = other
        for lane in self.lanes:
            lane.reloaded = True
        if self.settings.seams == "ids" and self.rng.random() < 0.5:
            for lane in self.lanes:
                if lane.trajectory >= 0:
                    self.restart(lane, from_zero=True)

    def late_flags(self) -> None:
        """Replace flags or rewards of stored steps."""
        env = self.rng.randrange(self.settings.num_envs)
        lane = self.lanes[env]
        if not lane.stored:
            return
        chosen = sorted(self.rng.sample(list(lane.stored), min(len(lane.stored), self.rng.randint(1, 3))))
        cells = self.buffer.writer.cell(torch.full((len(chosen),), env), torch.tensor(chosen))
        kind = self.rng.choice(("done", "done", "terminated", "init", "reward"))
        storage = self.buffer.storage
        values: list[bool | float] = [self.rng.random() < 0.6 for _ in chosen]
        if kind in ("done", "terminated"):
            for p, value in zip(chosen, values, strict=True):
                self.change_done(lane, p, bool(value), kind == "terminated")
            flags = {
                "done": [lane.steps[p].done for p in chosen],
                "terminated": [lane.steps[p].terminated for p in chosen],
            }
            for name, column in flags.items():
                storage.write_entry(("next", name), cells, torch.tensor(column).view(-1, 1))
        elif kind == "init" and self.settings.seams == "init":
            for p, value in zip(chosen, values, strict=True):
                lane.steps[p].init = bool(value)
                if value and p > lane.oldest:
                    lane.steps[p].cut = False
            storage.write_entry("is_init", cells, torch.tensor(values).view(-1, 1))
        elif kind == "reward" and self.settings.extra != "hindsight":
            rewards = [float(self.rng.randint(-3, 3)) for _ in chosen]
            for p, reward in zip(chosen, rewards, strict=True):
                lane.steps[p].reward = reward
            if self.settings.extra == "frames" or self.rng.random() < 0.5:
                storage.write_entry(("next", "reward"), cells, torch.tensor(rewards).view(-1, 1))
            else:
                self.buffer[cells] = (
                    storage.get(cells).clone().set(("next", "reward"), torch.tensor(rewards).view(-1, 1))
                )

    def change_done(self, lane: Lane, p: int, value: bool, terminated: bool) -> None:
        """Set a flag of the lists. A new end replaces a cut."""
        step, is_last = lane.steps[p], p + 1 == len(lane.steps)
        if value and is_last:
            lane.pending_cut = False
        elif value:
            lane.steps[p + 1].cut = False
        step.done, step.terminated = value, value and terminated

    def priorities(self) -> None:
        """Update the priorities of an earlier batch. Only steps that are still stored change."""
        if not self.late or "prioritized" not in self.settings.sampler:
            return
        batch, drawn = self.late.pop(self.rng.randrange(len(self.late)))
        values = [float(self.rng.randint(1, 4)) for _ in drawn]
        errors = torch.tensor(values).view(-1, *[1] * (batch.ndim - 1)).expand(batch.shape)
        self.buffer.update_tensordict_priority(batch.set("td_error", errors))
        for (env, position, serial), value in zip(drawn, values, strict=True):
            lane = self.lanes[env]
            if position in lane.stored and lane.steps[position].serial == serial:
                lane.steps[position].priority = value
                self.highest = max(self.highest, value)

    def run(self, operations: int = 30) -> None:
        """Apply random operations, and compare after each."""
        weights = {
            self.write: 12, self.cut: 2, self.drop: 3, self.empty: 0.4, self.load: 2, self.late_flags: 4,
            self.priorities: 3,
        }  # fmt: skip
        for operation in self.rng.choices(list(weights), list(weights.values()), k=operations):
            operation()
            self.check()

    # ------------------------------------------------------------------ rows

    def rows(self, steps: list[Step]) -> TensorDict:
        """Build the rows of steps, ``[n]``."""

        def column(values: list[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).view(-1, 1)

        now, after = column([step.value for step in steps]), column([step.value + 1 for step in steps])
        rows: dict[str, Any] = {"state": now, "serial": torch.tensor([step.serial for step in steps])}
        following: dict[str, Any] = {
            "state": after,
            "reward": column([step.reward for step in steps]),
            "done": column([step.done for step in steps], torch.bool),
            "terminated": column([step.terminated for step in steps], torch.bool),
        }
        if self.settings.seams == "ids":
            rows["collector"] = {"traj_ids": torch.tensor([step.label for step in steps])}
        if self.settings.seams == "init":
            rows["is_init"] = column([step.init for step in steps], torch.bool)
        if self.settings.extra == "hindsight":
            rows |= {"achieved_goal": now.clone(), "desired_goal": torch.full_like(now, NO_GOAL)}
            following |= {"achieved_goal": after.clone(), "desired_goal": torch.full_like(now, NO_GOAL)}
        if self.settings.extra == "stack":
            rows["picture"], following["picture"] = picture(now), picture(after)
        if self.settings.extra == "frames":
            rows["picture"] = torch.cat([picture(column(self.recipe_stack(step, 0))) for step in steps])
            following["picture"] = torch.cat([picture(column(self.recipe_stack(step, 1))) for step in steps])
            for level in (rows, following):
                level["picture"] = level["picture"].view(len(steps), STACK, 4, 4)
        data = TensorDict({**rows, "next": following}, [len(steps)])
        if self.settings.extra == "returns":
            data = self.settings.returns_of(self.buffer).with_default(data)
        return data

    @staticmethod
    def recipe_stack(step: Step, ahead: int) -> list[float]:
        """Return the newest frames of an environment at a step."""
        return [100.0 * step.trajectory + max(0, step.time + ahead - back) for back in reversed(range(STACK))]

    # ------------------------------------------------------------------ comparison

    def check(self) -> None:
        """Compare every stored step, and a sample."""
        buffer, writer = self.buffer, self.buffer.writer
        stored = [(env, p) for env, lane in enumerate(self.lanes) for p in lane.stored]
        assert len(buffer) == len(stored)
        assert writer.positions.tolist() == [len(lane.steps) for lane in self.lanes]
        if not stored:
            return
        env, position = torch.tensor(stored).unbind(1)
        bounds = [self.episode(self.lanes[e], p) for e, p in stored]
        assert writer.index.begin(env, position).tolist() == [
            max(begin, self.lanes[e].oldest) for (e, _), (begin, _) in zip(stored, bounds, strict=True)
        ]
        assert writer.index.end(env, position).tolist() == [end for _, end in bounds]
        cells = writer.cell(env, position)
        data = buffer.storage.get(cells)
        assert data["serial"].tolist() == [self.lanes[e].steps[p].serial for e, p in stored]
        assert data["state"].flatten().tolist() == [self.lanes[e].steps[p].value for e, p in stored]
        if self.settings.extra == "returns":
            expected = [self.discounted(self.lanes[e], p) for e, p in stored]
            assert data["discounted_return"].flatten().tolist() == expected
        if "prioritized" in self.settings.sampler:
            self.check_priorities(cells, stored)
        self.check_sample()

    def discounted(self, lane: Lane, p: int) -> float:
        """Return the return of a step, or the default if its episode has not ended."""
        _, end = self.episode(lane, p)
        total, factor = 0.0, 1.0
        for step in lane.steps[p : end + 1]:
            total += factor * step.reward
            factor *= GAMMA
            if step.terminated:
                return total if lane.steps[end].done else DEFAULT
        return DEFAULT

    def check_priorities(self, cells: torch.Tensor, stored: list[tuple[int, int]]) -> None:
        sampler: Any = self.buffer.sampler
        table = getattr(sampler, "prioritized", sampler).table
        assert table.priorities[cells].tolist() == [self.lanes[e].steps[p].priority for e, p in stored]
        assert int((table.priorities >= 0).sum()) == len(stored)

    def windows(self, steps: int, kind: str) -> dict[tuple[int, int], int]:
        """Return the steps at which windows may begin, and their numbers of steps."""
        found = {}
        for env, lane in enumerate(self.lanes):
            for p in lane.stored:
                last = self.episode(lane, p)[1] if kind in ("inside", "pad") else len(lane.steps) - 1
                count = min(steps, last - p + 1)
                if count == steps or kind == "pad":
                    found[env, p] = count
        return found

    def check_sample(self) -> None:
        """Compare a sample with the allowed steps."""
        sampler: Any = self.buffer.sampler
        length = getattr(sampler, "batch_length", None) or 1
        allowed = self.windows(length, self.settings.sampler)
        count = sum(len(lane.stored) for lane in self.lanes) if self.settings.sampler == "distinct" else 12
        if not allowed:
            try:
                self.buffer.sample(count)
            except ValueError as error:
                assert "batch_length" in str(error)  # noqa: PT017
                return
            raise AssertionError("a window was drawn, and there is none")
        batch = self.buffer.sample(count)
        places = dict(zip(*self.cells(), strict=True))
        drawn = [[places.get(cell) for cell in row] for row in batch["index"].view(count, -1).tolist()]
        starts = [row[0] for row in drawn]
        assert None not in [place for row in drawn for place in row], "a step was drawn that is not stored"
        assert set(starts) <= set(allowed)
        if self.settings.sampler == "distinct":
            assert len(set(starts)) == count
        for row in drawn:
            env, begin = row[0]
            steps = [(env, min(begin + t, begin + allowed[env, begin] - 1)) for t in range(length)]
            assert row == steps, "a window has gaps"
        self.check_rows(batch, drawn)
        if self.settings.sampler.startswith("prioritized") and self.rng.random() < 0.5:
            self.late.append((batch.clone(), [(e, p, self.lanes[e].steps[p].serial) for e, p in starts]))

    def cells(self) -> tuple[list[int], list[tuple[int, int]]]:
        stored = [(env, p) for env, lane in enumerate(self.lanes) for p in lane.stored]
        env, position = torch.tensor(stored).unbind(1)
        return self.buffer.writer.cell(env, position).tolist(), stored

    def check_rows(self, batch: TensorDictBase, drawn: list[list[tuple[int, int]]]) -> None:
        """Compare the entries of each sampled step."""
        flat = batch.reshape(-1) if batch.ndim > 1 else batch
        after = flat["next", "state"].flatten().tolist()
        rewards = flat["next", "reward"].flatten().tolist()
        taken = flat["steps_to_next_obs"].tolist() if self.settings.n_steps > 1 else [1] * len(after)
        for row, place in enumerate(place for window in drawn for place in window):
            lane, p = self.lanes[place[0]], place[1]
            begin, end = self.episode(lane, p)
            count = min(self.settings.n_steps, end - p + 1)
            last = lane.steps[p + count - 1]
            assert taken[row] == count, (taken[row], count)
            assert after[row] == last.value + 1
            assert bool(flat["next", "done"][row]) == last.done or self.settings.extra == "hindsight"
            if self.settings.extra != "hindsight":
                total = sum(GAMMA**i * step.reward for i, step in enumerate(lane.steps[p : p + count]))
                assert math.isclose(rewards[row], total, abs_tol=1e-5)
            if self.settings.extra == "stack":
                self.check_stack(flat[row], lane, max(begin, lane.oldest), p, last)
            if self.settings.extra == "frames":
                step = lane.steps[p]
                now = picture(torch.tensor(self.recipe_stack(step, 0)).view(-1, 1))
                then = picture(torch.tensor(self.recipe_stack(last, 1)).view(-1, 1))
                assert flat["picture"][row].equal(now)
                assert flat["next", "picture"][row].equal(then)
        if self.settings.extra == "hindsight":
            self.check_goals(flat, drawn)

    def check_stack(self, row: TensorDictBase, lane: Lane, first: int, p: int, last: Step) -> None:
        values = [lane.steps[max(first, p - back)].value for back in reversed(range(STACK))]
        assert row["picture"].equal(picture(torch.tensor(values).view(-1, 1)))
        at = lane.steps.index(last)
        values = [*(lane.steps[max(first, at - back)].value for back in reversed(range(STACK - 1))), last.value + 1]
        assert row["next", "picture"].equal(picture(torch.tensor(values).view(-1, 1)))

    def check_goals(self, flat: TensorDictBase, drawn: list[list[tuple[int, int]]]) -> None:
        """Compare goals: a window has one goal.

        The window's episode achieves it at the last step of the window or later. A window across
        episodes keeps its goal.
        """
        length = len(drawn[0])
        goals = flat["desired_goal"].view(-1, length).tolist()
        for window, goal in zip(drawn, goals, strict=True):
            lane = self.lanes[window[0][0]]
            (first, _), (begin, end) = self.episode(lane, window[0][1]), self.episode(lane, window[-1][1])
            whole = first == begin
            future = {lane.steps[p].value + 1 for p in range(window[-1][1], end + 1)} if whole else {NO_GOAL}
            assert len(set(goal)) == 1
            assert goal[0] in future, (goal, future)


def run(seed: int, operations: int = 30) -> None:
    """Run one seed. An odd seed draws sequences from the list of all beginnings after one try, as in large rings."""
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            patch.setattr(sequences, "MAX_DRAWS", 1)
        Twin(Settings.of(seed)).run(operations)
