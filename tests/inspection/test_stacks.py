"""Modules that run as several layers, stacks of equal sizes, and padding that only attention sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor, nn

import clearhead
import clearhead.integrations.transformers
from clearhead import masks
from clearhead.errors import ArgumentError, RecordError, ShapeError, UnknownNameError
from tests.integrations.architectures import padding, token_ids
from tests.support.randomised import randomised

from .small_models import small

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 12, 3
SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
PATCHES = 17  # and the class token
SHARED = "encoder.albert_layer_groups.0.albert_layers.0.attention"


def albert() -> Any:
    settings = SIZES | {"num_hidden_layers": 4, "vocab_size": 97, "embedding_size": 16, "initializer_range": 0.5}
    return transformers.AlbertModel(transformers.AlbertConfig(**settings)).eval()


def kept(model: nn.Module, *args: Any, **kwargs: Any) -> clearhead.record:
    with torch.no_grad(), clearhead.record(model, keep="queries_keys") as rec:
        model(*args, **kwargs)
    return rec


def product(weights: list[Tensor], target: int) -> Tensor:
    """The rollout of a target, (B, L), from the weights of every layer."""
    rows = torch.eye(weights[0].shape[-1])[target].expand(len(weights[0]), 1, -1)
    for layer in reversed(weights):
        rows = (rows + rows @ layer.mean(1)) / 2
    return rows[:, 0]


def test_a_shared_module_has_a_layer_for_each_run() -> None:
    model, ids = albert(), token_ids(LENGTH)
    rec = kept(model, ids)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = list(model(ids, output_attentions=True).attentions)
    assert list(rec) == [f"{SHARED}/{run}" for run in range(4)]
    assert repr(rec).startswith(f"<record of 4 attention layers: {SHARED}/0, ")
    for number, weights in enumerate(expected):
        torch.testing.assert_close(rec.weights(number), weights, rtol=0, atol=1e-5)
        torch.testing.assert_close(rec.weights(SHARED, call=number), weights, rtol=0, atol=1e-5)
    for layers in (None, [SHARED], "encoder"):
        torch.testing.assert_close(rec.rollout([2], layers=layers)[:, 0], product(expected, 2), rtol=0, atol=1e-5)
    ranked = rec.rank_heads(4, 1)
    assert {(one.layer, one.head) for one in ranked} == {(name, head) for name in rec for head in range(HEADS)}
    assert list(rec.summary()["entropy"]) == list(rec.reduce()) == list(rec)
    assert len(rec[SHARED]) == 4
    assert torch.equal(rec[SHARED][3].entropy, rec[f"{SHARED}/3"].entropy)
    with pytest.raises(AttributeError, match=r"albert_layers\.0\.attention: called 4 times"):
        _ = rec[SHARED].entropy
    assert rec.page().text.count("attention/3") == 1
    assert len(rec.plot_heads("entropy").get_yticklabels()) == 4


def test_several_texts_are_calls_of_each_run() -> None:
    model = albert()
    with torch.no_grad(), clearhead.record(model, ("entropy",), layers=[2, f"{SHARED}/3"]) as rec:
        for length in (3, 5):
            model(token_ids(length))
    assert {name: [call.query_length for call in calls] for name, calls in rec.items()} == {
        f"{SHARED}/2": [3, 5],
        f"{SHARED}/3": [3, 5],
    }
    assert [call.query_length for call in rec[SHARED]] == [3, 3, 5, 5]
    with pytest.raises(UnknownNameError, match=rf"one of '{SHARED}/2', '{SHARED}/3', which were recorded, got 0, '"):
        rec.name_of(0)
    with (
        pytest.raises(ArgumentError, match=r"layers: expected numbers below 4, or names among .*/3', got 4"),
        torch.no_grad(),
        clearhead.record(model, layers=[0, 4]),
    ):
        model(token_ids(3))


class Repeated(nn.Module):
    """One layer, three times, as a user writes it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer] * 3)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **options)
        return x


