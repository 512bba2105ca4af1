"""What an attention call is: its spec, without tensors, and the call, which adds them. Validated once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from .._checks import FLOATS, PLAIN, flag, is_probability, number, strided
from .._environment import Environment, read_environment
from ..errors import DeviceError, DTypeError, ShapeError, shape_text
from ..masks._base import Mask
from ..masks._check import as_positions
from ..masks._coverage import COVERS_ALL, Coverage, coverage
from ..masks._grid import Block, Grid
from ..masks._tensors import as_mask
from .dropout import DropoutOrigin, dropout_factors
from .rows import OfDocument, Rows, within_rows
from .sharding import CallPart

#: As a logit it has no weight beside any score, and it is finite.
NO_SINK = -1e38

#: Which weights a call returns beside its output: (B, H, L, S), or their average over the heads (B, L, S).
WeightsWanted = Literal["heads", "average"] | None


def weights_wanted(need_weights: bool, average_attn_weights: bool) -> WeightsWanted:
    """From the two arguments of a module's call, which are checked."""
    need_weights = flag("need_weights", need_weights)
    average_attn_weights = flag("average_attn_weights", average_attn_weights)
    return ("average" if average_attn_weights else "heads") if need_weights else None


class Layout(NamedTuple):
    """Shape and strides of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tensor.stride())

    @property
    def has_whole_rows(self) -> bool:
        """Whether the elements of a row lie side by side."""
        return self.strides[-1] == 1 or self.shape[-1] <= 1


# A tuple and no dataclass: it is made, hashed and compared in every call.
class AttentionSpec(NamedTuple):
    """Everything about a call but its tensors: hashable, the key of a cached plan.

    Args:
        query: layout of (B, H, L, D).
        key: of (B, Hkv, S, D).
        value: of (B, Hkv, S, Dv).
        dtype, device: of all three.
        subclass: name of the tensor subclass among them, or ``None``.
        negative: whether one of them is a lazily negated view.
        mask: the mask's signature; ``None`` without a mask, and for one that has no signature.
        masked: whether there is a mask.
        query_positions, key_positions: ``None``, an int, or the shape of a tensor.
        scale: factor of q·k.
        softcap: c in s ← c·tanh(s/c), or ``None``.
        sinks: whether there are sinks.
        dropout_p: probability that a weight is dropped, in [0, 1].
        origin: where the call begins in the one whose weights it drops; ``None`` where it is the whole.
        gradients: which of the call's inputs want one, in the order of `AttentionCall.inputs`; empty if none does.
        lse: whether the log-sum-exp is returned.
        weights: which weights are returned.
        documents: how many documents lie end to end, or ``None``.
        tracing, transformed, dispatching: of the environment.
    """

    query: Layout
    key: Layout
    value: Layout
    dtype: torch.dtype
    device: torch.device
    negative: bool
    mask: Hashable | None
    masked: bool
    query_positions: int | tuple[int, ...] | None
    key_positions: int | tuple[int, ...] | None
    scale: float
    dropout_p: float
    gradients: tuple[bool, ...]
    weights: WeightsWanted
    transformed: bool
    dispatching: bool
    # What `quick_spec` has nothing of.
    tracing: bool = False
    subclass: str | None = None
    softcap: float | None = None
    sinks: bool = False
    origin: DropoutOrigin | None = None
    lse: bool = False
    documents: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.query.shape[1] // self.key.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 stays float64; everything else is scored and accumulated in float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def needs_gradients(self) -> bool:
        return bool(self.gradients)

    @property
    def learns_bias(self) -> bool:
        """Whether a tensor that the mask adds to the scores wants a gradient."""
        return any(self.gradients[3 + self.sinks :])

    @property
    def empty(self) -> bool:
        """Whether a size is 0."""
        return 0 in self.query.shape or 0 in self.key.shape or 0 in self.value.shape

    @property
    def can_be_cached(self) -> bool:
        """Whether equal specs are planned alike."""
        # A subclass may hold what no spec does, sizes of a graph are symbols, and a mask without a signature may be
        # another one in the next call.
        return self.subclass is None and not self.tracing and (self.mask is not None or not self.masked)


class Results(NamedTuple):
    """What a call returns.

    Args:
        output: (B, H, L, Dv).
        lse: (B, H, L), if the call wants it.
        weights: (B, H, L, S) or (B, L, S), if the call wants them.
    """

    output: Tensor
    lse: Tensor | None = None
    weights: Tensor | None = None


@dataclass(slots=True)
class AttentionCall:
    """A spec and its operands: what a kernel computes.

    Args:
        spec: everything but the tensors.
        query: (B, H, L, D).
        key: (B, Hkv, S, D); Hkv divides H, query head h reads key/value head h // (H / Hkv).
        value: (B, Hkv, S, Dv).
        mask: still a description; kernels lower it. ``None`` hides nothing.
        sinks: (H,) logits in the softmax's denominator only, or ``None``.
        query_positions, key_positions: as in `Grid`.
        rows: the documents of a call of one batch item, within which the mask counts; or ``None``.
        dropout_seed: int64 scalar; drawn once when a kernel of ours drops weights.
        first_item: which item of a larger batch the first one is, for dropout.
        part: of a call shown to observers of which this process holds some queries and keys: then query, key and value
            are these, and all else, with `grid`, is of the whole.
    """

    spec: AttentionSpec
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    sinks: Tensor | None = None
    query_positions: Tensor | int | None = None
    key_positions: Tensor | int | None = None
    rows: Rows | None = None
    dropout_seed: Tensor | None = None
    first_item: int = 0
    part: CallPart | None = None
    grid_: Grid | None = field(default=None, init=False, repr=False)
    coverage_: Coverage | None = field(default=None, init=False, repr=False)

    @property
    def grid(self) -> Grid:
        """Sizes and positions for the mask."""
        if self.grid_ is None:
            (batch, heads, length, _), keys = self.query.shape, self.key.shape[2]
            positions = (self.query_positions, self.key_positions)
            self.grid_ = Grid(batch, heads, length, keys, self.query.device, *positions)
        return self.grid_

    @property
    def coverage(self) -> Coverage:
        """Which queries see a key, and which keys are seen by a query."""
        if self.coverage_ is None:
            self.coverage_ = COVERS_ALL if self.mask is None else coverage(self.mask, self.grid)
        return self.coverage_

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        return () if self.mask is None else self.mask.bias_tensors()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that gradients may be asked for."""
        sinks = () if self.sinks is None else (self.sinks,)
        return (self.query, self.key, self.value, *sinks, *self.bias_tensors)

    def dropout_factors(self, block: Block, dtype: torch.dtype) -> Tensor:
        """What a block's weights are multiplied with, (b, h, l, s); for a call that has a seed."""
        spec, seed = self.spec, cast(Tensor, self.dropout_seed)
        return dropout_factors(seed, spec.dropout_p, block, dtype, self.first_item, spec.origin)

    @property
    def read_again(self) -> tuple[Tensor, ...]:
        """What a backward pass reads beside `inputs`: the tensors of mask and positions.

        Functions save them through autograd, which refuses a backward pass after they were written to.
        """
        masks = () if self.mask is None else self.mask.tensors()
        positions = (each for each in (self.query_positions, self.key_positions) if isinstance(each, Tensor))
        # Inference tensors cannot be saved: writes to them are not counted.
        return tuple(tensor for tensor in (*masks, *positions) if not tensor.is_inference())

    @property
    def rebuild(self) -> Callable[..., AttentionCall]:
        """A function that makes the same call of other inputs, in the order of `inputs`.

        It holds none of this call's own: for a backward pass only autograd may hold them, so that it can free them.
        Tensors that were one (self-attention, a bias used twice) get gradients of their own when views are given.
        """
        spec, mask, has_sinks, coverage = self.spec, self.mask, self.sinks is not None, self.coverage_
        rest = (self.query_positions, self.key_positions, self.rows, self.dropout_seed, self.first_item)

        def build(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> AttentionCall:
            tensors = iter(others)
            sinks = next(tensors) if has_sinks else None
            own = None if mask is None else mask.with_bias_tensors(tensors)
            call = AttentionCall(spec, query, key, value, own, sinks, *rest)
            call.coverage_ = coverage
            return call

        return build

    def wanting(self, *, lse: bool) -> AttentionCall:
        """The call that returns the log-sum-exp too, or not."""
        call = replace(self, spec=self.spec._replace(lse=lse))
        call.coverage_ = self.coverage_
        return call

    def each_document(self) -> Iterator[AttentionCall]:
        """The documents of a call that has `rows`, as calls of their own.

        Each is an item of a batch to dropout, so that they drop what a kernel drops that computes the call whole.
        """
        rows, mask, spec = cast(Rows, self.rows), self.mask, self.spec
        # Rules about positions count within a document as they do within a call; tensors have to be cut out.
        is_cut = mask is not None and not mask.fits_any_call
        whole = self.as_one_document().grid if is_cut else None
        for document, (queries, keys) in enumerate(rows.slices()):
            parts = self.query[:, :, queries], self.key[:, :, keys], self.value[:, :, keys]
            layouts = dict(zip(("query", "key", "value"), map(Layout.of, parts), strict=True))
            one = spec._replace(**layouts, mask=None if is_cut else spec.mask, documents=None)
            own = mask if mask is None or whole is None else OfDocument(mask, whole, queries, keys)
            yield AttentionCall(one, *parts, own, self.sinks, dropout_seed=self.dropout_seed, first_item=document)

    def as_one_document(self) -> AttentionCall:
        """A call of documents as one of T × Tk scores whose mask hides other documents."""
        if self.rows is None:
            return self
        rows = self.rows
        mask, spec = within_rows(rows, self.mask), self.spec
        # Rules about positions count within a document, whose first token is at 0.
        q_positions, k_positions = rows.query_positions[None], rows.key_positions[None]
        spec = spec._replace(
            documents=None,
            mask=None,
            masked=True,
            query_positions=tuple(q_positions.shape),
            key_positions=tuple(k_positions.shape),
        )
        return replace(self, spec=spec, mask=mask, query_positions=q_positions, key_positions=k_positions, rows=None)


_NUMBERS = (float, int)


def quick_spec(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    scale: object,
    dropout_p: object,
    weights: WeightsWanted,
    environment: Environment,
    positions: tuple[object, object],
) -> AttentionSpec | None:
    """The spec of a call without soft-cap, sinks, lse and documents, of which only the mask is left to validate.

    Returns:
        ``None`` where `validate_call` has to check the arguments one by one.
    """
    # Exact types: what a subclass's operations do is up to the subclass.
    if type(query) not in PLAIN or type(key) not in PLAIN or type(value) not in PLAIN:
        return None
    if type(dropout_p) not in _NUMBERS or not (scale is None or type(scale) is float):
        return None
    for each in positions:
        if each is not None and type(each) is not int:
            return None
    try:
        shape = query.shape
        q_layout = Layout(shape, query.stride())
        k_layout, v_layout = Layout(key.shape, key.stride()), Layout(value.shape, value.stride())
    except RuntimeError:  # nested and sparse tensors have none
        return None
    # The spec holds the query's dtype and device alone; whatever else does not fit has no plan.
    if len(shape) != 4 or query.dtype is not key.dtype or query.dtype is not value.dtype or not _strided(query):
        return None
    if query.device != key.device or query.device != value.device or not _strided(key) or not _strided(value):
        return None
    signature = None
    if mask is not None and (signature := mask.signature()) is None:
        return None
    gradients = _gradients((query, key, value, *(() if mask is None else mask.bias_tensors())), environment)
    return AttentionSpec(
        q_layout,
        k_layout,
        v_layout,
        query.dtype,
        query.device,
        query.is_neg() or key.is_neg() or value.is_neg(),
        signature,
        mask is not None,
        cast("int | None", positions[0]),
        cast("int | None", positions[1]),
        (1.0 / math.sqrt(shape[3]) if shape[3] else 1.0) if scale is None else scale,
        cast(float, dropout_p),
        gradients,
        weights,
        environment.transformed,
        environment.dispatching,
    )


def _strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _gradients(inputs: tuple[Tensor, ...], environment: Environment) -> tuple[bool, ...]:
    if not environment.gradients:
        return ()
    # Where no input wants one, calls with and without `no_grad` share a plan.
    wanted = tuple([tensor.requires_grad for tensor in inputs])
    return wanted if True in wanted else ()


def validate_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: object,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    query_positions: Tensor | int | None = None,
    key_positions: Tensor | int | None = None,
    return_lse: bool = False,
    weights: WeightsWanted = None,
    rows: Rows | None = None,
    origin: DropoutOrigin | None = None,
    dropout_seed: Tensor | None = None,
    environment: Environment | None = None,
) -> AttentionCall:
    """Check `attention`'s arguments, and add a batch of one where there is none.

    Without a `value` the key stands in for it.
    """
    environment = read_environment() if environment is None else environment
    given = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
    _require_tensors(given)
    _require_shapes(given)
    if query.dim() == 3:
        query, key, value = query[None], key[None], None if value is None else value[None]  # (1, H, L, D)
    value = key if value is None else value
    q_positions = _positions("query_positions", query_positions, query)
    k_positions = _positions("key_positions", key_positions, key, heads=query.shape[1])
    checked = None if mask is None else as_mask(mask)
    sinks = _sinks(sinks, query)
    biases = () if checked is None else checked.bias_tensors()
    inputs = (query, key, value, *(() if sinks is None else (sinks,)), *biases)
    # By position as far as in `quick_spec`: names for so many fields take a microsecond.
    spec = AttentionSpec(
        Layout(tuple(query.shape), _strides(query, environment)),
        Layout(tuple(key.shape), _strides(key, environment)),
        Layout(tuple(value.shape), _strides(value, environment)),
        query.dtype,
        query.device,
        not environment.tracing and any(tensor.is_neg() for tensor in (query, key, value)),
        None if checked is None or environment.tracing else checked.signature(),
        checked is not None,
        tuple(q_positions.shape) if isinstance(q_positions, Tensor) else q_positions,
        tuple(k_positions.shape) if isinstance(k_positions, Tensor) else k_positions,
        _scale(scale, query),
        number("dropout_p", dropout_p, "a probability in [0, 1]", is_probability),
        # Read anew: the environment may have been read outside of the `no_grad` that this call is in.
        _gradients(inputs, environment._replace(gradients=torch.is_grad_enabled())),
        weights,
        environment.transformed,
        environment.dispatching,
        tracing=environment.tracing,
        subclass=next((type(tensor).__name__ for tensor in (query, key, value) if type(tensor) not in PLAIN), None),
        softcap=_softcap(softcap, query),
        sinks=sinks is not None,
        # Without dropout it would only keep equal calls from sharing a plan.
        origin=origin if dropout_p else None,
        lse=flag("return_lse", return_lse),
        documents=None if rows is None else rows.count,
    )
    call = AttentionCall(spec, query, key, value, checked, sinks, q_positions, k_positions, rows, dropout_seed)
    if checked is not None:
        if rows is None:
            checked.validate(call.grid)
        else:
            # Its tensors line up with the tokens of all documents, end to end.
            within_rows(rows, checked).validate(call.as_one_document().grid)
    return call


