"""`record`: statistics of all attention of a model while it runs, without a (B, H, L, S) tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn

from .._call.call import Call
from .._call.sharding import HeadShard
from .._checks import choice, index, module
from .._statistics.arguments import DEFAULT, Per, make_options, require_names, require_per, whole_numbers
from .._statistics.compute import compute_statistics
from .._statistics.patch_layout import PatchLayout
from .._statistics.stacks import Sides
from .._weights import Queries, checked_queries
from ..errors import ClearheadError, RecordError
from ._calls import Calls
from ._chosen_layers import ChosenLayers
from ._drawing import Drawable
from ._naming import Layer
from ._patch_layout import find_layout
from ._recorded_calls import RecordedCalls
from ._recorder import Recorder, require_uncompiled

Keep = Literal["statistics", "queries_keys"]


class record(Drawable, RecordedCalls, Recorder):
    """Record the attention of a model inside a ``with`` block, without gradients and without changing its results.

    Recorded are Clearhead's modules and functions, all calls of `F.scaled_dot_product_attention` (transformers with
    ``sdpa`` or ``clearhead``, timm, …), and `nn.MultiheadAttention` and the layers of `nn.Transformer` in training and
    eval. PyTorch's inference fast path is off inside the block. With a padding mask that path returns zeros for padded
    positions and the ordinary path does not, so these outputs may differ.

    After `clearhead.distributed.tensor_parallel` or `context_parallel`, every process makes the same record, and passes
    `query_mask` and `queries` for the full call. A padding mask of the model's call may also be split like the tokens.
    Results cover all heads. If the sequence is split, per-query statistics cover the queries of this process, ``rows``
    the chosen ones among them, and ``received`` its keys. All others, and `summary`, cover the full call.

    Afterwards the record is a mapping from the qualified name of the module in which attention ran to its `Calls`. A
    module that runs as several layers, as in ALBERT, has the names ``"<module>/0"``, ``"<module>/1"``, … Such layers
    are told apart by what their inputs were computed from. That is not followed through numpy, through ``.data``, or
    through writes to views in inference mode. The methods `page`, `plot_heads`, `plot_map`, `plot_received` and
    `plot_rollout` of a record draw it.

    Args:
        model: the model. The names of its submodules are the keys of the record.
        statistics: as for `attention_statistics`. Default entropy, received, max_logit, top_k.
        layers: the attention modules to record, as names or as numbers in running order. Default all.
        heads: the heads to record. Default all.
        query_mask: bool or 0/1 (B, L), the counted queries. By default padding does not count: in self-attention the
            keys that the mask hides from every query, and in all attention what an argument ``attention_mask`` or
            ``src_key_padding_mask`` of a running module marks.
        keep: ``"queries_keys"`` also saves query and key of every call, for `weights` and `rollout`. Default
            ``"statistics"``.
        queries, top_k, map_size, map_pooling, sink_keys, offsets, per: as for `attention_statistics`.

    Raises:
        RecordError: at the end of the block, if no attention was recorded, or if compiled functions attended. In a call
            of a module that is split over processes, for ``keep="queries_keys"``.
        DistributedError: in such a call, unless every process makes the same record.
        ArgumentError, DTypeError: for invalid arguments.

    Warns:
        UnseenAttentionWarning: if modules computed a softmax over four dimensions, called attention kernels of other
            libraries, or attended over nested tensors or under `torch.vmap`. It names the modules.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
        >>> with clearhead.record(model, statistics=("entropy",)) as rec:
        ...     _ = model(torch.randn(2, 5, 12))
        >>> list(rec), rec["self_attn"].entropy.shape
        (['self_attn'], torch.Size([2, 3, 5]))
    """

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
        require_uncompiled()
        module("model", model)
        choice("keep", keep, ("statistics", "queries_keys"))
        self._names = require_names(statistics, has_value=True)
        require_per(per, self._names)
        self._options = make_options(top_k, map_size, map_pooling, sink_keys, offsets)
        RecordedCalls.__init__(self, ChosenLayers(layers, model))
        Recorder.__init__(self, model, self._layers, query_mask)
        self._heads = None if heads is None else whole_numbers("heads", heads)
        self._keep = keep
        self._queries = checked_queries("queries", queries)
        self._per: Per = per

    @property
    def _layers_seen(self) -> Collection[Layer]:
        return self._calls

    def wanted(self) -> Hashable:
        """The settings that all processes need to share for the running module. ``None`` if it is not recorded.

        Raises:
            RecordError: if queries and keys are to be saved.
        """
        name = self._running.current
        if name is None or not self._layers.include(Layer(name)):
            return None
        return self._settings(name)

    def _settings(self, name: str) -> Hashable:
        if self._keep != "statistics":
            expected = "'statistics' of a module that is split over processes"
            fix = "Each process would keep a part, of which no weights can be computed later."
            raise RecordError("keep", expected=expected, got=repr(self._keep), fix=fix)
        queries = self._queries.tolist() if isinstance(self._queries, Tensor) else self._queries
        signature = self._counted_queries.signature(name)
        return self._names, repr(self._options), self._per, self._heads, repr(queries), signature

    def _receive(self, layer: Layer, query: Tensor, call: Call, sides: Sides, output: Tensor | None) -> None:
        self._sides.setdefault(layer, sides)
        heads: HeadShard | None = getattr(self._running.model.get_submodule(layer.module), "head_shard", None)
        is_self, is_first = sides.queries == sides.keys, layer not in self._calls
        find = partial(self._counted_queries.of_call, layer.module, call, query, is_self=is_self, is_first=is_first)
        counted = find() if heads is None else self._agreed(layer.module, heads, find)
        statistics = compute_statistics(call, self._names, self._options, counted, self._queries, self._per, heads)
        if self._heads is not None:
            statistics = statistics.with_heads(self._heads)
        calls = self._calls.setdefault(layer, Calls())
        calls.add(self._running.root_calls, statistics, call if self._keep == "queries_keys" else None)

    def _agreed(self, name: str, heads: HeadShard, find: Callable[[], Tensor | None]) -> Tensor | None:
        """The counted queries. Processes that share the heads first agree on what they record."""
        counted, wanted, problem = None, None, None
        try:
            wanted = self._settings(name)
            counted = find()
        except ClearheadError as error:
            problem = error
        heads.agree(wanted, problem)
        return counted

    def kept_call(self, layer: int | str, call: int = 0) -> Call:
        """The query, key and mask of one call. Its value is the key.

        Raises:
            RecordError: without ``keep="queries_keys"``.
        """
        calls = self[self.name_of(layer)]
        if not calls.saved:
            expected, got = "a record made with keep='queries_keys'", f"keep={self._keep!r}"
            fix = "Weights are computed from queries and keys. Record again with keep='queries_keys'."
            raise RecordError("keep", expected=expected, got=got, fix=fix)
        return calls.saved[index("call", call, len(calls.saved))]

    def patches(self, layer: int | str) -> PatchLayout:
        """The positions of a vision model's tokens on its input, from the model's configuration."""
        module, first = self._layer(layer).module, self[self.name_of(layer)][0]
        return find_layout(self._running.model, module, self._picture_size, first.query_length, first.key_length)
