# SPDX-License-Identifier: Apache-2.0
"""Extensions of cpool; everything else is in pyproject.toml.

Switches, read from the environment when the extensions are built:

    CPOOL_DEBUG=1     check every invariant after each operation; build ``_testing``
    CPOOL_ASAN=1      AddressSanitizer and UndefinedBehaviorSanitizer
    CPOOL_ANNOTATE=1  write Cython's annotated HTML beside each source
"""

import os
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup


def is_on(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


debug = is_on("CPOOL_DEBUG")
asan = is_on("CPOOL_ASAN")

compile_args = ["-O3", "-std=c11", "-fno-strict-aliasing", "-Wno-unused-function"]
link_args: list[str] = []
if debug or asan:
    compile_args += ["-O1", "-g1"]  # line numbers for stack traces; more takes longer to build
else:
    compile_args += ["-g0"]  # debug information would be most of the file and of the build time
if asan:
    sanitizers = "-fsanitize=address,undefined"
    compile_args += [sanitizers, "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined"]
    link_args += [sanitizers]

EXTENSIONS = [
    "cpool.core.pool",
    "cpool.hashing.chain",
    "cpool.hashing.block_hashes",
    "cpool.prefix.cache",
    "cpool.vllm.request",
    "cpool.vllm.tails",
]

directives = {
    "language_level": 3,
    "cdivision": True,
    "initializedcheck": False,
    "auto_pickle": False,
    "autotestdict": False,
    "embedsignature": True,
    "legacy_implicit_noexcept": False,
}

setup(
    ext_modules=cythonize(
        [
            Extension(
                name,
                [str(Path(*name.split(".")).with_suffix(".pyx"))],
                extra_compile_args=compile_args,
                extra_link_args=link_args,
                include_dirs=[numpy.get_include()],
                define_macros=[
                    ("CPOOL_DEBUG", "1" if debug else "0"),
                    ("NPY_NO_DEPRECATED_API", "NPY_1_22_API_VERSION"),
                ],
            )
            for name in EXTENSIONS
        ],
        compiler_directives=directives,
        annotate=is_on("CPOOL_ANNOTATE"),
    ),
)