def build_call(*args: object, **options: object) -> AttentionCall:
    """`validate_call`, with zeros for what the mask hides; for computing from the call without a kernel."""
    return zero_hidden(validate_call(*args, **options))  # type: ignore[arg-type]


def zero_hidden(call: AttentionCall, queries: bool = True) -> AttentionCall:
    """The call with zeros in fully masked queries and in keys and values that are masked for every query.

    NaN or inf stored there then reaches neither outputs nor gradients, whatever the kernel. Queries may be left as they
    are for a kernel that isolates them.
    """
    covered = call.coverage
    if covered is COVERS_ALL or (covered.queries is None and covered.keys is None):
        return call
    query, key, value = call.query, call.key, call.value
    if queries and covered.masked_queries is not None:
        query = query.masked_fill(covered.masked_queries, 0)
    masked = covered.masked_keys_of(key.shape[1])
    if masked is not None:
        # One tensor stays one, so that it is filled, and read by the kernel, once.
        same = key is value
        key = key.masked_fill(masked, 0)
        value = key if same else value.masked_fill(masked, 0)
    zeroed = replace(call, query=query, key=key, value=value)
    # Both follow from sizes and mask, which are the same.
    zeroed.grid_, zeroed.coverage_ = call.grid_, covered
    return zeroed


