"""The names under which attention weights are stored, as data: `Naming`, and the table of those known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from torch import Tensor

from .._checks import flag, items, shown, text
from ..errors import ArgumentError, DTypeError

Role = Literal["query", "key", "value", "output"]
ROLES: tuple[Role, ...] = ("query", "key", "value", "output")


class Projection(NamedTuple):
    """Weight (out, in) and bias (out,) of one of the four projections."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint.

    Args:
        key: its name, without the prefix of the block. ``*`` stands for the number of a head: each head has such a
            tensor, and the heads are joined in their order.
        holds: the projections in it, one after the other. A fused tensor holds more than one.
    """

    key: str
    holds: tuple[Role, ...]


@dataclass(frozen=True)
class Naming:
    """How one family of classes names and lays out the weights of an attention block.

    Args:
        name: the value of ``naming=``.
        description: the classes with this naming, and what they compute that the weights do not show.
        weights: all weights. Each is required.
        biases: all biases. Each is optional.
        transposed: weights are stored (in, out) instead of (out, in). Default False.
        square: inputs, outputs and all heads together have one size. Modules with other sizes cannot be saved in this
            naming. Default False.
        ignored: regular expressions of keys of the block that attention does not need. Default none.
        by_head: the rows of a fused tensor are sorted by heads: query, key and value of head 0, then of head 1.
            Default False: all queries, then all keys, then all values.

    Example:
        >>> mine = Naming.of_linears("mine", "ask", "offer", "content", "mix")
        >>> mine.keys
        ('ask.weight', 'offer.weight', 'content.weight', 'mix.weight')
    """

    name: str
    description: str
    weights: tuple[Entry, ...]
    biases: tuple[Entry, ...]
    transposed: bool = False
    square: bool = False
    ignored: tuple[str, ...] = ()
    by_head: bool = False

    def __post_init__(self) -> None:
        text("name", self.name)
        text("description", self.description)
        for argument, entries in (("weights", self.weights), ("biases", self.biases)):
            for entry in cast("list[object]", items(argument, entries, "a tuple of entries")):
                if not isinstance(entry, Entry):
                    fix = "Naming.of_linears(name, query, key, value, output) makes a naming of four Linears."
                    raise DTypeError(argument, expected="entries of one tensor each", got=shown(entry), fix=fix)

    @classmethod
    def of_linears(
        cls,
        name: str,
        query: str,
        key: str,
        value: str,
        output: str,
        *,
        description: str = "four separate Linears",
        square: bool = False,
        ignored: tuple[str, ...] = (),
    ) -> Naming:
        """A naming of four separate `Linear`s. Each name is the part before ``.weight`` and ``.bias``."""
        texts = {"name": name, "query": query, "key": key, "value": value, "output": output, "description": description}
        for argument, content in texts.items():
            text(argument, content)
        square = flag("square", square)
        ignored = tuple(text("ignored", pattern) for pattern in items("ignored", ignored, "a list of strings"))
        stems = dict(zip(ROLES, (query, key, value, output), strict=True))
        weights, biases = (
            tuple(Entry(f"{stem}.{kind}", (role,)) for role, stem in stems.items()) for kind in ("weight", "bias")
        )
        return cls(name, description, weights, biases, square=square, ignored=ignored)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the weights, without prefix."""
        return tuple(entry.key for entry in self.weights)

    @property
    def fused(self) -> bool:
        """Whether one weight holds several projections."""
        return any(len(entry.holds) > 1 for entry in self.weights)

    @property
    def of_single_heads(self) -> bool:
        """Whether each head has weights of its own."""
        return any("*" in key for key in self.keys)


_INPUTS: tuple[Role, ...] = ("query", "key", "value")
_IN_PROJ_BIASES = (Entry("in_proj_bias", _INPUTS), Entry("out_proj.bias", ("output",)))
# Masks that lessons register as buffers. The call passes `mask=` instead.
_MASK_BUFFERS = (r"mask", r"causal_mask", r"tril")
_ROTARY_TABLES = (r"rotary_emb\.inv_freq",)


