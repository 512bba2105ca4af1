"""Ways to run an encoder of transformers on a CPU: each takes the loaded model and gives a function of batches."""

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

import clearhead
from benchmarks.comparing import OURS
from benchmarks.peers.work import Unsupported
from clearhead._layer.linear import processor_maker
from clearhead.cli._demo import default_model_path

__all__ = ["PADDED", "PEERS", "SDPA", "TRAINABLE", "Batch", "Eager", "Encode"]

PADDED, SDPA = "Clearhead, padded", "transformers sdpa"


@final
@dataclass(frozen=True)
class Batch:
    """Texts as token ids, padded on the right.

    Args:
        ids: int64 (B, L).
        mask: int64 (B, L), 1 for real tokens.
    """

    ids: Tensor
    mask: Tensor

    @staticmethod
    def of(lengths: list[int], vocabulary: int = 30_000) -> Batch:
        """Random tokens, the same ones every time."""
        generator = torch.Generator().manual_seed(0)
        mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(1000, vocabulary, tuple(mask.shape), generator=generator)
        return Batch(ids * mask, mask)

    @property
    def real(self) -> Tensor:
        """Bool (B, L)."""
        return self.mask.bool()


#: A padded batch in, (B, L, E) out; what stands at padding does not matter.
Encode = Callable[[Batch], Tensor]


@final
class Eager:
    """A model of transformers as a function of batches."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> Tensor:
        return self.model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state


def ours(model: nn.Module) -> Eager:
    upgraded = copy.deepcopy(model)
    clearhead.upgrade(upgraded, unpad=True)
    return Eager(upgraded)


def ours_padded(model: nn.Module) -> Eager:
    upgraded = copy.deepcopy(model)
    clearhead.upgrade(upgraded)
    return Eager(upgraded)


def sdpa(model: nn.Module) -> Eager:
    return Eager(model)


def compiled(model: nn.Module) -> Eager:
    return Eager(torch.compile(copy.deepcopy(model), dynamic=False))


def zentorch(model: nn.Module) -> Encode:
    if processor_maker() != "AuthenticAMD":
        raise Unsupported("it is for processors of AMD")
    import zentorch  # noqa: F401  # pyright: ignore  # registers the backend

    def backend(graph: Any, inputs: Any) -> Any:
        # It leaves its pass in the settings of Inductor, where every later `torch.compile` would run it too.
        with torch._inductor.config.patch(joint_custom_post_pass=None):
            return torch._dynamo.lookup_backend("zentorch")(graph, inputs)

    return Eager(torch.compile(copy.deepcopy(model), backend=backend, dynamic=False))


def onnx_runtime(model: nn.Module) -> Encode:
    """Exported in float32, with the fusions that ONNX Runtime has for BERT."""
    import onnxruntime
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    if _dtype(model) != torch.float32:
        raise Unsupported("its CPU provider computes in float32")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin after a call would occupy the cores during the next call.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with tempfile.TemporaryDirectory() as folder:
        exported = _exported(model, Path(folder))
        config: Any = model.config
        fused = optimizer.optimize_model(
            str(exported),
            "bert",
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            optimization_options=FusionOptions("bert"),
        )
        fused.save_model_to_file(str(Path(folder) / "fused.onnx"))
        session = onnxruntime.InferenceSession(
            str(Path(folder) / "fused.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def encode(batch: Batch) -> Tensor:
        given = {"input_ids": batch.ids.numpy(), "attention_mask": batch.mask.numpy()}
        return torch.from_numpy(session.run(None, given)[0])

    return encode


def openvino(model: nn.Module) -> Encode:
    """Converted from the ONNX export; one stream, PyTorch's number of threads, the precision of the model."""
    import openvino as ov

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "bf16" if _dtype(model) == torch.bfloat16 else "f32",
        "ENABLE_CPU_PINNING": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        exported = _exported(model, Path(folder))
        request = ov.Core().compile_model(ov.Core().read_model(exported), "CPU", settings).create_infer_request()

    def encode(batch: Batch) -> Tensor:
        results = request.infer({"input_ids": batch.ids.numpy(), "attention_mask": batch.mask.numpy()})
        return torch.from_numpy(results[0])

    return encode


def ctranslate2(model: nn.Module) -> Encode:
    """Converted to a format of its own; it takes lists of tokens and leaves padding out itself."""
    import ctranslate2
    import transformers

    kind = "bfloat16" if _dtype(model) == torch.bfloat16 else "float32"
    if kind not in ctranslate2.get_supported_compute_types("cpu"):
        raise Unsupported(f"it does not compute in {kind} on this processor")
    with tempfile.TemporaryDirectory() as folder:
        source, converted = str(Path(folder) / "model"), str(Path(folder) / "converted")
        copy.deepcopy(model).float().save_pretrained(source)
        transformers.AutoTokenizer.from_pretrained(str(default_model_path())).save_pretrained(source)
        ctranslate2.converters.TransformersConverter(source).convert(converted)
        encoder = ctranslate2.Encoder(
            converted, compute_type=kind, inter_threads=1, intra_threads=torch.get_num_threads()
        )

    def encode(batch: Batch) -> Tensor:
        lengths = batch.mask.sum(1).tolist()
        texts = [ids[:length] for ids, length in zip(batch.ids.tolist(), lengths, strict=True)]
        states = encoder.forward_batch(texts).last_hidden_state
        if kind == "bfloat16":
            states = states.to(ctranslate2.DataType.float32)
        return torch.from_numpy(np.array(states))

    return encode


#: The first is what the others are compared with.
PEERS: dict[str, Callable[[nn.Module], Encode]] = {
    OURS: ours,
    PADDED: ours_padded,
    SDPA: sdpa,
    "torch.compile": compiled,
    "ONNX Runtime": onnx_runtime,
    "OpenVINO": openvino,
    "CTranslate2": ctranslate2,
    "zentorch": zentorch,
}
#: Those that give gradients.
TRAINABLE: dict[str, Callable[[nn.Module], Eager]] = {
    OURS: ours,
    PADDED: ours_padded,
    SDPA: sdpa,
    "torch.compile": compiled,
}


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


class _LastHiddenState(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def _exported(model: nn.Module, folder: Path) -> Path:
    """The model as ONNX, for batches and lengths of any size."""
    path = folder / "model.onnx"
    example = Batch.of([7, 5, 3])
    shapes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=512)}
    torch.onnx.export(
        _LastHiddenState(copy.deepcopy(model).float()).eval(),
        (example.ids, example.mask),
        path,
        input_names=["input_ids", "attention_mask"],
        output_names=["last_hidden_state"],
        dynamic_shapes={"input_ids": shapes, "attention_mask": shapes},
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    return path
