"""ONNX Runtime's fused operator ``com.microsoft.MultiHeadAttention`` on its CPU provider."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .work import AttentionWork, Operands, Outputs, Unsupported, Way

__all__ = ["onnx_runtime"]


def onnx_runtime(work: AttentionWork, operands: Operands) -> Way:
    """Inputs and output stay where they are: the session is bound to their memory.

    The operator takes the query as (B, L, H·D). Keys and values may have their heads apart, which spares it two copies,
    if they are of one shape.
    """
    import onnxruntime

    if work.backward:
        raise Unsupported("it has no backward pass")
    if work.dropout_p > 0:
        raise Unsupported("it has no dropout")
    if work.dtype != torch.float32:
        raise Unsupported("its operator takes float32 alone on CPUs")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin after a call would occupy the cores during the next call.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    arrays = _arrays(work, operands)
    shapes = {name: array.shape for name, array in arrays.items()}
    session = onnxruntime.InferenceSession(_model(work, shapes), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
    output = torch.empty(work.batch, work.length, work.heads * work.value_features)
    binding.bind_output("output", "cpu", 0, np.float32, tuple(output.shape), output.data_ptr())

    def run() -> Outputs:
        session.run_with_iobinding(binding)
        # The arrays are named here so that they live as long as the binding points at them.
        return (_split(output, work, arrays),)

    return run


def _split(output: Tensor, work: AttentionWork, _alive: object) -> Tensor:
    return output.view(work.batch, work.length, work.heads, work.value_features).transpose(1, 2)  # (B, H, L, Dv)


def _arrays(work: AttentionWork, operands: Operands) -> dict[str, np.ndarray]:
    arrays = {"query": _merged(operands.query), "key": operands.key.numpy(), "value": operands.value.numpy()}
    if work.value_features != work.head_dim:
        arrays |= {"key": _merged(operands.key), "value": _merged(operands.value)}
    if operands.mask is not None:
        mask = operands.mask
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        arrays["bias"] = mask[None, None].contiguous().numpy()  # (1, 1, L, S)
    return arrays


def _merged(tensor: Tensor) -> np.ndarray:
    return tensor.transpose(1, 2).flatten(2).contiguous().numpy()  # (B, L, H·D)


def _model(work: AttentionWork, shapes: dict[str, tuple[int, ...]]) -> bytes:
    from onnx import TensorProto, helper

    # The fourth and fifth inputs are the projections' bias and the padding mask.
    inputs = ["query", "key", "value", "", "", "bias"] if "bias" in shapes else ["query", "key", "value"]
    node = helper.make_node(
        "MultiHeadAttention",
        inputs,
        ["output"],
        domain="com.microsoft",
        num_heads=work.heads,
        unidirectional=int(work.causal),
    )
    output = helper.make_tensor_value_info(
        "output", TensorProto.FLOAT, (work.batch, work.length, work.heads * work.value_features)
    )
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([node], "attention", given, [output])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
