"""Libraries that load, adapt, shrink or explain models: accelerate, peft, torchao and captum."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..subject import Numbers, Subject, forward, inference, loss_of, named, noise, numbers, salt_of
from ._tool import Tool

RANK, ALPHA = 2, 4


def _offloaded(subject: Subject) -> Numbers:
    """Parameters are on the meta device, and accelerate's hooks load them for a forward pass."""
    import accelerate

    return inference(subject, accelerate.cpu_offload(subject.module, execution_device="cpu"))


def _dispatched(subject: Subject) -> Numbers:
    import accelerate

    return numbers(subject, accelerate.dispatch_model(subject.module, device_map={"": "cpu"}, force_hooks=True))


def _prepared(subject: Subject) -> Numbers:
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a trainer in this process may have left its settings
    return numbers(subject, accelerate.Accelerator(cpu=True).prepare_model(subject.module))


def _names_of_linears(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def _adapted(module: nn.Module, adapters: Iterable[str] = ("default",)) -> Any:
    """The module with LoRA in every linear layer, whose numbers depend on the name of the adapter and of the layer."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=_names_of_linears(module))
    for adapter in adapters:
        module = inject_adapter_in_model(config, module, adapter)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                layer, _, rest = name.partition(".lora_")
                parameter.copy_(_factor(layer, rest[0], rest.split(".")[1], parameter))
    return module


def _factor(layer: str, letter: str, adapter: str, like: Tensor) -> Tensor:
    return noise(salt_of(f"{layer} {letter} {adapter}"), like.shape, like) / 8


def _merged_by_hand(module: nn.Module, adapter: str) -> None:
    """Add to every linear layer what its adapter adds."""
    with torch.no_grad():
        for name in _names_of_linears(module):
            weight: Tensor = module.get_submodule(name).weight
            a, b = weight.new_empty(RANK, weight.shape[1]), weight.new_empty(weight.shape[0], RANK)
            weight.add_(_factor(name, "B", adapter, b) @ _factor(name, "A", adapter, a), alpha=ALPHA / RANK)


def _lora(subject: Subject) -> Numbers:
    return _for_inputs(replace(subject, module=_adapted(subject.module)))


def _lora_expected(subject: Subject) -> Numbers:
    _merged_by_hand(subject.module, "default")
    return _for_inputs(subject)


def _merged_lora(subject: Subject) -> Numbers:
    """Merged into the weights."""
    _merge(_adapted(subject.module), "merge")
    return _for_inputs(subject)


def _unmerged_lora(subject: Subject) -> Numbers:
    """Merged, run, and taken out again."""
    module = _adapted(subject.module)
    _merge(module, "merge")
    inference(subject)
    _merge(module, "unmerge")
    return _for_inputs(subject)


def _merge(module: nn.Module, action: str) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            getattr(part, action)()


def _for_inputs(subject: Subject) -> Numbers:
    return {name: x for name, x in numbers(subject).items() if name.startswith(("output", "gradient of input"))}


def _mixed_adapters(subject: Subject) -> Numbers:
    """Each sample of the batch with another adapter, or none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    names = _chosen(subject)
    module = _adapted(subject.module, ("first", "second"))

    def choose(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs | {"adapter_names": names}

    for part in module.modules():
        if isinstance(part, BaseTunerLayer):
            part.register_forward_pre_hook(choose, with_kwargs=True)
    return inference(replace(subject, module=module.eval()))


def _chosen(subject: Subject) -> list[str]:
    return ["first", "__base__", "second"][: len(subject.inputs[0])]


def _one_adapter_each(subject: Subject) -> Numbers:
    rows: list[Numbers] = []
    for index, adapter in enumerate(_chosen(subject)):
        module = copy.deepcopy(subject.module).eval()
        if adapter != "__base__":
            _merged_by_hand(module, adapter)
        inputs, given = (tuple(x[index : index + 1] for x in tensors) for tensors in (subject.inputs, subject.given))
        rows.append(inference(Subject(module, inputs, given)))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _int8(subject: Subject) -> Numbers:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(subject.module, Int8WeightOnlyConfig())
    assert any(type(p.data).__module__.startswith("torchao") for p in subject.module.parameters())
    return inference(subject)


def _rounded_by_hand(subject: Subject) -> Numbers:
    """The plain call with the numbers that the quantised weights stand for."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    rounded = copy.deepcopy(subject.module).float()
    quantize_(rounded, Int8WeightOnlyConfig())
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if hasattr(parameter, "qdata"):
                subject.module.get_parameter(name).copy_(parameter.dequantize())
    return inference(subject)


def _integrated(subject: Subject) -> Numbers:
    """captum's integrated gradients, which make one large batch of all steps."""
    from captum.attr import IntegratedGradients

    def outputs(*tensors: Tensor) -> Tensor:
        output = forward(subject, (), lambda *_: subject.module(*tensors))[0]
        return output.flatten(1).sum(1)

    arguments: dict[str, Any] = {"n_steps": _STEPS, "method": "riemann_right"}
    attributions = IntegratedGradients(outputs).attribute(
        subject.inputs, additional_forward_args=subject.given, **arguments
    )
    return named("attribution", attributions)


_STEPS = 3


def _integrated_by_hand(subject: Subject) -> Numbers:
    totals = [torch.zeros_like(x) for x in subject.inputs]
    for step in range(1, _STEPS + 1):
        inputs = [(x.detach() * step / _STEPS).requires_grad_() for x in subject.inputs]
        output = forward(subject, tuple(inputs))[0]
        for total, gradient in zip(totals, torch.autograd.grad(output.sum(), inputs), strict=True):
            total += gradient / _STEPS
    return named("attribution", [x * total for x, total in zip(subject.inputs, totals, strict=True)])


def _layer_attributions(subject: Subject) -> Numbers:
    """captum's gradient × activation of the first linear layer, which hooks it."""
    from captum.attr import LayerGradientXActivation

    layer = subject.module.get_submodule(_names_of_linears(subject.module)[0])
    tool = LayerGradientXActivation(lambda *tensors: _total(subject, tensors)[None], layer)
    return named("attribution", [tool.attribute(subject.inputs, additional_forward_args=subject.given)])


def _total(subject: Subject, tensors: tuple[Tensor, ...]) -> Tensor:
    return loss_of(forward(subject, (), lambda *_: subject.module(*tensors)))


def _layer_attributions_by_hand(subject: Subject) -> Numbers:
    kept: list[Tensor] = []
    layer = subject.module.get_submodule(_names_of_linears(subject.module)[0])
    with layer.register_forward_hook(lambda *arguments: kept.append(arguments[-1])):
        total = _total(subject, (*subject.inputs, *subject.given))
    return named("attribution", [kept[0] * torch.autograd.grad(total, kept)[0]])


_ADAPTED = frozenset({"linears", "gradients"})
_EXPLAINED = frozenset({"gradients", "samples", "no dropout"})
TOOLS = (
    Tool("accelerate.cpu_offload", _offloaded, inference, needs=frozenset({"parameters"})),
    Tool("accelerate.dispatch_model", _dispatched, needs=frozenset({"parameters"})),
    Tool("accelerate.Accelerator", _prepared, needs=frozenset({"parameters"})),
    Tool("LoRA", _lora, _lora_expected, needs=_ADAPTED),
    Tool("merged LoRA", _merged_lora, _lora_expected, needs=_ADAPTED),
    Tool("LoRA merged and unmerged", _unmerged_lora, _lora_expected, needs=_ADAPTED),
    Tool("adapter_names", _mixed_adapters, _one_adapter_each, needs=_ADAPTED | {"samples"}),
    Tool("torchao int8 weights", _int8, _rounded_by_hand, needs=frozenset({"quantisable"})),
    Tool("captum integrated gradients", _integrated, _integrated_by_hand, needs=_EXPLAINED),
    Tool("captum layer attribution", _layer_attributions, _layer_attributions_by_hand, needs=_EXPLAINED | {"linears"}),
)