def _strides(tensor: Tensor, environment: Environment) -> tuple[int, ...]:
    # In a graph they are symbols, which a comparison would tie to these strides.
    return () if environment.tracing else tensor.stride()


def _require_tensors(given: dict[str, Tensor]) -> None:
    query = given["query"]
    for name, tensor in given.items():
        strided(name, tensor)
        if tensor.dtype not in FLOATS:
            raise DTypeError(
                name,
                expected="float64, float32, bfloat16 or float16",
                got=str(tensor.dtype),
                fix="Convert it, for example with .float().",
            )
        if tensor.dtype != query.dtype:
            fix = f"Convert it with .to({query.dtype})."
            raise DTypeError(name, expected=f"query's dtype {query.dtype}", got=str(tensor.dtype), fix=fix)
        _require_device(name, tensor, query)


def _require_shapes(given: dict[str, Tensor]) -> None:
    query, key = given["query"], given["key"]
    dims = {tensor.dim() for tensor in given.values()}
    # Before sizes are compared, which stand elsewhere in the other form.
    if dims == {3, 4}:
        _mismatch(
            "numbers of dimensions: all (B, H, L, D), or all (H, L, D)", given, "Add the batch with .unsqueeze(0)."
        )
    for name, tensor in given.items():
        if tensor.dim() not in (3, 4):
            raise ShapeError(
                name,
                expected="(B, H, L, D), or (H, L, D) for all without a batch",
                got=shape_text(tensor.shape),
                fix="clearhead.split_heads turns (B, L, H·D) into (B, H, L, D).",
            )
    if query.dim() == 4 and any(tensor.shape[0] != query.shape[0] for tensor in given.values()):
        _mismatch("batch sizes (B)", given, "Repeat the smaller with .expand, or check that they belong together.")
    if key.shape[-1] != query.shape[-1]:
        raise ShapeError(
            "key",
            expected=f"head_dim D = {query.shape[-1]} as in query {shape_text(query.shape)}",
            got=shape_text(key.shape),
            fix="Project both to the same size; only values may have another.",
        )
    value = given.get("value", key)
    if value.shape[-3] != key.shape[-3]:
        _mismatch("key/value head counts (Hkv)", given, "Each key head needs its value head.")
    if value.shape[-2] != key.shape[-2]:
        _mismatch("key and value lengths (S)", given, "Each key needs its value.")
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            "key",
            expected=f"a head count that divides the query's H = {heads}",
            got=f"Hkv = {kv_heads} in {shape_text(key.shape)}",
            fix="Heads are the second dimension: (B, H, L, D), not (B, L, H, D).",
        )


