"""`upgrade(model)`: which linear layers are swapped, and what transformers, peft and torchao make of the model."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune

import clearhead
from benchmarks.quality.architectures_cases.building import build_config
from benchmarks.quality.architectures_cases.types import architectures
from clearhead.errors import DTypeError
from clearhead.integrations.transformers import attention_forward
from tests.integrations.architectures import relative_error
from tests.integrations.conftest import Rows
from tests.integrations.encoders import build, inputs_of, require_near
from tests.support.models import minilm
from tests.support.snapshots import snapshot


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which oneDNN's GEMM outruns PyTorch's."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        pytest.skip("this build of PyTorch has no oneDNN")
    monkeypatch.setattr("clearhead._layer.linear._why_pytorchs", lambda: None)


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
    before, parameters = snapshot(model, 40), list(model.parameters())
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
    assert snapshot(model, 40) == before
    assert {name for name, module in model.named_modules() if type(module) is not kinds[name]} == {"ours"}


def test_where_pytorchs_gemm_is_as_fast_nothing_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead._layer.linear._why_pytorchs", lambda: "MKL is as fast here")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    report = clearhead.upgrade(model)
    assert report.linears == ()
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    text = "left alone: 2 linear layers, the GEMM stays PyTorch's: MKL is as fast here"
    assert str(report) == f"upgraded: nothing\n  {text}"


@pytest.mark.usefixtures("on_amd")
def test_choices() -> None:
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
    model = build("BertModel", "ForMaskedLM")
    theirs, before = copy.deepcopy(model), snapshot(model, 40)
    keys, parameters = list(model.state_dict()), [(id(each), each.data_ptr()) for each in model.parameters()]
    report = clearhead.upgrade(model, unpad=True)
    assert len(report.linears) == 14  # two layers of six, and the head's two
    assert (report.models, report.unpadded, report.left) == (("",), ("bert",), {})
    assert [(id(each), each.data_ptr()) for each in model.parameters()] == parameters
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert list(model.state_dict()) == keys
    given = inputs_of("right")
    expected = theirs(**given).logits
    require_near(model(**given).logits, expected, given["attention_mask"])

    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert (type(loaded), loaded.config._attn_implementation) == (transformers.BertForMaskedLM, "sdpa")
    assert type(loaded.cls.predictions.decoder) is nn.Linear
    require_near(loaded(**given).logits, expected, given["attention_mask"])
    clearhead.downgrade(model)
    assert snapshot(model, 40) == before


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
    report = clearhead.downgrade(model)
    assert (report.models, report.left) == (("bert",), {})
    assert model["bert"].config._attn_implementation == "sdpa"


def on_meta(name: str) -> Any:
    """A model without memory, of a type in the table of model types."""
    known = {architecture.name: architecture for architecture in architectures()}
    if name not in known:
        pytest.skip(f"transformers {transformers.__version__} has no such architecture")
    with torch.device("meta"):
        return known[name].model_class._from_config(build_config(known[name]))


def test_what_clearheads_attention_refuses_is_left() -> None:
    """The models whose calls would raise, as the table of model types lists them, and those with sparse layers."""
    kept = json.loads((Path(__file__).parents[2] / "benchmarks/results/architectures.json").read_text(encoding="utf-8"))
    error = re.compile(r"ArgumentError: (\w+): expected no keyword")
    refused = [(name, found[1]) for name, text in kept["figures"]["refused"].items() if (found := error.match(text))]
    assert ("minimax_m3_vl_text", "block_indices") in refused
    for name, keyword in refused:
        model = on_meta(name)
        report = clearhead.upgrade(model, linears=False)
        assert report.models == ()
        assert re.fullmatch(
            rf"Clearhead's attention does not take .*\b{keyword}\b.*, which \w+ passes", report.left[""]
        )
        assert model.config._attn_implementation != "clearhead"


@pytest.mark.parametrize("name", ["fnet", "mamba"])
def test_a_model_without_attention_is_no_upgraded_model(name: str) -> None:
    report = clearhead.upgrade(on_meta(name), linears=False)
    reason = "none of its layers calls the attention function of transformers"
    assert (report.models, report.left) == ((), {"": reason})
    assert str(report) == f"upgraded: nothing\n  left alone: (the model itself), {reason}"


def test_the_ids_that_a_model_passes_on_change_no_attention() -> None:
    query = torch.randn(1, 2, 5, 4)
    more = {"input_ids": torch.arange(5)[None]}
    outputs = [attention_forward(nn.Module(), query, query, query, None, **given)[0] for given in ({}, more)]
    assert torch.equal(*outputs)


def test_a_model_of_several_keeps_what_each_had() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 40}
    text, vision = sizes | {"vocab_size": 11}, sizes | {"image_size": 4, "patch_size": 2}
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    clip.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    configs = (clip.config, clip.config.text_config, clip.config.vision_config)
    before = [config._attn_implementation for config in configs]
    assert clearhead.upgrade(clip).models == ("",)
    assert [config._attn_implementation for config in configs] == ["clearhead"] * 3
    clearhead.downgrade(clip)
    assert [config._attn_implementation for config in configs] == before


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
def test_peft(rows: Rows, first: str) -> None:
    base = build("BertModel", "ForTokenClassification")
    theirs = lora(copy.deepcopy(base))
    if first == "adapters":
        ours = lora(base)
        report = clearhead.upgrade(ours, unpad=True)
        assert "base_model.model.bert.encoder.layer.0.attention.self.key" in report.linears
        assert not any("query" in name or "dense" in name for name in report.linears)
        reasons = {why for name, why in report.left_linears.items() if "lora_A" in name}
        assert reasons == {"it is part of an adapter"}
    else:
        clearhead.upgrade(base, unpad=True)
        ours = lora(base)
    given = inputs_of("right")
    real = given["attention_mask"].bool()
    labels = (given["input_ids"] % 2).masked_fill(~real, -100)
    results = []
    for model in (theirs, ours):
        output = model(**given, labels=labels)
        output.loss.backward()
        adapters = [parameter.grad for name, parameter in model.named_parameters() if "lora_" in name]
        results.append([output.logits[real], *adapters])
    assert rows.unpadded
    for expected, actual in zip(*results, strict=True):
        assert relative_error(actual, expected) <= 5e-5
    merged = ours.merge_and_unload()
    clearhead.downgrade(merged)
    require_near(merged(**given).logits[real], results[0][0])
    assert not rows.batches


@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("first", ["quantise", "upgrade"])
@torch.no_grad()
def test_torchao(rows: Rows, first: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    theirs = build("BertModel")
    ours = copy.deepcopy(theirs)
    quantize_(theirs, Int8WeightOnlyConfig())
    if first == "quantise":
        quantize_(ours, Int8WeightOnlyConfig())
        report = clearhead.upgrade(ours, unpad=True)
        assert report.linears == ()
        assert set(report.left_linears.values()) == {f"its weight is a {type(ours.pooler.dense.weight).__name__}"}
    else:
        clearhead.upgrade(ours, unpad=True)
        quantize_(ours, Int8WeightOnlyConfig())
        assert type(ours.pooler.dense.weight) is type(theirs.pooler.dense.weight)
    given = inputs_of("right")
    expected, actual = theirs(**given), ours(**given)
    assert rows.unpadded
    require_near(actual[0], expected[0], given["attention_mask"])
    require_near(actual.pooler_output, expected.pooler_output)
    clearhead.downgrade(ours)
    require_near(ours(**given)[0], expected[0], given["attention_mask"])


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_sentence_transformers(rows: Rows, count: int) -> None:
    from pydoc_data.topics import topics  # English that comes with Python

    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(minilm(), device="cpu")
    sentences = " ".join(" ".join(topics.values()).split()).split(". ")
    texts = [sentence for sentence in sentences if 3 <= len(sentence.split()) <= 40][:count]
    expected = model.encode(texts, convert_to_tensor=True)
    assert len(clearhead.upgrade(model, unpad=True).unpadded) == 1
    actual = model.encode(texts, convert_to_tensor=True)
    assert 1 in rows.batches
    assert actual.shape == (count, 384)
    assert (actual - expected).abs().max() <= 2e-5
    clearhead.downgrade(model)
    torch.testing.assert_close(model.encode(texts[:3], convert_to_tensor=True), expected[:3], atol=1e-6, rtol=0)
