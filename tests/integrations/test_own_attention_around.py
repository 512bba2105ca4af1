"""Encoders with attention code of their own, after `upgrade`: copies, adapters, graphs, records and threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper

import clearhead
from tests.integrations.architectures import VOCABULARY, relative_error
from tests.integrations.conftest import Rows
from tests.integrations.encoders import BATCH, LENGTH, pair, require_near
from tests.integrations.own_attention import TYPES, given, make, upgraded


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["MegatronBert", "RemBert", "RoFormer"])
def test_checkpointing_keeps_the_texts_of_a_row_apart(rows: Rows, name: str, reentrant: bool) -> None:
    theirs, ours = pair(make(name).train())
    ours.pooler = theirs.pooler = None
    enable = getattr(ours, "activation_checkpointing_enable", ours.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    arguments = given(name, "right")
    real = arguments["attention_mask"].bool()
    table = theirs.get_input_embeddings()(arguments.pop("input_ids")).detach()
    direction = torch.randn(int(real.sum()), 32)
    gradients: list[Any] = []
    for model in (theirs, ours):
        embeds = table.clone().requires_grad_()
        (model(inputs_embeds=embeds, **arguments)[0][real] * direction).sum().backward()
        gradients.append(embeds.grad)
    assert rows.batches
    require_near(gradients[1], gradients[0])


@pytest.mark.parametrize("part", ["encoder", "layers", "layers, reentrant"])
@pytest.mark.parametrize("name", ["MPNet", "RoFormer"])
def test_parts_in_checkpoint_wrappers(rows: Rows, name: str, part: str) -> None:
    theirs, ours = pair(make(name).train())
    ours.pooler = theirs.pooler = None
    if part == "encoder":
        ours.encoder = wrapper.checkpoint_wrapper(ours.encoder)
    else:
        kind = wrapper.CheckpointImpl.REENTRANT if "reentrant" in part else wrapper.CheckpointImpl.NO_REENTRANT
        ours.encoder.layer = nn.ModuleList(wrapper.checkpoint_wrapper(layer, kind) for layer in ours.encoder.layer)
    arguments = given(name, "right")
    real, direction = arguments["attention_mask"].bool(), torch.randn(BATCH, LENGTH, 32)
    for model in (theirs, ours):
        (model(**arguments)[0][real] * direction[real]).sum().backward()
    assert rows.unpadded
    learnt = [pair for pair in zip(theirs.parameters(), ours.parameters(), strict=True) if pair[0].grad is not None]
    assert len(learnt) > 20
    for expected, actual in learnt:
        scale = max(expected.grad.abs().max().item(), 0.1)
        assert (actual.grad - expected.grad).abs().max().item() <= 2e-5 * scale


@pytest.mark.parametrize("name", TYPES)
def test_downgrade_copies_and_pickles(name: str) -> None:
    theirs, arguments = make(name), given(name, "right")
    ours = upgraded(theirs)
    output = ours(**arguments)[0]
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    copies = copy.deepcopy(ours), torch.load(stored, weights_only=False), pickle.loads(pickle.dumps(ours))
    for each in copies:
        assert torch.equal(each(**arguments)[0], output)
    for each in (ours, *copies):
        assert clearhead.downgrade(each).models == ("",)
        kinds = [[type(part) for part in model.modules()] for model in (each, theirs)]
        assert kinds[0] == kinds[1]
        assert each.config._attn_implementation == theirs.config._attn_implementation
        assert torch.equal(each(**arguments)[0], theirs(**arguments)[0])


def test_saved_models_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = make("MPNet")
    upgraded(theirs).save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    assert (tmp_path / "ours/config.json").read_text() == (tmp_path / "theirs/config.json").read_text()
    loaded, arguments = transformers.AutoModel.from_pretrained(tmp_path / "ours"), given("MPNet", "left")
    assert torch.equal(loaded.eval()(**arguments)[0], theirs(**arguments)[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hooks_and_adapters() -> None:
    theirs, arguments = make("MPNet"), given("MPNet", "right")
    theirs.encoder.layer[0].attention.attn.q.register_forward_hook(lambda module, args, output: output * 2)
    require_near(upgraded(theirs)(**arguments)[0], theirs(**arguments)[0], arguments["attention_mask"])
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make("MPNet"), peft.LoraConfig(target_modules=["q", "v"], init_lora_weights=False))
    ours = copy.deepcopy(adapted.eval())
    assert len(clearhead.upgrade(ours, unpad=True).unpadded) == 1
    require_near(ours(**arguments)[0], adapted(**arguments)[0], arguments["attention_mask"])
    ours.merge_adapter()
    adapted.merge_adapter()
    require_near(ours(**arguments)[0], adapted(**arguments)[0], arguments["attention_mask"])


def test_other_attention_classes_stay() -> None:
    model = make("MPNet")
    attention: Any = model.encoder.layer[1].attention.attn
    attention.__class__ = type("Own", (type(attention),), {})
    report = clearhead.upgrade(model)
    assert "Own is a subclass with code of its own" in report.left[""]
    assert model.config._attn_implementation == "eager"
    assert type(model.encoder.layer[0].attention.attn).__module__.startswith("transformers.")
    model = make("RemBert", output_attentions=True)
    assert "output_attentions" in clearhead.upgrade(model).left[""]


@pytest.mark.parametrize("name", ["Luke", "LayoutLMv3"])
def test_encoders_that_keep_their_padding(name: str) -> None:
    model = make(name)
    report = clearhead.upgrade(model, unpad=True)
    assert report.models == ("",)
    assert report.left_padded[""].startswith("its ")


@pytest.mark.parametrize("name", TYPES)
def test_compiled_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    theirs, arguments = make(name), given(name, "right")
    compiled = torch.compile(upgraded(theirs), backend="eager", fullgraph=True)
    with torch.no_grad():
        actual, expected = (model(**arguments)[0][:, :LENGTH] for model in (compiled, theirs))
    require_near(actual, expected, arguments["attention_mask"])


@pytest.mark.parametrize("name", TYPES)
def test_autocast(name: str) -> None:
    theirs, arguments = make(name), given(name, "right")
    real, exact = arguments["attention_mask"].bool(), theirs(**arguments)[0][:, :LENGTH]
    with torch.autocast("cpu", torch.bfloat16):
        rounded, actual = (model(**arguments)[0][:, :LENGTH] for model in (theirs, upgraded(theirs)))
    assert actual.dtype == rounded.dtype
    assert relative_error(actual[real], exact[real]) <= 2 * relative_error(rounded[real], exact[real])


@pytest.mark.parametrize("name", TYPES)
def test_records_are_of_the_weights_of_eager(name: str) -> None:
    theirs, arguments = make(name), given(name, "right")
    ours = upgraded(theirs)
    with torch.no_grad(), clearhead.record(ours) as record:
        ours(**arguments)
    weights, real = theirs(**arguments, output_attentions=True).attentions, arguments["attention_mask"].bool()
    assert len(record) == len(weights) == 2
    for part, expected in zip(record, weights, strict=True):
        entropy = torch.special.entr(expected).sum(-1).transpose(1, 2)[:, :LENGTH]  # (B, L, H)
        require_near(record[part][0].entropy.transpose(1, 2)[:, :LENGTH], entropy, real)


def test_dropout_in_training() -> None:
    torch.manual_seed(0)
    model = upgraded(make("MPNet", attention_probs_dropout_prob=0.5)).train()
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    first, second = model(ids)[0], model(ids)[0]
    assert not torch.equal(first, second)
    assert torch.equal(model.eval()(ids)[0], model(ids)[0])


def test_threads() -> None:
    theirs, ours = pair(make("RoFormer"))
    batches = [given("RoFormer", side) for side in ("left", "right", "none") * 3]
    found: dict[int, Tensor] = {}

    def run(number: int) -> None:
        with torch.no_grad():
            found[number] = ours(**batches[number])[0]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(batches):
        require_near(found[number], theirs(**batch)[0], batch["attention_mask"])


def test_models_that_were_loaded_with_the_name_of_clearhead() -> None:
    theirs, arguments = make("XLM"), given("XLM", "right")
    loaded = transformers.AutoModel.from_config(theirs.config, attn_implementation="clearhead").eval()
    loaded.load_state_dict(theirs.state_dict())
    report = clearhead.upgrade(loaded, unpad=True)
    assert report.models == report.unpadded == ("",)
    require_near(loaded(**arguments)[0], theirs(**arguments)[0], arguments["attention_mask"])
    clearhead.downgrade(loaded)
    assert type(loaded.attentions[0]) is type(theirs.attentions[0])


def test_an_intervention_changes_one_head() -> None:
    theirs, arguments = make("MPNet"), given("MPNet", "right")
    ours = upgraded(theirs)
    attention = theirs.encoder.layer[0].attention.attn
    with torch.no_grad(), clearhead.intervene(ours, {("encoder.layer.0.attention.attn", 1): 0.0}):
        actual = ours(**arguments)[0]
    attention.v.weight.data[8:16], attention.v.bias.data[8:16] = 0, 0  # of head 1
    require_near(actual, theirs(**arguments)[0], arguments["attention_mask"])
