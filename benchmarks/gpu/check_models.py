"""What `benchmarks.gpu --check` compares of modules, caches, records, whole models and compiled graphs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from benchmarks.gpu.check_cases import DTYPES, Check, Place, drawn, mask_of, named, rounded, short, with_gradients
from benchmarks.peers.work import Outputs, Way
from clearhead import masks
from clearhead.errors import CacheError
from clearhead.masks import Mask
from clearhead.positions import Rotary

__all__ = ["model_checks"]

EMBED, HEADS, LENGTH = 256, 4, 130
#: A batch whose padding is worth leaving out: E, L and the real tokens of its items.
WIDE, LONG, REAL = 1024, 256, (256, 30, 9)
HALF = torch.bfloat16
STATISTICS = ("entropy", "received", "max_logit", "top_k")
Build = Callable[[], nn.Module]


def model_checks() -> Iterator[Check]:
    """Modules, caches, layers, statistics, transformers' models, states around a call, and compiled calls at last."""
    yield from _modules()
    yield from _unpadded()
    yield from _statistics()
    yield from _transformers()
    yield from _states()
    yield from _compiled()


def _attention(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return clearhead.MultiHeadAttention(EMBED, HEADS, **options)


def _wide(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return clearhead.MultiHeadAttention(WIDE, WIDE // 64, **options)


def _rotary() -> nn.Module:
    return _attention(position=Rotary(EMBED // HEADS), num_kv_heads=2)


def _encoder() -> nn.Module:
    feed_forward = partial(clearhead.transformer.FeedForward, EMBED, 2 * EMBED)
    layers = (clearhead.transformer.EncoderLayer(EMBED, _attention(), feed_forward()) for _ in range(2))
    return clearhead.transformer.Encoder(layers).eval()


def _torch_encoder(upgraded: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 2 * EMBED, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    if upgraded:
        clearhead.upgrade(model)
    return model


def _placed(build: Build, place: Place) -> nn.Module:
    """A module with parameters rounded to the dtype that is compared."""
    return build().to(place.values).to(place.dtype).to(place.device)


def _run(build: Build, mask: Callable[[str], Mask | None], place: Place) -> Way:
    """Forward and every gradient."""
    model, made = _placed(build, place), mask(place.device)
    x = place.put(drawn(2, LENGTH, EMBED)).requires_grad_()
    # A bias of the keys has no gradient but rounding.
    parameters = [each for name, each in model.named_parameters() if not name.endswith("k_proj.bias")]
    return lambda: with_gradients(model(x, mask=made), (x, *parameters))


def _run_torch(upgraded: bool, place: Place) -> Way:
    model = _placed(partial(_torch_encoder, upgraded), place)
    x = place.put(drawn(2, LENGTH, EMBED)).requires_grad_()
    padding = torch.arange(LENGTH, device=place.device) >= torch.tensor([[LENGTH], [90]], device=place.device)

    def run() -> Outputs:
        output = model(x, src_key_padding_mask=padding)
        return with_gradients(output[:, :90], [x])

    return run


def _modules() -> Iterator[Check]:
    for name in ("none", "causal", "lengths"):
        mask = partial(named, name, LENGTH)
        for dtype in DTYPES:
            yield rounded(f"MHA {name}", dtype, partial(_run, _attention, mask))
    causal = partial(mask_of, "none", True, LENGTH)
    lengths = partial(mask_of, "lengths", False, LENGTH)
    yield rounded("MHA rotary, grouped", HALF, partial(_run, _rotary, causal))
    yield rounded("Encoder, lengths", torch.float32, partial(_run, _encoder, lengths))
    yield rounded("Encoder, lengths", HALF, partial(_run, _encoder, lengths))
    for dtype in (torch.float32, HALF):
        yield Check(
            f"nn.TransformerEncoder upgraded {short(dtype)}",
            lambda device, dtype=dtype: _run_torch(True, Place(device, dtype, dtype)),
            lambda dtype=dtype: _run_torch(False, Place("cpu", torch.float64, dtype))(),
            lambda device, dtype=dtype: _run_torch(False, Place(device, dtype, dtype))(),
        )
    for label, build in (("", _attention), (" rotary, grouped", _rotary)):
        yield rounded(f"8 decoding steps{label}", HALF, partial(_decode, build, "whole"))
    yield rounded("8 steps, sliding cache", HALF, partial(_decode, _attention, "sliding"))
    yield rounded("need_weights", HALF, partial(_need_weights), fused=False)
    yield Check(
        "second derivatives, packed bf16",
        lambda device: _derived_twice(Place(device, HALF, HALF)),
        lambda: _derived_twice(Place("cpu", torch.float64, HALF))(),
        most=0.05,
        backend="varlen",
    )


def _unpadded() -> Iterator[Check]:
    """Batches of which only the real tokens are computed, because their lengths lie on the CPU."""
    n = torch.tensor(REAL)
    for name, dtype, mask, parts in (
        ("keys", HALF, masks.lengths(n), dict[str, Any]()),
        ("window", torch.float16, masks.lengths(n, n) & masks.sliding_window(30, 9), dict[str, Any]()),
        ("rotary, grouped", HALF, masks.lengths(n, n) & masks.causal(), {"position": Rotary(64), "num_kv_heads": 4}),
    ):
        yield rounded(f"MHA without padding, {name}", dtype, partial(_run_unpadded, parts, mask), backend="varlen")


def _run_unpadded(parts: dict[str, Any], mask: Mask, place: Place) -> Way:
    """Forward and every gradient. On the device padding that is left out holds NaN."""
    # A position part is a module, which the models of two devices cannot share.
    model = _placed(partial(_wide, **deepcopy(parts)), place)
    leaves_queries_out = len(mask.parts()) > 1
    padding = (torch.arange(LONG) >= torch.tensor(REAL)[:, None])[..., None]
    fill = torch.nan if place.device != "cpu" and leaves_queries_out else 0.0
    x = place.put(drawn(len(REAL), LONG, WIDE).masked_fill(padding, fill)).requires_grad_()
    parameters = [each for name, each in model.named_parameters() if not name.endswith("k_proj.bias")]
    return lambda: with_gradients(model(x, mask=mask), (x, *parameters))


def _decode(build: Build, kind: str, place: Place) -> Way:
    """A prompt, then eight tokens one by one; the reference sees all tokens at once."""
    model: Any = _placed(build, place).eval()
    x = place.put(drawn(2, 40, EMBED))
    mask = masks.causal() & masks.sliding_window(15, 0) if kind == "sliding" else masks.causal()

    def whole() -> Outputs:
        with torch.no_grad():
            return (model(x, mask=mask),)

    def steps() -> Outputs:
        cache = model.make_cache(2, 64)
        if kind == "sliding":
            where: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
            cache = clearhead.caches.SlidingKVCache(2, model.num_kv_heads, 16, model.head_dim, **where)
        with torch.no_grad():
            parts = [model(x[:, :32], mask=mask, cache=cache)]
            parts += [model(x[:, n : n + 1], mask=mask, cache=cache) for n in range(32, 40)]
        return (torch.cat(parts, 1),)

    return whole if place.device == "cpu" and place.dtype == torch.float64 else steps


def _derived_twice(place: Place) -> Way:
    """Gradients of the squares of gradients."""
    q, k, v = leaves = [place.put(drawn(LENGTH, HEADS, 64, seed=seed)).requires_grad_() for seed in (1, 2, 3)]
    ends = torch.tensor([0, 5, 70, LENGTH], dtype=torch.int32, device=place.device)

    def run() -> Outputs:
        output = clearhead.attention_varlen(q, k, v, ends, ends, masks.causal())
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        squares = torch.stack([each.float().square().sum() for each in first]).sum()
        return torch.autograd.grad(squares, leaves)

    return run


def _need_weights(place: Place) -> Way:
    model = _placed(_attention, place)
    x = place.put(drawn(2, LENGTH, EMBED)).requires_grad_()

    def run() -> Outputs:
        output, weights = model(x, mask=masks.causal(), need_weights=True)
        return output.detach(), *with_gradients(weights, [x])

    return run


def _recorded(place: Place) -> Way:
    model = _placed(_encoder, place)
    x = place.put(drawn(2, LENGTH, EMBED))
    lengths = torch.tensor([LENGTH, 90], device=place.device)

    def run() -> Outputs:
        with torch.no_grad(), clearhead.record(model, STATISTICS) as rec:
            model(x, mask=masks.lengths(lengths) & masks.causal())
        first: Any = rec[next(iter(rec))]
        return first.entropy, first.received, first.max_logit, first.top_k.weights

    return run


def _statistics_of(mask: Mask | None, place: Place) -> Way:
    query, key = (place.put(drawn(2, HEADS, LENGTH, 64, seed=seed)) for seed in (1, 2))

    def run() -> Outputs:
        found = clearhead.attention_statistics(query, key, mask, statistics=STATISTICS)
        top: Any = found.top_k
        results: Any = (found.entropy, found.received, found.max_logit, top.weights)
        return results

    return run


def _statistics() -> Iterator[Check]:
    # The statistics are float32, whatever the inputs are.
    for dtype in (torch.float32, HALF):
        for name, mask in (("none", None), ("causal", masks.causal()), ("window", masks.sliding_window(9, 9))):
            yield rounded(f"statistics {name}", dtype, partial(_statistics_of, mask), fused=False, most=1e-4)
    yield rounded("record of 2 layers", torch.float32, partial(_recorded), most=1e-4)


def _states() -> Iterator[Check]:
    """What stands around a call: autocast, determinism, the default device, a captured graph, another stream."""
    for name, state in {
        "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
        "deterministic": _deterministic,
        "default device": lambda: torch.device("cuda"),
        "check_values": getattr(clearhead, "check_values", contextlib.nullcontext),
    }.items():
        # Autocast rounds in each product; only errors are looked for.
        yield Check(f"MHA, {name}", partial(_in_state, state), None, waits=None if name == "check_values" else 0)
    yield Check("captured graph, lengths & causal", _captured, None, waits=None)
    yield Check("captured graph, MHA without padding", _captured_module, None, waits=None)
    yield Check("captured graph, decoding", _captured_decoding, None, waits=None, fused=False)


@contextlib.contextmanager
def _deterministic() -> Generator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _in_state(state: Callable[[], Any], device: str) -> Way:
    model, x = _attention().to(device), drawn(2, LENGTH, EMBED).to(device).requires_grad_()
    mask = mask_of("lengths", True, LENGTH, device)

    def run() -> Outputs:
        with state() if device != "cpu" else contextlib.nullcontext():
            output = model(x, mask=mask)
        return with_gradients(output, (x, *model.parameters()))

    return run


def _replaying(call: Callable[[], Tensor], change: Callable[[], object], device: str) -> Way:
    """Capture a call, change its inputs, replay it: it has to give what the call itself then gives."""

    def run() -> Outputs:
        if device == "cpu":
            return (call(),)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        change()
        graph.replay()
        replayed, direct = output.clone(), call()
        if not torch.allclose(replayed, direct, rtol=1e-2, atol=1e-3):
            raise AssertionError(f"the replay is {(replayed - direct).abs().max().item():.1e} away from the call")
        return (replayed,)

    return run


@torch.no_grad()
def _captured(device: str) -> Way:
    x = drawn(2, HEADS, LENGTH, 64).to(HALF).to(device)
    mask = (masks.lengths(torch.tensor([LENGTH, 90])) & masks.causal()).prepare(
        LENGTH, LENGTH, batch_size=2, num_heads=HEADS, device=torch.device(device)
    )
    return _replaying(lambda: clearhead.attention(x, x, x, mask), partial(x.mul_, 0.5), device)


def _captured_module(device: str) -> Way:
    """A module that leaves padding out, whose lengths are those of the capture."""
    model: Any = _wide().to(device).to(HALF)
    x, n = drawn(len(REAL), LONG, WIDE).to(HALF).to(device), torch.tensor(REAL)
    mask = masks.lengths(n, n)

    def call() -> Tensor:
        with torch.no_grad():
            return model(x, mask=mask)

    return _replaying(call, partial(x.mul_, 0.5), device)


def _captured_decoding(device: str) -> Way:
    """One step as a graph. A refusal is an answer too; a wrong replay is none."""
    model: Any = _attention().to(device).to(HALF).eval()
    token = drawn(2, 1, EMBED).to(HALF).to(device)
    cache = model.make_cache(2, 64)

    def call() -> Tensor:
        with torch.no_grad():
            output = model(token, mask=masks.causal(), cache=cache)
            cache.crop(1)
        return output

    replay = _replaying(call, partial(token.mul_, 0.5), device)

    def run() -> Outputs:
        with contextlib.suppress(CacheError):
            return replay()
        return (token,)

    return run


def _compiled() -> Iterator[Check]:
    for name in ("none", "causal", "lengths"):
        mask = partial(named, name, LENGTH)
        yield rounded(
            f"compiled MHA {name}", torch.float32, partial(_compile, mask), waits=None, fused=False, compiled=True
        )
    options = {"waits": None, "fused": False, "compiled": True}
    changed = partial(_compile, partial(named, "causal", LENGTH), softcap=5.0)
    yield rounded("compiled MHA causal, soft-cap", HALF, changed, **options)
    yield rounded("compiled packed, causal", HALF, partial(_compile_packed), stock=True, **options)


def _compile(mask: Callable[[str], Mask | None], place: Place, **parts: Any) -> Way:
    model, made = _placed(partial(_attention, **parts), place), mask(place.device)
    x = place.put(drawn(2, LENGTH, EMBED)).requires_grad_()
    run: Any = model if place.device == "cpu" else torch.compile(model, fullgraph=True)
    return lambda: with_gradients(run(x, mask=made), (x, *(each for each in model.parameters() if each.dim() == 2)))


def _compile_packed(place: Place) -> Way:
    leaves = [place.put(drawn(LENGTH, HEADS, 64, seed=seed)).requires_grad_() for seed in (1, 2, 3)]
    ends = torch.tensor([0, 5, 70, LENGTH], dtype=torch.int32, device=place.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        options: Any = {"max_seqlen_q": 70, "max_seqlen_k": 70}
        return clearhead.attention_varlen(query, key, value, ends, ends, masks.causal(), **options)

    if place.stock:
        numbers = torch.arange(LENGTH, device=place.device)
        of_tokens = torch.bucketize(numbers, ends[1:], right=True)
        visible = (of_tokens[:, None] == of_tokens) & (numbers[:, None] >= numbers)

        def masked() -> Outputs:
            query, key, value = (each.transpose(0, 1)[None] for each in leaves)
            output = F.scaled_dot_product_attention(query, key, value, visible)
            return with_gradients(output[0].transpose(0, 1), leaves)

        return masked
    run: Any = attend if place.device == "cpu" else torch.compile(attend, fullgraph=True)
    return lambda: with_gradients(run(*leaves, ends), leaves)


def _transformers() -> Iterator[Check]:
    for name in ("BERT", "Llama", "GPT-2", "T5"):
        for dtype in (torch.float32, HALF):
            # transformers looks whether a mask hides anything, which waits.
            yield Check(
                f"transformers {name} upgraded {short(dtype)}",
                partial(_model_way, name, True, dtype, dtype),
                lambda name=name, dtype=dtype: _model_way(name, False, dtype, torch.float64, "cpu")(),
                lambda device, name=name, dtype=dtype: _model_way(name, False, dtype, dtype, device)(),
                waits=None,
                fused=name != "T5",
            )


def _model_of(name: str) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")

    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    configs: dict[str, Callable[[], nn.Module]] = {
        "BERT": lambda: transformers.BertModel(
            transformers.BertConfig(vocab_size=100, hidden_size=128, intermediate_size=256, **heads)
        ),
        "Llama": lambda: transformers.LlamaModel(
            transformers.LlamaConfig(
                vocab_size=100, hidden_size=128, intermediate_size=256, num_key_value_heads=2, **heads
            )
        ),
        "GPT-2": lambda: transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=100, n_embd=128, n_layer=2, n_head=4, n_positions=128)
        ),
        "T5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=100, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
        ),
    }
    return configs[name]().eval()


def _model_way(name: str, upgraded: bool, values: torch.dtype, dtype: torch.dtype, device: str) -> Way:
    """The outputs at real tokens, padded on the left for decoders."""
    model = _model_of(name).to(values).to(dtype).to(device)
    if upgraded:
        clearhead.upgrade(model)
    ids = torch.randint(0, 100, (2, 64), generator=torch.Generator().manual_seed(4)).to(device)
    real = torch.arange(64) < torch.tensor([[64], [40]])
    real = (real.flip(1) if name in ("Llama", "GPT-2") else real).to(device)

    def run() -> Outputs:
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=real.long()).last_hidden_state
        return (hidden * real[:, :, None],)

    return run
