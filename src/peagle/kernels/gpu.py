"""The loss of a chunk's rows in one Triton kernel: pass by pass, PyTorch's functions move three times the bytes.

The definition is that of `train/loss.py`, in float32 whatever type the logits have. Without a GPU, tests run the kernel
in Triton's interpreter and compile it for several chips. Inductor writes Triton as well, so where Triton is not,
`torch.compile` would be no way out: the definition runs as it stands.
"""

import functools
import importlib.util
import logging
import os
import shutil
from contextlib import nullcontext

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Columns of a row that a program has at a time, in eight warps: sixteen numbers a thread of each of the two rows, so
# that several programs share a multiprocessor and one computes while another one waits for memory.
BLOCK, NUM_WARPS = 4096, 8


@functools.cache
def fused_loss_problem() -> str | None:
    """Why `row_losses_` cannot run on this machine's GPUs; None if it can. Said once, as a warning."""
    problem = None
    if importlib.util.find_spec("triton") is None:
        problem = "Triton is not installed"
    elif not (os.environ.get("CC") or any(map(shutil.which, ("cc", "gcc", "clang")))):
        problem = "Triton needs a C compiler, and there is none"
    if problem is not None:
        logger.warning("%s: the loss runs on PyTorch's functions, with three times the memory traffic", problem)
    return problem


def row_losses_(
    *,
    logits: Tensor,
    verifier_logits: Tensor,
    label_of_row: Tensor,
    choices: Tensor | None,
    loss: str,
    with_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Losses of rows against the verifier's, in one launch; the host waits for nothing.

    Args:
        logits: rows contiguous, [num_rows, vocab_size]; with gradients d loss / d logits stands there afterwards.
        verifier_logits: rows contiguous, [num_labels, vocab_size].
        label_of_row: each row's own row of `verifier_logits`, int64, [num_rows].
        choices: the verifier's choice per label, -1 for one outside the vocabulary, int64, [num_labels]; None: its
            largest logit, the first of several.
        loss: `kl_div`, `ce` or `tv`, as in `train/loss.py`.
        with_grad: whether `logits` becomes its gradient.

    Returns:
        The loss, float32, and whether the first of the largest logits is the choice, bool; each [num_rows].
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == verifier_logits.stride(1) == 1, "the numbers of a row lie next to each other"
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    is_correct = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return losses, is_correct
    from peagle.kernels import triton_loss

    # Triton launches on the thread's current device, whatever device the tensors are on.
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        triton_loss.row_losses[(num_rows,)](
            *(logits, verifier_logits, label_of_row, choices, losses, is_correct),
            *(vocab_size, logits.stride(0), verifier_logits.stride(0)),
            LOSS=loss,
            HAS_CHOICES=choices is not None,
            WITH_GRAD=with_grad,
            BLOCK=min(BLOCK, 1 << (vocab_size - 1).bit_length()),
            num_warps=NUM_WARPS,
        )
    return losses, is_correct
