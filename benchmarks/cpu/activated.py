"""PyTorch's own attention with and without `clearhead.activate`, in turn in one process.

    python -m benchmarks.cpu.activated [--only PATTERN] [--rounds 5] [--docs]

Calls of `torch.nn.functional.scaled_dot_product_attention` (B × H × L × D, S = L unless said), whole models that make
such calls and are not changed, and `torch.nn.attention.varlen.varlen_attn`, which PyTorch lacks on a CPU, beside
`clearhead.attention_varlen`. Outputs are compared before timing. Models have random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing.pictures import draw_speed
from benchmarks.figures import ROOT, Figures, differing
from benchmarks.timing import in_blocks
from benchmarks.writing import milliseconds, ratio, table

THEIRS, OURS = "PyTorch's kernel", "activated"
CALLS, MODELS, VARLEN = "calls", "models", "varlen_attn"
SECTIONS = (CALLS, MODELS, VARLEN)
PICTURE = ROOT / "docs" / "images" / "activated.svg"
_CLOCK = 3e-2  #: seconds of one figure, at least

Way = Callable[[], Tensor]


@final
@dataclass(frozen=True)
class Call:
    """A call of `scaled_dot_product_attention`: sizes, and what differs from the plain one."""

    sizes: tuple[int, int, int, int]  # B, H, L, D
    keys: int | None = None
    kv_heads: int | None = None
    mask: str = ""
    causal: bool = False
    backward: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        words = [" × ".join(map(str, self.sizes))]
        words += [f"S = {self.keys}"] if self.keys else []
        words += [f"{self.kv_heads} key/value heads"] if self.kv_heads else []
        words += [self.mask] if self.mask else []
        words += ["causal"] if self.causal else []
        words += ["forward + backward"] if self.backward else []
        words += ["bf16"] if self.dtype is torch.bfloat16 else []
        return ", ".join(words)

    def way(self, effort: Effort) -> Way:
        batch, heads, length, dim = self.sizes
        length, keys = effort.size(length, 7), effort.size(self.keys or length, 7)
        draw = torch.Generator().manual_seed(0)
        shapes = [(batch, heads, length, dim), *[(batch, self.kv_heads or heads, keys, dim)] * 2]
        q, k, v = (torch.randn(shape, generator=draw).to(self.dtype).requires_grad_(self.backward) for shape in shapes)
        options: dict[str, Any] = {"is_causal": self.causal, "enable_gqa": self.kv_heads is not None}
        if self.mask == "padding":
            ends = torch.linspace(keys // 3, keys, batch).long()[:, None]
            options["attn_mask"] = (torch.arange(keys) < ends)[:, None, None].expand(batch, 1, length, keys)
        elif self.mask == "float mask":
            options["attn_mask"] = torch.randn(length, keys, generator=draw).to(self.dtype)
        gradient = torch.randn(q.shape, generator=draw).to(self.dtype)

        def call() -> Tensor:
            output = functional.scaled_dot_product_attention(q, k, v, **options)
            return torch.autograd.grad(output, (q, k, v), gradient)[0] if self.backward else output

        return call


_BERT, _VIT, _GPT = (8, 12, 128, 64), (4, 12, 197, 64), (2, 12, 1024, 64)
ALL_CALLS = (
    Call((2, 4, 5, 4)),
    Call((2, 4, 5, 4), backward=True),
    Call((1, 12, 16, 64)),
    Call((1, 12, 64, 64)),
    Call(_BERT),
    Call(_BERT, mask="padding"),
    Call(_BERT, mask="padding", backward=True),
    Call(_VIT),
    Call(_VIT, backward=True),
    Call(_GPT),
    Call(_GPT, causal=True),
    Call(_GPT, causal=True, backward=True),
    Call(_GPT, mask="float mask"),
    Call((2, 12, 1024, 64), kv_heads=4, causal=True),
    Call((1, 12, 4096, 64), causal=True),
    Call((4, 12, 1, 64), keys=1024),
    Call(_GPT, causal=True, dtype=torch.bfloat16),
    Call(_GPT, dtype=torch.bfloat16),
    Call(_GPT, causal=True, backward=True, dtype=torch.bfloat16),
    Call(_GPT, mask="float mask", dtype=torch.bfloat16),
)
#: The bars of the picture above those of whole models.
_SHOWN = {
    "causal attention, 1,024 tokens": Call(_GPT, causal=True),
    "its training": Call(_GPT, causal=True, backward=True),
    "causal attention, bfloat16": Call(_GPT, causal=True, dtype=torch.bfloat16),
    "attention, 1,024 tokens": Call(_GPT),
    "attention of a ViT, 197 tokens": Call(_VIT),
    "padded batch, 128 tokens": Call(_BERT, mask="padding"),
    "a call of five tokens": Call((2, 4, 5, 4)),
}


class _Block(nn.Module):
    """A GPT block as lessons write it."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(features) for _ in range(2))
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.mlp = nn.Sequential(nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, L, D) each
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, features))
        return x + self.mlp(self.norms[1](x))


