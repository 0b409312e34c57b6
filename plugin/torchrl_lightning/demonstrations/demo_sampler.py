"""Decide whether the next episode of an environment replays a demonstration, and sample the demonstration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning._core.mixins import GeneratorMixin
from torchrl_lightning._core.state import GENERATOR, Attribute, Stateful, number
from torchrl_lightning._core.validators import Checked, check_defaults, fraction, non_negative
from torchrl_lightning.demonstrations.demo_storage import DemonstrationStorage
from torchrl_lightning.demonstrations.trajectory import Demonstration


class DemonstrationSampler(Stateful, GeneratorMixin):
    """Sample the demonstration to replay at the start of an episode.

    This class is not a TorchRL sampler. TorchRL samplers draw batches of cells; this class draws at most one
    demonstration.

    Args:
        rho: The probability of a reward demonstration before the first success; see ``human_share``.
        phi: The probability of a value demonstration before the first success. If ``v`` is the largest state value in a
            demonstration, the demonstration is drawn with ``P ~ max(v, 0) ** alpha``, or uniformly if no value is
            positive. Successes move ``phi`` to ``rho``, see :class:`DemonstrationAnnealing`. The sum of ``rho`` and
            ``phi`` is constant. With probability ``1 - rho - phi``, or if the storage lacks demonstrations of the drawn
            kind, no demonstration is replayed.
        alpha: The exponent of the values. A larger exponent prefers higher values.
        human_share: The minimum share of human demonstrations among the drawn reward demonstrations. With 0, all reward
            demonstrations are equally likely.
        generator: The random generator; ``None`` seeds one from torch's global generator.

    Raises:
        ValueError: ``rho``, ``phi``, their sum or ``human_share`` is outside ``[0, 1]``, ``alpha`` is negative or
            infinite, ``alpha`` is set without a ``phi`` above 0, or ``human_share`` is set although ``rho`` and ``phi``
            are 0.

    Examples:
        >>> sampler = DemonstrationSampler(rho=0.1, phi=0.3, generator=torch.Generator().manual_seed(0))
        >>> storage = DemonstrationStorage()
        >>> sampler.probabilities(storage), sampler.draw(storage)
        ((0.1, 0.3), None)
    """

    OWNER, VERSION = "demonstration sampler", 1
    STATE = {
        "rho": Attribute(number(0), "_rho"),
        "phi": Attribute(number(0), "_phi"),
        "alpha": Attribute(number(0), "_alpha"),
        "generator": GENERATOR,
    }
    human_share = Checked(fraction)

    def __init__(
        self,
        rho: float = 0.1,
        phi: float = 0.3,
        alpha: float = 10,
        generator: torch.Generator | None = None,
        *,
        human_share: float = 0.0,
    ) -> None:
        self._rho, self._phi, self._alpha = _validate_probabilities(rho, phi, alpha)
        self.human_share = human_share
        check_defaults("without phi above 0", "give phi", **({} if self._phi else {"alpha": (alpha, 10)}))
        share = {} if self._rho or self._phi else {"human_share": (human_share, 0.0)}
        check_defaults("without rho or phi above 0", "give one of them", **share)
        self._generator = generator

    @property
    def rho(self) -> float:
        """Probability of a reward demonstration before the first success."""
        return self._rho

    @rho.setter
    def rho(self, value: float) -> None:
        self.set_probabilities(rho=value)

    @property
    def phi(self) -> float:
        """Probability of a value demonstration before the first success."""
        return self._phi

    @phi.setter
    def phi(self, value: float) -> None:
        self.set_probabilities(phi=value)

    @property
    def alpha(self) -> float:
        """Exponent in the probability of a value demonstration."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.set_probabilities(alpha=value)

    def probabilities(self, storage: DemonstrationStorage) -> tuple[float, float]:
        """Return the current rho and phi, which depend on the number of successes."""
        return self.rho + storage.annealed * self.phi, self.phi * (1.0 - storage.annealed)

    def set_probabilities(self, rho: float | None = None, phi: float | None = None, alpha: float | None = None) -> None:
        """Set alpha and the initial probabilities rho and phi. A value stays unchanged if its argument is None.

        Raises:
            ValueError: A value, or the sum of rho and phi, is out of range. Nothing was changed.
        """
        requested, current = (rho, phi, alpha), (self.rho, self.phi, self.alpha)
        self._rho, self._phi, self._alpha = _validate_probabilities(
            *(previous if new is None else new for new, previous in zip(requested, current, strict=True))
        )

    def draw(self, storage: DemonstrationStorage) -> Demonstration | None:
        """Sample the demonstration to replay in the next episode; return None if nothing is replayed.

        Each call draws exactly two random numbers.
        """
        kind_draw, index_draw = torch.rand(2, dtype=torch.float64, generator=self.generator).tolist()
        rho, phi = self.probabilities(storage)
        if kind_draw < rho:
            demos, human_share = storage.reward_demonstrations, self.human_share
            num_human = storage.num_human
            if 0 < num_human < len(demos) and human_share > num_human / len(demos):
                is_human = index_draw < human_share
                demos = demos[:num_human] if is_human else demos[num_human:]
                index_draw = index_draw / human_share if is_human else (index_draw - human_share) / (1.0 - human_share)
            return demos[min(int(index_draw * len(demos)), len(demos) - 1)] if demos else None
        demos = storage.value_demonstrations
        if kind_draw >= rho + phi or not demos:
            return None
        cumulative = value_probabilities([demo.value for demo in demos], self.alpha).cumsum(0)
        index = torch.searchsorted(cumulative, index_draw * cumulative[-1], right=True)
        return demos[int(index.clamp(max=len(demos) - 1))]

    def _validate_consistency(self, values: Mapping[str, Any]) -> None:
        _validate_probabilities(values["rho"], values["phi"], values["alpha"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rho={self.rho}, phi={self.phi}, alpha={self.alpha})"


def value_probabilities(values: Sequence[float], alpha: float) -> Tensor:
    """Return the probability ``P ~ max(v, 0) ** alpha`` of each value in float64, uniform if no value is positive.

    Examples:
        >>> value_probabilities([1e300, 2e300, -5.0], alpha=2).tolist()
        [0.2, 0.8, 0.0]
    """
    positive = torch.tensor(values, dtype=torch.float64).clamp(min=0.0)
    highest = positive.max()
    if highest == 0:
        return torch.full_like(positive, 1 / len(positive))
    weights = (positive / highest) ** alpha  # the base is at most 1, so the power cannot overflow
    return weights / weights.sum()


def _validate_probabilities(rho: float, phi: float, alpha: float) -> tuple[float, float, float]:
    rho, phi = fraction(rho, "rho"), fraction(phi, "phi")
    if rho + phi > 1 + 1e-9:  # rounding can raise the sum of decimal fractions above 1
        raise ValueError(f"rho + phi must be at most 1, got rho={rho} and phi={phi}; lower one of them.")
    return rho, phi, non_negative(alpha, "alpha")
