"""What turns a call into a graph."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ..functions import Function
from ..subject import Numbers, Subject, inference, numbers
from ._tool import Tool


def _compiled(subject: Subject, **options: Any) -> Numbers:
    return numbers(subject, torch.compile(subject.module, backend="aot_eager", **options))


def _symbolically(subject: Subject) -> Numbers:
    module = subject.module
    return numbers(subject, torch.fx.symbolic_trace(module.function if isinstance(module, Function) else module))


def _proxies(subject: Subject, **options: Any) -> Numbers:
    arguments = (*subject.inputs, *subject.given)
    return inference(subject, make_fx(subject.module, **options)(*arguments))


def _jit(subject: Subject) -> Numbers:
    traced: Any = torch.jit.trace(subject.module, (*subject.inputs, *subject.given), check_trace=False)
    return numbers(subject, traced)


def _exported(subject: Subject, **options: Any) -> Numbers:
    program = torch.export.export(subject.module, (*subject.inputs, *subject.given), **options)
    return numbers(subject, program.module())


def _decomposed(subject: Subject) -> Numbers:
    program = torch.export.export(subject.module, (*subject.inputs, *subject.given))
    return inference(subject, program.run_decompositions().module())


_GRADIENTS = frozenset({"no dropout"})
TOOLS = (
    Tool("compile", partial(_compiled, fullgraph=True), needs=_GRADIENTS, slow=True),
    Tool("compile with symbolic sizes", partial(_compiled, dynamic=True), needs=_GRADIENTS, slow=True),
    Tool("fx.symbolic_trace", _symbolically, needs=_GRADIENTS | {"symbols"}),
    Tool("make_fx", _proxies, inference, needs=_GRADIENTS),
    Tool(
        "make_fx with fake tensors",
        partial(_proxies, tracing_mode="fake", _allow_non_fake_inputs=True),
        inference,
        needs=_GRADIENTS,
    ),
    Tool("jit.trace", _jit, needs=_GRADIENTS),
    Tool("export", _exported, needs=_GRADIENTS, slow=True),
    Tool("export with decompositions", _decomposed, inference, needs=_GRADIENTS, slow=True),
)
