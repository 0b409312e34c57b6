"""MBPO: an agent that learns from branches imagined by its world model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lightning._core.errors import autocast_dtype
from torchrl_lightning._core.protocols import DataApi
from torchrl_lightning._core.settings import computed, default_factory, setting
from torchrl_lightning.agents.metrics import train_names
from torchrl_lightning.agents.model_based.world_model_fit import WorldModelFit
from torchrl_lightning.agents.model_based.world_models import WorldModel
from torchrl_lightning.agents.q_learning import SACModule
from torchrl_lightning.dynamics import DynamicsTargets
from torchrl_lightning.environments.autocast import to_single


class MBPOModule(SACModule):
    """MBPO (Janner et al., 2019): soft actor-critic on short branches that a world model imagines from real states.

    The policy acts in the environment and in the world model. A :class:`~torchrl_lightning.BranchedReplay`, as
    ``source=`` of a ``ReplayDataModule``, configures when to fit the world model, where branches start, their length
    and their share of a batch. A checkpoint contains all networks and the world model.

    Args:
        network: Network in front of the heads; two layers of 256 rectified units by default.
        dynamics: Settings of the world model and its fit; the defaults are the settings of the paper.
        num_critics: As in :class:`SACModule`, like all arguments that are not listed here.

    Raises:
        TypeError: The network is a ``RecurrentNetwork``, but the world model does not imagine recurrent states.
            ``build`` raises the same error if the actions are not bounded floating-point vectors.
        ValueError: An observation is discrete. The setup of a fit raises this error.

    Examples:
        >>> from torchrl_lightning import environment_specs, make_vector_env
        >>> specs = environment_specs(make_vector_env("Pendulum-v1", 1))
        >>> module = MBPOModule(dynamics=WorldModelFit([16])).build(specs)
        >>> start = TensorDict(specs.observation.zero([4]), [4])
        >>> module.imagine(start, 3)["next", "reward"].shape
        torch.Size([12, 1])
    """

    training_metrics = (*SACModule.training_metrics, *train_names("dynamics_error", "dynamics_epochs"))

    supports_several_ranks = False

    dynamics: Annotated[WorldModelFit, default_factory(WorldModelFit)] = setting(default=None)
    errors: Tensor = computed()
    epochs_of_fit: Tensor = computed()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.network.recurrent:
            raise TypeError(
                "network must not be recurrent in MBPOModule, because its world model predicts no recurrent states, "
                f"got {type(self.network).__name__}. Use an MLPNetwork."
            )
        self.world_model: WorldModel | None = None
        # The last fit's validation errors of the elites (infinite before the first fit) and its number of epochs.
        self.register_buffer("errors", torch.full((self.dynamics.num_elites,), torch.inf))
        self.register_buffer("epochs_of_fit", torch.zeros((), dtype=torch.int64))

    def build(self, specs: Any) -> Self:
        """Build networks, targets and world model from the specs and return the module; a second call does nothing."""
        if self.world_model is None:
            super().build(specs)
            self.world_model = self.dynamics.build(specs)
        return self

    def incompatibility(self, data: Any) -> str | None:
        """Return an error message if the DataModule has no branches or the world model cannot learn, else None."""
        imagines = DataApi.of(data).has_imagined_rows
        if imagines is None:
            return super().incompatibility(data)
        if imagines(self):
            return DynamicsTargets(
                data.specs.observation, data.specs.action
            ).incompatibility() or super().incompatibility(data)
        return (
            f"the DataModule of {type(self).__name__} must provide branches of its world model. Use data=branched "
            "(ReplayDataModule with source=functools.partial(BranchedReplay, ...)), or another learner, such as "
            "model=sac."
        )

    # -- the world model --------------------------------------------------------------------------------------------

    def fit_dynamics(self, training: TensorDictBase, validation: TensorDictBase) -> None:
        """Fit the world model to transitions ``[N]``, validated on ``[V]``; see :meth:`WorldModelFit.fit`."""
        errors, epochs = self.dynamics.fit(self.require_built(self.world_model), training, validation)
        self.errors.copy_(errors)
        self.epochs_of_fit.fill_(epochs)

    @torch.no_grad()
    def imagine(self, start: TensorDictBase, length: int) -> TensorDictBase:
        """Follow the policy in the world model for ``length`` steps or until termination.

        Args:
            start: Observations ``[R]`` at the start of the branches.
            length: Maximum number of steps of a branch.

        Returns:
            Transitions ``[N]``, ordered by step, in the format of a collector. A branch that reaches ``length`` is not
            marked as done. The world model continues from its unrounded predictions. The policy and the transitions
            receive the predictions in the dtypes of real observations, with rounded integers.

        Raises:
            RuntimeError: A prediction is not finite.
        """
        model, act = self.require_built(self.world_model), self._act_under_autocast()
        targets, device = model.targets, model.elites.device
        observation = targets.observation(start).to(device)
        members = model.assign_members(len(observation)) if model.propagation == "trajectory" else None
        steps: list[TensorDictBase] = []
        for step in range(length):
            shape, entries = observation.shape[:1], targets.observed(observation)
            action = act([entries[key] for key in self._keys], True)
            next_observation, reward, terminated = model.step(observation, targets.action(action, shape), members)
            if not (next_observation.isfinite().all() and reward.isfinite().all()):
                raise RuntimeError(
                    "predictions of the world model must be finite, got NaN or infinity at step "
                    f"{step + 1} of {length}. Use shorter branches, or fit the world model to more frames."
                )
            done = terminated.unsqueeze(1)
            false = torch.zeros_like(done)
            flags = {"terminated": done, "truncated": false, "done": done.clone(), "is_init": false.clone()}
            next_step = TensorDict(
                {**targets.observed(next_observation), **flags, "reward": reward.unsqueeze(1)}, shape
            )
            steps.append(TensorDict({**entries, "action": action, "is_init": false.clone(), "next": next_step}, shape))
            if terminated.any():
                observation = next_observation[~terminated]
                members = None if members is None else members[~terminated]
            else:
                observation = next_observation
            if not len(observation):
                break
        imagined: TensorDictBase = torch.cat(steps)
        return imagined

    def _act_under_autocast(self) -> Callable[[list[Tensor], bool], Tensor]:
        """Return the policy's ``act`` with the autocast that applies to its actions in the environment."""
        act: Callable[[list[Tensor], bool], Tensor] = self.policy.act
        dtype = None if self._trainer is None else autocast_dtype(self.trainer)
        if dtype is None:
            return act

        def autocast_act(entries: list[Tensor], explore: bool) -> Tensor:
            with torch.autocast(entries[0].device.type, dtype=dtype, cache_enabled=False):
                return to_single(act(entries, explore))

        return autocast_act

    def epoch_metrics(self) -> dict[str, float]:
        """Return the base metrics, the elites' mean validation error and the number of epochs of the last fit."""
        return {
            **super().epoch_metrics(),
            "dynamics_error": float(self.errors.mean()),
            "dynamics_epochs": float(self.epochs_of_fit),
        }
