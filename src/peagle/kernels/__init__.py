"""What a step spends its time on besides matrix products: tensors in, tensors out, autograd goes through.

Each function stands beside its definition in PyTorch, which it equals but for rounding; threads change no bit of it.
Nobody outside asks what the processor can do: attention in C is chosen by its name (`native_attention_problem` says
once why it cannot be), and the loss's functions choose by themselves.
"""

from peagle.kernels.cpu import (
    TILE_ROWS,
    Tile,
    attend,
    causal_tiles,
    log_sum_exp,
    native_attention_problem,
    num_native_threads,
    reference_attend,
    rms_norm,
    soft_cross_entropy_,
    softmax_with_entropy,
    swiglu,
)

__all__ = [
    "TILE_ROWS",
    "Tile",
    "attend",
    "causal_tiles",
    "log_sum_exp",
    "native_attention_problem",
    "num_native_threads",
    "reference_attend",
    "rms_norm",
    "soft_cross_entropy_",
    "softmax_with_entropy",
    "swiglu",
]
