"""The agent that learns from branches which its own world model imagines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lightning.dynamics import DynamicsTargets
from torchrl_lightning.environments.autocast import to_single
from torchrl_lightning.fitting import learning_dtype
from torchrl_lightning.learn.q_learning import SACModule
from torchrl_lightning.learn.reports import train_names
from torchrl_lightning.learn.world_model_fit import WorldModelFit
from torchrl_lightning.learn.world_models import WorldModel
from torchrl_lightning.protocols import DataApi
from torchrl_lightning.settings import derived, otherwise, setting


class MBPOModule(SACModule):
    """MBPO (Janner et al., 2019): soft actor-critic on short branches that a world model imagines from real states.

    The policy acts in the environment and in the world model alike. When to fit the world model, where branches begin,
    how long they are, and how they are mixed with real experience says a :class:`~torchrl_lightning.BranchedReplay`, as
    ``source=`` of a ``ReplayDataModule``. All that was learnt is in a checkpoint.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        dynamics: How the world model is built and fitted; by default as in the paper.
        num_critics: As in :class:`SACModule`, like everything that is not named here.

    Raises:
        TypeError: The network is a ``RecurrentNetwork``, whose states nobody imagines; when the networks are built: the
            actions are not bounded floating-point vectors.
        ValueError: When a fit is set up: an observation is discrete.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> module = MBPOModule(dynamics=WorldModelFit([16])).build(specs)
        >>> start = TensorDict(specs.observation.zero([4]), [4])
        >>> module.imagine(start, 3)["next", "reward"].shape
        torch.Size([12, 1])
    """

    training_metrics = (*SACModule.training_metrics, *train_names("dynamics_error", "dynamics_epochs"))

    dynamics: Annotated[WorldModelFit, otherwise(WorldModelFit)] = setting(default=None)
    errors: Tensor = derived()
    epochs_of_fit: Tensor = derived()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network.recurrent:
            raise TypeError("MBPOModule imagines observations, but no recurrent states; take an MLPNetwork.")
        self.world_model: WorldModel | None = None
        # Of the last fit: the elites' errors on held out rows, infinite before the first; and its epochs.
        self.register_buffer("errors", torch.full((self.dynamics.num_elites,), torch.inf))
        self.register_buffer("epochs_of_fit", torch.zeros((), dtype=torch.int64))

    def build(self, specs: Any) -> Self:
        """Build networks, targets and world model for an environment's specs, once; return the module."""
        if self.world_model is None:
            super().build(specs)
            self.world_model = self.dynamics.build(specs)
        return self

    def setup(self, stage: str) -> None:
        """Refuse several ranks, whose world models would differ, by a ValueError."""
        if stage == "fit" and self.trainer.world_size > 1:
            raise ValueError(
                f"MBPOModule fits one world model to one buffer, but the trainer has {self.trainer.world_size} ranks; "
                "take devices=1."
            )
        super().setup(stage)

    def misfit(self, data: Any) -> str | None:
        """Return that nobody has it imagine, or that it cannot; None if it can and does."""
        imagines = DataApi.of(data).imagines
        if imagines is None:
            return super().misfit(data)
        if imagines(self):
            return DynamicsTargets(data.specs.observation, data.specs.action).misfit() or super().misfit(data)
        return (
            f"{type(self).__name__} learns from the branches that it imagines; choose a stream with them, such as "
            "data=branched (ReplayDataModule with source=functools.partial(BranchedReplay, ...)), or another learner, "
            "such as model=sac."
        )

    # -- the world model --------------------------------------------------------------------------------------------

    def fit_dynamics(self, training: TensorDictBase, validation: TensorDictBase) -> None:
        """Fit the world model to transitions ``[N]``, judged by others ``[V]``; see :meth:`WorldModelFit.fit`."""
        errors, epochs = self.dynamics.fit(self.require_built(self.world_model), training, validation)
        self.errors.copy_(errors)
        self.epochs_of_fit.fill_(epochs)

    @torch.no_grad()
    def imagine(self, start: TensorDictBase, length: int) -> TensorDictBase:
        """Follow the policy in the world model, for ``length`` steps or until an episode terminates.

        Args:
            start: Where branches begin: observations ``[R]``.
            length: Steps of a branch.

        Returns:
            Transitions ``[N]``, step by step, as a collector would give them; a branch that is cut off goes on. The
            world model goes on from what it predicts; what the policy sees of it, and what is kept, has the dtypes of
            real observations, integers rounded.

        Raises:
            RuntimeError: What it imagines is not finite.
        """
        model, act = self.require_built(self.world_model), self._acting()
        targets, device = model.targets, model.elites.device
        now = targets.observation(start).to(device)
        members = model.deal(len(now)) if model.propagation == "trajectory" else None
        steps: list[TensorDictBase] = []
        for step in range(length):
            shape, seen = now.shape[:1], targets.observed(now)
            action = act([seen[key] for key in self._keys], True)
            following, reward, terminated = model.step(now, targets.action(action, shape), members)
            if not (following.isfinite().all() and reward.isfinite().all()):
                raise RuntimeError(
                    f"step {step + 1} of the {length} that the world model imagines holds NaN or infinite numbers; "
                    "imagine shorter branches, or fit it to more frames"
                )
            ended = terminated.unsqueeze(1)
            goes_on = torch.zeros_like(ended)
            flags = {"terminated": ended, "truncated": goes_on, "done": ended.clone(), "is_init": goes_on.clone()}
            after = TensorDict({**targets.observed(following), **flags, "reward": reward.unsqueeze(1)}, shape)
            steps.append(TensorDict({**seen, "action": action, "is_init": goes_on.clone(), "next": after}, shape))
            if terminated.any():
                now = following[~terminated]
                members = None if members is None else members[~terminated]
            else:
                now = following
            if not len(now):
                break
        imagined: TensorDictBase = torch.cat(steps)
        return imagined

    def _acting(self) -> Callable[[list[Tensor], bool], Tensor]:
        """Return the policy's ``act`` in the precision in which it acts in the environment."""
        act: Callable[[list[Tensor], bool], Tensor] = self.policy.act
        dtype = None if self._trainer is None else learning_dtype(self.trainer)
        if dtype is None:
            return act

        def act_under_autocast(entries: list[Tensor], explore: bool) -> Tensor:
            with torch.autocast(entries[0].device.type, dtype=dtype, cache_enabled=False):
                return to_single(act(entries, explore))

        return act_under_autocast

    def report(self) -> dict[str, float]:
        """Add the elites' mean error on held out rows, and the epochs of the last fit."""
        return {
            **super().report(),
            "dynamics_error": float(self.errors.mean()),
            "dynamics_epochs": float(self.epochs_of_fit),
        }
