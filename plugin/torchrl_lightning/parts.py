"""What our parts have beyond TorchRL's: a constructor that can be read, and a generator that travels to processes."""

from __future__ import annotations

import inspect
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


class _Shown:
    """The signature of a class: its constructor's, without ``self``."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        shown = inspect.signature(owner.__init__)  # type: ignore[misc]
        return shown.replace(parameters=list(shown.parameters.values())[1:])


class OwnSignature:
    """Show a class's constructor to ``inspect.signature``, ``help`` and editors.

    TorchRL's metaclasses of buffers and samplers define ``__call__(cls, *args, **kwargs)``, which hides it.
    """

    __signature__ = _Shown()


def is_spawning() -> bool:
    """Return whether objects are pickled right now for a process that starts, and not for a copy or a file."""
    return get_spawning_popen() is not None


def _built(device: str, state: Any) -> torch.Generator:
    return torch.Generator(device).set_state(torch.from_numpy(state))


# To processes travels what numpy holds: a tensor that exists only while a process starts loses its file before the
# process opens it.
ForkingPickler.register(torch.Generator, lambda each: (_built, (str(each.device), each.get_state().numpy())))


def fresh_generator() -> torch.Generator:
    """Return a generator that is seeded from torch's global one."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, ())))


class OwnGenerator:
    """Give a part a generator: the one that it is handed, else its own, seeded from torch's global one."""

    _own_rng: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        """The random generator."""
        if self._own_rng is None:
            self._own_rng = fresh_generator()
        return self._own_rng

    @generator.setter
    def generator(self, value: torch.Generator) -> None:
        self._own_rng = value

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # TorchRL's samplers refuse to travel, and leave their generator out
