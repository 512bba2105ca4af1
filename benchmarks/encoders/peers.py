"""Ways to run an encoder of transformers on a CPU: each takes the loaded model and gives a function of batches."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, final

import torch
from torch import Tensor, nn

import clearhead
from benchmarks.comparing import OURS
from benchmarks.encoders.batches import Batch
from benchmarks.encoders.converted import CTRANSLATE2, ONNX_RUNTIME, OPENVINO, Encode
from benchmarks.peers.work import Unsupported
from clearhead._layer.linear import processor_maker

__all__ = ["PADDED", "PEERS", "SDPA", "TRAINABLE", "Eager", "quiet"]

PADDED, SDPA = "Clearhead, padded", "transformers sdpa"


@final
class Eager:
    """A model of transformers as a function of batches."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> Tensor:
        return self.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters and converters say, and without what `torch.compile` kept of earlier runs."""
    compiler: Any = torch.compiler.config
    dynamo: Any = torch._dynamo.config
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # A graph for each model, dtype and batch.
        with (
            compiler.patch(force_disable_caches=True),
            dynamo.patch(recompile_limit=64),
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def ours(model: nn.Module) -> Eager:
    upgraded = copy.deepcopy(model)
    clearhead.upgrade(upgraded, unpad=True)
    return Eager(upgraded)


def ours_padded(model: nn.Module) -> Eager:
    upgraded = copy.deepcopy(model)
    clearhead.upgrade(upgraded)
    return Eager(upgraded)


def sdpa(model: nn.Module) -> Eager:
    return Eager(model)


def compiled(model: nn.Module) -> Eager:
    return Eager(torch.compile(copy.deepcopy(model), dynamic=False))


def zentorch(model: nn.Module) -> Encode:
    if processor_maker() != "AuthenticAMD":
        raise Unsupported("it is for processors of AMD")
    import zentorch  # noqa: F401  # pyright: ignore  # registers the backend

    def backend(graph: Any, inputs: Any) -> Any:
        # It leaves its pass in the settings of Inductor, where every later `torch.compile` would run it too.
        with torch._inductor.config.patch(joint_custom_post_pass=None):
            return torch._dynamo.lookup_backend("zentorch")(graph, inputs)

    return Eager(torch.compile(copy.deepcopy(model), backend=backend, dynamic=False))


#: The first is what the others are compared with.
PEERS: dict[str, Callable[[nn.Module], Encode]] = {
    OURS: ours,
    PADDED: ours_padded,
    SDPA: sdpa,
    "torch.compile": compiled,
    "ONNX Runtime": ONNX_RUNTIME,
    "OpenVINO": OPENVINO,
    "CTranslate2": CTRANSLATE2,
    "zentorch": zentorch,
}
#: Those that give gradients.
TRAINABLE: dict[str, Callable[[nn.Module], Eager]] = {
    OURS: ours,
    PADDED: ours_padded,
    SDPA: sdpa,
    "torch.compile": compiled,
}