def _linears(stems: str, description: str, ignored: tuple[str, ...] = (), name: str = "") -> Naming:
    """A naming of four `Linear`s. Its name is the first stem, unless it has another one."""
    query, key, value, output = stems.split()
    return Naming.of_linears(name or query, query, key, value, output, description=description, ignored=ignored)


def _lesson(stems: str, whose: str = "step-by-step lessons", name: str = "") -> Naming:
    return _linears(stems, f"four separate Linears, {whose}", _MASK_BUFFERS, name)


def fused(
    name: str,
    stems: str,
    description: str,
    ignored: tuple[str, ...] = (),
    *,
    transposed: bool = False,
    by_head: bool = False,
) -> Naming:
    """A naming with query, key and value in one weight. `stems` has the two names before ``.weight`` and ``.bias``."""
    inputs, output = stems.split()
    weights, biases = (
        (Entry(f"{inputs}.{kind}", _INPUTS), Entry(f"{output}.{kind}", ("output",))) for kind in ("weight", "bias")
    )
    return Naming(name, description, weights, biases, transposed, square=True, ignored=ignored, by_head=by_head)


def _with_keys_and_values(output: str) -> Naming:
    """``to_q``, and keys and values in one weight."""
    weights, biases = (
        (
            Entry(f"to_q.{kind}", ("query",)),
            Entry(f"to_kv.{kind}", ("key", "value")),
            Entry(f"{output}.{kind}", ("output",)),
        )
        for kind in ("weight", "bias")
    )
    return Naming("to_kv", "lessons with one Linear for keys and values", weights, biases, ignored=_MASK_BUFFERS)


def _of_heads(stems: str, description: str) -> Naming:
    """A naming of Linears of each head. `stems` has their names, and that of the output."""
    query, key, value, output = stems.split()
    names = f"heads.*.{query}", f"heads.*.{key}", f"heads.*.{value}", output
    buffers = tuple(rf"heads\.\d+\.{pattern}" for pattern in _MASK_BUFFERS)
    return Naming.of_linears("heads", *names, description=description, ignored=buffers)


