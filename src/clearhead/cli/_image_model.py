"""Vision models and their processors, and running them on a picture."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, ClearheadError
from ..inspection._record import record
from ..integrations._hub import read_model, shortened, without_noise
from ._seeing import recorded_with, unseen_on_stderr


@dataclass(frozen=True)
class VisionModel:
    """A model of pictures with its processor, ready to be recorded.

    Args:
        name: what to call it in a title.
        model: a transformers model in eval mode, its vision side if it has another.
        processor: its image processor.
    """

    name: str
    model: Any
    processor: Any


def load_vision_model(name: str, *, notify: Callable[[str], None] = lambda message: None) -> VisionModel:
    """Load a vision model and its image processor, with Clearhead's attention where its code allows that.

    Args:
        name: a folder, or a name on the Hugging Face hub; the local cache comes before the network.
        notify: called with a sentence before anything is downloaded.

    Raises:
        ArgumentError: if there is no such model, or it takes no pictures.
    """
    model, processor = read_model(name, "AutoImageProcessor", notify=notify)
    model = getattr(model, "vision_model", model)  # of CLIP and SigLIP
    with without_noise(), suppress(ValueError):  # timm's models in transformers have attention of their own
        from ..integrations.transformers import NAME  # importing it registers the attention

        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            model.set_attn_implementation("sdpa")
    return VisionModel(Path(name).name or name, model.eval(), processor)


def record_picture(loaded: VisionModel, picture: Any, statistic: str | None = None) -> record:
    """Run the model on a picture of Pillow and record every attention of it, with one more key of `SHOWN`.

    Raises:
        ArgumentError: if the model does not run on pictures alone.
    """
    with unseen_on_stderr(set()):
        try:
            inputs = loaded.processor(images=picture, return_tensors="pt")
            with torch.no_grad(), record(loaded.model, recorded_with(statistic), keep="queries_keys") as rec:
                loaded.model(pixel_values=inputs["pixel_values"])
        except ClearheadError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            got = shortened(f"{type(error).__name__}: {error}", 160)
            expected = "a model that runs on pictures alone"
            raise ArgumentError(f"model {loaded.name}", expected=expected, got=got) from error
    return rec