def _mismatch(what: str, given: dict[str, Tensor], fix: str) -> NoReturn:
    shapes = ", ".join(f"{name} {shape_text(tensor.shape)}" for name, tensor in given.items())
    raise ShapeError(", ".join(given), expected=f"equal {what}", got=shapes, fix=fix)


def _require_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        fix = f"Move it with .to({str(query.device)!r})."
        raise DeviceError(name, expected=f"query's device {query.device}", got=str(tensor.device), fix=fix)


def _positions(name: str, positions: object, tensor: Tensor, *, heads: int | None = None) -> Tensor | int | None:
    result = as_positions(name, positions, per_head=heads is not None)
    if not isinstance(result, Tensor):
        return result
    _require_device(name, result, tensor)
    batch, length = tensor.shape[0], tensor.shape[2]
    fits = (result.shape[0] == 1 or result.shape[0] == batch) and result.shape[-1] == length
    if not fits or (result.dim() == 3 and result.shape[1] != heads):
        per_head = "" if heads is None else f" or ({batch}, {heads}, {length})"
        raise ShapeError(
            name,
            expected=f"shape ({length},) or ({batch}, {length}){per_head}",
            got=shape_text(cast(Tensor, positions).shape),
            fix="Give every query, or every key, its absolute position.",
        )
    return result


