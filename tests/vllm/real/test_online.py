"""Training that asks a real vLLM for its states: the same losses in each mode, a server killed on the way, EAGLE-3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from peagle import embedded
from peagle.hidden_states.store import StoreReader
from peagle.verifier.model_config import load_verifier_config
from tests.vllm.real.conftest import questions
from tests.vllm.support.commands import Servers, begin, must, records, when
from tests.vllm.support.decoding import our_passes, question_prompts
from tests.vllm.support.engines import Engines, greedy_task

NUM_QUESTIONS, NEW_TOKENS, STEPS = 14, 48, 3


@dataclass
class Online:
    """What the runs left behind."""

    work: Path
    losses: dict[str, list[float]]
    said: dict[str, str]
    status: int


def losses(save_path: Path) -> list[float]:
    return [line["loss"] for line in records(save_path / "metrics.jsonl")]


@pytest.fixture(scope="module")
def online(verifier: Path, work: Path) -> Iterator[Online]:
    """One server: extraction, then a run in each mode, one whose server is killed, and EAGLE-3."""
    servers = Servers(verifier, work)
    try:
        servers.start()
        yield the_runs(servers, verifier, work)
    finally:
        servers.stop()


def the_runs(servers: Servers, verifier: Path, work: Path) -> Online:
    """The commands."""
    data = questions(embedded.TRAIN_QUESTIONS, NUM_QUESTIONS, work / "online.jsonl")
    must("regenerate", "--model", verifier, "--data", data, "--output", work / "online_answers.jsonl",
         "--max-new-tokens", NEW_TOKENS, "--dtype", "float32")  # fmt: skip
    rows = work / "online_rows"
    must("prepare", "--model", verifier, "--data", work / "online_answers.jsonl", "--output", rows,
         "--seq-length", 1024)  # fmt: skip
    must("extract", "--preprocessed-data", rows, "--endpoint", servers.url, "--output", work / "offline_states",
         "--hidden-states-path", work / "shared", "--dtype", "float32")  # fmt: skip
    plain = ["train", "--verifier-name-or-path", verifier, "--data-path", rows, "--num-layers", 1, "--epochs", 3,
             "--total-seq-len", 512, "--optimizer", "adamw", "--lr", "3e-4",
             "--scheduler-type", "cosine", "--train-data-ratio", 0.9]  # fmt: skip
    served = ["--endpoint", servers.url, "--hidden-states-path", work / "shared", "--hidden-states-dtype", "float32",
              "--concurrency", 4, "--restart-wait-s", 1, "--max-retries", 1]  # fmt: skip
    said, found = {}, {}
    for mode in ("offline", "online", "hybrid"):
        more = ["--hidden-states-path", work / "offline_states"] if mode == "offline" else served
        said[mode] = must(*plain, *more, "--hidden-states", mode, "--save-path", work / mode)
        found[mode] = losses(work / mode)
        if mode == "hybrid":
            found["rows"] = [float(len(StoreReader.open(work / "shared")))]
    killed = [*plain, *served, "--hidden-states", "online", "--save-path", work / "killed"]
    running = begin(*killed)
    when(lambda: len(records(work / "killed" / "metrics.jsonl")) >= 2, 300)
    servers.kill()
    said["killed"] = running.communicate(timeout=300)[1]
    found["until killed"] = losses(work / "killed")
    servers.start()
    said["resumed"] = must(*killed)
    found["resumed"] = losses(work / "killed")
    said["eagle3"] = must(*plain, *served, "--hidden-states", "online", "--save-path", work / "eagle3",
                          "--speculator-type", "eagle3", "--ttt-steps", STEPS)  # fmt: skip
    return Online(work, found, said, running.returncode)


def test_offline_online_and_hybrid_give_the_same_losses(online: Online) -> None:
    assert len(online.losses["offline"]) > 6
    # The server forms other batches each time, so that states, and what follows from them, differ by float32 rounding.
    for mode in ("online", "hybrid"):
        assert online.losses[mode] == pytest.approx(online.losses["offline"], rel=2e-3)
    assert online.losses["online"][0] == pytest.approx(online.losses["offline"][0], rel=1e-5)


def test_hybrid_fills_the_store_and_online_leaves_nothing_behind(online: Online) -> None:
    assert online.losses["rows"] == [len(StoreReader.open(online.work / "offline_states"))]
    assert list((online.work / "shared" / "in-flight").iterdir()) == []


def test_a_killed_server_stops_the_run_clearly_and_the_same_command_goes_on_at_the_same_step(online: Online) -> None:
    assert online.status == 2
    assert "gone for 1 s" in online.said["killed"].splitlines()[-1]
    so_far = len(online.losses["until killed"])
    assert 2 <= so_far < len(online.losses["online"])
    assert "resumed from" in online.said["resumed"]
    assert "interrupted" in online.said["resumed"]
    assert online.losses["resumed"] == pytest.approx(online.losses["online"], rel=2e-3)


def test_an_eagle3_drafter_trained_online_drafts_in_vllm_as_in_our_engine_and_loses_nothing(
    online: Online, engines: Engines, verifier: Path
) -> None:
    checkpoint = online.work / "eagle3" / "checkpoint_last"
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    eos = load_verifier_config(str(verifier), False).eos_token_ids
    prompts = question_prompts(verifier, embedded.TRAIN_QUESTIONS, 8) + question_prompts(
        verifier, embedded.TEST_QUESTIONS, 8
    )
    tasks = [greedy_task(prompts, 40, eos, one) for one in (True, False)]
    plain = engines.generate(verifier, None, tasks, False)
    settings = {"model": str(checkpoint), "method": "eagle3", "num_speculative_tokens": STEPS}
    drafted = engines.generate(verifier, settings, tasks, False)
    assert [task["answers"] for task in drafted] == [task["answers"] for task in plain]
    ours = our_passes(verifier, checkpoint, prompts, 40, STEPS, eos)
    accepted = [sum(one.num_accepted > k for passes in ours for one in passes) for k in range(STEPS)]
    assert drafted[0]["num_drafts"] == sum(map(len, ours))
    assert [int(n) for n in drafted[0]["accepted"]] == accepted
    assert accepted[0] > 0
