"""Builds the native CPU kernel where there is a compiler; everything else of the package is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("src/clearhead/_native").glob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("src/clearhead/_native").glob("*.h"))


class BuildIfPossible(build_ext):
    """Builds with threads, else without them, else not at all: the package works without its native kernel."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:
            print("clearhead: no OpenMP here, the native kernel is built for one thread", file=sys.stderr)
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)  # a failure of an optional extension is a warning


setup(
    ext_modules=[
        Extension(
            "clearhead._native._attention",
            sources=SOURCES,
            depends=HEADERS,
            # gcc 12 warns of what its own AVX-512 functions leave open on purpose.
            extra_compile_args=[
                *("-std=gnu++17", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wno-maybe-uninitialized")
            ],
            extra_link_args=["-fopenmp"],
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildIfPossible},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
