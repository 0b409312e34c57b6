"""What a run normalises, with which statistics, and when these advance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._compat import put_entry
from torchrl_lightning.collectors import EnvironmentSpecs
from torchrl_lightning.collectors.normalization import (
    EPSILON,
    NormalizedPolicy,
    ObservationNormalizer,
    normalizes,
    scaled,
)
from torchrl_lightning.datamodules.ranks import gather_states
from torchrl_lightning.entries import level_of
from torchrl_lightning.moments import Moments
from torchrl_lightning.ranges import positive
from torchrl_lightning.scan import discounted_scan
from torchrl_lightning.state import anything, check_state, mapping, sequence, tensor, whole

_REWARD = ("next", "reward")
_CHUNK = 256  # rows that are reduced to moments at a time, where they come one by one


class Normalization:
    r"""Running moments of observations and of discounted sums of rewards, over all environments and ranks.

    Observations are standardised. Rewards are divided by the standard deviation of \(y_t = \gamma y_{t-1} + r_t\),
    which starts anew with each episode; both are clipped. What is collected is noted, and enters the statistics when
    they advance, on all ranks at once; evaluation notes nothing.

    Args:
        observation: True for all entries of the observation, or the names of some.
        reward: whether rewards are normalised.
        clip: largest absolute value of what comes out.

    Raises:
        ValueError: ``clip`` is not positive.
    """

    def __init__(self, observation: bool | Sequence[NestedKey], reward: bool, clip: float) -> None:
        self.observation, self.reward = observation, reward
        self.clip = float(positive(clip, "normalize_clip"))
        self.gamma = 0.99  # the buffer's, as soon as there is one
        self._normalizer: ObservationNormalizer | None = None
        self._scale = Moments.none()  # of the discounted sums
        self._constants = torch.zeros(1), torch.ones(1)  # nothing is subtracted; one over their standard deviation
        self._sums = torch.zeros(0, dtype=torch.float64)  # the last one of each environment
        self._rows: dict[NestedKey, list[Tensor]] = {}  # observations that were noted
        self._ends: list[tuple[Tensor, Tensor]] = []  # rewards and ends that were noted, all of the same environments
        self._env_ids: Tensor | None = None  # which ones
        self._waiting = self._steps = 0  # how many rows, and ends in time
        self._noted_last: TensorDictBase | None = None  # the rollout, its observations and where they go, its ends
        self._observed: list[tuple[list[Tensor], Tensor]] = []
        self._rewarded: tuple[Tensor, Tensor] = (self._sums, self._sums)
        self._noted: dict[NestedKey, Moments] = {}  # what was noted before those
        self._count = 0  # frames noted since the statistics advanced
        self._total = 0  # frames in the statistics of this rank

    def __bool__(self) -> bool:
        return bool(self.observation) or self.reward

    # ------------------------------------------------------------------ what the learner sees

    def specs(self, specs: EnvironmentSpecs) -> EnvironmentSpecs:
        """Return the specs of what the learner sees.

        Raises:
            ValueError: an entry is not there, or cannot be normalised.
        """
        if not self.observation:
            return specs
        if self._normalizer is None:
            self._normalizer = ObservationNormalizer(specs, self.observation, self.clip)
        return self._normalizer.specs

    def policy(self, policy: Any) -> Any:
        """Return a policy of normalised observations as one of raw observations, once."""
        if self._normalizer is None or normalizes(policy):
            return policy
        return NormalizedPolicy(policy, self._normalizer)

    def rollout(self, rollout: TensorDictBase, env_ids: Tensor | None, cut: bool) -> TensorDictBase:
        """Return a rollout ``[N, T]`` as the learner sees it, and take it into the statistics.

        Its observations are those that the policy acted on, with the statistics before it; the rewards are divided by
        those with it.
        """
        if not self:
            return rollout
        seen = rollout.copy()
        if self._normalizer is not None:
            self._normalizer.normalize_(seen)
        self.note(rollout, env_ids, cut)
        self._noted_last, self._observed = None, []  # is not kept alive: the next one has other memory
        self.advance()
        self._scale_reward_(seen)
        return seen

    def normalize_(self, batch: TensorDictBase) -> None:
        """Put what the learner sees in the place of a batch's raw observations and rewards."""
        if self._normalizer is not None:
            self._normalizer.normalize_(batch)
        self._scale_reward_(batch)

    def _scale_reward_(self, data: TensorDictBase) -> None:
        if self.reward:
            following = level_of(data)["next"]
            reward = level_of(following)["reward"]
            zero, factor = self._constants
            if factor.device != reward.device:
                zero, factor = self._constants = (zero.to(reward.device), factor.to(reward.device))
            put_entry(following, "reward", scaled(reward, zero, factor, self.clip))

    # ------------------------------------------------------------------ statistics

    def note(self, rollout: TensorDictBase, env_ids: Tensor | None, cut: bool) -> None:
        """Note a rollout ``[N, T]`` of the environments ``env_ids`` ``[N]``, all in order if None.

        With ``cut`` the environments are reset afterwards.
        """
        if rollout is not self._noted_last:
            # Looked up once where the collector delivers the same memory again and again.
            keys = [] if self._normalizer is None else self._normalizer.keys
            self._observed = [(self._rows.setdefault(key, []), rollout.get(key)) for key in keys]
            self._rewarded = (rollout.get(("next", "reward")), rollout.get(("next", "done")))
            self._noted_last = rollout
        frames = rollout.numel()
        self._count += frames
        if self._normalizer is not None:
            for rows, value in self._observed:
                rows.append(value.clone())
            self._waiting += frames
            if self._waiting >= _CHUNK:
                self._reduce_rows()
        if self.reward:
            if env_ids is not self._env_ids:
                self._reduce_ends()
                self._env_ids = env_ids
            reward, done = self._rewarded
            self._ends.append((reward.clone(), done.clone()))
            self._steps += done.shape[1]
            if cut:
                self.forget_unfinished()
            elif self._steps >= _CHUNK:
                self._reduce_ends()

    def advance_if_due(self) -> None:
        """Advance the statistics as soon as some rows are noted, and a hundredth of those before."""
        if (self._count >= _CHUNK and self._count * 100 >= self._total) or not self._total:
            self.advance()

    def advance(self) -> None:
        """Take what all ranks have noted into the statistics."""
        self._reduce_rows()
        self._reduce_ends()
        noted, self._noted = self._noted, {}
        self._total, self._count = self._total + self._count, 0
        ranks: list[dict[Any, Moments]] = gather_states(noted)
        merged: dict[NestedKey, Moments] = {}
        for rank in ranks:
            for key, moments in rank.items():
                merged[key] = merged[key].merged(moments) if key in merged else moments
        scale = merged.pop(_REWARD, None)
        if scale is not None:
            self._set_scale(self._scale.merged(scale))
        if self._normalizer is not None:
            self._normalizer.advance(merged)

    def forget_unfinished(self) -> None:
        """Let the next rewards be the first of their episodes."""
        self._reduce_ends()
        self._sums.zero_()

    def _reduce_rows(self) -> None:
        self._waiting = 0
        for key, parts in self._rows.items():
            if not parts:
                continue
            moments = Moments.of(torch.cat([part.flatten(0, 1) for part in parts]))
            parts.clear()
            if not moments.mean.isfinite().all():
                raise ValueError(f"observation {key!r} holds values that are not finite; its environment is at fault.")
            self._note_moments(key, moments)

    def _reduce_ends(self) -> None:
        """Run the filter over the noted rewards."""
        if not self._ends:
            return
        reward, done = (torch.cat(each, 1).cpu() for each in zip(*self._ends, strict=True))
        self._ends.clear()
        self._steps = 0
        reward = reward.flatten(2).sum(-1).double().T
        goes_on = ~done.flatten(2).any(-1).T
        ids = torch.arange(reward.shape[1]) if self._env_ids is None else self._env_ids
        missing = int(ids.max()) + 1 - len(self._sums)
        if missing > 0:
            self._sums = torch.cat([self._sums, self._sums.new_zeros(missing)])
        known = ids >= 0  # of the others, nobody knows which ones they were before
        before = torch.where(known, self._sums[ids], 0.0)
        discount = torch.full_like(reward, self.gamma)
        discount[1:] *= goes_on[:-1]
        sums = discounted_scan(reward, discount, initial=before, reverse=False)
        moments = Moments.of(sums.flatten())
        if not moments.mean.isfinite():
            raise ValueError("rewards are not finite; their environment is at fault.")
        self._sums[ids[known]] = (sums[-1] * goes_on[-1])[known]
        self._note_moments(_REWARD, moments)

    def _set_scale(self, scale: Moments) -> None:
        self._scale = scale
        if scale.count:
            self._constants = torch.zeros(1), (scale.variance + EPSILON).rsqrt().float().reshape(1)

    def _note_moments(self, key: NestedKey, moments: Moments) -> None:
        before = self._noted.get(key)
        self._noted[key] = moments if before is None else before.merged(moments)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics, which are the same on all ranks: all that acting and learning need."""
        normalizer = self._normalizer
        return {
            "observation": {} if normalizer is None else normalizer.moments_state(),
            "reward": self._scale.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: it does not fit what this run normalises; nothing is changed then.
        """
        check_state(state, {"observation": mapping, "reward": mapping}, "normalization")
        scale = self._scale.restored(state["reward"], "moments of rewards")
        if self._normalizer is not None:
            self._normalizer.load_moments(state["observation"])
        self._set_scale(scale)

    def rank_state(self) -> dict[str, Any]:
        """Return what this rank has noted and not yet taken into the statistics, copied."""
        state: dict[str, Any] = {"count": self._count, "total": self._total, "sums": self._sums.clone()}
        state["rows"] = [torch.cat(rows, 1) for rows in self._rows.values() if rows]
        state["ends"] = [torch.cat(each, 1) for each in zip(*self._ends, strict=True)]
        state["env_ids"] = None if self._env_ids is None else self._env_ids.clone()
        state["noted"] = [
            None if (moments := self._noted.get(key)) is None else moments.state_dict() for key in self._keys()
        ]
        return state

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`rank_state` returned; a ValueError if it does not fit."""
        sizes = {"count": whole(), "total": whole(), "sums": tensor(torch.float64, None), "noted": sequence}
        check_state(state, {**sizes, "rows": sequence, "ends": sequence, "env_ids": anything}, "normalization")
        keys = self._keys()
        observed = [] if self._normalizer is None else self._normalizer.keys
        self._count, self._total, self._sums = state["count"], state["total"], state["sums"].clone()
        self._rows = {key: [rows.clone()] for key, rows in zip(observed, state["rows"], strict=False)}
        self._noted_last = None
        self._ends = [tuple(each.clone() for each in state["ends"])] if state["ends"] else []
        self._env_ids = state["env_ids"]
        self._waiting = state["rows"][0].shape[:2].numel() if state["rows"] else 0
        self._steps = state["ends"][0].shape[1] if state["ends"] else 0
        self._noted = {
            key: Moments.none(*self._shape(key)).restored(moments, f"moments of {key}")
            for key, moments in zip(keys, state["noted"], strict=True)
            if moments is not None
        }

    def _keys(self) -> list[NestedKey]:
        return [*([] if self._normalizer is None else self._normalizer.keys), _REWARD]

    def _shape(self, key: NestedKey) -> tuple[int, ...]:
        return () if self._normalizer is None or key == _REWARD else tuple(self._normalizer.moments[key].mean.shape)
