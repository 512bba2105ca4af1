"""Compare the C++ kernel for aarch64 with a loop in float64, on any machine.

    python -m benchmarks.quality.native_aarch64

compiles the kernel with ``aarch64-linux-gnu-g++``, links it with the programme in ``tests/native/aarch64``, and runs
the result under ``qemu-aarch64``. It prints the largest errors of each kind of call, and fails if one is above 1e-5.
Takes about a minute. On Debian the two tools are in the packages ``g++-aarch64-linux-gnu`` and ``qemu-user``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["build", "main", "run"]

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "src" / "clearhead" / "_native"
DRIVER = ROOT / "tests" / "native" / "aarch64" / "driver.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = ["-std=gnu++17", "-fopenmp", "-w"]


def build(compiler: str, folder: Path, *options: str, level: str = "-O3") -> Path:
    """Compile kernel and driver at a level of optimization into one programme, linked with `options`, and return it."""
    # The driver compares the sets that every processor has. Python's module and the other sets are not linked.
    skipped = {"module.cpp", "instruction_sets.cpp"}
    skipped |= {"isa_amx.cpp", "isa_avx2.cpp", "isa_avx512.cpp", "isa_avx512_bf16.cpp"}
    sources = [*sorted(KERNEL.glob("*.cpp")), DRIVER]

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        subprocess.run([compiler, *FLAGS, level, f"-I{KERNEL}", "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, (source for source in sources if source.name not in skipped)))
    program = folder / "driver"
    subprocess.run([compiler, *FLAGS, *options, *objects, "-o", str(program)], check=True)
    return program


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run the programme. Its threads sleep while they wait: they are more than a machine may have processors."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    if missing:
        print(f"not found: {', '.join(missing)}. Debian has g++-aarch64-linux-gnu and qemu-user", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        # Linked statically, because the emulator would look for this machine's libraries.
        done = run(EMULATOR, str(build(COMPILER, Path(folder), "-static")))
    print(done.stdout + done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
