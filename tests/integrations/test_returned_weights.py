"""Weights that a model returns are in the graph of its output, and checkpointing computes such layers again."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import causal_mask_function

import clearhead
from clearhead.integrations.transformers import attention_forward, make_mask
from tests.integrations.architectures import DECODERS, SMALL, make_pair, padding, relative_error, token_ids

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
]
#: Norms inside of the models compute in float32.
LIMITS = {torch.float64: 1e-5, torch.float32: 1e-3}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **DECODERS,
    "bert": ("BertModel", "BertConfig", SMALL),
    # These layers do not pass `output_attentions` on: only transformers' collector has it, in the forward pass alone.
    "gpt2": ("GPT2Model", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}),
    "opt": ("OPTModel", "OPTConfig", SMALL | {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    "gpt_bigcode": ("GPTBigCodeModel", "GPTBigCodeConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}),
    "bart": ("BartModel", "BartConfig", SMALL | {"d_model": 32, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}),
}


def without_dropout(model: Any) -> Any:
    """In training mode, where checkpointing works."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    model_name, config_name, options = MODELS[name]
    if not hasattr(transformers, config_name):
        pytest.skip(f"transformers {transformers.__version__} has no {config_name}")
    eager, ours = make_pair(model_name, config_name, options)
    return without_dropout(eager.to(dtype)), without_dropout(ours.to(dtype))


def weights_of(output: Any) -> list[Tensor]:
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [tensor for name in names for tensor in output.get(name) or ()]


def gradients(model: Any, double: float = 1.0, **inputs: Any) -> dict[str, Tensor]:
    """Gradients of every parameter and of the returned weights, whose gradient a hook multiplies by `double`."""
    model.zero_grad(set_to_none=True)
    if "bert" not in model.config.model_type:
        inputs["use_cache"] = False
    output = model(**inputs, output_attentions=True, output_hidden_states=True)
    weights = weights_of(output)
    assert weights
    for tensor in weights:
        if tensor.requires_grad:  # not those of reentrant checkpointing
            tensor.register_hook(lambda gradient: gradient * double)
            tensor.retain_grad()
    output[0].square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {f"weights {index}": each.grad for index, each in enumerate(weights) if each.requires_grad}


def require_alike(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert gradient is not None
        scale = max(gradient.abs().max(), 1e-3 * largest)
        assert (actual[name] - gradient).abs().max() <= LIMITS[gradient.dtype] * scale, name


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["stored", "checkpointed", "reentrant"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    # The experts of GPT-OSS have no product in float64.
    [(name, torch.float32 if "oss" in name else torch.float64) for name in MODELS]
    + [("bert", torch.float32), ("gpt2", torch.float32)],
)
def test_gradients_are_eagers_with_and_without_checkpointing(
    name: str, dtype: torch.dtype, checkpointing: bool | None
) -> None:
    models = pair(name, dtype)
    if checkpointing is not None:
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    inputs: dict[str, Any] = {"input_ids": token_ids(), "attention_mask": padding("right")}
    expected, actual = (gradients(model, 2.0, **inputs) for model in models)
    assert any(each.startswith("weights") for each in expected) == (checkpointing is not True)
    require_alike(actual, expected)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_recorded_training_step_with_checkpointing(name: str) -> None:
    eager, ours = pair(name)
    ours.gradient_checkpointing_enable()
    inputs = {"input_ids": token_ids(), "attention_mask": padding("right")}
    with clearhead.record(ours) as record:
        actual = gradients(ours, **inputs)
    require_alike(actual, gradients(eager, **inputs))
    assert len(record) == 2
    with clearhead.record(ours):  # the backward pass comes after
        loss = ours(**inputs, output_attentions=True)[0].square().sum()
    ours.zero_grad(set_to_none=True)
    loss.backward()
    require_alike({n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, dict([*actual.items()][:-2]))


def test_gradients_of_weights_without_retaining() -> None:
    eager, ours = pair("llama")
    found: list[tuple[Tensor, ...]] = []
    ids = token_ids()
    for model in (eager, ours):
        output = model(input_ids=ids, output_attentions=True)
        found.append(torch.autograd.grad(output[0].square().sum(), output.attentions))
    for expected, actual in zip(*found, strict=True):
        assert relative_error(actual, expected) <= LIMITS[torch.float64]


def test_an_intervention_counts_in_the_gradient_of_weights() -> None:
    _, ours = pair("llama")
    inputs = {"input_ids": token_ids(), "use_cache": False}
    changes = {("model.layers.0.self_attn", 1): 0.0}
    with clearhead.intervene(ours, changes):
        found = gradients(ours, **{name: value for name, value in inputs.items() if name != "use_cache"})
        ours.zero_grad(set_to_none=True)
        ours(**inputs)[0].square().sum().backward()
    assert found["weights 0"][:, 1].eq(0).all()
    assert found["weights 0"][:, 0].ne(0).any()
    plain = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    require_alike({name: found[name] for name in plain}, plain)


# One call of the attention function: with weights it is the same call, and has the same gradients.

B, H, HKV, L, S, D = 2, 6, 3, 5, 7, 4
BOUNDS = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "is_causal": True}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"s_aux": torch.linspace(-2, 3, H)},
    "soft-cap, scale": {"softcap": 1.5, "scaling": 0.3},
    "bias": {"position_bias": torch.linspace(-3, 3, H * L * S).view(1, H, L, S)},
    "padding": {"attention_mask": torch.arange(S).expand(B, 1, L, S) < 4},
    "packed": PACKED,
}


