"""Real vLLM on CPU against Transformers and against our own engine, all in float32.

    .venv-vllm/bin/python benchmarks/vllm_agreement.py --verifier embedded:verifier --drafter CHECKPOINT --json

prints `states_error` (worst token's relative error, over families), `answers` and `identical` (with the drafter against
without, one at a time and eight at a time), `counts_equal` and `draft_tokens_equal` (against our engine; a difference
counts as equal only where it is shown to be a logit gap under 1e-4), `chi2_p` (first three sampled tokens, with against
without), `extract_rate_ratio` (tokens per second of extraction against plain prefill, the same requests in turn).
Run with one thread; it starts one engine or two servers at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.vllm_engines import Engines, greedy_task, server, speculative
from peagle import embedded
from peagle.verifier.facts import VerifierFacts, load_facts
from peagle.verifier.layers import resolve_aux_layer_ids
from peagle.verifier.transformers import TransformersVerifier

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text")
"""gemma3_text has no native support: it shows the detour through vLLM's Transformers backend."""
TIE_GAP = 1e-4
CHUNKED = ("--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--enable-prefix-caching")


def mixed_rows(count: int, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    """Random rows from one token to `longest`; every fourth repeats the start of an earlier one (prefix caching)."""
    rng = random.Random(seed)
    rows: list[list[int]] = []
    for i in range(count):
        length = rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 100, 200, longest])
        row = [rng.randrange(3, vocab_size) for _ in range(length)]
        if i % 4 == 3:
            row = (rows[i - 2] + row)[:longest]
        rows.append(row)
    return rows


def worst_error(found: torch.Tensor, expected: torch.Tensor, hidden_size: int) -> float:
    """Worst relative L2 error of a token's state, layer by layer."""
    a, b = found.reshape(-1, hidden_size).double(), expected.reshape(-1, hidden_size).double()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-6)).max())


def states_error(engines: Engines, model: Path, rows: Sequence[list[int]], folder: Path) -> float:
    """Worst error of vLLM's states against Transformers', with chunked prefill and prefix caching.

    The whole list runs twice in one engine, so that the second half is served from the cache of the first.
    """
    facts = load_facts(str(model), False)
    aux = resolve_aux_layer_ids(facts.num_layers, None)
    found = engines.states(model, [*rows, *rows], aux, folder, CHUNKED)["tensors"]
    worst = 0.0
    for i, (expected_aux, expected_last) in enumerate(TransformersVerifier(facts, "float32", "cpu").states(rows, aux)):
        for again in (i, i + len(rows)):
            worst = max(worst, worst_error(found[f"{again}.aux"], expected_aux, facts.hidden_size))
            worst = max(worst, worst_error(found[f"{again}.last"], expected_last, facts.hidden_size))
    return worst


@dataclass(frozen=True)
class Decoding:
    """vLLM with a drafter against vLLM without, and against our engine."""

    answers: int
    """Answers compared, both ways together."""
    identical: int
    num_drafts: int
    accepted: list[int]
    our_num_drafts: int
    our_accepted: list[int]
    drafts_compared: int
    drafts_equal: int
    ties: int
    """Drafts that differ by a logit gap under `TIE_GAP`."""

    @property
    def counts_equal(self) -> bool:
        """Whether both engines count the same, up to shown ties."""
        same = (self.num_drafts, self.accepted) == (self.our_num_drafts, self.our_accepted)
        return same or (self.ties > 0 and self.drafts_equal + self.ties == self.drafts_compared)

    @property
    def draft_tokens_equal(self) -> bool:
        """Whether every draft is the same, up to shown ties."""
        return self.drafts_compared > 0 and self.drafts_equal + self.ties == self.drafts_compared


