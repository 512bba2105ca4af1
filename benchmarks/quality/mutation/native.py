"""Twenty small faults in the C++ sources, and a build fast enough to try each of them.

Only the file that changes is compiled anew, or, if it is a header of the instruction sets, the instruction set
``generic``, which every processor has; the tests then run as if there were no better one.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import final

FOLDER = "src/clearhead/_native"
FLAGS = ("-std=gnu++17", "-O1", "-g0", "-fopenmp", "-fvisibility=hidden", "-fPIC", "-w")


@final
@dataclass(frozen=True)
class Fault:
    """A change of one C++ source.

    Args:
        file: name of the source.
        old: text that occurs in it once.
        new: what takes its place.
        description: what goes wrong.
    """

    file: str
    old: str
    new: str
    description: str

    def apply(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} must hold this text once, not {text.count(self.old)} times: {self.old}")
        return text.replace(self.old, self.new)

    def line(self, text: str) -> int:
        return text[: text.index(self.old)].count("\n") + 1


FAULTS = (
    Fault(
        "forward.h",
        "exp2(load(tile.total_max + lane) - load(tile.row_max + lane))",
        "exp2(load(tile.row_max + lane) - load(tile.total_max + lane))",
        "the total of earlier runs of keys is rescaled the wrong way",
    ),
    Fault(
        "forward.h",
        "        factor *= static_cast<float>(exp(without - lse));\n",
        "",
        "a sink takes no weight from the output",
    ),
    Fault(
        "forward.h",
        "x > splat(-INFINITY) ? raw : x, raw_maxima[v]",
        "raw, raw_maxima[v]",
        "masked keys count for the largest raw score",
    ),
    Fault(
        "forward.h",
        "row_max == LOWEST ? LOWEST : row_max * LN_OF_2 + log(sum)",
        "row_max * LN_OF_2 + log(sum)",
        "the lse of a row whose every score is the lowest number",
    ),
    Fault(
        "tile.h", "            tile.lowest_last = 0;\n", "", "a fully masked row is not masked beside rows that see all"
    ),
    Fault(
        "tile.h",
        "(counter[word] >> 16) >= p.drop_below",
        "(counter[word] >> 16) > p.drop_below",
        "dropout at the threshold",
    ),
    Fault(
        "tile.h",
        "memcpy(undropped, both + place % OCTET, OCTET * sizeof(Ints));",
        "memcpy(undropped, both, OCTET * sizeof(Ints));",
        "dropout of a call that begins inside an octet of keys",
    ),
    Fault(
        "masks.h",
        "return added == splat(-INFINITY) ? added : score + added;",
        "return score + added;",
        "NaN in a masked score",
    ),
    Fault(
        "masks.h",
        "mask.bits ? mask.bits + key : nullptr",
        "mask.bits ? mask.bits : nullptr",
        "statistics read the mask of a block's first keys",
    ),
    Fault(
        "masks.h",
        "bias == splat(-INFINITY) ? bias : larger(splat(LOWEST), unit * bias)",
        "unit * bias",
        "a bias of the lowest number hides a key",
    ),
    Fault(
        "tile_masks.h",
        "if (marks && p.visible.row == 0 && (tile.one_head || p.visible.head == 0)) {",
        "if (marks && p.visible.row == 0) {",
        "per-head key masks of a tile with several heads",
    ),
    Fault(
        "backward_tile.h",
        "(p.lse_gradient ? p.lse_gradient[place] : 0)",
        "0",
        "the gradient of lse is dropped",
    ),
    Fault(
        "backward.h",
        "store(weights + place, only_where(undropped[t], weight));",
        "store(weights + place, weight);",
        "the gradient of values is taken without dropout",
    ),
    Fault(
        "backward_tile.h",
        "        if (usual) tile.missing[lane] = static_cast<float>(tile.lse[lane] - exact);\n",
        "",
        "the rounding of lse is not made up for in gradients",
    ),
    Fault(
        "decode.h",
        "            totals[r] *= factor;\n",
        "",
        "totals of decoding keep an old row maximum",
    ),
    Fault(
        "decode.h",
        "visible = visible || best[r] != -INFINITY;",
        "visible = best[r] != -INFINITY;",
        "only a chunk's last row is asked for keys",
    ),
    Fault(
        "driver_backward.cpp",
        "p.group() == 1 || p.lse_head == p.rows;",
        "true;",
        "gradients by parts of the keys read the lse of another head",
    ),
    Fault(
        "driver_backward.cpp",
        "    clear_bias_gradient(p);\n    compute",
        "    compute",
        "the gradient of a bias is added up twice where a call is repeated",
    ),
    Fault("packed_sequences.cpp", "p.offset.item = number, ", "", "every packed sequence drops the same weights"),
    Fault(
        "results.h",
        "entropy = sum * factor * (lse - row_max);",
        "entropy = lse - row_max;",
        "entropy counts the sink's weight",
    ),
)


@final
class Build:
    """The extension of a copy of the checkout, compiled with few optimisations.

    Args:
        tree: the copy.
        objects: a folder for compiled files, which are kept.
    """

    def __init__(self, tree: Path, objects: Path) -> None:
        self._sources, self._objects = tree / FOLDER, objects
        objects.mkdir(exist_ok=True)
        newest = max(path.stat().st_mtime for path in self._sources.iterdir() if path.suffix in (".h", ".cpp"))
        for source in sorted(self._sources.glob("*.cpp")):
            compiled = objects / f"{source.stem}.o"
            if not (compiled.exists() and compiled.stat().st_mtime > newest):
                self._compile(source.name, compiled)

    def unchanged(self) -> None:
        self._link({})

    def with_fault(self, fault: Fault) -> bool:
        """Build with a fault; returns whether the compiler takes it."""
        path = self._sources / fault.file
        before, times = path.read_text(encoding="utf-8"), path.stat()
        source = fault.file if path.suffix == ".cpp" else "isa_generic.cpp"
        changed = self._objects / "changed.o"
        try:
            path.write_text(fault.apply(before), encoding="utf-8")
            self._compile(source, changed)
        except subprocess.CalledProcessError:
            return False
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, (times.st_atime, times.st_mtime))
        self._link({source: changed})
        return True

    def _compile(self, source: str, to: Path) -> None:
        include = f"-I{sysconfig.get_paths()['include']}"
        subprocess.run([_compiler(), *FLAGS, include, "-c", self._sources / source, "-o", to], check=True)

    def _link(self, instead: dict[str, Path]) -> None:
        names = sorted(path.name for path in self._sources.glob("*.cpp"))
        objects = [instead.get(name, self._objects / f"{Path(name).stem}.o") for name in names]
        target = self._sources / "_attention.abi3.so"
        target.unlink(missing_ok=True)
        subprocess.run([_compiler(), "-shared", "-fopenmp", *objects, "-o", target], check=True)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")
