"""Runs vLLM engines in forked children of one process that imports vLLM once: the import takes longer than most jobs.

One JSON job per line on stdin, one JSON answer per line on stdout ("{}" once ready); vLLM's own output goes to stderr.
Run with vLLM's Python; `engines.Engines` is the other side.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def states(job: dict[str, Any]) -> dict[str, Any]:
    """Hidden states of rows through `InProcessSource`, into one safetensors file."""
    from safetensors.torch import save_file

    from peagle.data.records import TokenRow
    from peagle.verifier.model_config import load_verifier_config
    from peagle.verifier.source import RowRefused
    from peagle.vllm.inprocess import InProcessSource

    rows = [
        TokenRow(
            row_id=str(i), source="x", input_ids=ids, loss_mask=[1] * len(ids), next_is_supervised=False, tail_length=0
        )
        for i, ids in enumerate(job["rows"])
    ]
    source = InProcessSource(
        verifier=load_verifier_config(job["model"], False),
        aux_layer_ids=job["aux"],
        dtype=job["dtype"],
        folder=Path(job["folder"]),
        store=job["output"],
        check_all_positions=True,
        vllm_arguments=job["arguments"],
    )
    tensors = {}
    refused = {}
    started_s = time.monotonic()
    for found in source.states(rows, {row.row_id for row in rows}):
        if isinstance(found, RowRefused):
            refused[found.row_id] = f"{found.reason}: {found.detail}"
            continue
        tensors[f"{found.row_id}.aux"], tensors[f"{found.row_id}.last"] = found.aux_states, found.last_states
    seconds = time.monotonic() - started_s
    source.close()
    save_file(tensors, job["output"])
    return {"refused": refused, "seconds": seconds, "max_tokens": source.max_tokens}


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Answers of one engine, with its counters and, if asked, every draft, task by task."""
    from vllm import LLM

    drafts = record_drafts() if job["record_drafts"] else []
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        speculative_config=job["speculative"],
        max_num_seqs=8,
        disable_log_stats=False,
        enforce_eager=True,
        distributed_executor_backend="uni",
        **job["arguments"],
    )
    expanded = expanded_temperatures()  # the engine has put its device's kernels in place by now
    if job["repair_sampling"]:
        repair_cpu_sampling()
    results = []
    for task in job["tasks"]:
        before = counters(llm)
        drafts.clear()
        answers: list[list[int]] = []
        per_answer = []
        started_s = time.monotonic()
        groups = [[prompt] for prompt in task["prompts"]] if task["one_at_a_time"] else [task["prompts"]]
        first = 0
        for group in groups:
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for ids in group],
                [sampling(task, first + i) for i in range(len(group))],
                use_tqdm=False,
            )
            answers += [list(output.outputs[0].token_ids) for output in outputs]
            if task["one_at_a_time"]:
                per_answer.append([row for batch in drafts for row in batch])
                drafts.clear()
            first += len(group)
        seconds = time.monotonic() - started_s
        after = counters(llm)
        tails = continued(llm, task, answers) if task.get("tail_tokens") else None
        results.append(
            {
                "answers": answers,
                "seconds": seconds,
                "tails": tails,
                "expanded": expanded,
                "num_drafts": after["num_drafts"] - before["num_drafts"],
                "accepted": [a - b for a, b in zip(after["accepted"], before["accepted"] or [0] * 64)],
                "drafts": per_answer if job["record_drafts"] and task["one_at_a_time"] else None,
            }
        )
    return {"tasks": results}


def continued(llm: Any, task: dict[str, Any], answers: list[list[int]]) -> list[list[int]]:
    """What the model says past the end of each answer, greedily, `tail_tokens` tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_tokens=task["tail_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [*prompt, *answer]} for prompt, answer in zip(task["prompts"], answers)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, parameters, use_tqdm=False)]


def sampling(task: dict[str, Any], index: int) -> Any:
    """Parameters of one prompt; its own seed when sampled."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=task["temperature"],
        max_tokens=task["max_tokens"],
        ignore_eos=True,
        stop_token_ids=task["eos_ids"],
        seed=task["seed"] + index if task["temperature"] > 0 else None,
        detokenize=False,
    )


def counters(llm: Any) -> dict[str, Any]:
    """Speculative-decoding counters so far."""
    found: dict[str, Any] = {"num_drafts": 0, "accepted": []}
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["num_drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    return found


def expanded_temperatures() -> list[float]:
    """What vLLM's own kernel makes of temperature 1 for a request with four draft tokens: it should be four times 1."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    device = current_platform.device_type
    found = []
    for junk in (7.0, 3.0):  # fills the memory that is handed out next: an output that is never written shows itself
        filler = torch.full((4,), junk, device=device)
        del filler
        one, ends = torch.tensor([1.0], device=device), torch.tensor([4], dtype=torch.int32, device=device)
        found += expand_batch_to_tokens(one, ends, 4, 0, 1).tolist()
    return [float(value) for value in found]


def repair_cpu_sampling() -> None:
    """Undo a fault of vLLM 0.32's CPU kernels, so that the rejection rule itself can be tested.

    `_expand_kernel_impl` (vllm/utils/cpu_triton_utils.py) converts its float output to int64 for the C++ kernel and
    drops the result: what divides the verifier's logits is uninitialized memory, whatever the temperature, 1 included.
    Greedy decoding is not affected, nor are GPUs (Triton). Unnecessary once it copies back, as its neighbours do.
    """
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand(x: Any, cumulative: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = torch.diff(cumulative, prepend=cumulative.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand


def record_drafts() -> list[list[list[int]]]:
    """Keep what the drafter proposes: one entry per call, a row per request."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    kept: list[list[list[int]]] = []
    propose = SpecDecodeBaseProposer.propose

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = propose(self, *args, **kwargs)
        tensor = drafted[0] if isinstance(drafted, tuple) else drafted
        kept.append(tensor.tolist())
        return drafted

    SpecDecodeBaseProposer.propose = recording
    return kept


def in_child(job: dict[str, Any], answer_to: int) -> None:
    """Run one job and write its answer; never returns."""
    try:
        answer = {"states": states, "generate": generate}[job["kind"]](job)
    except BaseException as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(answer_to, json.dumps(answer).encode() + b"\n")
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Serve jobs until stdin ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints, prints to stderr
    import vllm
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine  # noqa: F401

    os.write(answers, b"{}\n")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            in_child(json.loads(line), answers)
        _, status = os.waitpid(child, 0)
        if status:
            os.write(answers, json.dumps({"error": f"the child ended with status {status}"}).encode() + b"\n")


if __name__ == "__main__":
    main()
