"""Builds the extension of the pretended device, without importing PyTorch, and loads it before PyTorch is."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
NAME = "pretended_cuda_device"


def compiler() -> str | None:
    """The C++ compiler, or ``None`` without one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """The compiled extension, which is kept in the folder for temporary files as long as source and PyTorch stay."""
    text = SOURCE.read_bytes() + metadata.version("torch").encode() + sys.version.encode()
    folder = Path(tempfile.gettempdir()) / f"clearhead-{os.getuid()}" / hashlib.sha256(text).hexdigest()[:16]
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    torch = _folder_of_torch()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    part = folder / f"{os.getpid()}.so"
    command = [str(compiler()), "-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-L{torch / 'lib'}"]
    command += [f"-I{include}" for include in includes]
    command += [str(SOURCE), "-o", str(part), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    subprocess.run(command, check=True)
    part.replace(library)  # at once, for several processes that build it
    return library


def load() -> None:
    """Load the extension before PyTorch is imported: PyTorch asks for a device's hooks once, when it starts."""
    if "torch" in sys.modules:
        raise RuntimeError("the pretended device has to be loaded before torch is imported")
    libraries = _folder_of_torch() / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    library = build()
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    sys.path.insert(0, str(library.parent))


def _folder_of_torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