def compare_decoding(
    engines: Engines,
    verifier: Path,
    checkpoint: Path,
    prompts: Sequence[list[int]],
    max_tokens: int,
    num_speculative_tokens: int,
) -> Decoding:
    """Decode greedily without the drafter, with it, and with our engine."""
    eos = load_facts(str(verifier), False).eos_token_ids
    tasks = [greedy_task(prompts, max_tokens, eos, one) for one in (True, False)]
    plain = engines.generate(verifier, None, tasks, False)
    drafted = engines.generate(verifier, speculative(checkpoint, num_speculative_tokens), tasks, True)
    identical = sum(a == b for p, d in zip(plain, drafted) for a, b in zip(p["answers"], d["answers"]))
    ours = our_passes(verifier, checkpoint, prompts, max_tokens, num_speculative_tokens, eos)
    compared = equal = ties = 0
    for prompt, passes, theirs, answer in zip(prompts, ours, drafted[0]["drafts"], drafted[0]["answers"]):
        found = compare_drafts(verifier, checkpoint, [*prompt, *answer], passes, theirs)
        compared, equal, ties = compared + found[0], equal + found[1], ties + found[2]
    accepted = [0] * num_speculative_tokens
    for passes in ours:
        for one in passes:
            for k in range(one.num_accepted):
                accepted[k] += 1
    return Decoding(
        answers=2 * len(prompts),
        identical=identical,
        num_drafts=int(drafted[0]["num_drafts"]),
        accepted=[int(n) for n in drafted[0]["accepted"]],
        our_num_drafts=sum(len(passes) for passes in ours),
        our_accepted=accepted,
        drafts_compared=compared,
        drafts_equal=equal,
        ties=ties,
    )


def our_passes(
    verifier: Path, checkpoint: Path, prompts: Sequence[list[int]], max_tokens: int, depth: int, eos: Sequence[int]
) -> list[list[Any]]:
    """The verifier passes of our own engine, per prompt."""
    from peagle.drafter import load
    from peagle.engine.engine import Engine, Request
    from peagle.engine.sampling import Sampling

    model = TransformersVerifier(load_facts(str(verifier), False), "float32", "cpu").model
    drafter = load(str(checkpoint), torch.float32, torch.device("cpu"))
    engine = Engine(model, drafter, depth, eos, Sampling(temperature=0.0, top_p=1.0, seed=0), 4)
    answers = engine.generate([Request(prompt, max_tokens) for prompt in prompts])
    return [answer.passes for answer in answers]


def compare_drafts(
    verifier: Path, checkpoint: Path, ids: list[int], passes: Sequence[Any], theirs: Sequence[list[int]]
) -> tuple[int, int, int]:
    """Compare the drafts of one answer, pass by pass: (compared, equal, near ties).

    A draft that differs is a tie if our own drafter's logits at the first differing depth are within `TIE_GAP`.
    """
    equal = ties = 0
    for one, other in zip(passes, theirs):
        mine = list(one.draft_ids)
        if mine == other:
            equal += 1
            continue
        first = next(k for k, (a, b) in enumerate(zip(mine, other)) if a != b)
        logits = draft_logits(verifier, checkpoint, ids[: one.num_known], len(mine))[first]
        ties += abs(float(logits[mine[first]] - logits[other[first]])) < TIE_GAP
    missing = abs(len(passes) - min(len(passes), len(theirs)))
    return len(passes) + missing, equal, ties


def draft_logits(verifier: Path, checkpoint: Path, known: list[int], depth: int) -> torch.Tensor:
    """Our drafter's logits for the `depth` tokens after `known`, from scratch, [depth, vocab_size]."""
    from peagle.drafter import load

    drafter = load(str(checkpoint), torch.float32, torch.device("cpu"))
    reader = TransformersVerifier(load_facts(str(verifier), False), "float32", "cpu")
    ((aux, _),) = reader.states([known], drafter.config.aux_layer_ids)
    count = len(known) - 1
    with torch.inference_mode():
        embeds, hidden = drafter.embed_pairs(torch.tensor(known[1:]), aux[:count])
        mask_embeds, mask_hidden = drafter.embed_masks(depth - 1)
        embeds, hidden = torch.cat([embeds, mask_embeds]), torch.cat([hidden, mask_hidden])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1).flatten(1)

        states = drafter.layers_pass(embeds, hidden, torch.arange(count + depth - 1), attend)
        logits = drafter.logits(states[count - 1 :])
    full = torch.full((depth, drafter.config.vocab_size), float("-inf"))
    full[:, drafter.to_verifier_ids(torch.arange(logits.shape[1]))] = logits
    return full