NAMINGS: tuple[Naming, ...] = (
    _linears(
        "q_proj k_proj v_proj out_proj",
        "clearhead.MultiHeadAttention; also BART, OPT, CLIP and Whisper",
        name="clearhead",
    ),
    _linears(
        "q_proj k_proj v_proj o_proj",
        "self-attention lessons; also Llama, Mistral and Qwen2, whose rotary position embeddings are not applied: "
        "these are the weights only",
        _MASK_BUFFERS + _ROTARY_TABLES,
        "o_proj",
    ),
    _linears("w_q w_k w_v w_o", "lessons that rebuild the original Transformer", _MASK_BUFFERS),
    _linears("w_q w_k w_v w_concat", "lessons that rebuild the original Transformer", _MASK_BUFFERS, "w_concat"),
    _linears("W_q W_k W_v W_o", "Dive into Deep Learning, without biases by default", name="d2l"),
    Naming(
        "torch",
        "torch.nn.MultiheadAttention, packed",
        weights=(Entry("in_proj_weight", _INPUTS), Entry("out_proj.weight", ("output",))),
        biases=_IN_PROJ_BIASES,
        square=True,
    ),
    Naming(
        "torch",
        "torch.nn.MultiheadAttention with a kdim or vdim of its own",
        weights=(
            *(Entry(f"{role[0]}_proj_weight", (role,)) for role in _INPUTS),
            Entry("out_proj.weight", ("output",)),
        ),
        biases=_IN_PROJ_BIASES,
        square=True,
    ),
    _linears(
        "self.query self.key self.value output.dense",
        "BERT, RoBERTa and ELECTRA in transformers, whose LayerNorm after the block is not part of attention",
        (r"output\.LayerNorm\.(weight|bias|gamma|beta)",),
        "bert",
    ),
    _linears(
        "attention.query attention.key attention.value output.dense",
        "ViT, DeiT and DINOv2 in the files of transformers",
        name="vit",
    ),
    fused("timm", "qkv proj", "Vision Transformers in timm"),
    fused(
        "gpt2",
        "c_attn c_proj",
        "GPT-2 in transformers, which stores weights as (in, out)",
        (r"bias", r"masked_bias"),
        transposed=True,
    ),
    fused("nanogpt", "c_attn c_proj", "nanoGPT: GPT-2's names on ordinary Linears", (r"bias",)),
    fused(
        "gpt_neox",
        "query_key_value dense",
        "GPT-NeoX and BLOOM, with query, key and value of each head side by side, whose rotary positions or ALiBi are "
        "not applied",
        (r"bias", r"masked_bias", *_ROTARY_TABLES),
        by_head=True,
    ),
    fused("query_key_value", "query_key_value dense", "all queries, then all keys, then all values", _MASK_BUFFERS),
    fused("to_qkv", "to_qkv to_out.0", "Vision Transformers of lessons", _MASK_BUFFERS),
    fused("to_qkv", "to_qkv to_out", "Vision Transformers of lessons", _MASK_BUFFERS),
    _lesson("to_q to_k to_v to_out.0", "lessons, and diffusers"),
    _lesson("to_q to_k to_v to_out"),
    _with_keys_and_values("to_out.0"),
    _with_keys_and_values("to_out"),
    _of_heads("query key value proj", "lessons on GPT, with three Linears for each head"),
    _of_heads("q k v output_linear", "lessons on BERT, with three Linears for each head"),
    _lesson("linears.0 linears.1 linears.2 linears.3", "as in The Annotated Transformer", "linears"),
    _lesson("q k v o"),
    _lesson("query key value output"),
    _lesson("query_proj key_proj value_proj output_proj"),
    _lesson("query_linear key_linear value_linear output_linear"),
    _lesson("q_linear k_linear v_linear out"),
    _lesson("linear_q linear_k linear_v linear_out"),
    _lesson("fc_q fc_k fc_v fc_o"),
    _lesson("wq wk wv wo", "lessons and the original files of Llama, whose rotary positions are not applied"),
    _lesson("wq wk wv dense", "as in TensorFlow's tutorial", "dense"),
    _linears(
        "w_qs w_ks w_vs fc",
        "lessons that rebuild the original Transformer, whose LayerNorm after the block is not part of attention",
        (*_MASK_BUFFERS, r"layer_norm\.(weight|bias)"),
    ),
    _lesson("Wq Wk Wv Wo"),
    _lesson("W_Q W_K W_V W_O"),
    _lesson("W_query W_key W_value out_proj"),
)


def namings_called(naming: str | Naming | None) -> tuple[Naming, ...]:
    """The layouts of one name, a `Naming` itself, or all known layouts for ``None``."""
    if naming is None:
        return NAMINGS
    if isinstance(naming, Naming):
        held = [role for entry in naming.weights for role in entry.holds]
        if sorted(held) != sorted(ROLES):
            expected, got = f"weights that hold {', '.join(ROLES)}, each once", ", ".join(held) or "none"
            raise ArgumentError("naming", expected=expected, got=got)
        return (naming,)
    name = text("naming", naming, "the name of a naming, or a clearhead.checkpoints.Naming")
    layouts = tuple(layout for layout in NAMINGS if layout.name == name)
    if not layouts:
        names = ", ".join(dict.fromkeys(layout.name for layout in NAMINGS))
        fix = "For other names build one with clearhead.checkpoints.Naming.of_linears."
        raise ArgumentError("naming", expected=f"one of {names}", got=shown(name), fix=fix)
    return layouts
