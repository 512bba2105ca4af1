"""The versions of PyTorch and Python that Clearhead is tested with; `clearhead doctor` warns of others."""

from __future__ import annotations

#: First and last minor version; docs/versions.md has the table of what was run. `pyproject.toml` declares the first.
TESTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 12), (2, 15)),
    "python": ((3, 11), (3, 14)),
}


def untested_versions(versions: dict[str, str]) -> str:
    """One line that names the versions outside `TESTED`; empty if there are none.

    Example:
        >>> from clearhead._versions import untested_versions
        >>> untested_versions({"torch": "2.13.0+cpu", "python": "3.11.7"})
        ''
    """
    untested: list[str] = []
    for name, (first, last) in TESTED.items():
        major, minor = versions[name].split(".")[:2]
        if not first <= (int(major), int(minor)) <= last:
            untested.append(f"{name} {versions[name]} (tested: {_dotted(first)} to {_dotted(last)})")
    return f"not tested with {' and '.join(untested)}" if untested else ""


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
