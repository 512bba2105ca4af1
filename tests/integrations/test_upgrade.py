"""`upgrade(model)`: which linear layers are swapped, and what transformers, peft and torchao make of the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import clearhead
from clearhead._layer import linear as layers
from clearhead.errors import DTypeError
from clearhead.integrations._pretrained import _REFUSED
from tests.integrations.architectures import SMALL, relative_error
from tests.integrations.test_unpad import build, inputs_of, rows, state  # noqa: F401  # a fixture among them


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which oneDNN's GEMM outruns PyTorch's."""
    if not layers.has_onednn_linear():
        pytest.skip("this build of PyTorch has no oneDNN")
    layers._why_pytorchs.cache_clear()
    layers._preferred.cache_clear()
    monkeypatch.setattr(layers, "_why_pytorchs", lambda: None)
    yield
    layers._preferred.cache_clear()


@pytest.fixture
def on_intel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    layers._preferred.cache_clear()
    monkeypatch.setattr(layers, "_why_pytorchs", lambda: "MKL is as fast here")
    yield
    layers._preferred.cache_clear()


class Own(nn.Linear):
    """Stands for anybody's subclass."""


def changed_linears() -> nn.ModuleDict:
    hooked, normed = nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4))
    hooked.register_forward_hook(lambda module, args, output: None)
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    pruned = nn.Linear(4, 4)
    prune.random_unstructured(pruned, "weight", 0.5)
    return nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "without bias": nn.Linear(4, 4, bias=False),
            "hooked": hooked,
            "parametrized": normed,
            "replaced": replaced,
            "pruned": pruned,
            "own": Own(4, 4),
            "ours": clearhead.nn.Linear(4, 4),
            "bf16": nn.Linear(4, 4, dtype=torch.bfloat16),
            "attention": nn.MultiheadAttention(4, 2),
            "whole": clearhead.MultiHeadAttention(4, 2),
        }
    )


@pytest.mark.usefixtures("on_amd")
def test_only_unmodified_linears_are_swapped() -> None:
    model = changed_linears()
    before, parameters = state(model), list(model.parameters())
    kinds = {name: type(module) for name, module in model.named_modules()}
    report = clearhead.upgrade(model)
    assert report.linears == ("plain", "without bias")
    assert {name: type(model[name]) for name in report.linears} == dict.fromkeys(report.linears, clearhead.nn.Linear)
    assert report.left_linears == {
        "hooked": "it has hooks, a parametrization, or a forward of its own",
        "parametrized": "torch.nn.utils.parametrize.ParametrizedLinear is a subclass with code of its own",
        "replaced": "it has hooks, a parametrization, or a forward of its own",
        "pruned": "it has hooks, a parametrization, or a forward of its own",
        "own": f"{Own.__module__}.Own is a subclass with code of its own",
        "ours": "it is Clearhead's already",
        "bf16": "PyTorch's GEMM is as fast for torch.bfloat16 on cpu",
    }
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert "\n  linear: plain\n" in str(report)
    assert "\n  left alone: 3 linear layers, it has hooks" in str(report)
    assert clearhead.downgrade(model).linears == ("plain", "without bias", "ours")
    assert state(model) == before
    assert {name for name, module in model.named_modules() if type(module) is not kinds[name]} == {"ours"}


@pytest.mark.usefixtures("on_intel")
def test_where_pytorchs_gemm_is_as_fast_nothing_is_swapped() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    report = clearhead.upgrade(model)
    assert report.linears == ()
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    text = "left alone: 2 linear layers, the GEMM stays PyTorch's: MKL is as fast here"
    assert str(report) == f"upgraded: nothing\n  {text}"