def _scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        head_dim = query.shape[-1]
        # Sums of no products are 0, whatever the factor.
        return 1.0 if head_dim == 0 else 1.0 / math.sqrt(head_dim)
    most = _largest(query)
    return number("scale", scale, "a finite number, or None for 1/√D", lambda factor: -most <= factor <= most)


def _softcap(softcap: float | None, query: Tensor) -> float | None:
    if softcap is None:
        return None
    most = _largest(query)
    return number("softcap", softcap, "a number > 0, or None", lambda c: 0 < c <= most)


def _largest(query: Tensor) -> float:
    """The largest number of the dtype that scores are computed in."""
    return torch.finfo(torch.float64 if query.dtype == torch.float64 else torch.float32).max


def _sinks(sinks: Tensor | None, query: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    heads = query.shape[1]
    expected = f"a float tensor ({heads},)"
    if strided("sinks", sinks, expected).dtype not in FLOATS:
        raise DTypeError("sinks", expected=expected, got=str(sinks.dtype))
    if tuple(sinks.shape) != (heads,):
        raise ShapeError(
            "sinks",
            expected=f"one logit per query head, ({heads},)",
            got=shape_text(sinks.shape),
            fix="Grouped heads have one sink per query head too.",
        )
    _require_device("sinks", sinks, query)
    # A sink of −∞ is none, and would be the whole softmax of a query that sees no key.
    return sinks.to(torch.promote_types(sinks.dtype, torch.float32)).clamp_min(NO_SINK)
