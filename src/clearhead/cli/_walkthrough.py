"""`clearhead walkthrough`: the steps of multi-head attention on a small example."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer

from .. import masks
from .._checks import LANGUAGES
from .._multihead import MultiHeadAttention
from ..errors import explain_problem
from ..inspection._walkthrough import walkthrough as walk_through
from ._encoding import unprintable
from ._errors import UsageProblem

_LARGEST_TENSOR = 50_000_000  # numbers; enough for any example, and no machine runs out of memory

LANGUAGE = "Language of the output: en or zh."


def require_language(lang: str) -> None:
    """Raise `UsageProblem` for a language that the commands do not speak."""
    if lang not in LANGUAGES:
        raise UsageProblem(explain_problem("--lang", expected=" or ".join(LANGUAGES), got=repr(lang)))


def walkthrough(
    lang: Annotated[str, typer.Option(help=LANGUAGE)] = "en",
    embed_dim: Annotated[int, typer.Option(help="E, features of every token.")] = 12,
    num_heads: Annotated[int, typer.Option(help="H, heads; divides E.")] = 3,
    num_kv_heads: Annotated[int | None, typer.Option(help="Hkv, key/value heads; divides H.", show_default="H")] = None,
    length: Annotated[int, typer.Option(help="L, tokens of every sequence.")] = 5,
    batch_size: Annotated[int, typer.Option(help="B, sequences.")] = 2,
    causal: Annotated[bool, typer.Option("--causal", help="Hide later tokens from earlier ones.")] = False,
) -> None:
    """Show one multi-head attention call step by step, with every shape and what it means."""
    _check_options(lang, embed_dim, num_heads, num_kv_heads, length, batch_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = MultiHeadAttention(embed_dim, num_heads, num_kv_heads=num_kv_heads).eval()
        query = torch.randn(batch_size, length, embed_dim)  # (B, L, E)
    walk = walk_through(module, query, mask=masks.causal() if causal else None, language=lang)
    signs = unprintable(str(walk))
    if signs:
        raise UsageProblem(
            f"the output's encoding ({sys.stdout.encoding}) has no sign for {signs[0]!a}. "
            "Set PYTHONIOENCODING=utf-8 and try again."
        )
    print(walk)


def _check_options(
    lang: str, embed_dim: int, num_heads: int, num_kv_heads: int | None, length: int, batch_size: int
) -> None:
    """Name the command line's option in an error."""
    require_language(lang)
    sizes = {"--embed-dim": embed_dim, "--num-heads": num_heads, "--length": length, "--batch-size": batch_size}
    for option, size in sizes.items():
        if size < 1:
            raise UsageProblem(explain_problem(option, expected="1 or more", got=str(size)))
    if embed_dim % num_heads:
        expected = f"a multiple of --num-heads {num_heads}"
        raise UsageProblem(explain_problem("--embed-dim", expected=expected, got=str(embed_dim)))
    if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
        expected = f"a divisor of --num-heads {num_heads}"
        raise UsageProblem(explain_problem("--num-kv-heads", expected=expected, got=str(num_kv_heads)))
    largest = max(batch_size * num_heads * length**2, batch_size * length * embed_dim, embed_dim**2)
    if largest > _LARGEST_TENSOR:
        raise UsageProblem(
            explain_problem(
                ", ".join(sizes),
                expected=f"an example whose tensors hold at most {_LARGEST_TENSOR:,} numbers",
                got=f"one of {largest:,}",
                fix="Choose smaller sizes.",
            )
        )
