"""What libraries tell torch's compiler before it is imported holds when it is."""

from __future__ import annotations

import torch
import torch._dynamo

from torchrl_lightning.libraries import CompilerNotes


def test_the_compiler_hears_what_was_noted() -> None:
    notes, compiling = CompilerNotes(), []

    @notes.disable
    def told(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    @notes.disable()
    def idle() -> None: ...

    @notes.assume_constant_result
    def constant() -> int:
        return 2

    assert told(torch.ones(())) == 2
    assert not hasattr(told, "_torchdynamo_disable")
    notes.watch()
    assert told._torchdynamo_disable
    assert idle._torchdynamo_disable
    assert constant._dynamo_marked_constant

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return told(x * constant())

    assert compiled(torch.ones(())) == 3
    assert compiling == [False, False]
