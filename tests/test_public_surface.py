"""The public names, their documentation, and what importing them costs."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import typing
from types import ModuleType
from typing import Any

import pytest

import clearhead

#: Every public module and its names. What has an underscore anywhere in its path is private.
SURFACE = {
    "clearhead": """
        AttentionStatistics Census Explanation Mass MultiHeadAttention MultiHeadLatentAttention Summary TopK
        UpgradeReport Walkthrough __version__ activate attention attention_statistics attention_varlen
        attention_weights caches census check_values checkpoints downgrade errors explain head_ablation
        head_importance intervene kernels masks merge_heads monitor nn plot positions qk_clip_ record split_heads
        transformer upgrade use_kernel use_linear walkthrough
    """,
    "clearhead.backend": "flash_attn_func flash_attn_varlen_func",
    "clearhead.caches": """
        Cache CrossKVCache EvictingKVCache EvictionPolicy HeavyHitters Held KVCache KeyValues RandomEviction
        SinksAndRecent SlidingKVCache
    """,
    "clearhead.checkpoints": "NAMINGS Finding Naming from_transformers identify layers_from_transformers load save",
    "clearhead.cli": "main",
    "clearhead.distributed": """
        attention_statistics clip_grad_norm_ context_parallel gather_sequence shard_sequence tensor_parallel
    """,
    "clearhead.errors": """
        ArgumentError AttentionHealthWarning CacheError CheckpointError ClearheadError DTypeError DeviceError
        DistributedError FileError KernelError MaskTypeError OutOfRangeError RecordError ShapeError UnknownNameError
        UnseenAttentionWarning
    """,
    "clearhead.inspection": "",
    "clearhead.integrations": "",
    "clearhead.integrations.transformer_lens": "fused",
    "clearhead.integrations.transformers": "AttentionMonitorCallback attention_forward cache_for make_mask register",
    "clearhead.kernels": "Kernel Refusal",
    "clearhead.masks": """
        Mask MaskReport PreparedMask bias block_causal causal documents drop keep lengths mask_mod prefix selected
        sliding_window tree
    """,
    "clearhead.nn": "Linear MultiheadAttention functional",
    "clearhead.nn.functional": "scaled_dot_product_attention",
    "clearhead.plot": """
        Comparison Page Tokens compare given page plot_heads plot_image plot_map plot_received plot_rollout read_tokens
    """,
    "clearhead.positions": """
        ALiBi DynamicNTKScaling LinearScaling Llama3Scaling LogScale RelativeBias Rotary Scaling Temperature YarnScaling
        rotary_from_config
    """,
    "clearhead.transformer": """
        Decoder DecoderCache DecoderLayer DecoderWeights Encoder EncoderLayer FeedForward SwiGLU load_transformer
    """,
}
PUBLIC = [(module, name) for module, names in SURFACE.items() for name in names.split()]
WITHOUT_EXAMPLE = {"__version__", "NAMINGS", "main"}  # a string, a table, a command


def test_the_public_modules() -> None:
    found = {module.name for module in pkgutil.walk_packages(clearhead.__path__, "clearhead.")}
    assert {"clearhead"} | {name for name in found if "._" not in name} == set(SURFACE)


@pytest.mark.parametrize("module", SURFACE)
def test_the_public_names(module: str) -> None:
    assert importlib.import_module(module).__all__ == SURFACE[module].split()


def test_attention_is_a_function_and_no_module() -> None:
    assert inspect.isfunction(clearhead.attention)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("clearhead.attention")


def public(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_name_is_documented(module: str, name: str) -> None:
    documented = public(module, name)
    text = inspect.cleandoc(documented.__doc__ or "")
    assert text.split("\n")[0].endswith((".", ":")) or name in WITHOUT_EXAMPLE
    assert not text.startswith(f"{name}(")  # what `dataclass` writes where nothing is written
    if not isinstance(documented, ModuleType) and module != "clearhead.errors" and name not in WITHOUT_EXAMPLE:
        assert "Example:" in text
        assert ">>> " in text


def test_every_public_method_is_documented_where_it_is_defined() -> None:
    classes = {base for pair in PUBLIC if inspect.isclass(each := public(*pair)) for base in each.__mro__}
    ours = [each for each in classes if each.__module__.startswith("clearhead")]
    methods = [(each, name, item) for each in ours for name, item in vars(each).items() if not name.startswith("_")]
    functions = [found for found in methods if inspect.isfunction(found[2]) and not found[2].__doc__]
    assert not [f"{each.__qualname__}.{name}" for each, name, _ in functions]


@pytest.mark.parametrize("name", ["dense", "check"])
def test_what_one_does_with_a_mask_shows_an_example(name: str) -> None:
    assert ">>> " in getattr(clearhead.masks.Mask, name).__doc__


#: Imports Clearhead after torch and prints what came in, and what of torch's that builds things was called.
IMPORT = """
import json, subprocess, sys, warnings
import torch

warnings.simplefilter("error")
before, calls, seed = set(sys.modules), [], torch.initial_seed()
for owner, name in ((torch, "compile"), (torch.cuda, "init"), (torch.cuda, "is_available"), (subprocess, "Popen")):
    setattr(owner, name, lambda *args, name=name, **options: calls.append(name))
import clearhead

new = {name for name in set(sys.modules) - before if name.split(".")[0] != "clearhead"}
print(json.dumps({
    "foreign": sorted(name for name in new if name.split(".")[0] not in {*sys.stdlib_module_names, "torch"}),
    "heavy": sorted(name for name in new if name.startswith(("torch._inductor", "torch._dynamo", "torch.utils.cpp_"))),
    "later": sorted({name.split(".")[1] for name in sys.modules if name.startswith("clearhead.")} & {
        "_latent", "checkpoints", "distributed", "inspection", "integrations", "nn", "plot", "transformer"
    }),
    "first use": [getattr(clearhead, name).__name__ for name in ("plot", "record")] + ["matplotlib" in sys.modules],
    "work": [calls, seed == torch.initial_seed(), torch.cuda.is_initialized()],
}))
"""


def test_importing_does_no_work_and_brings_in_nothing_but_torch_and_the_standard_library() -> None:
    result = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["foreign"] == found["heavy"] == []
    assert found["later"] == []
    assert found["first use"] == ["clearhead.plot", "record", False]
    assert found["work"] == [[], True, False]


def test_documented_arguments_are_parameters() -> None:
    wrong: list[str] = []
    for item in (public(*pair) for pair in PUBLIC):
        methods = [each for each in vars(item).values() if inspect.isfunction(each)] if inspect.isclass(item) else []
        for function in (item, *methods):
            section = re.search(r"^Args:\n((?: {4}.*\n|\n)+)", f"{inspect.getdoc(function) or ''}\n", re.MULTILINE)
            if section is not None and callable(function):
                documented = re.findall(r"^ {4}(\w[\w, ]*):", section[1], re.MULTILINE)
                listed = {each for names in documented for each in names.split(", ")}
                unknown = listed - {*inspect.signature(function).parameters}
                wrong += [f"{function.__qualname__}: {each}" for each in unknown]
    assert not wrong


def test_types_of_methods_can_be_read() -> None:
    """As tools do that read `typing.get_type_hints`."""
    methods = [each for item in vars(clearhead.masks.Mask).items() if inspect.isfunction(each := item[1])]
    assert [each.__qualname__ for each in methods if "return" not in typing.get_type_hints(each)] == []
