# pyright: basic, reportMissingImports=false
"""Compile the Triton kernels for devices that are not at hand, and check what the compiler made of them.

`python -m benchmarks.gpu.compile` prints a table and exits with 1 if a kernel spills registers, leaves no room for a
second block on a multiprocessor, or multiplies by other instructions than it should. It needs Triton and no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clearhead.kernels._triton import Operands
from clearhead.kernels._triton._gradients_launch import key_gradient_launch, query_gradient_launch
from clearhead.kernels._triton._launch import (
    Launch,
    columns_launch,
    map_launch,
    rows_launch,
    weights_launch,
)
from clearhead.kernels._triton._tiles import tiles_of
from clearhead.kernels._triton._top_launch import best_launch, groups_launch
from clearhead.masks._terms import Terms

CAPABILITIES = (80, 86, 89, 90, 100, 120)
DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Shared memory of a multiprocessor in bytes. A block also takes 1 KiB for the system.
SHARED = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
REGISTERS = 65536
WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
WANT = ("lse", "entropy", "max_logit", "confidence")
_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.bool: "i1", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel."""

    kernel: str
    mask: str
    dim: int
    dtype: str
    capability: int
    tiles: tuple[int, ...]
    registers: int
    spilled: int
    shared: int
    blocks: int
    product: str

    @property
    def faults(self) -> list[str]:
        found = [f"{self.spilled} bytes on the stack"] if self.spilled else []
        if self.blocks < (1 if self.dim > 128 else 2):
            found.append(f"{self.blocks} blocks fit")
        if self.kernel != "groups" and ("fma" if self.dtype == "fp32" else "mma") != self.product:
            found.append(f"multiplies by {self.product}")
        return found


def launches(dim: int, dtype: torch.dtype, capability: int) -> Iterator[tuple[str, str, Launch]]:
    """Every kernel with every mask: its name, the mask, and a launch."""
    query, key = torch.empty(1, 4, 64, dim, dtype=dtype), torch.empty(1, 2, 64, dim, dtype=dtype)
    lse, ranges = torch.empty(1, 4, 64), torch.empty(1, 64, dtype=torch.int32)
    ids, marks = torch.empty(1, 64, dtype=torch.int64), torch.empty(1, 64, dtype=torch.bool)
    band = Terms(-64, 0, 64)
    cases: dict[str, Terms] = {
        "causal": band,
        "ranges": band._replace(first=ranges, last=ranges),
        "keys": band._replace(keys=marks),
        "visible": band._replace(visible=marks.expand(1, 1, 64, 64)),
        "bias": band._replace(bias=lse[:, :, None].expand(1, 4, 64, 64)),
        "documents": band._replace(
            query_documents=ids, key_documents=ids, first=ranges, last=ranges, first_query=ranges, last_query=ranges
        ),
        "alibi": band._replace(slopes=torch.empty(4)),
    }
    of = (capability // 10, capability % 10)
    for mask, terms in cases.items():
        plain = mask == "causal"
        names = ("rows", "columns", "weights", "averaged", "map", "dq", "dk", "top")
        tiles = {name: tiles_of(name, dim, dtype, of, plain=plain) for name in names}
        call = Operands(query, key, terms, 0.1)
        yield "rows", mask, rows_launch(call, WANT, tiles=tiles["rows"])
        yield "columns", mask, columns_launch(call, lse, tiles=tiles["columns"])
        for name in ("weights", "averaged"):
            yield name, mask, weights_launch(call, lse, average=name == "averaged", tiles=tiles[name])
        yield "map", mask, map_launch(call, lse, (8, 8), tiles=tiles["map"])
        maxima, places = torch.empty(1, 4, 64, 512), torch.empty(1, 4, 64, 8, dtype=torch.int64)
        top = rows_launch(call, WANT, tiles=tiles["top"], maxima=maxima)
        yield "top", mask, top
        groups = groups_launch(top, maxima, 8)
        yield "groups", mask, groups
        yield "best", mask, best_launch(top, groups.results[0], lse, (places.float(), places))
        of_weights = lse[..., None].expand(1, 4, 64, 64).contiguous()
        yield "dq", mask, query_gradient_launch(call, lse, of_weights, tiles["dq"])
        yield "dk", mask, key_gradient_launch(call, lse, of_weights, lse, tiles["dk"])


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, int]]:
    """The kernel as a launch on a device would specialise it, and its options."""
    arguments = dict(launch.arguments)
    options = {name: arguments.pop(name) for name in ("num_warps", "maxnreg") if name in arguments}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for number, parameter in enumerate(launch.kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[number,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _NAMES[value.dtype]
            attributes[number,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[number,] = "constexpr", 1
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[number,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes), options


def compiled(kernel: str, mask: str, launch: Launch, dim: int, dtype: torch.dtype, capability: int) -> Compiled:
    """Compile one launch for a capability, and read the resources of its machine code."""
    source, options = source_of(launch)
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = resources(result.asm["cubin"])
    warps = result.metadata.num_warps
    shared = result.metadata.shared
    per_block = max(1, -(-usage["REG"] // 8) * 8 * 32 * warps)
    blocks = min(REGISTERS // per_block, SHARED[capability] // (shared + 1024), WARPS[capability] // warps)
    ptx = result.asm["ptx"]
    product = "mma" if re.search(r"\b(mma\.sync|wgmma\.|tcgen05\.mma)", ptx) else "fma"
    if dtype == torch.float32 and "tf32" in ptx:
        product = "tf32"
    arguments = launch.arguments
    tiles = arguments.get("M", 1), arguments.get("N", 1), warps, arguments.get("STAGES", 1)
    spilled = usage["STACK"] + usage["LOCAL"]
    name = _NAMES[dtype]
    return Compiled(kernel, mask, dim, name, capability, tiles, usage["REG"], spilled, shared, blocks, product)


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and others of the only function in a cubin, by the cuobjdump of Triton's wheel."""
    tool = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    line = next(line for line in text.splitlines() if "REG:" in line)
    return {name: int(number) for name, number in re.findall(r"(\w+(?:\[\d+\])?):(\d+)", line)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, nargs="*", default=CAPABILITIES, help="such as 90; default: all")
    parser.add_argument("--dim", type=int, nargs="*", default=DIMS, help="sizes of a head; default: 64 128 256")
    parser.add_argument("--dtype", nargs="*", choices=("bf16", "fp16", "fp32"), help="default: all")
    parser.add_argument("--mask", nargs="*", help="names of masks; default: all")
    parser.add_argument("--kernel", nargs="*", help="names of kernels, as the table has them; default: all")
    options = parser.parse_args()
    faults = 0
    print(f"Triton {triton.__version__}. Tiles: queries, keys, warps, stages.")
    for capability in options.capability:
        for dim in options.dim:
            for dtype in DTYPES:
                if options.dtype and _NAMES[dtype] not in options.dtype:
                    continue
                for kernel, mask, launch in launches(dim, dtype, capability):
                    if mask not in (options.mask or [mask]) or kernel not in (options.kernel or [kernel]):
                        continue
                    one = compiled(kernel, mask, launch, dim, dtype, capability)
                    faults += bool(one.faults)
                    print(
                        f"{capability / 10:4} {kernel:8} {mask:10} D={dim:<4} {one.dtype:5} {one.tiles!s:20} "
                        f"{one.registers:3} registers {one.shared:6} B shared {one.blocks:2} blocks {one.product:4} "
                        f"{'; '.join(one.faults) or 'ok'}",
                        flush=True,
                    )
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
