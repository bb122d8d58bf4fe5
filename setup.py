"""The C kernels of `peagle.kernels`; everything else about the package stands in pyproject.toml.

Optional: without a C compiler, or with one that does not know the processor, the package installs without them and
runs on PyTorch's functions.
"""

from setuptools import Extension, setup

KERNELS = Extension(
    "peagle.kernels._kernels",
    ["src/peagle/kernels/kernels.c"],
    extra_compile_args=["-O3", "-fwrapv"],
    libraries=["m"],
    optional=True,
)

setup(ext_modules=[KERNELS])
