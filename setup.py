"""The C kernels of `peagle.kernels.native`: all else about the package stands in pyproject.toml.

Optional: where there is no C compiler, or one that does not know the processor, the package installs without them and
PyTorch's products are taken.
"""

from setuptools import Extension, setup

KERNELS = Extension(
    "peagle.kernels.native._kernels",
    ["src/peagle/kernels/kernels.c"],
    extra_compile_args=["-O3", "-fwrapv"],
    libraries=["m"],
    optional=True,
)

setup(ext_modules=[KERNELS])
