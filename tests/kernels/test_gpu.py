"""The fused loss of a GPU, without one: run in Triton's interpreter against the definition, and compiled for chips."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels import gpu

triton = pytest.importorskip("triton", reason="Triton has no build for this system")
LOSSES = ["kl_div", "ce", "tv"]


def defined(
    logits: Tensor, verifier_logits: Tensor, row: Tensor, choices: Tensor | None, loss: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, correctness and the gradient by autograd, in float64."""
    z, v = logits.double().requires_grad_(), verifier_logits.double()
    choice = (v.argmax(-1) if choices is None else choices)[row]
    ours, theirs = z.log_softmax(-1), v.log_softmax(-1)[row]
    if loss == "kl_div":
        losses = (theirs.exp() * (theirs - ours)).sum(-1)
    elif loss == "ce":
        at_choice = ours.gather(1, choice.clamp(min=0)[:, None])[:, 0]
        losses = torch.where(choice >= 0, -at_choice, 0.0)
    else:
        losses = 1 - torch.minimum(ours.exp(), theirs.exp()).sum(-1)
    (grad,) = torch.autograd.grad(losses.sum(), z)
    return losses.detach(), z.argmax(-1) == choice, grad


def drawn(num_rows: int, num_labels: int, vocab_size: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Logits of both sides, and each row's label."""
    generator = torch.Generator().manual_seed(vocab_size)
    ours, theirs = (torch.randn(n, vocab_size, generator=generator) * scale for n in (num_rows, num_labels))
    return ours.to(dtype), theirs.to(dtype), torch.arange(num_rows) * num_labels // num_rows


# -------------------- in the interpreter


def case(
    loss: str, is_pruned: bool, dtype: torch.dtype, vocab_size: int, scale: float, with_grad: bool
) -> dict[str, Any]:
    """Arguments of a call. The third row's logits are the verifier's own."""
    logits, verifier_logits, row = drawn(4, 3, vocab_size, scale, dtype)
    logits[2] = verifier_logits[1]
    choices = torch.tensor([vocab_size // 2, vocab_size - 1, -1]) if is_pruned else None
    return call(logits, verifier_logits, row, choices, loss, with_grad)


def call(
    logits: Tensor, verifier_logits: Tensor, row: Tensor, choices: Tensor | None, loss: str, with_grad: bool = True
) -> dict[str, Any]:
    names = ("logits", "verifier_logits", "label_of_row", "choices", "loss", "with_grad")
    return dict(zip(names, (logits, verifier_logits, row, choices, loss, with_grad)))


def tied(places: tuple[int, int], loss: str, is_pruned: bool) -> dict[str, Any]:
    """Largest logits at two places: of both sides; ours alone, the verifier's at the second; the verifier's alone."""
    logits, verifier_logits, row = drawn(3, 3, 5000, 1.0, torch.bfloat16)
    logits[0, list(places)] = verifier_logits[0, list(places)] = 9.0
    logits[1, list(places)], verifier_logits[1, places[1]] = 9.0, 9.0
    logits[2, places[0]], verifier_logits[2, list(places)] = 9.0, 9.0
    choices = torch.tensor([places[0], places[1], -1]) if is_pruned else None
    return call(logits, verifier_logits, row, choices, loss)


def spoiled(loss: str) -> dict[str, Any]:
    """The second row's logits hold one that is no number."""
    logits, verifier_logits, row = drawn(3, 2, 300, 1.0, torch.float32)
    logits[1, 200] = float("nan")
    return call(logits, verifier_logits, row, torch.tensor([3, 4]), loss)


SHAPES = [(7, 3.0), (1000, 30.0), (4096, 0.1), (4099, 5.0)]  # vocabulary, size of the logits
CASES = list(itertools.product(LOSSES, [False, True], [torch.float32, torch.bfloat16], SHAPES))
# Columns 0 to 4095 are read together, then the rest.
TIES = [(places, loss, loss == "ce") for places, loss in itertools.product([(5, 4100), (4095, 4096), (17, 18)], LOSSES)]
INTERPRETED: dict[Any, Callable[[], dict[str, Any]]] = {
    **{one: partial(case, *one[:3], *one[3], with_grad=True) for one in CASES},
    **{(loss, "kept"): partial(case, loss, False, torch.float32, 1000, 30.0, with_grad=False) for loss in LOSSES},
    **{one: partial(tied, *one) for one in TIES},
    **{loss: partial(spoiled, loss) for loss in LOSSES},
}
# Triton reads the variable where a kernel is defined, its own library's too, so this process is lost for the compiler.
SOLVE = """
import sys, torch
from peagle.kernels import gpu
calls = torch.load(sys.argv[1])
torch.save([(*gpu.row_losses_(**call), call["logits"]) for call in calls], sys.argv[1])
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[Tensor, Tensor, Tensor]]:
    """Loss, correctness and the logits afterwards of each of the calls, all from one process."""
    path = tmp_path_factory.mktemp("interpreted") / "calls.pt"
    torch.save([make() for make in INTERPRETED.values()], path)
    subprocess.run([sys.executable, "-c", SOLVE, path], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    return dict(zip(INTERPRETED, torch.load(path)))


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_kernel_is_its_definition(one: Any, found: dict[Any, tuple[Tensor, Tensor, Tensor]]) -> None:
    (losses, is_correct, grad), (_, scale) = defined(*list(INTERPRETED[one]().values())[:5]), one[3]
    ours, ours_correct, changed = found[one]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), losses, rtol=2e-6, atol=2e-6 + 1e-6 * scale)
    assert torch.equal(ours_correct, is_correct)
    # A logit of 100 is known to 4e-6, and so is what it gives. The interpreter cuts a bfloat16 off, a GPU rounds it.
    rounding = 2**-7 if one[2] == torch.bfloat16 else 1e-5
    torch.testing.assert_close(changed.double(), grad, rtol=rounding, atol=1e-6 + 1e-6 * scale)


@pytest.mark.parametrize("loss", LOSSES)
def test_without_gradients_the_logits_stay(loss: str, found: dict[Any, tuple[Tensor, Tensor, Tensor]]) -> None:
    losses, is_correct, logits = found[loss, "kept"]
    for ours, with_grad in zip((losses, is_correct), found[loss, False, torch.float32, (1000, 30.0)]):
        assert torch.equal(ours, with_grad)
    assert torch.equal(logits, INTERPRETED[loss, "kept"]()["logits"])


@pytest.mark.parametrize("one", TIES, ids=str)
def test_R21_of_several_largest_logits_the_first_is_the_choice(
    one: Any, found: dict[Any, tuple[Tensor, Tensor, Tensor]]
) -> None:
    """Of columns read together and apart, on either side; with choices from outside, too."""
    is_pruned = one[2]
    assert found[one][1].tolist() == [True, False, not is_pruned]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_logit_that_is_not_a_number_spoils_its_own_row_only(
    loss: str, found: dict[Any, tuple[Tensor, Tensor, Tensor]]
) -> None:
    losses, _, changed = found[loss]
    assert losses.isnan().tolist() == [False, True, False]
    assert changed.isnan().any(1).tolist() == [False, True, False]


# -------------------- elsewhere


def test_no_rows_ask_for_no_kernel() -> None:
    logits, none = torch.empty(0, 8), torch.empty(0, dtype=torch.int64)
    losses, is_correct = gpu.row_losses_(
        logits=logits, verifier_logits=logits, label_of_row=none, choices=None, loss="tv", with_grad=True
    )
    assert losses.shape == is_correct.shape == (0,)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_for_a_chip_and_keeps_its_numbers_in_registers(capability: int, tmp_path: Path) -> None:
    """By Triton and ptxas, at the block of a large vocabulary: four numbers a load, nothing in local memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from peagle.kernels.triton_loss import row_losses

    types = {"logits": "*bf16", "verifier_logits": "*bf16", "label_of_row": "*i64", "choices": "*i64"}
    types |= {"losses": "*fp32", "is_correct": "*i1", "vocab_size": "i32"}
    types |= {"logits_stride": "i32", "verifier_stride": "i32"}
    tool, machine_code = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump", tmp_path / "cubin"
    for loss, has_choices in (("kl_div", False), ("ce", True), ("tv", False)):
        constants = {"LOSS": loss, "HAS_CHOICES": has_choices, "WITH_GRAD": True, "BLOCK": gpu.BLOCK}
        if not has_choices:
            constants["choices"] = None
        names = row_losses.arg_names
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n] != "constexpr"}
        compiled = triton.compile(
            ASTSource(row_losses, signature, constants, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": gpu.NUM_WARPS},
        )
        assert "v4.b32" in compiled.asm["ptx"]
        machine_code.write_bytes(compiled.asm["cubin"])
        used = subprocess.run([tool, "-res-usage", machine_code], capture_output=True, text=True, check=True).stdout
        assert "STACK:0" in used


@pytest.mark.parametrize(
    ("missing", "problem"), [("triton", "Triton is not installed"), ("cc", "a C compiler"), (None, None)]
)
def test_what_keeps_the_kernel_from_running_is_said_once(
    missing: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "triton":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if missing == "cc":
        monkeypatch.setattr("shutil.which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)
    gpu.fused_loss_problem.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            found = [gpu.fused_loss_problem() for _ in range(2)]
    finally:
        gpu.fused_loss_problem.cache_clear()
    assert (found[0] is None) if problem is None else problem in str(found[0])
    assert len(caplog.records) == (problem is not None)
