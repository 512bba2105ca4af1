"""OpenVINO's operator ``scaled_dot_product_attention`` on its CPU plugin."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .work import AttentionWork, Operands, Outputs, Unsupported, Way

__all__ = ["openvino"]


def openvino(work: AttentionWork, operands: Operands) -> Way:
    """Inputs stay where they are; one stream, PyTorch's number of threads, and the precision of the operands."""
    import openvino as ov
    from openvino import opset13 as operators

    if work.backward:
        raise Unsupported("it has no backward pass")
    if work.dropout_p > 0:
        raise Unsupported("it has no dropout")
    kind = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}[work.dtype]
    tensors = [operands.query, operands.key, operands.value]
    kinds = [kind] * 3
    if operands.mask is not None:
        tensors.append(operands.mask)
        kinds.append(ov.Type.boolean if work.mask == "bool" else kind)
    inputs = [operators.parameter(list(tensor.shape), each) for tensor, each in zip(tensors, kinds, strict=True)]
    result = operators.scaled_dot_product_attention(*inputs, causal=work.causal)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "bf16" if work.dtype == torch.bfloat16 else "f32",
        "ENABLE_CPU_PINNING": False,
    }
    request = ov.Core().compile_model(ov.Model([result], inputs), "CPU", settings).create_infer_request()
    arrays = [_array(tensor) for tensor in tensors]
    for index, (array, each) in enumerate(zip(arrays, kinds, strict=True)):
        # A tensor made of an array and a shape points at the array's memory.
        request.set_input_tensor(index, ov.Tensor(array, list(tensors[index].shape), each))
    output = request.get_output_tensor(0)

    def run() -> Outputs:
        request.infer()
        return (_tensor(output.data, work, arrays),)

    return run


def _array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as numpy sees it; numpy has no bfloat16, so its bits pass as integers."""
    tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tensor(array: np.ndarray, work: AttentionWork, _alive: object) -> Tensor:
    if work.dtype == torch.bfloat16 and array.dtype.itemsize == 2:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