@pytest.mark.usefixtures("on_amd")
def test_choices(rows: Any) -> None:  # noqa: F811
    model = build("BertModel")
    assert clearhead.upgrade(model, attention=False).models == ()
    assert model.config._attn_implementation == "sdpa"
    assert clearhead.upgrade(model, linears=False).linears == ()
    assert model.config._attn_implementation == "clearhead"
    with pytest.raises(DTypeError, match="unpad: expected True or False"):
        clearhead.upgrade(model, unpad="yes")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match=r"model: expected a torch\.nn\.Module"):
        clearhead.upgrade("bert", unpad=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_amd")
def test_a_model_of_transformers_keeps_its_parameters_ties_and_files(tmp_path: Path) -> None:
    model = build("BertModel", "ForMaskedLM", hidden_size=512, intermediate_size=512, num_attention_heads=8)
    theirs, exact, before = copy.deepcopy(model), copy.deepcopy(model).double(), state(model)
    keys, parameters = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    report = clearhead.upgrade(model, unpad=True)
    assert len(report.linears) == 14  # two layers of six, and the head's two
    assert (report.models, report.unpadded, report.left) == (("",), ("bert",), {})
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert list(model.state_dict()) == keys

    given = inputs_of("right")
    real = given["attention_mask"].bool()
    expected, actual = theirs(**given).logits[real], model(**given).logits[real]
    assert relative_error(actual, expected) <= 2e-5
    gradients = [
        torch.autograd.grad(m(**given).logits[real].sin().sum(), [*m.parameters()]) for m in (exact, theirs, model)
    ]
    of_theirs, of_ours = (
        max((one - right).abs().max().item() for one, right in zip(found, gradients[0], strict=True))
        for found in gradients[1:]
    )
    assert of_ours <= 2 * of_theirs

    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert (type(loaded), loaded.config._attn_implementation) == (transformers.BertForMaskedLM, "sdpa")
    assert type(loaded.cls.predictions.decoder) is nn.Linear
    assert relative_error(loaded(**given).logits[real], expected) <= 2e-5
    clearhead.downgrade(model)
    assert state(model) == before


def test_attention_that_cannot_be_set_is_left() -> None:
    bloom = transformers.BloomModel(transformers.BloomConfig(hidden_size=8, n_head=2, n_layer=1, vocab_size=11))
    chosen = build("BertModel")
    chosen.set_attn_implementation("flex_attention")
    model = nn.ModuleDict({"bloom": bloom, "chosen": chosen, "bert": build("BertModel", "ForTokenClassification")})
    report = clearhead.upgrade(model)
    assert report.models == ("bert",)
    assert report.left == {
        "bloom": "BloomModel computes attention with code of its own",
        "chosen": "it was set to attention 'flex_attention'",
    }
    assert chosen.config._attn_implementation == "flex_attention"
    part = clearhead.downgrade(model["bert"].bert)
    assert list(part.left) == [""]
    assert "a model that it is a part of" in part.left[""]
    whole = clearhead.downgrade(model)
    assert (whole.models, whole.left) == (("bert",), {})
    assert model["bert"].config._attn_implementation == "sdpa"


def test_what_clearheads_attention_refuses_is_left() -> None:
    """The models whose every call would raise, as the table of model types lists them."""
    page = (Path(__file__).parents[2] / "docs" / "model-table.md").read_text(encoding="utf-8")
    row = r"^\| `(\w+)` \| refused \| ArgumentError: argument `\w+` is not supported"
    refused = re.findall(row, page, re.MULTILINE)
    assert tuple(sorted(refused)) == _REFUSED
    config = transformers.BertConfig(**SMALL)
    config.model_type = "deepseek_v32"
    report = clearhead.upgrade(transformers.BertModel(config))
    assert report.left == {"": "Clearhead's attention does not take what deepseek_v32 gives it"}


def test_a_model_of_several_keeps_what_each_had() -> None:
    config = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 40}
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=config | {"vocab_size": 11}, vision_config=config | {"image_size": 4, "patch_size": 2}
        )
    )
    clip.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    configs = (clip.config, clip.config.text_config, clip.config.vision_config)
    before = [each._attn_implementation for each in configs]
    assert clearhead.upgrade(clip).models == ("",)
    assert [each._attn_implementation for each in configs] == ["clearhead"] * 3
    clearhead.downgrade(clip)
    assert [each._attn_implementation for each in configs] == before


# --- Other libraries, before and after ---