class Recurrent(nn.Module):
    """An encoder that reads its own output, beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder(1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(3):
            state = torch.tanh(self.encoder(state + x))
        return state


def encoder(depth: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=True)
    return randomised(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), 0.4).eval()


def own_layer() -> nn.Module:
    attend, feed = clearhead.MultiHeadAttention(WIDTH, HEADS), clearhead.transformer.FeedForward(WIDTH, 20)
    return clearhead.transformer.EncoderLayer(WIDTH, attend, feed)


def upgraded(model: nn.Module) -> nn.Module:
    clearhead.upgrade(model)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: Repeated(own_layer()),
    "own, no residual": lambda: Repeated(clearhead.MultiHeadAttention(WIDTH, HEADS)),
    "torch": lambda: Repeated(encoder(1).layers[0]),
    "upgraded": lambda: upgraded(Repeated(encoder(1).layers[0])),
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_layers_that_read_each_other_are_one_stack(kind: str, training: bool) -> None:
    model = randomised(MODELS[kind](), 0.4).train(training)
    with clearhead.record(model, keep="queries_keys") as rec:
        model(torch.randn(BATCH, LENGTH, WIDTH))
    assert [name[-2:] for name in rec] == ["/0", "/1", "/2"]
    assert len({rec.sides(name) for name in rec}) == 1
    expected = product([rec.weights(number) for number in range(3)], 4)
    torch.testing.assert_close(rec.rollout([4])[:, 0], expected, rtol=0, atol=1e-6)


def test_padded_layers_without_a_residual_are_told_apart() -> None:
    """Tokens are packed, so the shown call has copies of its operands."""
    width = 64
    model, lengths = Repeated(clearhead.MultiHeadAttention(width, 2)), torch.tensor([257, 31, 19, 11])
    rec = kept(model, torch.randn(4, 257, width), mask=masks.lengths(lengths))
    assert list(rec) == ["layers.0/0", "layers.0/1", "layers.0/2"]
    for name in rec:
        assert rec[name].counted.sum(1).tolist() == lengths.tolist()


class Towers(nn.Module):
    """Two encoders of equal sizes, or one for two texts."""

    def __init__(self, *, tied: bool, chained: bool = False) -> None:
        super().__init__()
        self.left = encoder()
        self.right = self.left if tied else encoder()
        self.chained = chained

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.right(self.left(x)) if self.chained else (self.left(x), self.right(y))


@pytest.mark.parametrize("same", [False, True], ids=["two inputs", "one input"])
def test_towers_are_not_chained(same: bool) -> None:
    x, y = torch.randn(2, BATCH, LENGTH, WIDTH)
    model = Towers(tied=False)
    rec = kept(model, x, x if same else y)
    text = r"one stack, got layers of left\.layers \(self-attention, 2\), right\.layers \(self-a.*layers='left\.layers'"
    with pytest.raises(ShapeError, match=text):
        rec.rollout([0])
    for side, inputs in (("left", x), ("right", x if same else y)):
        alone = kept(getattr(model, side), inputs).rollout([1])
        torch.testing.assert_close(rec.rollout([1], layers=side), alone, rtol=0, atol=0)
    with pytest.raises(
        ArgumentError, match=r"query: expected layers whose queries are the same tokens.*left\.layers, ri"
    ):
        rec.rank_heads("a", 2, tokens=list("abcdefg"))
    assert {one.layer for one in rec.rank_heads("a", "b", tokens=list("abcdefg"), layers="right")} == set(list(rec)[2:])
    with pytest.raises(
        ArgumentError, match="layers: expected a list of names or numbers, or a module with self-attention"
    ):
        rec.rollout([0], layers="middle")


def test_chained_encoders_are_one_stack() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    rec = kept(Towers(tied=False, chained=True), x, x)
    expected = product([rec.weights(number) for number in range(4)], 3)
    torch.testing.assert_close(rec.rollout([3])[:, 0], expected, rtol=0, atol=1e-6)


def test_texts_of_a_tied_encoder_are_calls() -> None:
    x, y = torch.randn(2, BATCH, LENGTH, WIDTH)
    model = Towers(tied=True)
    rec = kept(model, x, y)
    assert [len(calls) for calls in rec.values()] == [2, 2]
    for call, inputs in enumerate((x, y)):
        alone = kept(model.left, inputs).rollout([1])
        torch.testing.assert_close(rec.rollout([1], call=call), alone, rtol=0, atol=0)


def clip(texts: int = BATCH) -> tuple[Any, dict[str, Tensor]]:
    text = SIZES | {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=SIZES | {"image_size": 32, "patch_size": 8}, projection_dim=16
    )
    inputs = {"input_ids": torch.randint(3, 97, (texts, PATCHES)), "pixel_values": torch.rand(BATCH, 3, 32, 32)}
    inputs["attention_mask"] = torch.ones(texts, PATCHES).long()
    inputs["attention_mask"][1:, 7:] = 0
    return transformers.CLIPModel(config).eval(), inputs


def test_two_towers_of_equal_lengths() -> None:
    model, inputs = clip()
    rec = kept(model, **inputs)
    counted = {name: calls.counted.sum(1).tolist() for name, calls in rec.items()}
    vision, text = ([name for name in rec if name.startswith(tower)] for tower in ("vision_model", "text_model"))
    assert counted == {name: [PATCHES, PATCHES] for name in vision} | {name: [PATCHES, 7] for name in text}
    with pytest.raises(ShapeError, match=r"layers of vision_model\.encoder\.layers \(self-attention, 2\), text_model"):
        rec.rollout([0])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True)
    for tower, output in (("vision_model", outputs.vision_model_output), ("text_model", outputs.text_model_output)):
        expected = product(list(output.attentions), 5)
        torch.testing.assert_close(rec.rollout([5], layers=tower)[:, 0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "clearhead"])
def test_an_encoder_and_a_decoder_of_equal_lengths(implementation: str) -> None:
    model = small("bart")
    model.set_attn_implementation(implementation)
    rec = kept(model, input_ids=token_ids(LENGTH), decoder_input_ids=token_ids(LENGTH))
    text = r"layers of model\.encoder\.layers \(self.*, model\.decoder\.layers \(self-at.* \(cross-attention, 2\)"
    with pytest.raises(ShapeError, match=text):
        rec.rollout([0])
    for side in ("encoder", "decoder"):
        weights = [rec.weights(f"model.{side}.layers.{number}.self_attn") for number in range(2)]
        rollout = rec.rollout([4], layers=f"model.{side}")[:, 0]
        torch.testing.assert_close(rollout, product(weights, 4), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}, {"use_cache": False}], ids=str
)
def test_steps_of_generate_are_calls(options: dict[str, Any]) -> None:
    """The text of a step was computed from the steps before it, and is not another layer."""
    for kind in ("llama", "bart"):
        model = small(kind)
        with clearhead.record(model, ("entropy",)) as rec:
            model.generate(token_ids(LENGTH), max_new_tokens=3, min_new_tokens=3, do_sample=False, **options)
        assert not any("/" in name for name in rec)
        assert {len(calls) for name, calls in rec.items() if "encoder.layers" not in name} == {3}
        crossing = {rec.sides(name) for name in rec if "encoder_attn" in name}
        assert crossing == ({(1, 0)} if kind == "bart" else set())


class Writing(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)


def test_steps_inside_one_call_of_the_model_are_calls() -> None:
    with clearhead.record(Writing(small("llama")), ("entropy",)) as rec:
        rec._running.model(token_ids(LENGTH))
    assert [len(calls) for calls in rec.values()] == [3, 3]


def test_frames_are_counted_and_not_samples() -> None:
    config = transformers.Wav2Vec2Config(
        **SIZES | {"num_hidden_layers": 1, "vocab_size": 31, "conv_dim": (16, 16), "conv_stride": (5, 4)},
        conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
    )
    for model in (
        transformers.Wav2Vec2Model(config).eval(),
        transformers.HubertModel(transformers.HubertConfig(**config.to_dict())),
    ):
        mask = torch.ones(2, 1600).long()
        mask[1, 800:] = 0
        rec = kept(model.eval(), torch.randn(2, 1600), attention_mask=mask)
        expected = model._get_feat_extract_output_lengths(mask.sum(1)).tolist()
        assert next(iter(rec.values())).counted.sum(1).tolist() == expected


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_virtual_tokens_count_and_padding_does_not(kind: str, side: str) -> None:
    peft, virtual = pytest.importorskip("peft"), 5
    configs = {"prompt": peft.PromptTuningConfig, "prefix": peft.PrefixTuningConfig}
    config = configs[kind](task_type="CAUSAL_LM", num_virtual_tokens=virtual)
    model, mask = peft.get_peft_model(small("llama"), config).eval(), padding(side, LENGTH)
    rec = kept(model, input_ids=token_ids(LENGTH), attention_mask=mask)
    added = virtual if kind == "prompt" else 0
    for calls in rec.values():
        assert calls.counted.sum(1).tolist() == (mask.sum(1) + added).tolist()


def test_own_masks_mark_padding_too() -> None:
    lengths, x = torch.tensor([LENGTH, 4]), torch.randn(BATCH, LENGTH, WIDTH)
    mask = masks.lengths(lengths) & masks.causal()
    rec = kept(Repeated(clearhead.MultiHeadAttention(WIDTH, HEADS)), x, mask=mask)
    for calls in rec.values():
        assert calls.counted.sum(1).tolist() == [LENGTH, 4]
    everything = torch.ones(BATCH, LENGTH).bool()
    with clearhead.record(Repeated(clearhead.MultiHeadAttention(WIDTH, HEADS)), query_mask=everything) as rec:
        rec._running.model(x, mask=mask)
    assert all(bool(calls.counted.all()) for calls in rec.values())


def test_one_run_of_a_shared_module_is_changed() -> None:
    model, x = Repeated(clearhead.MultiHeadAttention(WIDTH, HEADS)), torch.randn(BATCH, LENGTH, WIDTH)
    attend = model.layers[0]
    with clearhead.intervene(model, {("layers.0/1", 1): 0.0}):
        result = model(x)
    first = attend(x)
    with clearhead.intervene(attend, {("", 1): 0.0}):
        second = attend(first)
    expected = attend(second)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-6)
    with clearhead.intervene(model, {("layers.0", 1): 0.0}):
        everywhere = model(x)
    assert not torch.allclose(everywhere, result)
    with (
        pytest.raises(ArgumentError, match=r"whose attention runs through Clearhead, got 'layers\.0/3', which never"),
        clearhead.intervene(model, {("layers.0/3", 1): 0.0}),
    ):
        model(x)


def test_a_run_that_is_computed_again_is_refused() -> None:
    model = Repeated(clearhead.MultiHeadAttention(WIDTH, HEADS))
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    text = r"interventions in one of several runs.*activation checkpointing.*name the module without a run"
    with clearhead.intervene(model, {("layers.0/1", 1): 0.0}), pytest.raises(RecordError, match=text):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()


def test_importance_and_scalars_have_the_names_of_a_record() -> None:
    model, x = Repeated(own_layer()), torch.randn(BATCH, LENGTH, WIDTH)
    names = [f"layers.0.self_attention/{run}" for run in range(3)]
    importance = clearhead.head_importance(model, [x], lambda m, x: m(x).square().mean(), progress=False)
    assert list(importance) == names
    assert not torch.allclose(importance[names[0]], importance[names[2]])
    seen: dict[str, float] = {}
    with clearhead.monitor(model.train(), statistics=("entropy",), to=lambda _, values: seen.update(values)):
        model(x)
    assert [name for name in seen if "head" not in name] == [f"attention/{name}/entropy" for name in names]


def test_layers_side_by_side_are_one_stack() -> None:
    """Layers that read the same tokens, and whose outputs no other layer reads, are over one text."""

    class SideBySide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(clearhead.MultiHeadAttention(12, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([layer(x) for layer in self.layers]).sum(0)

    model, x = SideBySide(), torch.randn(2, 5, 12)
    with clearhead.record(model, keep="queries_keys") as rec:
        model(x)
    assert {rec.sides(name) for name in rec} == {(0, 0)}
    assert rec.page(tokens=[list("abcde"), list("fghij")])


@pytest.mark.parametrize("way", ["copy_", "out", "setitem", "view before"])
def test_layers_that_write_through_views_are_a_chain(way: str) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.att = clearhead.MultiHeadAttention(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            buffer = torch.zeros(3, *x.shape)
            views = [buffer[number] for number in range(3)]
            for number in range(3):
                y = self.att(x)
                if way == "copy_":
                    buffer[number].copy_(y)
                elif way == "setitem":
                    buffer[number][:] = y
                elif way == "out":
                    torch.mul(y, 2, out=buffer[number])
                else:
                    buffer[number, :, :3] = y[:, :3]
                x = (views if way == "view before" else buffer)[number] + 1
            return x

    model = Writing()
    with torch.no_grad(), clearhead.record(model, ("entropy",)) as rec:
        model(torch.randn(2, 5, 12))
    assert list(rec) == ["att/0", "att/1", "att/2"]
