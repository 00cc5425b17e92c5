"""Compiles the kernel of the Spark pipeline, if it can: all else about the package is in pyproject.toml.

Without a compiler, or without Cython, the installation still succeeds and ``penstock/spark/decode.py`` is
interpreted.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup

try:
    from Cython.Build import cythonize
except ImportError:
    cythonize = None

KERNEL = Extension(
    "penstock.spark.decode",
    ["src/penstock/spark/decode.py"],
    # Loops over bytes become vector instructions at this level only.
    extra_compile_args=[] if sys.platform == "win32" else ["-O3"],
    optional=True,
)

DIRECTIVES = {
    "language_level": "3",
    # The types are those of decode.pxd; annotations are for mypy.
    "annotation_typing": False,
    # Every index follows from a comparison in the code itself, and none is below zero.
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
}

setup(
    ext_modules=[]
    if cythonize is None
    else cythonize([KERNEL], build_dir="build", compiler_directives=DIRECTIVES, quiet=True)
)
