"""What figures are measured on: the processor, its threads, and the versions of the libraries."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable

import torch

__all__ = ["machine", "versions"]

#: Names of generations, by vendor, family and model; virtual machines often call all of them the same.
GENERATIONS = {
    ("GenuineIntel", 6, 85): "Skylake or Cascade Lake",
    ("GenuineIntel", 6, 106): "Ice Lake",
    ("GenuineIntel", 6, 143): "Sapphire Rapids",
    ("GenuineIntel", 6, 173): "Granite Rapids",
    ("GenuineIntel", 6, 207): "Emerald Rapids",
    ("AuthenticAMD", 25, 1): "Zen 3",
    ("AuthenticAMD", 25, 17): "Zen 4",
    ("AuthenticAMD", 25, 160): "Zen 4c",
    ("AuthenticAMD", 26, 2): "Zen 5",
}
#: The widest instructions first, as Linux names them and as readers do.
INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}


def machine() -> str:
    """The processor with its generation and its widest instructions, and the number of threads."""
    threads = torch.get_num_threads()
    return f"{_processor(_first_processor())}, {threads} thread{'s' if threads > 1 else ''}"


def versions(peers: Iterable[str] = ()) -> str:
    """PyTorch's version and those of the peers that are installed."""
    found = [f"torch {torch.__version__}"]
    for name in peers:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _first_processor() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            first = info.read().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _processor(info: dict[str, str]) -> str:
    """Such as ``Intel Xeon (Emerald Rapids, family 6 model 207, AMX)``, from the fields of /proc/cpuinfo."""
    if "model name" not in info:
        return "unknown processor"
    name = " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b|@.*", " ", info["model name"]).split())
    details = []
    if "cpu family" in info and "model" in info:
        family, model = int(info["cpu family"]), int(info["model"])
        generation = GENERATIONS.get((info.get("vendor_id", ""), family, model))
        details += [*([generation] if generation else []), f"family {family} model {model}"]
    flags = info.get("flags", "").split()
    details += [INSTRUCTIONS[flag] for flag in INSTRUCTIONS if flag in flags][:1]
    return f"{name} ({', '.join(details)})" if details else name