def sampling_p_value(
    engines: Engines, verifier: Path, checkpoint: Path, prompt: list[int], count: int, num_speculative_tokens: int
) -> float:
    """Chi-square test: do the first three tokens at temperature 1 have one distribution with and without the drafter?

    Cells are the sequences of three tokens; those seen less than ten times in both samples together are one cell.
    """
    task = {
        "prompts": [prompt] * count,
        "max_tokens": 3,
        "temperature": 1.0,
        "eos_ids": [],
        "one_at_a_time": False,
        "seed": 0,
    }
    # Other seeds with the drafter: the samples must be independent.
    (plain,) = engines.generate(verifier, None, [task], False)
    (drafted,) = engines.generate(
        verifier, speculative(checkpoint, num_speculative_tokens), [{**task, "seed": 10_000_000}], False
    )
    return two_sample_p(Counter(map(tuple, plain["answers"])), Counter(map(tuple, drafted["answers"])))


def two_sample_p(a: Counter[Any], b: Counter[Any]) -> float:
    """p-value of Pearson's test that two samples of one size come from one distribution."""
    pairs = [(a[cell], b[cell]) for cell in sorted(set(a) | set(b))]
    cells = [pair for pair in pairs if sum(pair) >= 10]
    rare = [pair for pair in pairs if sum(pair) < 10]
    if rare:
        cells.append((sum(x for x, _ in rare), sum(y for _, y in rare)))
    total_a, total_b = sum(x for x, _ in cells), sum(y for _, y in cells)
    chi2 = 0.0
    for x, y in cells:
        share = (x + y) / (total_a + total_b)
        chi2 += (x - total_a * share) ** 2 / (total_a * share) + (y - total_b * share) ** 2 / (total_b * share)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(chi2 / 2, dtype=torch.float64)))


def extract_rate_ratio(verifier: Path, rows: Sequence[list[int]], work: Path, rounds: int) -> dict[str, float]:
    """Tokens per second of extraction against plain prefill: two servers, the same requests in turn, best round."""
    from peagle.data.rows import TokenRow
    from peagle.verifier.vllm_answers import states_request
    from peagle.verifier.vllm_client import Endpoint, EndpointPool, RetryPolicy
    from peagle.verifier.vllm_endpoint import EndpointSettings, EndpointSource
    from peagle.verifier.vllm_parallel import in_parallel

    facts = load_facts(str(verifier), False)
    aux = resolve_aux_layer_ids(facts.num_layers, None)
    policy = RetryPolicy(300.0, 3, 60.0)
    token_rows = [TokenRow(str(i), "x", list(ids), [1] * len(ids), False, 0) for i, ids in enumerate(rows)]
    wanted = {row.row_id for row in token_rows}
    num_tokens = sum(len(ids) for ids in rows)
    options = ["--no-enable-prefix-caching"]
    extracting = ["launch-vllm", str(verifier), "--hidden-states-path", str(work / "shared"), "--", *options]
    seconds: dict[str, list[float]] = {"extract": [], "prefill": []}
    with (
        server(extracting, work / "extract.log") as (_, extract_url),
        plain_server(verifier, options, work / "plain.log") as plain_url,
    ):
        source = EndpointSource(
            facts,
            aux,
            "float32",
            EndpointSettings((extract_url,), None, None, 16, policy, work / "shared"),
            "rate",
            False,
        )
        endpoint = Endpoint(plain_url, None, policy, 16)
        endpoint.model(None)
        pool = EndpointPool([endpoint], policy)
        payloads = [{**states_request(list(ids), "x", False), "kv_transfer_params": None} for ids in rows]
        for _ in range(rounds + 1):
            started_s = time.monotonic()
            for _found in source.states(token_rows, wanted):
                pass
            seconds["extract"].append(time.monotonic() - started_s)
            started_s = time.monotonic()
            jobs = (lambda payload=payload: pool.post("/v1/completions", payload) for payload in payloads)
            for _found in in_parallel(jobs, 16, pool.close):
                pass
            seconds["prefill"].append(time.monotonic() - started_s)
        source.close()
        pool.close()
    best = {name: min(values[1:]) for name, values in seconds.items()}  # the first round warms up
    return {
        "extract_tokens_per_s": num_tokens / best["extract"],
        "prefill_tokens_per_s": num_tokens / best["prefill"],
        "extract_rate_ratio": best["prefill"] / best["extract"],
    }