def _gpt(effort: Effort) -> Callable[[], Tensor]:
    model = nn.Sequential(*(_Block(384, 6) for _ in range(effort.size(6, 1)))).eval()
    x = torch.randn(2, effort.size(1024, 7), 384)
    return lambda: model(x)


def _training(effort: Effort) -> Callable[[], Tensor]:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, effort.size(4, 1), enable_nested_tensor=False)
    x = torch.randn(4, effort.size(512, 7), 384)

    def step() -> Tensor:
        model.zero_grad()
        output = model(x)
        output.square().mean().backward()
        return output.detach()

    return step


def _pretrained(kind: str, effort: Effort) -> Callable[[], Tensor]:
    """A model of transformers with random weights, on ``sdpa``."""
    import transformers

    small = effort.smallest
    sizes: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 1 if small else 6, "num_attention_heads": 6}
    sizes |= {"intermediate_size": 1536}
    t5 = {"d_model": 384, "d_ff": 1536, "d_kv": 64, "num_heads": 6, "num_layers": 1 if small else 4}
    whisper = {"d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    whisper |= {"encoder_layers": 1 if small else 4, "decoder_layers": 1 if small else 4}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "BERT": ("Bert", sizes),
        "ViT": ("ViT", sizes),
        "Llama": ("Llama", sizes | {"num_key_value_heads": 2}),
        "T5": ("T5", t5),
        "Whisper": ("Whisper", whisper),
    }
    name, options = settings[kind]
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}Model")(config).eval()
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    tokens = torch.randint(3, 30_000, (4, effort.size(256, 7)), generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(tokens.shape[1] // 2, tokens.shape[1], len(tokens)).long()
    padding = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    inputs: dict[str, dict[str, Tensor]] = {
        "ViT": {"pixel_values": torch.randn(4, 3, 224, 224)},
        "T5": {"input_ids": tokens, "attention_mask": padding, "decoder_input_ids": tokens},
        "Whisper": {"input_features": torch.randn(1, 80, 3000), "decoder_input_ids": tokens[:1]},
    }
    given = inputs.get(kind, {"input_ids": tokens, "attention_mask": padding})
    return lambda: model(**given)[0]


ALL_MODELS: dict[str, Callable[[Effort], Way]] = {
    "GPT, 6 layers, 2 × 1,024 tokens": _gpt,
    "BERT, 6 layers, 4 × 256 tokens with padding": lambda effort: _pretrained("BERT", effort),
    "ViT, 6 layers, 4 pictures of 224 × 224": lambda effort: _pretrained("ViT", effort),
    "Llama, 6 layers, 4 × 256 tokens with padding": lambda effort: _pretrained("Llama", effort),
    "T5, 4 + 4 layers, 4 × 256 tokens with padding": lambda effort: _pretrained("T5", effort),
    "Whisper, 4 + 4 layers, 30 s of sound": lambda effort: _pretrained("Whisper", effort),
    "nn.TransformerEncoder, 4 layers, training step, 4 × 512 tokens": _training,
}


def _packed(sequences: int, length: int, causal: bool) -> dict[str, Way]:
    query, key, value = torch.randn(3, sequences * length, 8, 64)
    ends = (torch.arange(sequences + 1) * length).int()
    mask, window = (clearhead.masks.causal(), (-1, 0)) if causal else (None, (-1, -1))
    return {
        THEIRS: lambda: clearhead.attention_varlen(query, key, value, ends, ends, mask),
        OURS: lambda: cast(Tensor, varlen_attn(query, key, value, ends, ends, length, length, window_size=window)),
    }


def measured(ways: dict[str, Way], effort: Effort) -> dict[str, float]:
    """Median seconds of each way, in turn, and the largest difference of their results.

    Clearhead is activated for `OURS`, outside the clock.
    """

    def within(name: str) -> AbstractContextManager[object]:
        return clearhead.activate() if name == OURS else nullcontext()

    times, results = in_blocks(ways, rounds=effort.rounds, seconds=effort.least(_CLOCK), within=within)
    theirs, ours = (results[name].detach().double() for name in (THEIRS, OURS))
    return times | {"difference": float((ours - theirs).abs().max() / theirs.abs().max())}


def _both(way: Way, effort: Effort, no_grad: bool) -> dict[str, float]:
    with torch.no_grad() if no_grad else nullcontext():
        return measured({THEIRS: way, OURS: way}, effort)


def lines(effort: Effort) -> Iterator[Line]:
    for call in ALL_CALLS:
        yield Line(f"{CALLS}: {call}", lambda call=call: _both(call.way(effort), effort, not call.backward))
    for name, make in ALL_MODELS.items():
        yield Line(f"{MODELS}: {name}", lambda n=name, make=make: _both(make(effort), effort, "training" not in n))
    for sequences, length in ((8, 64), (64, 64), (16, 256), (2, 16)):
        for causal in (False, True):
            name = f"{VARLEN}: {sequences} sequences of {length}{', causal' if causal else ''}"
            sizes = effort.size(sequences, 2), effort.size(length, 5)
            yield Line(name, lambda sizes=sizes, causal=causal: measured(_packed(*sizes, causal), effort))


def texts(figures: Figures) -> dict[str, str]:
    rows: dict[str, list[tuple[str, ...]]] = {section: [] for section in SECTIONS}
    for line, found in figures.items():
        section, _, work = line.partition(": ")
        rows[section].append((work, *map(milliseconds, (found[THEIRS], found[OURS])), _gain(found)))
    heads = {CALLS: "call", MODELS: "model", VARLEN: "packed sequences"}
    columns = {VARLEN: ("`attention_varlen`", "`varlen_attn`")}
    by_section = {
        f"table-{section.replace('_', '-')}": table(
            (heads[section], *columns.get(section, (THEIRS, OURS)), "ratio"), each
        )
        for section, each in rows.items()
    }
    return by_section | {
        "gpt": _gain(figures[f"{MODELS}: GPT, 6 layers, 2 × 1,024 tokens"]),
        "least": min(_gain(found) for line, found in figures.items() if line.startswith(MODELS)),
        "causal": _gain(figures[f"{CALLS}: {Call(_GPT, causal=True)}"]),
        "causal-training": _gain(figures[f"{CALLS}: {Call(_GPT, causal=True, backward=True)}"]),
        "causal-bf16": _gain(figures[f"{CALLS}: {Call(_GPT, causal=True, dtype=torch.bfloat16)}"]),
        "small": _gain(figures[f"{CALLS}: {ALL_CALLS[0]}"]),
    }


def pictures(figures: Figures) -> dict[Path, str]:
    """The calls of a GPT's sizes and the whole models, one bar each."""
    bars = {work: figures[f"{CALLS}: {call}"] for work, call in _SHOWN.items()}
    bars |= {name: figures[f"{MODELS}: {name}"] for name in ALL_MODELS}
    speeds = {name: found[THEIRS] / found[OURS] for name, found in bars.items()}
    return {PICTURE: draw_speed(speeds, "speed after activate (1: as before; longer: faster)")}


def _gain(found: dict[str, float]) -> str:
    return ratio(found[THEIRS] / found[OURS])


def wrong(figures: Figures) -> list[str]:
    """Results that differ by more than rounding."""
    return differing(figures, lambda line: 2e-2 if "bf16" in line else 1e-5)


BENCHMARK = Benchmark("activated", __doc__, lines, texts, minutes=4, peers=("transformers",), wrong=wrong)

if __name__ == "__main__":
    BENCHMARK.main()