def lora(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["query", "dense"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("first", ["adapters", "upgrade"])
def test_peft(rows: Any, first: str) -> None:  # noqa: F811
    base = build("BertModel", "ForTokenClassification")
    theirs = lora(copy.deepcopy(base))
    if first == "adapters":
        ours = lora(base)
        report = clearhead.upgrade(ours, unpad=True)
        assert "base_model.model.bert.encoder.layer.0.attention.self.key" in report.linears
        assert not any("query" in name or "dense" in name for name in report.linears)
        assert {report.left_linears[name] for name in report.left_linears if "lora_A" in name} == {
            "it is part of an adapter"
        }
    else:
        clearhead.upgrade(base, unpad=True)
        ours = lora(base)
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    labels = (given["input_ids"] % 2).masked_fill(~real, -100)
    found = []
    for model in (theirs, ours):
        model.zero_grad()
        output = model(**given, labels=labels)
        output.loss.backward()
        adapters = [parameter.grad for name, parameter in model.named_parameters() if "lora_" in name]
        assert all(gradient is not None for gradient in adapters)
        found.append([output.logits[real], *adapters])
    assert rows.unpadded
    for expected, actual in zip(*found, strict=True):
        assert relative_error(actual, expected) <= 5e-5
    merged = ours.merge_and_unload()
    clearhead.downgrade(merged)
    assert relative_error(merged(**given).logits[real], found[0][0]) <= 2e-5
    assert not rows.batches


@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("first", ["quantise", "upgrade"])
def test_torchao(rows: Any, first: str) -> None:  # noqa: F811
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    theirs = build("BertModel")
    ours = copy.deepcopy(theirs)
    quantize_(theirs, Int8WeightOnlyConfig())
    if first == "quantise":
        quantize_(ours, Int8WeightOnlyConfig())
        report = clearhead.upgrade(ours, unpad=True)
        assert report.linears == ()
        (why,) = set(report.left_linears.values())
        assert why == f"its weight is a {type(ours.pooler.dense.weight).__name__}"
    else:
        clearhead.upgrade(ours, unpad=True)
        quantize_(ours, Int8WeightOnlyConfig())
        assert type(ours.pooler.dense.weight) is type(theirs.pooler.dense.weight)
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    with torch.no_grad():
        expected, actual = theirs(**given), ours(**given)
    assert rows.unpadded
    assert relative_error(actual[0][real], expected[0][real]) <= 2e-5
    assert relative_error(actual.pooler_output, expected.pooler_output) <= 2e-5
    clearhead.downgrade(ours)
    with torch.no_grad():
        assert relative_error(ours(**given)[0][real], expected[0][real]) <= 2e-5


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """Classified texts of many lengths."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 12, (24,), generator=generator).tolist()
        self.ids = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": len(self.ids[index]) % 2}


def collate(texts: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(text["input_ids"]) for text in texts)
    ids = torch.tensor([text["input_ids"] + [0] * (longest - len(text["input_ids"])) for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([t["labels"] for t in texts])}


@pytest.mark.usefixtures("on_amd")
def test_trainer_learns_the_same(rows: Any, tmp_path: Path) -> None:  # noqa: F811
    losses: list[list[float]] = []
    for unpad in (False, True):
        torch.manual_seed(1)
        model = build("BertModel", "ForSequenceClassification")
        if unpad:
            clearhead.upgrade(model, unpad=True)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            per_device_train_batch_size=6,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), data_collator=collate)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert rows.unpadded
    assert len(losses[0]) == 8
    assert losses[0][-1] != losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-4)


def sentences(count: int) -> list[str]:
    """English that comes with Python: what `help` prints about the language."""
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics.values()).split())
    found = [sentence.strip() for sentence in text.split(". ") if 3 <= len(sentence.split()) <= 40]
    assert len(found) >= count
    return found[:count]


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_sentence_transformers(rows: Any, count: int) -> None:  # noqa: F811
    from sentence_transformers import SentenceTransformer

    from clearhead.cli._demo import default_model_path

    model = SentenceTransformer(str(default_model_path()), device="cpu")
    texts = sentences(count)
    expected = model.encode(texts, convert_to_tensor=True)
    report = clearhead.upgrade(model, unpad=True)
    assert len(report.unpadded) == 1
    actual = model.encode(texts, convert_to_tensor=True)
    assert 1 in rows.batches
    assert actual.shape == (count, 384)
    assert (actual - expected).abs().max() <= 2e-5
    clearhead.downgrade(model)
    torch.testing.assert_close(model.encode(texts[:3], convert_to_tensor=True), expected[:3], atol=1e-6, rtol=0)


@torch.no_grad()
def test_bfloat16_embeddings_point_the_same_way(rows: Any) -> None:  # noqa: F811
    from clearhead.cli._demo import default_model_path

    path = str(default_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    given = tokenizer(sentences(6), padding=True, return_tensors="pt")
    weights = given["attention_mask"][..., None]
    exact = (model(**given)[0] * weights).sum(1)
    model.to(torch.bfloat16)
    clearhead.upgrade(model, unpad=True)
    rounded = (model(**given)[0] * weights).sum(1)
    assert rows.unpadded
    assert torch.cosine_similarity(exact, rounded.float()).min() > 0.995


def test_upgrade_copies_nothing() -> None:
    config = transformers.BertConfig(**SMALL | {"vocab_size": 30522, "hidden_size": 768, "num_attention_heads": 12})
    model = transformers.BertModel(config)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    clearhead.upgrade(model, unpad=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
