"""The C kernels of `peagle.kernels`, built once for AVX2 and once for AVX-512; everything else about the package stands
in pyproject.toml.

Two libraries from one source, so that the source needs neither attributes nor names per processor; PyTorch says which
one to load. Optional: without a C compiler, or with one that does not know the processor, the package installs without
them and runs on PyTorch's functions.
"""

from setuptools import Extension, setup

TARGETS = {"_avx2": ["-mavx2", "-mfma"], "_avx512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mfma"]}

setup(
    ext_modules=[
        Extension(
            f"peagle.kernels.{name}",
            ["src/peagle/kernels/kernels.c"],
            extra_compile_args=["-O3", "-fwrapv", *flags],
            libraries=["m"],
            optional=True,
        )
        for name, flags in TARGETS.items()
    ]
)