def plain_server(verifier: Path, options: Sequence[str], log: Path) -> Any:
    """The same vLLM without extraction."""
    import contextlib

    from benchmarks.vllm_engines import QUIET, SMALL, free_port
    from peagle.verifier.vllm_launch import ServerCommand, start, stop, wait_ready

    @contextlib.contextmanager
    def running() -> Any:
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(verifier), "--port", str(port)]
        command += ["--host", "127.0.0.1", "--dtype", "float32", *SMALL, *options]
        with open(log, "ab") as output:
            process = start(ServerCommand(tuple(command), QUIET), output)
            try:
                wait_ready(process, f"http://127.0.0.1:{port}", 900.0)
                yield f"http://127.0.0.1:{port}"
            finally:
                stop(process)

    return running()


def toy(family: str, folder: Path) -> Path:
    """A random verifier of a family, with heads of 32: vLLM's CPU kernels take no smaller ones.

    Its weights are tamer than those of `tests.fakes`: what is compared is two float32 implementations, and a network
    that multiplies rounding errors by ten at every layer measures itself.
    """
    from tests.fakes import byte_tokenizer, tiny_model

    model = tiny_model(family, 0, hidden_size=128, head_dim=32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name and "lm_head" not in name:
                parameter.div_(3.0)
    model.save_pretrained(folder / family)
    byte_tokenizer().save_pretrained(folder / family)
    return folder / family


def question_prompts(verifier: Path, file: Path, count: int) -> list[list[int]]:
    """Questions as the verifier's own template renders them."""
    from peagle.verifier.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(verifier), False)
    prompts = []
    for line in file.read_text(encoding="utf-8").splitlines()[:count]:
        messages = [{"role": "user", "content": json.loads(line)["question"]}]
        prompts.append(list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)))
    return prompts


def main() -> int:
    """Measure and print; exit 1 if anything disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", default="embedded:verifier")
    parser.add_argument("--drafter", default="demo-output/checkpoints/checkpoint_best", help="a checkpoint for it")
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--skip", nargs="*", default=[], choices=["states", "decoding", "sampling", "rate"])
    parser.add_argument("--json", action="store_true", help="print one JSON object on one line last")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    verifier, drafter = Path(embedded.resolve(asked.verifier)).resolve(), Path(asked.drafter).resolve()
    facts: VerifierFacts = load_facts(str(verifier), False)
    prompts = question_prompts(verifier, embedded.TEST_QUESTIONS, asked.prompts)
    figures: dict[str, Any] = {}
    good = True
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        work = Path(folder)
        engines = Engines(work / "vllm.log")
        try:
            if "states" not in asked.skip:
                figures["states_errors"] = {
                    "verifier": states_error(engines, verifier, mixed_rows(48, facts.vocab_size, 600, 0), work / "v")
                }
                for family in FAMILIES:
                    error = states_error(engines, toy(family, work), mixed_rows(12, 260, 300, 1), work / f"{family}-s")
                    figures["states_errors"][family] = error
                figures["states_error"] = max(figures["states_errors"].values())
                good = good and figures["states_error"] <= 1e-5
            if "decoding" not in asked.skip:
                found = compare_decoding(
                    engines, verifier, drafter, prompts, asked.max_tokens, asked.num_speculative_tokens
                )
                figures |= {
                    "answers": found.answers,
                    "identical": found.identical,
                    "counts_equal": found.counts_equal,
                    "draft_tokens_equal": found.draft_tokens_equal,
                    "decoding": found.__dict__,
                }
                good = good and found.identical == found.answers and found.counts_equal and found.draft_tokens_equal
            if "sampling" not in asked.skip:
                figures["chi2_p"] = sampling_p_value(
                    engines, verifier, drafter, prompts[0], asked.samples, asked.num_speculative_tokens
                )
                good = good and figures["chi2_p"] > 0.001
        finally:
            engines.close()
        if "rate" not in asked.skip:
            figures |= extract_rate_ratio(verifier, mixed_rows(200, facts.vocab_size, 600, 2), work, 3)
            good = good and figures["extract_rate_ratio"] >= 0.9
    if asked.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}: {value}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
