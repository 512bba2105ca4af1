"""Small models in folders, as `--model` takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from clearhead.cli import _demo as demo
from tests.integrations.architectures import GROUPED, SMALL, VOCABULARY
from tests.plot.test_images import BOTH
from tests.plot.test_images import SMALL as VISION

WORDS = ["the", "animal", "did", "not", "cross", "street", "because", "it", "was", "too", "tired", "and", ",", "."]

SIDE = VISION["image_size"]
RESIZED: dict[str, Any] = {"size": {"height": SIDE, "width": SIDE}}
CROPPED: dict[str, Any] = {"size": {"shortest_edge": SIDE + 4}, "crop_size": {"height": SIDE, "width": SIDE}}
DINO = ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", VISION | {"num_register_tokens": 2})
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}

#: Model, configuration, its options, and of models that take pictures the processor and its options.
KINDS: dict[str, tuple[Any, ...]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mpnet": ("MPNetModel", "MPNetConfig", SMALL),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, "ViTImageProcessorPil", RESIZED),
    "deit": ("DeiTModel", "DeiTConfig", VISION, "DeiTImageProcessorPil", RESIZED | {"do_center_crop": False}),
    "registers": (*DINO, "BitImageProcessorPil", CROPPED),
    "clip": ("CLIPModel", "CLIPConfig", {"vision_config": VISION, **BOTH}, "CLIPImageProcessorPil", CROPPED),
    "siglip": ("SiglipModel", "SiglipConfig", {"vision_config": VISION, **BOTH}, "SiglipImageProcessorPil", RESIZED),
}


def save_tokenizer(folder: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from the name of a kind of model to a folder with a small random one, a tokenizer and a processor."""
    made: dict[str, Path] = {}

    def folder_for(kind: str) -> Path:
        if kind not in made:
            model_name, config_name, options, *processor = KINDS[kind]
            made[kind] = tmp_path_factory.mktemp(f"small-{kind}")
            config = getattr(transformers, config_name)(**options)
            getattr(transformers, model_name)(config).save_pretrained(made[kind])
            save_tokenizer(made[kind])
            if processor:
                getattr(transformers, processor[0])(**processor[1]).save_pretrained(made[kind])
        return made[kind]

    return folder_for


@pytest.fixture(name="in_an_empty_folder")
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", name="default_model_once")
def _load_the_default_model_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        default = demo.load_text_model()
        load = demo.load_text_model
        patch.setattr(demo, "load_text_model", lambda name, **options: load(name, **options) if name else default)
        yield
