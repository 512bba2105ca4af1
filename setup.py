"""Builds the native CPU kernel where there is a compiler; everything else of the package is in pyproject.toml.

CLEARHEAD_PURE=1 builds the wheel for every platform, which has no kernel. LDFLAGS reaches the linker: a wheel for other
machines links the compiler's own libraries statically (`.ci/wheels`).
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

FOLDER = Path("src/clearhead/_native")
PURE = os.environ.get("CLEARHEAD_PURE") == "1"
SOURCES = sorted(str(path) for path in FOLDER.glob("*.cpp"))
HEADERS = sorted(str(path) for path in FOLDER.glob("*.h"))


class BuildIfPossible(build_ext):
    """Builds with threads, else without them, else not at all: the package works without its native kernel.

    Sources are compiled side by side. An editable install takes the extension that lies in the checkout if it is newer
    than its sources; ``python setup.py build_ext --inplace --force`` compiles it whatever lies there.
    """

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                # Backwards, so that two processors finish together: AVX-512, generic and AVX2 take the longest.
                found = pool.map(lambda source: compile_in_turn([source], **options), reversed(sources))
                return [each for objects in found for each in objects]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        built = Path(self.get_ext_fullpath(ext.name))
        if self.editable_mode and not newer_group([*SOURCES, *HEADERS, __file__], FOLDER / built.name):
            built.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(FOLDER / built.name, built)
            return
        try:
            super().build_extension(ext)
        except Exception:
            print("clearhead: no OpenMP here, the native kernel is built for one thread", file=sys.stderr)
            ext.extra_compile_args.remove("-fopenmp")
            ext.extra_link_args.remove("-fopenmp")
            super().build_extension(ext)  # a failure of an optional extension is a warning


KERNEL = Extension(
    "clearhead._native._attention",
    sources=SOURCES,
    depends=HEADERS,
    # gcc 12 warns of what its own AVX-512 functions leave open on purpose.
    extra_compile_args=["-std=gnu++17", "-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wno-maybe-uninitialized"],
    extra_link_args=["-fopenmp"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[] if PURE else [KERNEL],
    cmdclass={"build_ext": BuildIfPossible},
    options={} if PURE else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
