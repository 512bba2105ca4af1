"""PyTorch's private names stand in one file, and attention and both modules are right without any one of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clearhead

SOURCES = Path(clearhead.__file__).parent
PRIVATE = SOURCES / "_torch_private.py"

#: What `_torch_private` looks up when it is imported, and attributes that are read in calls.
AT_IMPORT = [path for path in re.findall(r'_lookup\("([\w.]+)"', PRIVATE.read_text()) if "._" in f".{path}"]
IN_CALLS = ["autograd.forward_ad._current_level", "fx.experimental._config", "ops.mkldnn._linear_pointwise"]
NAMES = [*AT_IMPORT, *IN_CALLS]

#: Forks a process for each name, since importing PyTorch takes longer than all the rest.
SCRIPT = r"""
import json, os, sys, traceback, types
import torch

torch.set_num_threads(1)
import torch.fx.experimental._config
torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged).unbind()  # imports what takes long
at_import, in_calls = json.loads(sys.argv[1])


def close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert float((one - other).abs().max()) <= 1e-5 * max(1.0, float(other.detach().abs().max()))


def derivatives(function, *inputs):
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]


def run():
    import clearhead
    from clearhead import masks

    torch.manual_seed(5)
    lengths, keys = torch.tensor([7, 3]), torch.arange(7) < torch.tensor([[7], [3]])
    shown = keys[:, None, None] & torch.ones(5, 7, dtype=torch.bool).tril()
    mask = masks.causal() & masks.lengths(lengths)

    qkv = [torch.randn(2, 3, n, 11, requires_grad=True) for n in (5, 7, 7)]
    expected = derivatives(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, attn_mask=shown), *qkv)
    for _ in range(2):
        close(derivatives(lambda *x: clearhead.attention(*x, mask), *qkv), expected)
        with torch.no_grad():
            close([clearhead.attention(*qkv, mask)], expected[:1])
    own = clearhead.MultiHeadAttention(12, 3)
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    drop_in = clearhead.nn.MultiheadAttention(12, 3, batch_first=True)
    drop_in.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
        for part, weight, bias in zip((own.q_proj, own.k_proj, own.v_proj), weights, biases):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        own.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x, memory = torch.randn(2, 5, 12, requires_grad=True), torch.randn(2, 7, 12, requires_grad=True)
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(1)

    def pytorchs(x, memory, module=theirs):
        return module(x, memory, memory, key_padding_mask=~keys, attn_mask=hidden, need_weights=False)[0]

    modules = {
        own: lambda x, memory: own(x, memory, mask=mask),
        drop_in: lambda x, memory: pytorchs(x, memory, drop_in),
    }
    expected = derivatives(pytorchs, x, memory)
    for training in (True, False):
        for module, call in modules.items():
            module.train(training)
            close(derivatives(call, x, memory), expected)
            assert all(each.requires_grad for each in module.parameters())
            with torch.no_grad():
                close([call(x, memory)], expected[:1])
    output, weights = drop_in(x, memory, memory)
    close([output, weights], theirs(x, memory, memory))
    rows = torch.nested.nested_tensor([memory[0].detach(), memory[1, :3].detach()], layout=torch.jagged)
    close(own(rows).unbind(), [own(memory[0]), own(memory[1, :3])])
    with clearhead.record(own) as seen:
        own(x, memory, mask=mask)
    assert [len(seen[name]) for name in seen] == [1]


class Missing:
    def __get__(self, instance, owner):
        raise AttributeError


def run_without(path, restore):
    owner, _, name = path.rpartition(".")
    place = torch
    for part in owner.split(".") if owner else ():
        place = getattr(place, part)
    kept = getattr(place, name)
    if owner.startswith("ops."):  # its operators come from a registry
        place = types.SimpleNamespace()
        setattr(torch.ops, owner[4:], place)
    elif name in vars(place):
        delattr(place, name)
        sys.modules.pop("torch." + path if path in in_calls else None, None)
    else:  # inherited from a class that cannot be changed
        setattr(place, name, Missing())
    assert not hasattr(place, name)
    if restore:
        import clearhead._torch_private  # PyTorch itself needs the name when it runs

        setattr(place, name, kept)
    run()


found = {}
for path in [None, *at_import, *in_calls]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            run() if path is None else run_without(path, path in at_import)
        except BaseException:
            text = traceback.format_exc()
        os.write(writing, text.encode()[-8000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read().decode()
    status = os.waitpid(child, 0)[1]
    found[path or "nothing"] = text or (f"exit status {status}" if status else "")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent), "PYTHONWARNINGS": "ignore"}
    names = json.dumps([AT_IMPORT, IN_CALLS])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, names], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["nothing", *NAMES])
def test_a_pytorch_without_one_of_its_private_names(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == ""


#: Underscored attributes and imports of PyTorch's modules.
_PRIVATE_NAME = re.compile(
    r"(?<![.\w])(?:torch|nn|F|Tensor)(?:\.\w+)*\._(?!_)\w+|^\s*(?:from|import) torch\S*(?: import)?.*\b_[a-z]\w*",
    re.MULTILINE,
)
_LOOKED_UP = {name.rpartition(".")[2] for name in NAMES} | set(
    re.findall(r'getattr\([\w.]+, "(_(?!_)\w+)"', PRIVATE.read_text())
)
_LOOKED_UP -= {path.stem for path in SOURCES.rglob("_*.py")}  # names of our own modules, such as `_base`


def _private_names(text: str) -> list[str]:
    looked_up = [name for name in _LOOKED_UP if re.search(rf"(?:[\w)\]]\.|[\"']|def ){name}\b", text)]
    return _PRIVATE_NAME.findall(text) + looked_up


def test_private_names_stand_in_one_file() -> None:
    """The dictionaries of `nn.Module` aside, such as ``module._forward_hooks``."""
    found = {path: names for path in SOURCES.rglob("*.py") if (names := _private_names(path.read_text()))}
    assert found.keys() == {PRIVATE}, found
