"""What libraries compile while they are imported is compiled once it is called."""

from __future__ import annotations

import torch

from memest.trace.model.quantization import quiet


def test_compiled_when_called(monkeypatch):
    compiled = []

    def compiler(function, **options):
        compiled.append(options)
        return lambda *args: ("compiled", function(*args))

    monkeypatch.setattr(torch, "compile", compiler)
    with quiet():

        @torch.compile(dynamic=False)
        def double(x):
            """Twice."""
            return 2 * x

        triple = torch.compile(lambda x: 3 * x)
    assert torch.compile is compiler
    assert not compiled
    assert double.__doc__ == "Twice."
    assert double(2) == double(2) == ("compiled", 4)
    assert compiled == [{"dynamic": False}]
    assert triple(1) == ("compiled", 3)
