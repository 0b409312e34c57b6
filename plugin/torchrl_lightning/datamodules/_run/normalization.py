"""Normalise observations and rewards of a run by running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_lightning._core.keys import REWARD
from torchrl_lightning._core.moments import Moments
from torchrl_lightning._core.ranks import all_gather
from torchrl_lightning._core.state import (
    Attribute,
    Child,
    Stateful,
    bounded_integer,
    check_state,
    expect,
    list_of,
    mapping,
    sequence,
    state_error,
)
from torchrl_lightning.datamodules._run.collector_stream import Part
from torchrl_lightning.datamodules._run.reward_scale import RewardScale
from torchrl_lightning.environments import EnvironmentSpecs
from torchrl_lightning.environments.normalization import EPSILON, NormalizedPolicy, ObservationNormalizer, normalizes

_CHUNK = 256  # single rows are reduced to moments in chunks of this size


class Normalization(Stateful):
    """Running moments of observations and of discounted sums of rewards, over all environments and ranks.

    Collected steps are noted first. :meth:`advance` adds them to the statistics on all ranks together. Evaluation does
    not change the statistics.

    Args:
        observation: True for all entries of the observation, or the names of some.
        reward: whether rewards are scaled.
        clip: largest absolute value of a normalised entry.
        epsilon: added to variances.
        frozen: never update the statistics.
    """

    OWNER = "normalization"
    STATE = {
        "count": Attribute(bounded_integer(), "_count"),
        "total": Attribute(bounded_integer(), "_total"),
        "rows": Attribute(list_of(expect(torch.is_tensor, "a tensor")), "_kept_rows"),
        "noted": Attribute(of=lambda own: own._read_moments, at="_kept_moments"),
        "scale": Child(at="_scale"),
    }
    """The steps that this rank has noted and not yet added to the statistics."""

    def __init__(
        self,
        observation: bool | Sequence[NestedKey],
        reward: bool,
        clip: float,
        epsilon: float = EPSILON,
        *,
        frozen: bool = False,
    ) -> None:
        self.observation, self.reward, self.frozen = observation, reward, frozen
        self.clip, self.epsilon = float(clip), float(epsilon)
        self.is_on = bool(observation) or reward
        self._normalizer: ObservationNormalizer | None = None
        self._scale = RewardScale(self.clip, self.epsilon)
        self._rows: dict[NestedKey, list[Tensor]] = {}  # noted observations
        self._waiting = 0  # number of rows in ``_rows``
        self._noted: dict[NestedKey, Moments] = {}  # moments of earlier noted observations and of reward sums
        self._count = 0  # frames noted since the statistics advanced
        self._total = 0  # frames of this rank in the statistics
        # The last noted rollout; its observations with their target lists; its rewards and end flags.
        self._last: TensorDictBase | None = None
        self._observed: list[tuple[list[Tensor], Tensor]] = []
        self._ends: list[Tensor] = []

    # ------------------------------------------------------------------ normalised data

    def specs(self, specs: EnvironmentSpecs) -> EnvironmentSpecs:
        """Return the specs with normalised observations.

        Raises:
            ValueError: An entry is missing, or cannot be normalised.
        """
        if not self.observation:
            return specs
        if self._normalizer is None:
            self._normalizer = ObservationNormalizer(specs, self.observation, self.clip, self.epsilon)
        shown = self._normalizer.specs
        return shown.with_clipping(specs.action_format.clip)

    def policy(self, policy: Any) -> Any:
        """Wrap a policy of normalised observations, once, so that it accepts raw observations."""
        if self._normalizer is None or normalizes(policy):
            return policy
        return NormalizedPolicy(policy, self._normalizer)

    def rollout(
        self, rollout: TensorDictBase, parts: Sequence[Part], env_ids: Tensor | None, *, cut: bool, gamma: float
    ) -> TensorDictBase:
        """Return the normalised rollout ``[N, T]``, and add the raw one, part by part, to the statistics.

        Observations use the statistics before the rollout, as the policy did; rewards use the statistics after it.
        """
        if not self.is_on:
            return rollout
        seen = rollout.copy()
        if self._normalizer is not None:
            self._normalizer.normalize_(seen)
        for part in parts:
            if part.begun is not None:
                self.forget_unfinished(part.begun)
            self.note(part.rollout, env_ids, cut=cut and part.is_last, gamma=gamma)
        self._last, self._observed, self._ends = None, [], []  # free them: the next rollout has other memory
        self.advance()
        if self.reward:
            self._scale.scale_(seen)
        return seen

    def normalize_(self, batch: TensorDictBase) -> None:
        """Normalise observations and rewards of a batch in place."""
        if self._normalizer is not None:
            self._normalizer.normalize_(batch)
        if self.reward:
            self._scale.scale_(batch)

    # ------------------------------------------------------------------ statistics

    def check_frozen(self) -> None:
        """Validate that frozen statistics have moments for each entry; raise ValueError if not."""
        if not self.frozen:
            return
        moments = {} if self._normalizer is None else dict(self._normalizer.moments)
        missing = [f"observation {key!r}" for key, each in moments.items() if not each.count]
        if self.reward and not self._scale.moments.count:
            missing.append("rewards")
        if missing:
            raise ValueError(
                f"freeze_statistics must be False without the moments of an earlier run, got True, but there are none "
                f"of {', '.join(missing)}, which would be clipped only. Give load_normalization(...) the statistics of "
                "that run, or freeze_statistics=False."
            )

    def note(self, rollout: TensorDictBase, env_ids: Tensor | None, *, cut: bool, gamma: float) -> None:
        """Note a rollout for the statistics.

        Args:
            rollout: Raw steps ``[N, T]``.
            env_ids: Environment of each row, ``[N]``; None for all environments in order.
            cut: The environments are reset afterwards.
            gamma: The discount of the sums of rewards.
        """
        if self.frozen:
            return
        if rollout is not self._last:
            # Look the entries up once if the collector always delivers the same memory.
            keys = [] if self._normalizer is None else self._normalizer.keys
            self._observed = [(self._rows.setdefault(key, []), rollout.get(key)) for key in keys]
            self._ends = [rollout.get(("next", name)) for name in ("reward", "done")]
            self._last = rollout
        frames = rollout.numel()
        self._count += frames
        if self._observed:
            for rows, value in self._observed:
                rows.append(value.clone())
            self._waiting += frames
            if self._waiting >= _CHUNK:
                self._reduce_rows()
        if self.reward:
            reward, done = self._ends
            self._add(REWARD, self._scale.note(reward, done, env_ids, gamma))
            if cut:
                self.forget_unfinished()

    def advance_if_due(self) -> None:
        """Advance the statistics if enough rows are noted: 256, and 1 % of the earlier rows, or the first rows."""
        is_due = (self._count >= _CHUNK and self._count * 100 >= self._total) or not self._total
        if is_due and not self.frozen:
            self.advance()

    def advance(self) -> None:
        """Add the noted steps of all ranks to the statistics."""
        self._reduce_rows()
        self._add(REWARD, self._scale.reduced())
        noted, self._noted = self._noted, {}
        self._total, self._count = self._total + self._count, 0
        ranks: list[dict[Any, Moments]] = all_gather(noted)
        merged: dict[NestedKey, Moments] = {}
        for rank in ranks:
            for key, moments in rank.items():
                merged[key] = merged[key].merged(moments) if key in merged else moments
        if REWARD in merged:
            self._scale.load_moments(self._scale.moments.merged(merged.pop(REWARD)))
        if self._normalizer is not None:
            self._normalizer.advance(merged)

    def forget_unfinished(self, env_ids: Tensor | slice = slice(None)) -> None:
        """Begin new reward sums for these environments."""
        self._add(REWARD, self._scale.reduced())
        self._scale.cut(env_ids)

    def _reduce_rows(self) -> None:
        self._waiting = 0
        for key, parts in self._rows.items():
            if parts:
                moments = Moments.of(_flat(parts))
                parts.clear()
                if not moments.mean.isfinite().all():
                    raise ValueError(f"observation {key!r} holds values that are not finite: mend its environment.")
                self._add(key, moments)

    def _add(self, key: NestedKey, moments: Moments | None) -> None:
        if moments is not None:
            self._noted[key] = self._noted[key].merged(moments) if key in self._noted else moments

    # ------------------------------------------------------------------ state

    def statistics(self) -> dict[str, Any]:
        """Return the statistics for acting and learning; they are the same on all ranks."""
        observation = {} if self._normalizer is None else self._normalizer.moments_state()
        return {"observation": observation, "reward": self._scale.moments.state_dict()}

    def load_statistics(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`statistics`.

        Raises:
            ValueError: The statistics do not fit the normalised entries of this run; nothing is changed then.
        """
        check_state(state, {"observation": mapping, "reward": mapping}, "normalization")
        scale = Moments.none().restored(state["reward"], "moments of rewards")
        if self._normalizer is not None:
            self._normalizer.load_moments(state["observation"])
        self._scale.load_moments(scale)

    def load_normalization(self, state: Mapping[str, Any]) -> None:
        """Load the :meth:`statistics` of another run; without its reward moments, reward scaling starts fresh.

        Raises:
            ValueError: Only one of the runs normalises observations, or moments for frozen rewards are missing; nothing
                is changed then.
        """
        check_state(state, {"observation": mapping, "reward": mapping}, "normalization")
        scale = Moments.none().restored(state["reward"], "moments of rewards")
        if bool(state["observation"]) != (self._normalizer is not None):
            saw, sees = ("normalised", "raw") if state["observation"] else ("raw", "normalised")
            keys = [".".join(entry["key"]) for entry in state["observation"].get("entries", [])]
            mend = f"data.normalize_observation={str(keys == ['observation']).lower()}"
            if keys not in ([], ["observation"]):
                mend = f"'data.normalize_observation=[{','.join(keys)}]'"  # quotes, because a shell interprets brackets
            raise ValueError(f"it learnt from {saw} observations, this run shows {sees} ones; say {mend}.")
        if self.frozen and self.reward and not scale.count:
            raise ValueError(
                "it scaled no rewards, so that there is nothing to be frozen; say data.normalize_reward=false."
            )
        if self._normalizer is not None:
            self._normalizer.load_moments(state["observation"])
        if self.reward and scale.count:
            self._scale.load_moments(scale)

    @property
    def _kept_rows(self) -> list[Tensor]:
        return [_flat(parts) for parts in self._rows.values() if parts]

    @_kept_rows.setter
    def _kept_rows(self, rows: Sequence[Tensor]) -> None:
        self._rows = {key: [each.unsqueeze(0)] for key, each in zip(self._shapes(), rows, strict=False)}
        self._waiting = len(rows[0]) if rows else 0
        self._last = None

    @property
    def _kept_moments(self) -> list[dict[str, Any] | None]:
        return [self._noted[key].state_dict() if key in self._noted else None for key in self._shapes()]

    @_kept_moments.setter
    def _kept_moments(self, moments: dict[NestedKey, Moments]) -> None:
        self._noted = moments

    def _read_moments(self, value: Any, name: str) -> dict[NestedKey, Moments]:
        shapes = self._shapes()
        if len(sequence(value, name)) != len(shapes):
            raise state_error(value, name, f"the moments of {len(shapes)} entries")
        return {
            key: Moments.none(*shape).restored(its, f"moments of {key!r}")
            for (key, shape), its in zip(shapes.items(), value, strict=True)
            if its is not None
        }

    def _shapes(self) -> dict[NestedKey, tuple[int, ...]]:
        """Return the shape of each entry's moments; the reward is last."""
        observed = {} if self._normalizer is None else self._normalizer.moments
        return {**{key: tuple(moments.mean.shape) for key, moments in observed.items()}, REWARD: ()}


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Flatten parts ``[N, T, *F]`` into rows ``[B, *F]``."""
    return torch.cat([part.flatten(0, 1) for part in parts])
