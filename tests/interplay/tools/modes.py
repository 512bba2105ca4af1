"""Modes that see every operation of a call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..subject import Numbers, Subject, inference, numbers
from ._tool import Tool


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _under(make: Callable[[], AbstractContextManager[Any]], subject: Subject) -> Numbers:
    with make():
        return numbers(subject)


def _in_inference_mode(subject: Subject) -> Numbers:
    with torch.inference_mode():
        return inference(subject)


def _sizes(found: Numbers) -> Numbers:
    return {name: torch.tensor(tensor.shape) for name, tensor in found.items()}


def _fake(subject: Subject) -> Numbers:
    """Sizes of outputs and gradients, of tensors without memory. Masks are made inside, from fake lengths."""
    mode = FakeTensorMode()
    with mode:
        fake = _converted(subject, mode.from_tensor)
        found = numbers(fake)
    return _sizes(found)


def _converted(subject: Subject, convert: Callable[[Tensor], Tensor]) -> Subject:
    module: Any = subject.module
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = convert(parameter)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = convert(buffer)
    return Subject(module, tuple(map(convert, subject.inputs)), tuple(map(convert, subject.given)))


def _plain_sizes(subject: Subject) -> Numbers:
    return _sizes(numbers(subject))


def _profiled(subject: Subject) -> Numbers:
    with torch.profiler.profile(record_shapes=True, with_stack=False, with_flops=True) as profile:
        found = numbers(subject)
    assert profile.key_averages()
    return found


def _counted(subject: Subject) -> Numbers:
    """The outputs and gradients; and the operations of matrix products, which do not depend on the kernel."""
    with FlopCounterMode(display=False) as counter:
        found = numbers(subject)
    assert counter.get_total_flops() > 0
    return found


def _anomalies(subject: Subject) -> Numbers:
    with torch.autograd.detect_anomaly():
        return numbers(subject)


TOOLS = (
    Tool("TorchFunctionMode", partial(_under, _Functions)),
    Tool("TorchDispatchMode", partial(_under, _Operations)),
    Tool("default device", partial(_under, lambda: torch.device("cpu"))),
    Tool("inference_mode", _in_inference_mode, inference),
    Tool("FakeTensorMode", _fake, _plain_sizes),
    Tool("FlopCounterMode", _counted),
    Tool("profiler", _profiled),
    Tool("detect_anomaly", _anomalies, needs=frozenset({"gradients"})),
)
