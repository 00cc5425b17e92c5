"""Compiles the modules that have a ``.pxd`` beside them, if it can. Everything else is in pyproject.toml.

Without a compiler, or without Cython, the installation still succeeds and these modules are interpreted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from Cython.Build import cythonize
except ImportError:
    cythonize = None

DIRECTIVES = {
    "language_level": "3",
    # The types are those of the .pxd; annotations are for mypy.
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


def compiled_modules() -> list[Extension]:
    if cythonize is None:
        return []
    extensions = [
        Extension(
            ".".join(types.relative_to("src").with_suffix("").parts),
            [str(types.with_suffix(".py"))],
            # Loops over bytes become vector instructions at this level only; symbols are five times the code.
            extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-g0"],
        )
        for types in sorted(Path("src").rglob("*.pxd"))
    ]
    compiled: list[Extension] = cythonize(
        extensions, build_dir="build", compiler_directives=DIRECTIVES, quiet=True
    )
    for extension in compiled:
        # An editable installation does not ask for the file then.
        extension.optional = True
    return compiled


setup(ext_modules=compiled_modules(), cmdclass={"build_ext": BuildIfPossible})
