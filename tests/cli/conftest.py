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
from tests.support.models import VISION, build, processor_of, two_sided, vision_model

WORDS = ["the", "animal", "did", "not", "cross", "street", "because", "it", "was", "too", "tired", "and", ",", "."]
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
#: Models of texts, and vision models with a head for a task or with a side for texts.
MODELS: dict[str, Callable[[], Any]] = {
    "albert": lambda: build("Albert", "Model", SMALL | {"embedding_size": 16, "num_hidden_layers": 4}),
    "llama": lambda: build("Llama", "ForCausalLM", GROUPED),
    "mpnet": lambda: build("MPNet", "Model", SMALL),
    "t5": lambda: build("T5", "ForConditionalGeneration", T5),
    "vit": lambda: vision_model("vit", "ForImageClassification"),
    "clip": lambda: two_sided("CLIP"),
    "siglip": lambda: two_sided("Siglip"),
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
            made[kind] = tmp_path_factory.mktemp(f"small-{kind}")
            MODELS.get(kind, lambda: vision_model(kind))().save_pretrained(made[kind])
            save_tokenizer(made[kind])
            if kind in VISION:
                processor_of(kind).save_pretrained(made[kind])
        return made[kind]

    return folder_for


@pytest.fixture(name="in_an_empty_folder")
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", name="default_model_once")
def _load_the_default_model_once() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        default, load = demo.load_text_model(), demo.load_text_model
        patch.setattr(demo, "load_text_model", lambda name, **options: load(name, **options) if name else default)
        yield default
