"""Drafters served by vLLM: nothing lost, the same drafts and the same counts as in our own engine, all in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle import embedded
from peagle.config import ServerSettings
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.drafter.model_config import config_for
from peagle.drafter.network import Drafter
from peagle.evaluate.served import ServedDrafter
from peagle.serve.check import check_checkpoint
from peagle.serve.config import CheckConfig
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.source import GenerationSettings, Prompt
from peagle.verifier.weights import load_embedding, load_head
from peagle.vllm.launch import engine_here
from tests.vllm.real.conftest import questions
from tests.vllm.support.commands import must, peagle
from tests.vllm.support.decoding import Decoding, compare_decoding, compare_drafts, our_passes, question_prompts
from tests.vllm.support.engines import Engines, greedy_task, server, speculative
from tests.vllm.support.sampling import compare_sampling

DEPTH, NUM_PROMPTS, NEW_TOKENS = 4, 60, 64
SEEN = 24
"""Prompts whose answers the drafter was trained on: they make sure that deep positions are really accepted."""


@pytest.fixture(scope="module")
def drafter(engines: Engines, verifier: Path, work: Path) -> Path:
    """Trained for a moment on states from vLLM in process (`--backend vllm`)."""
    data = questions(embedded.TRAIN_QUESTIONS, SEEN, work / "seen.jsonl")
    must("regenerate", "--model", verifier, "--data", data, "--output", work / "seen_answers.jsonl",
         "--max-new-tokens", NEW_TOKENS, "--dtype", "float32")  # fmt: skip
    must("prepare", "--model", verifier, "--data", work / "seen_answers.jsonl", "--output", work / "seen_rows",
         "--seq-length", 1024)  # fmt: skip
    must("extract", "--preprocessed-data", work / "seen_rows", "--backend", "vllm", "--output", work / "seen_states",
         "--dtype", "float32", "--validate-outputs", "--", "--enforce-eager", "--distributed-executor-backend", "uni",
         )  # fmt: skip
    must("train", "--verifier-name-or-path", verifier, "--data-path", work / "seen_rows", "--hidden-states-path",
         work / "seen_states", "--save-path", work / "drafter", "--num-layers", 1, "--num-depths", DEPTH,
         "--max-steps", 160, "--epochs", 160, "--total-seq-len", 1024, "--lr", "2e-3",
         "--optimizer", "muon", "--scheduler-type", "cosine", "--depth-loss-decay", 1)  # fmt: skip
    return work / "drafter" / "checkpoint_last"  # learnt by heart, which validation would not call best


@pytest.fixture(scope="module")
def prompts(verifier: Path) -> list[list[int]]:
    seen = question_prompts(verifier, embedded.TRAIN_QUESTIONS, SEEN)
    return seen + question_prompts(verifier, embedded.TEST_QUESTIONS, NUM_PROMPTS - SEEN)


@pytest.fixture(scope="module")
def decoding(engines: Engines, verifier: Path, drafter: Path, prompts: list[list[int]], work: Path) -> Decoding:
    return compare_decoding(engines, verifier, drafter, prompts, NEW_TOKENS, DEPTH, work / "decoding")


def test_every_greedy_answer_is_the_verifiers_own_one_at_a_time_and_eight_at_a_time(decoding: Decoding) -> None:
    assert decoding.answers == NUM_PROMPTS
    assert decoding.identical == decoding.answers


def test_deep_positions_are_really_accepted(decoding: Decoding) -> None:
    assert decoding.accepted[DEPTH - 1] > 10, decoding


def test_acceptance_counts_are_those_of_replay_on_the_same_answers_and_of_our_engine(decoding: Decoding) -> None:
    assert decoding.counts_equal, decoding


def test_draft_tokens_are_those_of_our_engine(decoding: Decoding) -> None:
    assert decoding.draft_tokens_equal, decoding


def test_sampling_has_the_verifiers_distribution(engines: Engines, verifier: Path, drafter: Path, prompts: Any) -> None:
    sampled = compare_sampling(engines, verifier, drafter, prompts[0], 2000, DEPTH)
    assert sampled.p_value > 0.001
    assert sampled.control_p_value > 0.001
    # vLLM 0.32's CPU kernel alone is excused: where it is right, nothing is put right.
    assert sampled.was_repaired == (sampled.temperatures_as_shipped != [1.0] * 8)


def test_the_check_finds_nothing_with_the_installed_vllm(drafter: Path) -> None:
    found = check_checkpoint(CheckConfig(checkpoint=str(drafter)), engine_here())
    assert found.of("error") == []


def test_plain_vllm_serve_of_the_checkpoint_drafts_too(
    engines: Engines, verifier: Path, drafter: Path, prompts: list[list[int]]
) -> None:
    eos = load_verifier_config(str(verifier), False).eos_token_ids
    task = greedy_task(prompts[:6], 32, eos, True)
    (alone,) = engines.generate(drafter, None, [task], False)
    (named,) = engines.generate(verifier, speculative(drafter, DEPTH), [task], False)
    assert alone["num_drafts"] > 0
    assert {key: alone[key] for key in ("answers", "num_drafts", "accepted")} == {
        key: named[key] for key in ("answers", "num_drafts", "accepted")
    }


@pytest.fixture(scope="module")
def served(drafter: Path, work: Path) -> Iterator[str]:
    with server(["serve", str(drafter), "--", "--max-num-seqs", "8"], work / "serve.log") as (_, url):
        yield url


def test_the_counters_of_a_served_drafter_are_those_of_our_engine(
    served: str, verifier: Path, drafter: Path, prompts: list[list[int]]
) -> None:
    verifier_config = load_verifier_config(str(verifier), False)
    some = prompts[:12]
    settings = GenerationSettings(
        max_new_tokens=32, eos_ids=verifier_config.eos_token_ids, temperature=0.0, top_p=1.0, tail_tokens=0
    )
    servers = ServerSettings(
        endpoint=(served,), concurrency=4, request_timeout_s=120.0, max_retries=2, restart_wait_s=5.0
    )
    measured = ServedDrafter(verifier_config, settings, servers)
    run = measured.run([Prompt(str(i), ids, 0) for i, ids in enumerate(some)])
    measured.close()
    ours = our_passes(verifier, drafter, some, 32, DEPTH, verifier_config.eos_token_ids)
    accepted = [sum(one.num_accepted > k for passes in ours for one in passes) for k in range(DEPTH)]
    assert run.counts.num_drafts == sum(map(len, ours))
    assert list(run.counts.accepted_per_position) == accepted
    assert not run.refused


def test_a_server_without_the_connector_is_refused(served: str, verifier: Path, work: Path, tmp_path: Path) -> None:
    said = peagle("extract", "--preprocessed-data", work / "seen_rows", "--endpoint", served, "--output",
                  tmp_path / "out")  # fmt: skip
    assert said.returncode == 2
    assert "runs without peagle's hidden-states connector" in said.stderr.splitlines()[-1]


VARIANTS: dict[str, dict[str, Any]] = {
    "llama layers, pruned vocabulary": {"layer_type": "llama", "draft_vocab_size": 300},
    "llama layers, four aux layers, normed before fc": {
        "layer_type": "llama", "aux_layer_ids": (1, 3, 5, 7), "norm_before_fc": True,
    },
    "qwen3 layers, two aux layers, normed residual": {
        "layer_type": "qwen3", "aux_layer_ids": (2, 6), "norm_before_residual": True, "norm_before_fc": True,
    },
    "eagle3": {"layer_type": "llama", "speculators_model_type": "eagle3", "mask_token_id": None},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_checkpoint_drafts_as_in_our_engine(
    engines: Engines, verifier: Path, prompts: list[list[int]], tmp_path: Path, variant: str
) -> None:
    verifier_config = load_verifier_config(str(verifier), False)
    settings: dict[str, Any] = {
        "speculators_model_type": "peagle",
        "num_layers": 2,
        "intermediate_size": None,
        "num_speculative_tokens": 3,
        "aux_layer_ids": (2, 4, 5),
        "draft_vocab_size": None,
        "mask_token_id": verifier_config.vocab_size - 1,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "norm_output": False,
    }
    config = config_for(verifier_config, **(settings | VARIANTS[variant]))
    torch.manual_seed(0)
    made = Drafter(config)
    state = made.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if tensor.is_floating_point() and name != "embed_tokens.weight":
                tensor.copy_(
                    1.0 + 0.1 * torch.randn(tensor.shape) if "norm" in name else 0.08 * torch.randn(tensor.shape)
                )
        state["embed_tokens.weight"].copy_(load_embedding(verifier_config))
        if config.is_pruned:
            kept = torch.randperm(verifier_config.vocab_size)[: config.draft_vocab_size].sort().values
            state["d2t"].copy_(kept - torch.arange(config.draft_vocab_size))
            state["t2d"].zero_()
            state["t2d"][kept] = True
            state["lm_head.weight"].copy_(load_head(verifier_config).weight[kept])
        else:
            state["lm_head.weight"].copy_(load_head(verifier_config).weight)
    drafter_checkpoint.save(made, tmp_path / "d", "float32")
    found = check_checkpoint(CheckConfig(checkpoint=str(tmp_path / "d")), engine_here())
    assert found.of("error") == []
    some, eos = prompts[:6], verifier_config.eos_token_ids
    method = {} if "speculators_model_type" in VARIANTS[variant] else {"parallel_drafting": True}
    spec = {"model": str(tmp_path / "d"), "method": "eagle3", "num_speculative_tokens": 3, **method}
    (theirs,) = engines.generate(verifier, spec, [greedy_task(some, 16, eos, True)], True)
    ours = our_passes(verifier, tmp_path / "d", some, 16, 3, eos)
    assert theirs["num_drafts"] == sum(map(len, ours))
    for prompt, passes, drafts, answer in zip(some, ours, theirs["drafts"], theirs["answers"]):
        compared, equal, ties = compare_drafts(verifier, tmp_path / "d", [*prompt, *answer], passes, drafts)
        assert equal + ties == compared, json.dumps({"ours": [p.draft_ids for p in passes], "theirs": drafts})
