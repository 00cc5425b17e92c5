"""Compiles the kernel between record batches and Arrow, if it can: all else about the package is in pyproject.toml.

Without a compiler, or without Cython, the installation still succeeds and ``penstock/columnar/kernel.py`` is
interpreted.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from Cython.Build import cythonize
except ImportError:
    cythonize = None

DIRECTIVES = {
    "language_level": "3",
    # The types are those of kernel.pxd; annotations are for mypy.
    "annotation_typing": False,
    # Every index follows from a comparison in the code itself, and none is below zero.
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
}


class BuildIfPossible(build_ext):
    def build_extension(self, extension: Extension) -> None:
        try:
            super().build_extension(extension)
        # What a missing or broken compiler raises differs between systems and setuptools' versions.
        except Exception as error:
            self.warn(f"{extension.name} is not compiled and will be interpreted: {error}")


def kernel() -> list[Extension]:
    if cythonize is None:
        return []
    extension = Extension(
        "penstock.columnar.kernel",
        ["src/penstock/columnar/kernel.py"],
        # Loops over bytes become vector instructions at this level only; symbols are five times the code.
        extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-g0"],
    )
    compiled: list[Extension] = cythonize(
        [extension], build_dir="build", compiler_directives=DIRECTIVES, quiet=True
    )
    for extension in compiled:
        # An editable installation does not ask for the file then.
        extension.optional = True
    return compiled


setup(ext_modules=kernel(), cmdclass={"build_ext": BuildIfPossible})
