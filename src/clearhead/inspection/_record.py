"""`record`: what every attention of a model attends to, while it runs, without building (B, H, L, S)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._call.call import AttentionCall
from .._call.naming import remember_names
from .._call.observers import observing
from .._call.sharding import HeadShard
from .._checks import choice, index, module, shown
from .._statistics.arguments import (
    DEFAULT,
    Per,
    make_options,
    require_names,
    require_per,
    whole_numbers,
)
from .._statistics.compute import compute_statistics
from .._statistics.patch_layout import PatchLayout
from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from .._statistics.summary import fold
from .._torch_private import is_compiler_error
from .._weights import Queries, checked_queries
from ..errors import ClearheadError, RecordError, UnknownNameError
from ._calls import Calls
from ._capture import CaptureMode, obstacle
from ._chosen_layers import ChosenLayers
from ._drawing import Drawable
from ._naming import ModuleNames, uncompiled
from ._padding import CountedQueries
from ._patch_layout import find_layout, picture_size
from ._unseen import Unseen

Keep = Literal["statistics", "queries_keys"]


class record(Drawable, Recorded):
    """Record the attention of a model inside a ``with`` block, without gradients and without changing its results.

    Seen are Clearhead's modules and functions, everything that calls `F.scaled_dot_product_attention` (transformers
    with ``sdpa`` or ``clearhead``, timm, …), and `nn.MultiheadAttention` with the layers of `nn.Transformer` in
    training and eval. PyTorch's inference fast path is off inside the block; with a padding mask that path returns
    zeros for padded positions and the ordinary one does not, so outputs may differ there.

    Of modules after `clearhead.distributed.tensor_parallel` or `context_parallel`, every process records the same, and
    gives `query_mask` and `queries` of the whole call; a mask that is found may also be cut as the tokens are. Results
    are of all heads; where the sequence is split, what has a number for each query is of the queries that the process
    holds, ``rows`` of the chosen ones among them, ``received`` of the keys that it holds, and all else, with `summary`,
    of the whole call.

    Afterwards the record is a mapping from the qualified name of the module in which attention ran to its `Calls`, and
    draws itself: `page`, `plot_heads`, `plot_map`, `plot_received`, `plot_rollout`.

    Args:
        model: the module whose submodules name the calls.
        statistics: as for `attention_statistics`. Default entropy, received, max_logit, top_k.
        layers: which attention modules to record: numbers in the order in which they first run, or names. Default all.
        heads: which heads the results hold. Default all.
        query_mask: bool or 0/1 (B, L), queries to count. Default: found in the root call's ``attention_mask`` or
            ``src_key_padding_mask``, by name or in a batch given as a dictionary, else all.
        keep: ``"queries_keys"`` also keeps query and key of every call, for `weights` and `rollout` later.
            Default ``"statistics"``.
        queries, top_k, map_size, map_pooling, sink_keys, offsets, per: as for `attention_statistics`.

    Raises:
        RecordError: at the end of the block if no attention was seen at all, or compiled functions attended. In a call
            of a module that is split over processes, for ``keep="queries_keys"``.
        DistributedError: in such a call, unless every process records the same.
        ArgumentError, DTypeError: for arguments that mean nothing.

    Warns:
        UnseenAttentionWarning: if modules computed a softmax over four dimensions by themselves, called attention
            kernels of others, or attended over nested tensors or under `torch.vmap`; it names them.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
        >>> with clearhead.record(model, statistics=("entropy",)) as rec:
        ...     _ = model(torch.randn(2, 5, 12))
        >>> list(rec), rec["self_attn"].entropy.shape
        (['self_attn'], torch.Size([2, 3, 5]))
    """

    recomputing = False

    def __init__(
        self,
        model: nn.Module,
        statistics: Sequence[str] = DEFAULT,
        *,
        layers: Sequence[int | str] | None = None,
        heads: Sequence[int] | None = None,
        query_mask: Tensor | None = None,
        keep: Keep = "statistics",
        queries: Queries | None = None,
        top_k: int = 8,
        map_size: int = 128,
        map_pooling: Literal["mass", "max"] = "mass",
        sink_keys: int = 1,
        offsets: Sequence[int] = (-1,),
        per: Per = "query_head",
    ) -> None:
        module("model", model)
        choice("keep", keep, ("statistics", "queries_keys"))
        self._names = require_names(statistics, has_value=True)
        require_per(per, self._names)
        self._options = make_options(top_k, map_size, map_pooling, sink_keys, offsets)
        self._layers = ChosenLayers(layers, model)
        self._heads = None if heads is None else whole_numbers("heads", heads)
        self._running = ModuleNames(model)
        self._counted = CountedQueries(query_mask, self._running)
        self._keep = keep
        self._rows = checked_queries("queries", queries)
        self._per: Per = per
        remember_names(model)
        self._calls: dict[str, Calls] = {}
        self._unseen = Unseen(model)
        self._picture_size: tuple[int, int] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> record:
        with ExitStack() as stack:
            stack.enter_context(uncompiled(self._running.model))
            stack.enter_context(self._running.following())
            stack.enter_context(observing(self))
            stack.enter_context(CaptureMode(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            self.report_unseen()
        elif is_compiler_error(kind):
            raise RecordError(
                "record: a compiled function attended inside the block, where calls cannot be observed. Run it "
                "uncompiled: with torch.compiler.set_stance('force_eager'), clearhead.record(model) as rec: "
                "…"
            ) from error

    def start_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin in a forward pre-hook of the model, whose own call, with these arguments, runs already."""
        self.__enter__()
        if hasattr(self._running.model, "_orig_mod"):  # from torch.compile, whose compiled forward is called next
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        self._running.enter("", args, kwargs)

    def stop(self) -> None:
        """End the block, without a word about what was not seen."""
        self._stack.close()
        self._running.root_arguments = ((), {})
        self._counted.forget()

    def wanted(self) -> Hashable:
        """What is recorded of the module that runs; a call of which there are parts is not kept.

        Raises:
            RecordError: if queries and keys are to be kept.
        """
        name = self._running.current
        if name is None or not self._layers.include(name):
            return None
        if self._keep != "statistics":
            raise RecordError(
                "keep",
                expected="'statistics' of a module that is split over processes",
                got=repr(self._keep),
                fix="Each process would keep a part, of which no weights can be computed later.",
            )
        rows = self._rows.tolist() if isinstance(self._rows, Tensor) else self._rows
        marks = self._counted.signature(name)
        return self._names, repr(self._options), self._per, self._heads, repr(rows), marks

    def attended(self, call: AttentionCall, output: Tensor) -> Tensor:
        """Record a call of Clearhead's own attention."""
        self.captured((call.query, call.key, call.value), lambda: call)
        return output

    @property
    def running_module(self) -> nn.Module:
        """The innermost module that is running."""
        return self._running.model.get_submodule(self._running.current or "")

    def captured(self, inputs: Iterable[object], read: Callable[[], AttentionCall]) -> None:
        """Fold one call into statistics, if the running module is among `layers`."""
        name = self._running.current
        if name is None or not self._layers.include(name):
            return
        what = obstacle(inputs)
        if what is not None:
            self._unseen.note(what, name)
            return
        heads: HeadShard | None = getattr(self.running_module, "head_shard", None)
        with torch.no_grad():
            call = read()
            counted = self._counted_queries(name, call) if heads is None else self._agreed(name, call, heads)
            statistics = compute_statistics(call, self._names, self._options, counted, self._rows, self._per, heads)
        if self._heads is not None:
            statistics = statistics.with_heads(self._heads)
        self._picture_size = self._picture_size or picture_size(self._running.root_arguments)
        calls = self._calls.setdefault(name, Calls(name))
        calls.statistics.append(statistics)
        if self._keep == "queries_keys":
            calls.keep(call)

    def missed(self, what: str) -> None:
        """Note something that the running module computed and that cannot be recorded."""
        name = self._running.current
        if name is not None:
            self._unseen.note(what, name)

    def __getitem__(self, name: str) -> Calls:
        if not isinstance(name, str) or name not in self._calls:
            recorded = ", ".join(map(repr, self._calls))
            raise UnknownNameError(f"name {shown(name)}: no attention was recorded there; recorded are {recorded}")
        return self._calls[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def name_of(self, layer: int | str) -> str:
        if isinstance(layer, str):
            if layer not in self._calls:
                recorded = ", ".join(map(repr, self._calls))
                raise UnknownNameError("layer", expected=f"one of {recorded}", got=shown(layer))
            return layer
        name = self._layers.order[index("layer", layer, len(self._layers.order))]
        if name not in self._calls:
            raise UnknownNameError("layer", expected="one of the layers that were recorded", got=f"{layer}, {name!r}")
        return name

    def kept_call(self, layer: int | str, call: int = 0) -> AttentionCall:
        calls = self[self.name_of(layer)]
        if not calls.kept:
            raise RecordError(
                "keep",
                expected="a record made with keep='queries_keys'",
                got=f"keep={self._keep!r}",
                fix="Weights are computed from queries and keys. Record again with keep='queries_keys'.",
            )
        return calls.kept[index("call", call, len(calls.kept))]

    def patches(self, layer: int | str) -> PatchLayout:
        name = self.name_of(layer)
        first = self._calls[name][0]
        return find_layout(self._running.model, name, self._picture_size, first.query_length, first.key_length)

    def reduce(self) -> dict[str, AttentionStatistics]:
        """Fold the calls of every module into one, along the batch.

        Shorter calls are padded with zeros (−1 in top-k indices); their padding is not ``counted``.

        Returns:
            One `AttentionStatistics` per module name.
        """
        return {name: fold(calls.statistics) for name, calls in self._calls.items()}

    def __repr__(self) -> str:
        names = ", ".join(name or "the model itself" for name in self._calls)
        return f"<record of {len(self._calls)} attention modules: {names or 'nothing yet'}>"

    def _agreed(self, name: str, call: AttentionCall, heads: HeadShard) -> Tensor | None:
        """The counted queries, after the processes that share the heads agreed on what they record."""
        counted, wanted, problem = None, None, None
        try:
            wanted, counted = self.wanted(), self._counted_queries(name, call)
        except ClearheadError as error:
            problem = error
        heads.agree(wanted, problem)
        return counted

    def _counted_queries(self, name: str, call: AttentionCall) -> Tensor | None:
        return self._counted.of_call(name, call, is_first=name not in self._calls)

    def report_unseen(self) -> None:
        """Raise or warn if layers that were chosen, or any attention at all, are not in the record."""
        self._layers.require_ran()
        self._unseen.report(self._calls)
