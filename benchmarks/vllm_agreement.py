"""Real vLLM (its CPU build is enough) against Transformers and against us, all in float32.

    python benchmarks/vllm_agreement.py --json

makes what it needs: an environment with vLLM beside this package (`scripts/setup_vllm.sh`, into .venv-vllm), and the
demo's drafter with half its training, on hidden states that vLLM handed out (or --drafter CHECKPOINT). Prints

- `states_error`: the worst token's relative error of vLLM's states against Transformers', over the embedded verifier
  and toys of six families, with chunked prefill, prefix caching and 48 requests at once;
- `answers`, `identical`: held-out answers and how many are, token by token, those of vLLM without the drafter, one at a
  time and eight at a time;
- `counts_equal`: vLLM's counters of passes and of accepted tokens per position equal those of `peagle evaluate --mode
  replay` on the same answers and those of our engine; `draft_tokens_equal`: every draft is our engine's. A difference
  counts as equal only where it is shown to be a logit gap under 1e-4 (`decoding.ties`);
- `chi2_p`: chi-square test of the first three tokens at temperature 1, with the drafter against without.
  `chi2_sampling_repaired` says whether a fault of vLLM's own CPU kernel was repaired for it, `chi2_p_as_shipped` is the
  result without the repair (docs/design/vllm.md);
- `extract_rate_ratio`: tokens per second of extraction over those of plain prefill, with the same requests in turn.

Exit status 1 if one of them fails its bound. One thread per process; one engine or two servers at a time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
NUM_DEPTHS, ANSWER_LIMIT = 4, 200
PARTS = ("states", "decoding", "sampling", "rate")
sys.path.insert(0, str(ROOT))


def ensure_vllm() -> None:
    """Continue in an environment that has vLLM, building it if needed. Does not return if it changes environments."""
    if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("peagle") is not None:
        return
    done = subprocess.run(["bash", str(ROOT / "scripts" / "setup_vllm.sh")], stdout=sys.stderr, check=False)
    if done.returncode != 0 or Path(sys.prefix).resolve() == VLLM_PYTHON.parents[1].resolve():
        sys.exit(done.returncode or 1)
    os.execv(VLLM_PYTHON, [str(VLLM_PYTHON), *sys.argv])


def make_drafter(verifier: Path, work: Path, questions: int, steps: int) -> Path:
    """The demo's drafter with half its training, on hidden states from vLLM: the commands, one by one.

    Returns:
        The checkpoint.

    Raises:
        RuntimeError: a command failed.
    """
    from tests.vllm.support.commands import must
    from tests.vllm.support.engines import SMALL

    answers, rows, states, checkpoints = work / "answers.jsonl", work / "rows", work / "states", work / "checkpoints"
    must("regenerate", "--model", verifier, "--data", "gsm8k=embedded:train", "--output", answers,
         "--max-samples", questions, "--max-new-tokens", ANSWER_LIMIT, "--dtype", "float32")  # fmt: skip
    must("prepare", "--model", verifier, "--data", answers, "--output", rows, "--seq-length", 1024)
    must("extract", "--preprocessed-data", rows, "--backend", "vllm", "--output", states, "--dtype", "float32",
         "--validate-outputs", "--", *SMALL)  # fmt: skip
    must("train", "--verifier-name-or-path", verifier, "--data-path", rows, "--hidden-states-path", states,
         "--save-path", checkpoints, "--num-layers", 2, "--num-depths", NUM_DEPTHS, "--total-seq-len", 1024,
         "--epochs", 100, "--max-steps", steps, "--optimizer", "muon", "--lr", "1.6e-3",
         "--scheduler-type", "cosine", "--depth-loss-decay", 1, "--train-data-ratio", 0.98,
         "--checkpoint-freq", steps, "--save-dtype", "float32")  # fmt: skip
    return checkpoints / "checkpoint_best"


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """All figures."""
    import torch

    from benchmarks.vllm_rate import extract_rate_ratio
    from peagle import embedded
    from peagle.verifier.model_config import load_verifier_config
    from tests.vllm.support import decoding, sampling, states
    from tests.vllm.support.engines import Engines

    torch.set_num_threads(1)
    verifier = Path(embedded.resolve(options.verifier)).resolve()
    vocab_size = load_verifier_config(str(verifier), False).vocab_size
    figures: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    began_s = time.monotonic()

    def done(part: str) -> None:
        nonlocal began_s
        seconds[part] = round(time.monotonic() - began_s, 1)
        began_s = time.monotonic()
        print(f"{part}: {seconds[part]:.0f} s", file=sys.stderr, flush=True)

    drafter = None if options.drafter is None else Path(options.drafter).resolve()
    if drafter is None and not {"decoding", "sampling"} <= set(options.skip):
        drafter = make_drafter(verifier, work / "drafter", options.questions, options.steps)
        done("drafter")
    engines = Engines(work / "vllm.log")
    try:
        if "states" not in options.skip:
            rows = states.mixed_rows(48, vocab_size, 600, 0)
            errors = {"verifier": states.states_error(engines, verifier, rows, work / "v")}
            rows = states.mixed_rows(12, 260, 300, 1)
            for family in states.FAMILIES:
                made = states.toy(family, work)
                errors[family] = states.states_error(engines, made, rows, work / f"{family}-states")
            figures |= {"states_error": max(errors.values()), "states_errors": errors}
            done("states")
        prompts = decoding.question_prompts(verifier, embedded.TEST_QUESTIONS, options.prompts)
        if "decoding" not in options.skip:
            assert drafter is not None
            found = decoding.compare_decoding(
                engines,
                verifier,
                drafter,
                prompts,
                options.max_tokens,
                options.num_speculative_tokens,
                work / "decoding",
            )
            figures |= {
                "answers": found.answers,
                "identical": found.identical,
                "counts_equal": found.counts_equal,
                "draft_tokens_equal": found.draft_tokens_equal,
                "decoding": found.__dict__,
            }
            done("decoding")
        if "sampling" not in options.skip:
            assert drafter is not None
            sampled = sampling.compare_sampling(
                engines, verifier, drafter, prompts[0], options.samples, options.num_speculative_tokens
            )
            figures |= {
                "chi2_p": sampled.p_value,
                "chi2_sampling_repaired": sampled.was_repaired,
                "chi2_p_as_shipped": sampled.p_value_as_shipped,
                "sampling": sampled.__dict__,
            }
            done("sampling")
    finally:
        engines.close()
    if "rate" not in options.skip:
        figures |= extract_rate_ratio(verifier, vocab_size, work)
        done("rate")
    return {**figures, "seconds": seconds}


def memory_disk() -> str | None:
    """A memory disk large enough for the states, or None: the usual place for temporary files."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and shutil.disk_usage(shared).free > 2 << 30 else None


def is_good(figures: dict[str, Any]) -> bool:
    """Whether everything that was measured is within its bound."""
    return (
        figures.get("states_error", 0.0) <= 1e-5
        and figures.get("identical") == figures.get("answers")
        and figures.get("counts_equal", True)
        and figures.get("draft_tokens_equal", True)
        and figures.get("chi2_p", 1.0) > 0.001
        and figures.get("extract_rate_ratio", 1.0) >= 0.9
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="embedded:verifier")
    parser.add_argument("--drafter", help="a checkpoint for it; by default one is trained")
    parser.add_argument("--questions", type=int, default=500, help="training questions for that drafter")
    parser.add_argument("--steps", type=int, default=300, help="its training steps")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--skip", nargs="*", default=[], choices=PARTS)
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line last")
    options = parser.parse_args()
    ensure_vllm()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=memory_disk()) as folder:
        try:
            figures = measure(options, Path(folder))
        except RuntimeError:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            raise
    if options.json:
        print(json.dumps(figures), flush=True)
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")
    return 0 if is_good(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
