"""Random network distillation: the intrinsic reward is the error of predicting a fixed random network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Categorical

from torchrl_lightning._core.modules import EvaluationMode
from torchrl_lightning._core.moments import precision_of
from torchrl_lightning._core.settings import PositiveFraction, PositiveInt, Settings, computed, default_factory, setting
from torchrl_lightning._core.tree import next_key
from torchrl_lightning.agents.networks.actors import observation_entries
from torchrl_lightning.agents.networks.encoders import MLPNetwork, orthogonal
from torchrl_lightning.agents.networks.network_protocol import Network
from torchrl_lightning.agents.networks.trunks import feature_count


class RandomNetworkDistillation(Settings, nn.Module):
    r"""Random network distillation (Burda et al., 2019).

    A predictor learns the output of a fixed, randomly initialised target network. Its error on the next observation is
    the intrinsic reward:
    \(r^{int} = \frac{1}{d}\lVert f(\tilde o') - \hat f(\tilde o') \rVert^2\).
    Observations are whitened by running moments over all observations so far:
    \(\tilde o = \mathrm{clip}((o - \mu)/\sigma, \pm 5)\).
    The rewards are raw. The buffer normalises them and estimates their returns.

    Args:
        network: Network in front of the embedding; ``MLPNetwork([64, 64], "relu")`` by default.
        embedding_size: Width ``d`` of the embedding.
        clip: Bound of the whitened observations.
        update_fraction: Fraction of each mini-batch that trains the predictor.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("CartPole-v1", 2))
        >>> rnd = RandomNetworkDistillation().build(specs)
        >>> rollout = TensorDict({"next": specs.observation.zero([5, 2])}, [5, 2])
        >>> rnd.annotate(rollout)
        >>> rollout["next", "intrinsic_reward"].shape
        torch.Size([5, 2, 1])
    """

    CONFIG_NAME: ClassVar[str | None] = "rnd"

    network: Annotated[Network, default_factory(lambda: MLPNetwork([64, 64], "relu"))] = setting(
        default=None, kw_only=False
    )
    embedding_size: PositiveInt = 64
    clip: float = 5.0
    update_fraction: PositiveFraction = 1.0
    count: Tensor = computed()
    mean_0: Tensor = computed()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys: list[Any] = []
        self.target: nn.Module | None = None
        self.predictor: nn.Module | None = None
        self._target_mode = EvaluationMode()

    def build(self, specs: Any) -> RandomNetworkDistillation:
        """Build networks and running moments from the specs and return the module; a second call does nothing."""
        if self.target is None:
            keys_and_entries = zip(*observation_entries(specs), strict=True)
            nonempty = [(key, entry) for key, entry in keys_and_entries if entry.shape.numel()]
            if not nonempty:
                raise ValueError(
                    "the observation must contain numbers for random network distillation, got only empty entries: "
                    f"{sorted(map(str, specs.observation.keys(True, True)))}. Leave intrinsic= out."
                )
            self.keys, entries = [key for key, _ in nonempty], [entry for _, entry in nonempty]
            self.whitened = [not isinstance(entry, Categorical) and entry.dtype is not torch.bool for entry in entries]
            self.target, self.predictor = self._embedding(entries), self._embedding(entries)
            self.target.requires_grad_(False)
            # Run the target in evaluation mode. Otherwise, dropout would add noise to the predictor's labels.
            self._target_mode = EvaluationMode(self.target)
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))
            for i, entry in enumerate(entries):
                self.register_buffer(f"mean_{i}", torch.zeros(entry.shape, dtype=torch.float64))
                self.register_buffer(f"variance_{i}", torch.ones(entry.shape, dtype=torch.float64))
        return self

    def _embedding(self, entries: list[Any]) -> nn.Module:
        encoder = self.network.encoder(entries)
        return _Embedding(encoder, orthogonal(nn.Linear(feature_count(encoder), self.embedding_size)))

    def predictor_parameters(self) -> Iterator[nn.Parameter]:
        """Return the trained parameters."""
        return self._require_built(self.predictor).parameters()

    @staticmethod
    def _require_built(module: nn.Module | None) -> nn.Module:
        if module is None:
            raise RuntimeError("The networks are not built yet. Call `build(specs)` first.")
        return module

    def _next_observations(self, batch: TensorDictBase) -> list[Tensor]:
        entries = [batch.get(next_key(key), None) for key in self.keys]
        for key, entry in zip(self.keys, entries, strict=True):
            if entry is None:
                raise KeyError(f"The batch has no ('next', {key!r}), which random network distillation reads.")
        return entries

    def _whiten(self, entries: list[Tensor]) -> list[Tensor]:
        outputs = []
        for i, (entry, whitened) in enumerate(zip(entries, self.whitened, strict=True)):
            if whitened:
                mean, variance = getattr(self, f"mean_{i}"), getattr(self, f"variance_{i}")
                dtype = precision_of(entry.dtype)
                scale = variance.rsqrt().clamp_max(1e4).to(dtype)  # a constant entry stays near zero
                entry = ((entry - mean.to(dtype)) * scale).clamp_(-self.clip, self.clip).float()
            outputs.append(entry)
        return outputs

    @torch.no_grad()
    def observe(self, entries: list[Tensor]) -> None:
        """Merge observations ``[*B, *F_i]`` into the running moments (Chan et al., 1979)."""
        count = self.count
        new_count = entries[0].numel() / max(self.mean_0.numel(), 1)
        total = count + new_count
        for i, entry in enumerate(entries):
            mean, variance = getattr(self, f"mean_{i}"), getattr(self, f"variance_{i}")
            flat = entry.reshape(-1, *mean.shape).double()
            new_variance, new_mean = torch.var_mean(flat, 0, correction=0)
            delta = new_mean - mean
            variance.copy_(
                (variance * count + new_variance * new_count + delta * delta * (count * new_count / total)) / total
            )
            mean.add_(delta * (new_count / total))
        count.copy_(total)

    @torch.no_grad()
    def annotate(self, rollout: TensorDictBase) -> None:
        """Update the moments with a rollout ``[T, N]`` and add its raw ``("next", "intrinsic_reward")`` ``[T, N, 1]``.

        The rollout and the networks may be on different devices; the rollout is not moved.
        """
        entries = self._next_observations(rollout)
        rollout_device, device = entries[0].device, self.count.device
        entries = [entry.to(device) for entry in entries]
        self.observe(entries)
        with EvaluationMode(self):
            error = self._error(entries)
        rollout.set(("next", "intrinsic_reward"), error.reshape(*rollout.batch_size, 1).to(rollout_device))

    def _error(self, entries: list[Tensor]) -> Tensor:
        whitened = self._whiten(entries)
        with torch.no_grad(), self._target_mode:
            target = self._require_built(self.target)(*whitened)
        return (self._require_built(self.predictor)(*whitened) - target).square().mean(-1)

    def loss(self, batch: TensorDictBase) -> Tensor:
        """Return the predictor's mean squared error on a mini-batch, or on a random fraction of it."""
        error = self._error(self._next_observations(batch)).reshape(-1)
        if self.update_fraction < 1.0:
            selected = (torch.rand_like(error) < self.update_fraction).to(error.dtype)
            return (error * selected).sum() / selected.sum().clamp_min(1.0)
        return error.mean()


class _Embedding(nn.Module):
    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, *entries: Tensor) -> Tensor:
        return self.head(self.encoder(*entries))
