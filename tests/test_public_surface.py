"""The public names, their documentation, and what importing them costs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

import clearhead
from clearhead import masks

PUBLIC = [
    "AttentionStatistics",
    "Decoder",
    "DecoderCache",
    "DecoderLayer",
    "DecoderWeights",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Linear",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "SwiGLU",
    "__version__",
    "attention",
    "attention_statistics",
    "attention_varlen",
    "attention_weights",
    "caches",
    "checkpoints",
    "downgrade",
    "errors",
    "explain",
    "head_importance",
    "intervene",
    "load_transformer",
    "masks",
    "merge_heads",
    "nn",
    "positions",
    "record",
    "split_heads",
    "upgrade",
    "use_kernel",
    "use_linear",
    "walkthrough",
]
MASKS = [
    "Mask",
    "MaskReport",
    "bias",
    "causal",
    "documents",
    "drop",
    "keep",
    "lengths",
    "mask_mod",
    "prefix",
    "sliding_window",
]


def test_the_public_names() -> None:
    assert clearhead.__all__ == PUBLIC
    assert masks.__all__ == MASKS


@pytest.mark.parametrize("module", [clearhead, masks, clearhead.errors], ids=lambda module: module.__name__)
def test_every_public_name_is_there(module: Any) -> None:
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


DOCUMENTED = [("clearhead", name) for name in PUBLIC if name != "__version__"] + [("clearhead.masks", n) for n in MASKS]


@pytest.mark.parametrize(("module", "name"), DOCUMENTED)
def test_every_public_object_is_documented(module: str, name: str) -> None:
    documented = getattr(sys.modules[module], name)
    text = inspect.cleandoc(documented.__doc__ or "")
    assert text.split("\n")[0].endswith((".", ":"))
    assert not text.startswith(f"{name}(")  # what `dataclass` writes where nothing is written


@pytest.mark.parametrize(
    ("module", "name"),
    [pair for pair in DOCUMENTED if pair[1] not in ("caches", "checkpoints", "errors", "masks", "nn", "positions")],
)
def test_every_public_function_and_class_shows_an_example(module: str, name: str) -> None:
    # DEFECT: MaskReport shows none.
    text = getattr(sys.modules[module], name).__doc__
    assert "Example:" in text
    assert ">>> " in text


@pytest.mark.parametrize("name", ["dense", "check"])
def test_what_one_does_with_a_mask_shows_an_example(name: str) -> None:
    assert ">>> " in getattr(masks.Mask, name).__doc__


#: Imports Clearhead after torch and prints what came in, and what of torch's that builds things was called.
IMPORT = """
import json, sys, warnings
import torch

warnings.simplefilter("error")
before = set(sys.modules)
calls = []

def watch(owner, name):
    setattr(owner, name, lambda *args, **options: calls.append(name))

watch(torch, "compile")
watch(torch.cuda, "init")
watch(torch.cuda, "is_available")

import subprocess
watch(subprocess, "Popen")

seed = torch.initial_seed()
import clearhead

new = set(sys.modules) - before
print(json.dumps({
    "new": sorted(name for name in new if name.split(".")[0] != "clearhead"),
    "calls": calls,
    "same seed": seed == torch.initial_seed(),
    "cuda": torch.cuda.is_initialized(),
    "standard": sorted(sys.stdlib_module_names),
}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What a fresh interpreter reports."""
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_importing_brings_in_nothing_but_torch_and_the_standard_library(imported: dict[str, Any]) -> None:
    standard = set(imported["standard"])
    assert [name for name in imported["new"] if name.split(".")[0] not in standard | {"torch"}] == []


@pytest.mark.parametrize(
    "heavy",
    [
        "transformers",
        "safetensors",
        "matplotlib",
        "typer",
        "rich",
        "numpy",
        "torch._inductor",
        "torch._dynamo",
        "torch.utils.cpp_extension",
        "triton",
    ],
)
def test_importing_leaves_what_is_heavy_or_optional_alone(imported: dict[str, Any], heavy: str) -> None:
    assert [name for name in imported["new"] if name == heavy or name.startswith(heavy + ".")] == []


def test_importing_compiles_and_probes_nothing(imported: dict[str, Any]) -> None:
    assert imported["calls"] == []
    assert imported["cuda"] is False
    assert imported["same seed"] is True


def test_type_checkers_see_the_types() -> None:
    package = clearhead.__path__[0]
    with open(f"{package}/py.typed") as marker:
        assert marker.read() == ""
