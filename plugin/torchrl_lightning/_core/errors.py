"""User errors, and checks that the parts of a run fit together.

The method ``incompatibility`` of a part returns a reason, or None if the part fits.
"""

from __future__ import annotations

from typing import Any

from torchrl_lightning._core.protocols import DataApi, LearnerApi


class UserError(ValueError):
    """A mistake of the user, not a bug in the program; the user needs only the one-line message."""


class IncompatibleError(ValueError):
    """A part does not fit the environment, the learner or the data; the message suggests a part that fits."""


def check_compatible(part: Any, *others: Any) -> None:
    """Call the method ``incompatibility`` of a part with the others; raise IncompatibleError if it returns a reason.

    Examples:
        >>> class Stack:
        ...     def incompatibility(self, specs, learner):
        ...         return None if len(specs) == 3 else f"a stack needs images, got {specs}."
        >>> check_compatible(Stack(), [84, 84, 3], None)
        >>> check_compatible(Stack(), [4], None)
        Traceback (most recent call last):
            ...
        torchrl_lightning._core.errors.IncompatibleError: a stack needs images, got [4].
    """
    check = getattr(part, "incompatibility", None)
    if check is not None and (reason := check(*others)) is not None:
        raise IncompatibleError(reason)


def check_stream(learner: Any, data: Any) -> None:
    """Check that a learner learns from the stream that a DataModule serves; raise IncompatibleError if it does not.

    Learner and DataModule name their stream in ``stream_kind``; None fits any stream.
    """
    learner_api, data_api = LearnerApi.of(learner), DataApi.of(data)
    if (
        learner_api.stream_kind is None
        or data_api.stream_kind is None
        or learner_api.stream_kind == data_api.stream_kind
    ):
        return
    raise IncompatibleError(
        f"{type(learner).__name__} does not learn from the {type(data).__name__}; choose a stream for it, such as "
        f"{learner_api.suggested_data}, or a learner for this stream, such as {data_api.suggested_model}."
    )


def check_precision(trainer: Any) -> None:
    """Validate a trainer's precision; raise ValueError if the policy could not act in the precision of training."""
    precision, plugin = str(trainer.precision), trainer.precision_plugin
    if precision.endswith("-true") and precision != "32-true":
        raise ValueError(
            f"precision must be '32-true', '16-mixed' or 'bf16-mixed', got {precision!r}. Lightning would rebuild each "
            "TensorDict without its batch size, and a policy of another dtype would receive float32 observations."
        )
    if precision.startswith("transformer-engine") or not _only_autocasts(plugin):
        raise ValueError(
            f"precision must be '32-true', '16-mixed' or 'bf16-mixed', got {precision!r} of {type(plugin).__name__}. "
            "It changes more than autocast, so the policy would act in another precision than in training."
        )


def autocast_dtype(trainer: Any) -> Any:
    """Return the dtype of the autocast around a trainer's training step; None without autocast.

    Examples:
        >>> from lightning import Trainer
        >>> autocast_dtype(Trainer(accelerator="cpu", precision="bf16-mixed", logger=False, barebones=True))
        torch.bfloat16
    """
    plugin = None if trainer is None else trainer.precision_plugin
    if plugin is None:
        return None
    import torch

    device = trainer.strategy.root_device.type
    with plugin.train_step_context():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _only_autocasts(plugin: Any) -> bool:
    """Return whether a precision plugin leaves batches and torch's default dtype unchanged."""
    if plugin is None:
        return True
    import torch
    from tensordict import TensorDict, TensorDictBase

    batch, default_dtype = TensorDict({"observation": torch.zeros(1, 1)}, [1]), torch.get_default_dtype()
    with plugin.train_step_context():
        is_default = torch.get_default_dtype() == default_dtype
    batch = plugin.convert_input(batch)
    is_unchanged = (
        isinstance(batch, TensorDictBase) and batch.shape == (1,) and batch["observation"].dtype == default_dtype
    )
    return is_default and is_unchanged
