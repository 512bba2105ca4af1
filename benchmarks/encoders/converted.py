"""Runtimes that read files of their own: each converts a loaded model once, and then loads what it wrote."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.encoders.batches import Batch
from benchmarks.peers.work import Unsupported
from clearhead.cli._demo import default_model_path

__all__ = ["CTRANSLATE2", "ONNX_RUNTIME", "OPENVINO", "Converted", "Encode"]

#: A padded batch in, (B, L, E) out; what stands at padding does not matter.
Encode = Callable[[Batch], Tensor]


@final
@dataclass(frozen=True)
class Converted:
    """A runtime.

    Args:
        package: its library.
        convert: writes a float32 model, for float32, bfloat16 or int8, into an empty folder. int8 is calibrated on the
            batches.
        load: gives the model of a folder as a function, in the precision for which it was written.
    """

    package: str
    convert: Callable[[nn.Module, str, list[Batch], Path], None]
    load: Callable[[str, Path], Encode]

    def __call__(self, model: nn.Module) -> Encode:
        """The model as a function, in its own dtype."""
        precision = str(next(model.parameters()).dtype).removeprefix("torch.")
        with tempfile.TemporaryDirectory() as folder:
            self.convert(copy.deepcopy(model).float(), precision, [], Path(folder))
            return self.load(precision, Path(folder))


class _LastHiddenState(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


_INPUTS, _OUTPUTS = ["input_ids", "attention_mask"], ["last_hidden_state"]


def _export(model: nn.Module, folder: Path) -> Path:
    """Write the model as ONNX, for batches and lengths of any size."""
    shapes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    options: dict[str, Any] = {"dynamic_shapes": dict.fromkeys(_INPUTS, shapes), "verbose": False}
    return _write(model, folder / "exported.onnx", dynamo=True, opset_version=18, **options)


def _trace(model: Any, folder: Path) -> Path:
    """Write a BERT as ONNX in the form in which ONNX Runtime finds its attention: traced, with eager attention."""
    model.set_attn_implementation("eager")
    axes = {name: {0: "batch", 1: "length"} for name in (*_INPUTS, *_OUTPUTS)}
    return _write(model, folder / "traced.onnx", dynamo=False, opset_version=17, dynamic_axes=axes)


def _write(model: nn.Module, path: Path, **options: Any) -> Path:
    example = Batch.of([7, 5, 3])
    given = example.ids, example.mask
    names: dict[str, Any] = {"input_names": _INPUTS, "output_names": _OUTPUTS}
    torch.onnx.export(_LastHiddenState(model).eval(), given, path, **names, **options)
    return path


def _arrays(batch: Batch) -> dict[str, np.ndarray]:
    return {"input_ids": batch.ids.numpy(), "attention_mask": batch.mask.numpy()}


def _convert_for_onnx_runtime(model: nn.Module, precision: str, calibration: list[Batch], folder: Path) -> None:
    """With the fusions that ONNX Runtime has for BERT; int8 activations get their scales while they are computed."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    if precision == "bfloat16":
        raise Unsupported("its CPU provider computes in float32")
    config: Any = model.config
    written = _trace(model, folder) if config.model_type == "bert" else _export(model, folder)
    fused = optimizer.optimize_model(
        str(written),
        "bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        optimization_options=FusionOptions("bert"),
    )
    path = folder / "model.onnx"
    fused.save_model_to_file(str(path))
    if precision == "int8":
        # Types cannot be inferred behind operators that are ONNX Runtime's own.
        kinds = {"DefaultTensorType": onnx.TensorProto.FLOAT}
        quantize_dynamic(path, path, per_channel=True, weight_type=QuantType.QInt8, extra_options=kinds)


def _load_onnx_runtime(precision: str, folder: Path) -> Encode:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin after a call would occupy the cores during the next call.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])

    def encode(batch: Batch) -> Tensor:
        return torch.from_numpy(session.run(None, _arrays(batch))[0])

    return encode


def _convert_for_openvino(model: nn.Module, precision: str, calibration: list[Batch], folder: Path) -> None:
    """From the ONNX export; int8 by NNCF's quantization after training, calibrated on the batches."""
    import openvino as ov

    converted = ov.Core().read_model(_export(model, folder))
    if precision == "int8":
        import nncf

        converted = nncf.quantize(
            converted,
            nncf.Dataset([_arrays(batch) for batch in calibration]),
            subset_size=len(calibration),
            model_type=nncf.ModelType.TRANSFORMER,
        )
    ov.save_model(converted, folder / "model.xml", compress_to_fp16=False)


def _load_openvino(precision: str, folder: Path) -> Encode:
    """One stream and PyTorch's number of threads; beside int8, OpenVINO itself chooses between float32 and bfloat16."""
    import openvino as ov

    settings: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    if precision != "int8":
        settings["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[precision]
    request = ov.Core().compile_model(folder / "model.xml", "CPU", settings).create_infer_request()

    def encode(batch: Batch) -> Tensor:
        return torch.from_numpy(request.infer(_arrays(batch))[0])

    return encode


def _convert_for_ctranslate2(model: nn.Module, precision: str, calibration: list[Batch], folder: Path) -> None:
    """To a format of its own; int8 activations get their scales while they are computed."""
    import ctranslate2
    import transformers

    if precision not in ctranslate2.get_supported_compute_types("cpu"):
        raise Unsupported(f"it does not compute in {precision} on this processor")
    source = str(folder / "source")
    model.save_pretrained(source)  # pyright: ignore  # a model of transformers
    transformers.AutoTokenizer.from_pretrained(str(default_model_path())).save_pretrained(source)
    converter = ctranslate2.converters.TransformersConverter(source)
    converter.convert(str(folder / "model"), quantization=precision)


def _load_ctranslate2(precision: str, folder: Path) -> Encode:
    """It takes lists of tokens and leaves padding out itself."""
    import ctranslate2

    encoder = ctranslate2.Encoder(
        str(folder / "model"), compute_type=precision, inter_threads=1, intra_threads=torch.get_num_threads()
    )

    def encode(batch: Batch) -> Tensor:
        states = encoder.forward_batch(batch.texts).last_hidden_state
        if precision == "bfloat16":
            states = states.to(ctranslate2.DataType.float32)
        return torch.from_numpy(np.array(states))

    return encode


ONNX_RUNTIME = Converted("onnxruntime", _convert_for_onnx_runtime, _load_onnx_runtime)
OPENVINO = Converted("openvino", _convert_for_openvino, _load_openvino)
CTRANSLATE2 = Converted("ctranslate2", _convert_for_ctranslate2, _load_ctranslate2)
