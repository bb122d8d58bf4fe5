"""Two tensor-parallel ranks, and two data-parallel engines: the same states, no file twice, counters added up."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch

from peagle.config import ServerSettings
from peagle.data.records import TokenRow
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.drafter.model_config import config_for
from peagle.drafter.network import Drafter
from peagle.evaluate.served import ServedDrafter
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config, resolve_aux_layer_ids
from peagle.verifier.source import GenerationSettings, Prompt, RowStates
from peagle.verifier.weights import load_embedding, load_head
from peagle.vllm.states import EndpointSource
from tests.vllm.support.decoding import our_passes
from tests.vllm.support.engines import server
from tests.vllm.support.states import mixed_rows, toy, worst_error

DEPTH = 3


def servers(url: str, concurrency: int) -> ServerSettings:
    return ServerSettings(
        endpoint=(url,), concurrency=concurrency, request_timeout_s=120.0, max_retries=2, restart_wait_s=5.0
    )


@pytest.mark.parametrize(("flag", "num_writers"), [("--tensor-parallel-size", 1), ("--data-parallel-size", 2)])
def test_states_are_transformers_and_each_file_has_one_writer(work: Path, flag: str, num_writers: int) -> None:
    name = flag.strip("-")
    model, shared, log = toy("llama", work / "toys"), work / f"{name}-shared", work / f"{name}.log"
    verifier_config = load_verifier_config(str(model), False)
    aux = resolve_aux_layer_ids(verifier_config.num_layers, None)
    ids = mixed_rows(48, 260, 300, 1)
    rows = [
        TokenRow(
            row_id=str(i), source="x", input_ids=row, loss_mask=[1] * len(row), next_is_supervised=False, tail_length=0
        )
        for i, row in enumerate(ids)
    ]
    arguments = [
        "launch-vllm",
        str(model),
        "--hidden-states-path",
        str(shared),
        "--",
        "--max-num-batched-tokens",
        "128",
    ]
    with server([*arguments, flag, "2"], log, several=True) as (_, url):
        source = EndpointSource(
            verifier=verifier_config,
            aux_layer_ids=aux,
            dtype="float32",
            servers=servers(url, 16),
            hidden_states_path=shared,
            store="parallel",
            check_all_positions=False,
        )
        found = {one.row_id: one for one in source.states(rows, {row.row_id for row in rows})}
        source.close()
        metrics = httpx.get(f"{url}/metrics", timeout=10).text
    served = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("vllm:prompt_tokens_total{")]
    assert len(served) == num_writers
    assert min(served) > 100  # the engines shared the work
    worst = 0.0
    for i, (expected_aux, expected_last) in enumerate(
        TransformersVerifier(verifier_config, "float32", "cpu").states(ids, aux)
    ):
        one = found[str(i)]
        assert isinstance(one, RowStates)
        worst = max(worst, worst_error(one.aux_states, expected_aux, verifier_config.hidden_size))
        worst = max(worst, worst_error(one.last_states, expected_last, verifier_config.hidden_size))
    assert worst < 1e-5
    assert log.read_text(errors="replace").count("are written to") == num_writers
    assert list((shared / "in-flight").iterdir()) == []


def test_counters_of_two_engines_add_up_to_what_our_engine_counts(work: Path, tmp_path: Path) -> None:
    model = toy("llama", work / "toys")
    verifier_config = load_verifier_config(str(model), False)
    torch.manual_seed(0)
    made = Drafter(
        config_for(
            verifier_config, speculators_model_type="peagle", layer_type="llama", num_layers=1, intermediate_size=None,
            num_speculative_tokens=DEPTH, aux_layer_ids=resolve_aux_layer_ids(verifier_config.num_layers, None),
            draft_vocab_size=None, mask_token_id=verifier_config.vocab_size - 1, norm_before_residual=False,
            norm_before_fc=False, norm_output=False,
        )
    )  # fmt: skip
    with torch.no_grad():
        made.state_dict()["embed_tokens.weight"].copy_(load_embedding(verifier_config))
        made.state_dict()["lm_head.weight"].copy_(load_head(verifier_config).weight)
    drafter_checkpoint.save(made, tmp_path / "drafter", "float32")
    prompts = [row for row in mixed_rows(24, 260, 60, 3) if len(row) > 1]
    arguments = ["serve", str(tmp_path / "drafter"), "--", "--data-parallel-size", "2"]
    with server(arguments, work / "dp-serve.log", several=True) as (_, url):
        settings = GenerationSettings(
            max_new_tokens=24, eos_ids=verifier_config.eos_token_ids, temperature=0.0, top_p=1.0, tail_tokens=0
        )
        measured = ServedDrafter(verifier_config, settings, servers(url, 8))
        run = measured.run([Prompt(str(i), ids, 0) for i, ids in enumerate(prompts)])
        measured.close()
        metrics = httpx.get(f"{url}/metrics", timeout=10).text
    drafts = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_drafts_total{")]
    assert len(drafts) == 2
    assert all(float(line.split()[-1]) > 0 for line in drafts)
    ours = our_passes(model, tmp_path / "drafter", prompts, 24, DEPTH, verifier_config.eos_token_ids)
    assert run.counts.num_drafts == sum(map(len, ours))
    assert list(run.counts.accepted_per_position) == [
        sum(one.num_accepted > k for passes in ours for one in passes) for k in range(DEPTH)
    ]
