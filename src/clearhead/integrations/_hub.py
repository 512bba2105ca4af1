"""Models of others, read with transformers: only safetensors, without their code and without warnings."""

from __future__ import annotations

import contextlib
import logging
import re
import textwrap
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import ArgumentError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

#: transformers' classes that prepare a model's input.
Companion = Literal["AutoTokenizer", "AutoImageProcessor"]


def read_model(name: str, companion: Companion, *, notify: Callable[[str], None]) -> tuple[Any, Any]:
    """Read a model without its task's head, in float32 and with eager attention, and its tokenizer or image processor.

    Args:
        name: a folder, or a name on the Hugging Face hub. The local cache is read first.
        companion: the class of the tokenizer or image processor.
        notify: called with a sentence before a download.

    Raises:
        ArgumentError: if there is no such model, or transformers cannot read it.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_pretrained(str(folder), companion, local=True)
    if folder.exists() or not HUB_NAME.fullmatch(name):
        raise _unknown_model(name, "a file" if folder.exists() else "no such folder")
    try:
        return _from_pretrained(name, companion, local=True)
    except ArgumentError:
        notify(f"{name} is not on this machine; asking the Hugging Face hub for it.")
        _require_on_hub(name)
        return _from_pretrained(name, companion, local=False)


@contextlib.contextmanager
def without_noise() -> Generator[None]:
    """Suppress warnings and progress bars of transformers and of its imports, and restore all settings.

    transformers imports all optional libraries, and some of them write warnings. torchao, for example, lists its
    extensions that do not fit the installed PyTorch. Errors are still raised.
    """
    with contextlib.ExitStack() as undo, warnings.catch_warnings():
        disabled = logging.root.manager.disable
        undo.callback(logging.disable, disabled)
        logging.disable(max(disabled, logging.WARNING))
        warnings.simplefilter("ignore")
        from transformers.utils import logging as its_logging

        if its_logging.is_progress_bar_enabled():
            undo.callback(its_logging.enable_progress_bar)
            its_logging.disable_progress_bar()
        yield


def _require_on_hub(name: str) -> None:
    """Make one quick request, because transformers retries for minutes without a network."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=10)
    except RepositoryNotFoundError as error:
        raise _unknown_model(name, "no folder here and no public model there") from error
    except Exception as error:  # of the network or its settings
        reason = textwrap.shorten(str(error), 80, placeholder="…")
        raise _unknown_model(name, f"no folder here and no answer from the hub ({reason})") from error


def _from_pretrained(path: str, companion: Companion, *, local: bool) -> tuple[Any, Any]:
    options: dict[str, Any] = {"local_files_only": local, "trust_remote_code": False}
    with without_noise():
        import transformers

        try:
            tokenizer = getattr(transformers, companion).from_pretrained(path, **options)
            model = transformers.AutoModel.from_pretrained(
                path, use_safetensors=True, dtype=torch.float32, attn_implementation="eager", **options
            )
        except Exception as error:  # transformers passes on the exceptions of its readers
            reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder="…")
            raise _unknown_model(path, f"this from transformers: {reason}") from error
    return model, tokenizer


def _unknown_model(name: str, got: str) -> ArgumentError:
    expected = (
        "a folder with config.json, model.safetensors and a tokenizer (of a vision model an image processor), "
        "or a model's name on the Hugging Face hub"
    )
    return ArgumentError(f"model {name}", expected=expected, got=got)
