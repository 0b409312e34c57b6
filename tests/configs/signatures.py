"""Which arguments a constructor really takes, ``**kwargs`` followed to the classes that they end in."""

from __future__ import annotations

import inspect

# What a class hands to its base itself, although its **kwargs lead there too.
SETTLED = {
    "PPOBuffer": {"gae_lambda"},  # lam, under its documented name
    "RecurrentReplayBuffer": {"storage"},
    "SimpleReplayBuffer": {"storage"},
}


def constructor_arguments(component: type) -> dict[str, inspect.Parameter]:
    """Gives all named arguments of ``component``, those of a base class only where ``**kwargs`` leads there."""
    arguments: dict[str, inspect.Parameter] = {}
    for base in component.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                arguments.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    for name in SETTLED.get(component.__name__, ()):
        del arguments[name]
    return arguments
