"""Recognition of attention in a state dict by its names: the naming and the prefix, described by a `Finding`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from torch import Tensor

from .._checks import text
from ..errors import CheckpointError
from ._namings import ROLES, Naming, Role
from ._tensors import Projections, join_heads, listed, unpack


def recognise(
    tensors: Mapping[str, Tensor], namings: tuple[Naming, ...], prefix: str = ""
) -> tuple[Finding, Projections]:
    """The only attention block under `prefix`, and its projections as views of the tensors."""
    prefix = as_path(prefix)
    heads: dict[str, int] = {}
    if any(naming.of_single_heads for naming in namings):
        tensors, heads = join_heads(tensors)
    blocks = [(path, naming) for naming in namings for path in _prefixes(tensors, naming) if path.startswith(prefix)]
    prefixes = list(dict.fromkeys(path for path, _ in blocks))
    if not prefixes:
        raise _nothing_found(tensors, namings, prefix)
    if prefix in prefixes:
        prefixes = [prefix]
    if len(prefixes) > 1:
        got = f"{len(prefixes)}, under {', '.join(map(repr, sorted(prefixes, key=_natural)))}"
        raise CheckpointError("source", expected="one attention block", got=got, fix="Choose one with prefix=.")
    naming, projections = _only_fit(tensors, [naming for path, naming in blocks if path == prefixes[0]], prefixes[0])
    finding = describe(tensors, naming, prefixes[0], projections)
    return replace(finding, num_heads=heads.get(prefixes[0] + naming.keys[0])), projections


def as_path(prefix: object) -> str:
    """The argument `prefix`, ending in a dot unless it is empty."""
    path = text("prefix", prefix)
    return path if not path or path.endswith(".") else f"{path}."


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that places layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _prefixes(tensors: Mapping[str, Tensor], naming: Naming) -> list[str]:
    """The prefixes under which the tensors include every weight of a naming."""
    first = naming.keys[0]
    prefixes = [key.removesuffix(first) for key in tensors if _ends(key, first)]
    return [prefix for prefix in prefixes if all(prefix + key in tensors for key in naming.keys)]


def _ends(name: str, key: str) -> bool:
    return name == key or name.endswith(f".{key}")


def _only_fit(tensors: Mapping[str, Tensor], namings: list[Naming], prefix: str) -> tuple[Naming, Projections]:
    """The naming that fits the shapes. GPT-2 and nanoGPT, for example, have the same keys."""
    fits: list[tuple[Naming, Projections]] = []
    errors: list[CheckpointError] = []
    for naming in namings:
        try:
            fits.append((naming, unpack(tensors, naming, prefix)))
        except CheckpointError as error:
            errors.append(error)
    if not fits:
        raise errors[0]
    if len(fits) > 1:
        got = f"keys under {prefix!r} that fit {', '.join(naming.name for naming, _ in fits)}"
        fix = "Choose one with naming=."
        if len({naming.keys for naming, _ in fits}) == 1:  # which the keys do not tell apart
            fix = f"{fix} {'; '.join(f'{naming.name}: {naming.description}' for naming, _ in fits)}."
        raise CheckpointError("source", expected="one naming", got=got, fix=fix)
    return fits[0]


def _nothing_found(tensors: Mapping[str, Tensor], namings: tuple[Naming, ...], prefix: str) -> CheckpointError:
    """The error that lists the names, the nearest naming, and the names missing for it."""
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    elsewhere = sorted({path for naming in namings for path in _prefixes(tensors, naming)}, key=_natural)
    fix = f"There is attention under {', '.join(map(repr, elsewhere))}. " if elsewhere else ""
    if names:
        nearest = max(namings, key=lambda naming: _nearness(naming, names))
        path = _best_prefix(nearest, names)
        missing = (path + key for key in nearest.keys if path + key not in names)
        fix += (
            f"The nearest known naming is {nearest.name} ({', '.join(nearest.keys)}); missing for it: "
            f"{', '.join(missing)}. Projections of other names are given as "
            '{"query": linear, "key": linear, "value": linear, "output": linear}.'
        )
    expected = "the names of an attention block" + (f" under {prefix!r}" if prefix else "")
    return CheckpointError("source", expected=expected, got=listed(names, 12), fix=fix.strip())


def _nearness(naming: Naming, names: list[str]) -> tuple[int, int, float]:
    """The number of present keys of a naming, how specific they are, and how similar the names are to all its keys."""
    prefix = _best_prefix(naming, names)
    present = [key for key in naming.keys if prefix + key in names]
    likeness = sum(_likeness(key, names) for key in naming.keys) / len(naming.keys)
    return len(present), sum(key.count(".") for key in present), likeness


def _best_prefix(naming: Naming, names: list[str]) -> str:
    """The prefix of most keys of a naming."""
    counts = Counter(name.removesuffix(key) for key in naming.keys for name in names if _ends(name, key))
    return max(counts, key=lambda prefix: counts[prefix], default="")


def _likeness(key: str, names: list[str]) -> float:
    lengths = (key.count(".") + 1, key.count(".") + 2)
    endings = {".".join(name.split(".")[-length:]).lower() for name in names for length in lengths}
    return max((SequenceMatcher(None, key.lower(), ending).ratio() for ending in endings), default=0.0)


_OBSTACLES = (
    (r"bias_[kv]", "a learned key or value appended to the others; clearhead.nn.MultiheadAttention has them"),
    (
        r"(q|k|query|key)_?(norm|layernorm|ln)\..*",
        "normalises queries or keys head by head; checkpoints.from_transformers reads it with its eps",
    ),
    (r"sinks?", "sinks, which checkpoints.from_transformers reads"),
    (
        r".*(relative_attention_bias|relative_position_bias_table|distance_embedding|rel_pos).*",
        "relative positions, which change the scores; checkpoints.from_transformers reads T5's",
    ),
    (r"(gate|g)_proj\..*", "a gate of the output, which checkpoints.from_transformers reads"),
    (r".*lora_.*", "LoRA: merge it into the weights first"),
)
_T5 = re.compile(r"(.*\.)?(SelfAttention|EncDecAttention)\.")


@dataclass(frozen=True)
class Finding:
    """The result of `identify`.

    Args:
        naming: the naming that fits.
        prefix: the prefix of its keys. It ends in a dot unless it is empty.
        embed_dim: E, features of the output.
        qdim: features of the query input.
        kdim: features of the key input.
        vdim: features of the value input.
        inner_dim: H·D, features of all query heads together.
        kv_inner_dim: Hkv·D, features of all key/value heads together. It is less than `inner_dim` with grouped heads.
        biases: the projections that have a bias.
        ignored: keys of the block that attention does not need.
        obstacles: the reason for each key that `load` refuses.
        num_heads: H, if each head has weights of its own, else ``None``.

    Example:
        >>> import torch, clearhead
        >>> found = clearhead.checkpoints.identify(torch.nn.TransformerEncoderLayer(12, 3))
        >>> found.naming.name, found.prefix, found.naming.fused, found.embed_dim
        ('torch', 'self_attn.', True, 12)
    """

    naming: Naming
    prefix: str
    embed_dim: int
    qdim: int
    kdim: int
    vdim: int
    inner_dim: int
    kv_inner_dim: int
    biases: tuple[Role, ...]
    ignored: tuple[str, ...]
    obstacles: Mapping[str, str]
    num_heads: int | None = None

    def __str__(self) -> str:
        naming = self.naming
        heads = f"all heads {self.inner_dim}"
        if self.kv_inner_dim != self.inner_dim:
            heads += f", grouped key/value heads {self.kv_inner_dim}"
        lines = [
            f"{naming.name}: {naming.description}",
            f"  weights: {', '.join(naming.keys)}" + (f" (under {self.prefix!r})" if self.prefix else ""),
            f"  sizes: query {self.qdim}, key {self.kdim}, value {self.vdim}, {heads}, output {self.embed_dim}",
            f"  biases: {', '.join(self.biases) or 'none'}",
        ]
        lines += [f"  heads: {self.num_heads}"] if self.num_heads else []
        lines += [f"  ignored: {', '.join(self.ignored)}"] if self.ignored else []
        lines += [f"  no place for {key}: {reason}" for key, reason in self.obstacles.items()]
        return "\n".join(lines)


def describe(tensors: Mapping[str, Tensor], naming: Naming, prefix: str, projections: Projections) -> Finding:
    """The sizes, biases and other keys of a block."""
    query, key, value, output = (projections[role].weight for role in ROLES)
    known = {prefix + entry.key for entry in naming.weights + naming.biases}
    unknown = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix) and name not in known]
    ignored = tuple(name for name in unknown if any(re.fullmatch(pattern, name) for pattern in naming.ignored))
    obstacles = {name: _reason(name) for name in unknown if name not in ignored}
    if _T5.fullmatch(prefix):
        obstacles[naming.keys[0]] = (
            "T5: its scores are not scaled and have a relative bias; checkpoints.from_transformers reads both"
        )
    return Finding(
        naming,
        prefix,
        embed_dim=output.shape[0],
        qdim=query.shape[1],
        kdim=key.shape[1],
        vdim=value.shape[1],
        inner_dim=query.shape[0],
        kv_inner_dim=key.shape[0],
        biases=tuple(role for role in ROLES if projections[role].bias is not None),
        ignored=ignored,
        obstacles=obstacles,
    )


def _reason(name: str) -> str:
    reasons = (reason for pattern, reason in _OBSTACLES if re.fullmatch(pattern, name))
    return next(reasons, "no part of attention that is known here")
