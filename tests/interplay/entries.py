"""The rows of the table: every public entry, with calls of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import functions, models, modules
from .subject import SEED, Subject

#: What a tool may need of an entry, and why a cell without it makes no sense.
NEEDS = {
    "gradients": "the results of statistics have no gradients, which their documentation says",
    "parameters": "a function has no parameters",
    "linears": "it has no `nn.Linear` of its own",
    "norms": "PyTorch's LayerNorm is wrong under hooks that change strides",
    "samples": "packed sequences, sinks and biases have no batch whose samples could be taken apart",
    "one input": "Opacus takes no parameters of modules with several inputs, such as `nn.MultiheadAttention`",
    "pickle": "transformers hooks its layers with functions that cannot be pickled when it collects their weights",
    "graph": "weights that transformers collects in a reentrant checkpoint have no graph, with eager too",
    "classes": "transformers collects weights by the class of a module, which fully_shard changes, with eager too",
    "symbols": "the code of transformers' models cannot be traced with symbols, whatever their attention",
    "quantisable": "torchao quantises no function, and skips the one linear layer of an `nn.MultiheadAttention`",
    "transformers": "only models of transformers have this tool",
    "no dropout": "the tool calls several times or in another order, so that other weights are dropped",
}


#: What single calls lack besides.
_LACKS: dict[tuple[str, str], set[str]] = {
    ("attention", "grouped with sinks"): {"samples"},
    ("attention", "learned bias"): {"samples"},
    ("attention_weights", "average with sinks"): {"samples"},
    ("module", "grouped with sinks, norms and positions"): {"one input"},
    ("module", "learned bias"): {"one input"},
    ("upgraded encoder", "with weights"): {"pickle", "graph", "classes"},
    ("upgraded decoder", "with weights"): {"pickle", "graph", "classes"},
}


@dataclass(frozen=True)
class Entry:
    """A public entry.

    Args:
        name: of the row.
        cases: calls of it. The first one is in every run, the others in the slow one.
        lacks: those of `NEEDS` that no call of it has.
        tolerance: of its results in float32, relative to the largest number of a result.
    """

    name: str
    cases: dict[str, Callable[[], Subject]]
    lacks: frozenset[str] = frozenset()
    tolerance: float = 1e-5

    def build(self, case: str) -> Subject:
        """A call with the same numbers in every run."""
        torch.manual_seed(SEED)
        return self.cases[case]()

    def lacks_in(self, case: str) -> frozenset[str]:
        return self.lacks | ({"no dropout"} if case == "dropout" else set()) | _LACKS.get((self.name, case), set())


_FUNCTION = frozenset({"parameters", "linears", "quantisable", "transformers"})
_MODULE = frozenset({"transformers"})
ENTRIES = (
    Entry("attention", functions.ATTENTION, _FUNCTION),
    Entry("attention_varlen", functions.VARLEN, _FUNCTION | {"samples"}),
    Entry("attention_weights", functions.WEIGHTS, _FUNCTION),
    Entry("attention_statistics", functions.STATISTICS, _FUNCTION | {"gradients"}),
    Entry("drop-in function", functions.SDPA, _FUNCTION),
    Entry("module", modules.OWN, _MODULE),
    Entry("latent attention", modules.LATENT, _MODULE),
    Entry("drop-in module", modules.DROP_IN, _MODULE | {"one input", "quantisable"}),
    Entry("stack", modules.STACK, _MODULE),
    Entry("upgraded stack", modules.UPGRADED_STACK, _MODULE | {"one input", "norms"}),
    Entry("upgraded encoder", models.ENCODER, frozenset({"norms", "symbols"}), 2e-5),
    Entry("upgraded decoder", models.DECODER, frozenset({"symbols"}), 2e-5),
    Entry("record", modules.RECORD, _MODULE),
)
BY_NAME = {entry.name: entry for entry in ENTRIES}