def operands(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    batch, length = (1, 7) if name == "packed" else (B, L)
    sizes = (batch, H, length, D), (batch, HKV, S, D), (batch, HKV, S, 3)
    query, key, value = (torch.randn(size).to(dtype).requires_grad_() for size in sizes)
    return query, key, value


def forward(
    name: str, inputs: tuple[Tensor, ...], *, dropout: float = 0.0, **more: Any
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """The output, the weights, and the tensors that gradients are asked for."""
    options = {"attention_mask": None, **CALLS[name]}
    leaves = [*inputs]
    for key in ("s_aux", "position_bias"):
        if key in options:
            options[key] = options[key].to(inputs[0].dtype).clone().requires_grad_()
            leaves.append(options[key])
    torch.manual_seed(7)
    module = SimpleNamespace(training=True)
    output, weights = attention_forward(module, *inputs, dropout=dropout, **options, **more)
    return output, weights, tuple(leaves)


@pytest.mark.parametrize("kernel", ["chunked", "reference", None])
@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", CALLS)
def test_with_weights_a_call_has_the_same_output_and_gradients(name: str, dropout: float, kernel: str | None) -> None:
    """Under dropout too, whose mask both draw: without a forced kernel in float32, on the native kernel where it is."""
    inputs = operands(name, torch.float32 if kernel is None else torch.float64)
    with clearhead.use_kernel(kernel) if kernel else torch.enable_grad():
        output, weights, leaves = forward(name, inputs, dropout=dropout, output_attentions=True)
        expected, _, expected_leaves = forward(name, inputs, dropout=dropout)
        assert weights is not None
        assert torch.equal(output, expected)
        direction = torch.randn_like(output)
        found = torch.autograd.grad((output * direction).sum(), (*leaves, weights))
        wanted = torch.autograd.grad((expected * direction).sum(), expected_leaves)
    limit = 1e-5 if kernel is None else 1e-10
    for actual, right in zip(found[:-1], wanted, strict=True):
        assert (actual - right).abs().max() <= limit * max(1.0, float(right.abs().max()))
    assert found[-1].shape == weights.shape
    if dropout == 0:  # do · vᵀ
        value = inputs[2].repeat_interleave(H // HKV, 1)
        assert (found[-1] - direction.transpose(1, 2) @ value.mT).abs().max() <= 10 * limit


def test_the_gradient_of_weights_flows_on_into_query_and_key() -> None:
    """A loss that reads both, against the textbook formula."""
    query, key, value = operands("plain")
    output, weights, _ = forward("plain", (query, key, value), output_attentions=True)
    repeated = [each.repeat_interleave(H // HKV, 1) for each in (key, value)]
    right = (query @ repeated[0].mT / D**0.5).softmax(-1)
    losses = [
        (o.square().sum() + (w * torch.arange(S)).square().sum())
        for o, w in ((output, weights), ((right @ repeated[1]).transpose(1, 2), right))
    ]
    for actual, expected in zip(*(torch.autograd.grad(loss, (query, key, value)) for loss in losses), strict=True):
        assert (actual - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_a_write_to_returned_weights_is_noticed() -> None:
    """As autograd does it, also where the weights are kept from checkpointing."""
    query, key, value = operands("plain")
    module = SimpleNamespace(training=True, config=SimpleNamespace(output_attentions=True))
    output, weights = attention_forward(module, query, key, value, None)
    assert weights is not None
    with torch.no_grad():
        weights.mul_(0)
    text = r"expected the values of the forward pass.*modified by an inplace operation.*weights\.clone\(\)"
    with pytest.raises(RuntimeError, match=text):
        output.sum().backward()


def test_nan_in_padding_reaches_no_gradient() -> None:
    query, key, value = operands("padding")
    with torch.no_grad():
        key[:, :, 4:], value[:, :, 4:] = torch.nan, torch.inf
    output, weights, leaves = forward("padding", (query, key, value), output_attentions=True)
    for gradient in torch.autograd.grad(output.square().sum(), (*leaves, weights)):
        assert gradient.isfinite().all()


def test_derivatives_of_derivatives_and_transforms() -> None:
    inputs = operands("plain")

    def loss(query: Tensor, *, weighted: bool) -> Tensor:
        return forward("plain", (query, *inputs[1:]), output_attentions=weighted)[0].square().sum()

    second = []
    for weighted in (False, True):
        (first,) = torch.autograd.grad(loss(inputs[0], weighted=weighted), inputs[0], create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), inputs[0])[0])
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-10)
    results = [torch.func.grad(partial(loss, weighted=weighted))(inputs[0]) for weighted in (False, True)]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_weights_are_in_the_graph_too(dtype: torch.dtype) -> None:
    inputs = operands("plain", torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        output, weights, leaves = forward("plain", inputs, output_attentions=True)
    assert weights is not None
    assert (output.dtype, weights.dtype) == (dtype, dtype)
    found = torch.autograd.grad(output.float().square().sum(), (*leaves, weights))
    exact, exact_weights, exact_leaves = forward("plain", operands("plain"), output_attentions=True)
    expected = torch.autograd.grad(exact.square().sum(), (*exact_leaves, exact_weights))
    for actual, right in zip(found, expected, strict=True):
        assert (actual - right).abs().max() <= 0.03 * right.abs().max()
        assert actual.norm() > 0


@torch.no_grad()
def test_without_gradients_and_while_tracing() -> None:
    inputs = operands("plain", torch.float32)
    output, weights, _ = forward("plain", inputs, output_attentions=True)
    assert not output.requires_grad

    def traced(query: Tensor) -> tuple[Tensor, Tensor | None]:
        return attention_forward(torch.nn.Module(), query, *inputs[1:], None, output_attentions=True)

    with torch.enable_grad():
        compiled = torch.compile(traced, backend="eager", fullgraph=True)(inputs[0])
        assert (compiled[0] - output).abs().max() <= 1e-6
        assert (compiled[1] - weights).abs().max() <= 1e-6
        assert torch.autograd.grad(compiled[0].sum(), compiled[1])[0].norm() > 0


def test_a_mask_that_a_later_layer_reads_is_the_same_when_checkpointing_computes_the_first_again() -> None:
    query, key, value = operands("plain", torch.float32)
    mask = make_mask(batch_size=B, q_length=S, kv_length=S, mask_function=causal_mask_function)
    assert mask is not None

    def layer(query: Tensor) -> Tensor:
        return attention_forward(SimpleNamespace(training=True), query, key, value, mask)[0]

    rows = torch.cat([query, query[:, :, :2]], 2)  # L = S
    (expected,) = torch.autograd.grad(layer(rows).square().sum(), query)
    rows = torch.cat([query, query[:, :, :2]], 2)
    output = checkpoint(layer, rows, use_reentrant=False)
    assert torch.cat([mask[:, :, :, :2], mask[..., 2:]], -1).shape == mask.shape
    (actual,) = torch.autograd.grad(output.square().sum(), query)
    assert torch.equal(actual, expected)
