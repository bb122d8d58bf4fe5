"""The Triton kernel behind `gpu.row_losses_`, apart because a file with a kernel cannot be read without Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def row_losses(  # type: ignore[no-untyped-def]
    logits,
    verifier_logits,
    label_of_row,
    choices,
    losses,
    is_correct,
    vocab_size,
    logits_stride,
    verifier_stride,
    LOSS: tl.constexpr,
    HAS_CHOICES: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row: its statistics, its loss, then its gradient in place. z are the drafter's logits, v the verifier's."""
    row = tl.program_id(0).to(tl.int64)  # a chunk's logits may be more numbers than 32 bits count
    label = tl.load(label_of_row + row)
    z_row, v_row = logits + row * logits_stride, verifier_logits + label * verifier_stride
    columns = tl.arange(0, BLOCK)
    READS_V: tl.constexpr = LOSS != "ce" or not HAS_CHOICES
    # 1. Of both rows the largest logit, where it stands first, and the sum of exp(logit - largest); the divergence is
    # sum p (v - z) - log_sum_v + log_sum_z with p = softmax(v).
    z_best, z_place, z_sum = float("-inf"), 0, 0.0
    v_best, v_place, v_sum, gap = float("-inf"), 0, 0.0, 0.0
    for first in range(0, vocab_size, BLOCK):
        column = first + columns
        inside = column < vocab_size
        z = tl.load(z_row + column, mask=inside, other=float("-inf")).to(tl.float32)
        best, place = tl.max(z, 0, return_indices=True, return_indices_tie_break_left=True)
        z_place = tl.where(best > z_best, first + place, z_place)
        best = tl.maximum(best, z_best)
        z_sum = z_sum * tl.exp(z_best - best) + tl.sum(tl.exp(z - best), 0)
        z_best = best
        if READS_V:
            v = tl.load(v_row + column, mask=inside, other=float("-inf")).to(tl.float32)
            best, place = tl.max(v, 0, return_indices=True, return_indices_tie_break_left=True)
            v_place = tl.where(best > v_best, first + place, v_place)
            best = tl.maximum(best, v_best)
            if LOSS != "ce":
                scale, power = tl.exp(v_best - best), tl.exp(v - best)
                v_sum = v_sum * scale + tl.sum(power, 0)
                gap = gap * scale + tl.sum(tl.where(inside, power * (v - z), 0.0), 0)
            v_best = best
    choice = tl.load(choices + label).to(tl.int32) if HAS_CHOICES else v_place
    tl.store(is_correct + row, z_place == choice)
    # 2. The loss.
    below = 0.0
    if LOSS == "kl_div":
        tl.store(losses + row, gap / v_sum - (v_best + tl.log(v_sum)) + (z_best + tl.log(z_sum)))
    elif LOSS == "ce":
        at_choice = tl.load(z_row + tl.maximum(choice, 0)).to(tl.float32)
        tl.store(losses + row, tl.where(choice >= 0, z_best + tl.log(z_sum) - at_choice, 0.0))
    else:
        overlap = 0.0
        for first in range(0, vocab_size, BLOCK):
            column = first + columns
            inside = column < vocab_size
            z = tl.load(z_row + column, mask=inside, other=float("-inf")).to(tl.float32)
            v = tl.load(v_row + column, mask=inside, other=float("-inf")).to(tl.float32)
            q, p = tl.exp(z - z_best) / z_sum, tl.exp(v - v_best) / v_sum
            overlap += tl.sum(tl.minimum(q, p), 0)
            below += tl.sum(tl.where(q <= p, q, 0.0), 0)
        tl.store(losses + row, 1.0 - overlap)
    # 3. The gradient takes the logits' place.
    if WITH_GRAD:
        tl.debug_barrier()  # no thread may still have to read the logit at the choice
        for first in range(0, vocab_size, BLOCK):
            column = first + columns
            inside = column < vocab_size
            z = tl.load(z_row + column, mask=inside, other=float("-inf")).to(tl.float32)
            grad = tl.exp(z - z_best) / z_sum
            if LOSS == "ce":
                grad = tl.where(choice >= 0, grad - (column == choice).to(tl.float32), 0.0)
            else:
                v = tl.load(v_row + column, mask=inside, other=float("-inf")).to(tl.float32)
                p = tl.exp(v - v_best) / v_sum
                if LOSS == "kl_div":
                    grad = grad - p
                else:
                    grad = grad * (below - (grad <= p).to(tl.float32))
            tl.store(z_row + column, grad.to(logits.dtype.element_ty), mask=inside)
