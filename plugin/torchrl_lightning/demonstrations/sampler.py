"""What an environment plays next: a demonstration, or an episode of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_lightning.demonstrations.storage import DemonstrationStorage
from torchrl_lightning.demonstrations.trajectory import Demonstration
from torchrl_lightning.parts import OwnGenerator
from torchrl_lightning.ranges import Checked, check_defaults, fraction, not_negative
from torchrl_lightning.state import GENERATOR, Attribute, Stated, number


class DemonstrationSampler(Stated, OwnGenerator):
    """Draw, where an episode begins, what is replayed in its place.

    It is no TorchRL sampler: those draw batches of cells, this one draws whether there is a demonstration at all.

    Args:
        rho: The probability of a reward demonstration before the first success; see ``human_share``.
        phi: The probability of a value demonstration before the first success; one whose largest value is ``v`` is
            drawn with ``P ~ max(v, 0) ** alpha``, all alike if none is positive. It moves to ``rho`` by and by, see
            :class:`DemonstrationAnnealing`; their sum stays. Else, and where there is none of the kind that was drawn,
            the environment plays.
        alpha: How much more likely higher values are.
        human_share: At least this share of the draws of reward demonstrations goes to the human ones, however many of
            the agent's there are; with 0 each is as likely as the others.
        generator: The random generator; ``None`` seeds one from torch's global one.

    Raises:
        ValueError: ``rho``, ``phi``, their sum or ``human_share`` is outside ``[0, 1]``, ``alpha`` is negative or
            infinite, or one of these has no effect because nothing is drawn by it.

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
        self._rho, self._phi, self._alpha = _checked(rho, phi, alpha)
        self.human_share = human_share
        check_defaults("without phi above 0", "give phi", **({} if self._phi else {"alpha": (alpha, 10)}))
        share = {} if self._rho or self._phi else {"human_share": (human_share, 0.0)}
        check_defaults("without rho or phi above 0", "give one of them", **share)
        self._own_rng = generator

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
        """Exponent of values in the probability of value demonstrations."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self.set_probabilities(alpha=value)

    def probabilities(self, storage: DemonstrationStorage) -> tuple[float, float]:
        """Return rho and phi as the successes in the storage have left them."""
        return self.rho + storage.annealed * self.phi, self.phi * (1.0 - storage.annealed)

    def set_probabilities(self, rho: float | None = None, phi: float | None = None, alpha: float | None = None) -> None:
        """Set rho or phi before the first success, or alpha.

        Raises:
            ValueError: One of them or the sum of rho and phi is out of range; nothing was changed.
        """
        given, own = (rho, phi, alpha), (self.rho, self.phi, self.alpha)
        self._rho, self._phi, self._alpha = _checked(
            *(old if new is None else new for new, old in zip(given, own, strict=True))
        )

    def draw(self, storage: DemonstrationStorage) -> Demonstration | None:
        """Draw what is replayed in the episode that begins; None if the environment plays it.

        Each call takes two random numbers, whatever comes of it.
        """
        source, place = torch.rand(2, dtype=torch.float64, generator=self.generator).tolist()
        rho, phi = self.probabilities(storage)
        if source < rho:
            kept, share = storage.reward_demonstrations, self.human_share
            human = storage.num_human
            if 0 < human < len(kept) and share > human / len(kept):
                is_human = place < share
                kept = kept[:human] if is_human else kept[human:]
                place = place / share if is_human else (place - share) / (1.0 - share)
            return kept[min(int(place * len(kept)), len(kept) - 1)] if kept else None
        kept = storage.value_demonstrations
        if source >= rho + phi or not kept:
            return None
        upto = value_probabilities([each.value for each in kept], self.alpha).cumsum(0)
        return kept[int(torch.searchsorted(upto, place * upto[-1], right=True).clamp(max=len(kept) - 1))]

    def _check_together(self, values: Mapping[str, Any]) -> None:
        _checked(values["rho"], values["phi"], values["alpha"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rho={self.rho}, phi={self.phi}, alpha={self.alpha})"


def value_probabilities(values: Sequence[float], alpha: float) -> Tensor:
    """Return ``P ~ max(v, 0) ** alpha`` of each value, float64; all alike if none is positive.

    Examples:
        >>> value_probabilities([1e300, 2e300, -5.0], alpha=2).tolist()
        [0.2, 0.8, 0.0]
    """
    positive = torch.tensor(values, dtype=torch.float64).clamp(min=0.0)
    highest = positive.max()
    if highest == 0:
        return torch.full_like(positive, 1 / len(positive))
    weights = (positive / highest) ** alpha  # at most 1: no power overflows
    return weights / weights.sum()


def _checked(rho: float, phi: float, alpha: float) -> tuple[float, float, float]:
    rho, phi = fraction(rho, "rho"), fraction(phi, "phi")
    if rho + phi > 1 + 1e-9:  # decimal fractions add up to a little more than 1
        raise ValueError(f"rho + phi must be at most 1, got rho={rho} and phi={phi}; lower one of them.")
    return rho, phi, not_negative(alpha, "alpha")
