"""Regenerate and extract through a real server that is killed with -9 on the way."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from peagle import embedded
from peagle.cli.main import main
from peagle.config import ServerSettings
from peagle.errors import EndpointError
from peagle.hidden_states.store import StoreReader
from peagle.verifier.model_config import load_verifier_config
from peagle.vllm import states as states_module
from peagle.vllm.states import EndpointSource
from tests.fakes import random_row
from tests.vllm.fake_vllm import FakeServer
from tests.vllm.real.conftest import questions
from tests.vllm.support.commands import Servers, begin, must, records, when
from tests.vllm.support.engines import free_port
from tests.vllm.support.states import worst_error

PROMPTS, NEW_TOKENS, ROWS = 100, 48, 150


@dataclass(frozen=True)
class Runs:
    """What the commands left behind."""

    work: Path
    verifier: Path
    url: str
    """A living server with the connector."""
    said: dict[str, str]
    """Standard error of each run, by a name; exit statuses and counts beside them."""


@pytest.fixture(scope="module")
def runs(verifier: Path, work: Path) -> Iterator[Runs]:
    """Regenerate and extract at the same server, which is killed under both; then the same undisturbed.

    Regenerate is set to give up soon and is run again; extract waits for the server to come back.
    """
    servers = Servers(verifier, work)
    data = questions(embedded.TRAIN_QUESTIONS, PROMPTS, work / "prompts.jsonl")
    must("prepare", "--model", verifier, "--data", embedded.TRAIN_QUESTIONS, "--max-samples", ROWS,
         "--output", work / "rows", "--seq-length", 1024)  # fmt: skip
    regenerate = ["regenerate", "--model", verifier, "--data", data, "--endpoint", servers.url,
                  "--max-new-tokens", NEW_TOKENS, "--tail-tokens", 4, "--dtype", "float32"]  # fmt: skip
    extract = ["extract", "--preprocessed-data", work / "rows", "--endpoint", servers.url, "--concurrency", 4,
               "--hidden-states-path", work / "shared", "--validate-outputs", "--dtype", "float32", "--shard-mb", 1,
               "--restart-wait-s", 1500]  # fmt: skip
    said = {}
    servers.start()
    try:
        # One answer at a time, so that there are some left when extraction has begun.
        answering = begin(*regenerate, "--output", work / "answers.jsonl", "--restart-wait-s", 1, "--concurrency", 1)
        when(lambda: len(records(work / "answers.jsonl")) >= 8, 600)
        extracting = begin(*extract, "--output", work / "states")
        when(lambda: any((work / "states").glob("*.safetensors")), 600)
        servers.kill()
        said["killed regenerate"] = answering.communicate(timeout=600)[1]
        said["killed regenerate status"] = str(answering.returncode)
        said["killed regenerate answers"] = str(len(records(work / "answers.jsonl")))
        servers.start()
        said["survived extract"] = extracting.communicate(timeout=1500)[1]
        said["survived extract status"] = str(extracting.returncode)
        said["resumed regenerate"] = must(*regenerate, "--output", work / "answers.jsonl")
        must(*regenerate, "--output", work / "undisturbed.jsonl")
        must(*regenerate, "--output", work / "chats.jsonl", "--chat")
        must(*extract, "--output", work / "undisturbed")
        yield Runs(work, verifier, servers.url, said)
    finally:
        servers.stop()


def test_regenerate_stops_clearly_when_its_server_is_killed_and_goes_on_afterwards(runs: Runs) -> None:
    assert runs.said["killed regenerate status"] == "2"
    assert "run the same command to go on" in runs.said["killed regenerate"].splitlines()[-1]
    kept = int(runs.said["killed regenerate answers"])
    assert 8 <= kept < PROMPTS
    assert f"{kept} were there" in runs.said["resumed regenerate"]


def test_killed_and_undisturbed_answers_are_the_same(runs: Runs) -> None:
    once, again = records(runs.work / "answers.jsonl"), records(runs.work / "undisturbed.jsonl")
    assert [record["id"] for record in once] == [record["id"] for record in again]
    assert len(once) == PROMPTS
    assert once == again


def test_chats_that_the_server_renders_are_the_prompts_that_we_render(runs: Runs) -> None:
    chats = records(runs.work / "chats.jsonl")
    assert len(chats) == PROMPTS
    assert chats == records(runs.work / "undisturbed.jsonl")


def test_answers_are_the_verifiers_own_and_what_the_limit_cut_is_marked(runs: Runs) -> None:
    from peagle.regenerate.answers import EngineAnswers
    from peagle.verifier.local import TransformersVerifier
    from peagle.verifier.source import GenerationSettings, Prompt

    verifier_config = load_verifier_config(str(runs.verifier), False)
    made = records(runs.work / "answers.jsonl")[:6]
    settings = GenerationSettings(
        max_new_tokens=NEW_TOKENS, eos_ids=verifier_config.eos_token_ids, temperature=0.0, top_p=1.0, tail_tokens=4
    )
    prompts = [[i for i, m in zip(r["input_ids"], r["loss_mask"]) if not m][: r["loss_mask"].index(1)] for r in made]
    ours = EngineAnswers(TransformersVerifier(verifier_config, "float32", "cpu"), settings, 6)
    rows = {str(place): Prompt(str(place), ids, 0) for place, ids in enumerate(prompts)}
    for answer in ours.answers(list(rows.values()), rows.keys()):
        record, generation = made[int(answer.row_id)], answer.generation
        assert record["input_ids"] == [*rows[answer.row_id].input_ids, *generation.ids, *generation.tail_ids]
        assert record["finish_reason"] == generation.finish_reason
        assert record["tail_length"] == len(generation.tail_ids)
    assert {record["finish_reason"] for record in records(runs.work / "answers.jsonl")} <= {"stop", "length"}


def test_several_turns_and_tools_give_what_transformers_gives_and_another_template_is_named(
    runs: Runs, tmp_path: Path
) -> None:
    asked = [json.loads(line)["prompt"] for line in (runs.work / "prompts.jsonl").read_text().splitlines()[:4]]
    reply = {"role": "assistant", "content": "not the verifier's"}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    lines = [
        {"messages": [{"role": "user", "content": asked[0]}, reply, {"role": "user", "content": asked[1]}]},
        {"messages": [{"role": "user", "content": asked[2]}, reply, {"role": "user", "content": asked[3]}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked[1]}]},
    ]
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "tools.jsonl").write_text(json.dumps({**lines[2], "tools": [tool]}) + "\n")
    own = (runs.verifier / "chat_template.jinja").read_text()
    (tmp_path / "tools.jinja").write_text("{%- if tools -%}{{ tools | tojson }}{%- endif -%}" + own)
    for name, more, num_answers in (("turns", [], 5), ("tools", ["--chat-template", tmp_path / "tools.jinja"], 1)):
        regenerate = ["regenerate", "--model", runs.verifier, "--data", tmp_path / f"{name}.jsonl",
                      "--dtype", "float32", "--max-new-tokens", 300, *more]  # fmt: skip
        served = must(*regenerate, "--endpoint", runs.url, "--output", tmp_path / f"{name}-served.jsonl")
        must(*regenerate, "--output", tmp_path / f"{name}-here.jsonl")
        found = records(tmp_path / f"{name}-served.jsonl")
        assert len(found) == num_answers
        assert found == records(tmp_path / f"{name}-here.jsonl")
        assert ("otherwise than the template in use here" in " ".join(served.split())) == (name == "tools")


def test_extract_survives_a_killed_and_restarted_server(runs: Runs) -> None:
    assert runs.said["survived extract status"] == "0", runs.said["survived extract"][-1500:]
    assert "connection lost" in runs.said["survived extract"]
    once, again = StoreReader.open(runs.work / "states"), StoreReader.open(runs.work / "undisturbed")
    assert sorted(once.row_ids) == sorted(again.row_ids)
    assert len(once) == ROWS
    for row_id in once.row_ids:
        a, b = once.read(row_id), again.read(row_id)
        assert a.row == b.row
        assert torch.equal(a.label_pos, b.label_pos)
        # Another batch, other rounding: a token's whole state is compared, as a number near 0 has no digits to spare.
        assert worst_error(a.aux_states, b.aux_states, a.last_states.shape[1]) < 1e-5
        assert worst_error(a.last_states, b.last_states, a.last_states.shape[1]) < 1e-5


def test_no_file_stays_behind(runs: Runs) -> None:
    assert list((runs.work / "shared" / "in-flight").iterdir()) == []


def source(runs: Runs, aux: tuple[int, ...] = (2, 4, 5), folder: Path | None = None) -> EndpointSource:
    return EndpointSource(
        verifier=load_verifier_config(str(runs.verifier), False),
        aux_layer_ids=aux,
        dtype="float32",
        servers=ServerSettings(
            endpoint=(runs.url,), concurrency=4, request_timeout_s=60.0, max_retries=2, restart_wait_s=5.0
        ),
        hidden_states_path=folder or runs.work / "shared",
        store="tests",
        check_all_positions=False,
    )


REFUSALS = {
    "wrong layers": r"hands out layers \[2, 4, 5, 8\], wanted are \[1, 4, 5, 8\]; start it with --target-layer-ids 1 4",
    "folder not shared": "its files are not seen here.*both must see one folder",
    "another model": "serves another model, .* whose hidden_size is 192",
    "another model of that size": "not .*/other; if these are the same weights, say so with --served",
    "unreachable": "nobody answers there; start a server",
    "not ready": r"not ready \(503\); wait until the model is loaded",
    "no vLLM": "no list of models there .* is it a vLLM server",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_extract_refuses_in_one_line_what_cannot_work(
    runs: Runs, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.fakes import tiny_verifier

    rows, url, shared, more = runs.work / "rows", runs.url, runs.work / "shared", []
    fake = FakeServer(tmp_path)
    fake.health = 503 if case == "not ready" else 418
    if case == "wrong layers":
        more = ["--target-layer-ids", 1, 4, 5]
    if case == "folder not shared":
        shared = tmp_path / "elsewhere"
    if case.startswith("another model"):
        if case.endswith("size"):
            shutil.copytree(runs.verifier, tmp_path / "other")
        else:
            tiny_verifier(tmp_path / "other")
        data, rows = tmp_path / "data.jsonl", tmp_path / "rows"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        data.write_text(json.dumps({"messages": turns}) + "\n")
        must("prepare", "--model", tmp_path / "other", "--data", data, "--output", rows)
    if case == "unreachable":
        url = f"http://127.0.0.1:{free_port()}"
    if case in ("not ready", "no vLLM"):
        url = fake.url
    extract = ["extract", "--preprocessed-data", rows, "--endpoint", url, "--output", tmp_path / "out",
               "--dtype", "float32", "--max-samples", 2, *more]  # fmt: skip
    refused_in_one_line([*extract, "--hidden-states-path", shared], REFUSALS[case], capsys)
    fake.close()
    assert not list((tmp_path / "out").glob("*.safetensors"))
    if case == "folder not shared":  # the right folder puts it right, and takes what the server had written away
        must(*extract, "--hidden-states-path", runs.work / "shared")
        assert list((runs.work / "shared" / "in-flight").iterdir()) == []


@pytest.mark.parametrize("case", ["another model", "unreachable", "not ready", "no vLLM"])
def test_regenerate_refuses_in_one_line_what_cannot_work(
    runs: Runs, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.fakes import tiny_verifier

    fake = FakeServer(tmp_path)
    fake.health = 503 if case == "not ready" else 418
    model = tiny_verifier(tmp_path / "other") if case == "another model" else runs.verifier
    url = {"another model": runs.url, "unreachable": f"http://127.0.0.1:{free_port()}"}.get(case, fake.url)
    regenerate = ["regenerate", "--model", model, "--data", runs.work / "prompts.jsonl", "--endpoint", url,
                  "--output", tmp_path / "answers.jsonl"]  # fmt: skip
    expected = {**REFUSALS, "another model": "serves .*, not .*other; if these are the same"}[case]
    refused_in_one_line(regenerate, expected, capsys)
    fake.close()
    assert not (tmp_path / "answers.jsonl").read_text()


def refused_in_one_line(arguments: list[object], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command in this process (starting one takes longer than the refusal)."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not line.startswith("INFO ")]
    assert len(lines) == 1, said.err
    assert re.match(f"peagle: error: .*{expected}", lines[0]), lines[0]


def test_unsafe_names_write_nothing_and_say_why(runs: Runs) -> None:
    payload = {"model": str(runs.verifier), "prompt": [5, 6, 7], "max_tokens": 1}
    for name in ("../escaped", "/tmp/escaped", "a/b", ".hidden", 5):
        answer = httpx.post(
            f"{runs.url}/v1/completions",
            json={**payload, "kv_transfer_params": {"hidden_states_name": name}},
            timeout=60,
        ).json()
        assert "only letters, digits" in answer["kv_transfer_params"]["hidden_states_error"]
    assert not list(runs.work.rglob("*escaped*"))


def test_requests_that_ask_for_no_states_write_none(runs: Runs) -> None:
    payload = {"model": str(runs.verifier), "prompt": [5, 6, 7], "max_tokens": 1}
    answer = httpx.post(f"{runs.url}/v1/completions", json=payload, timeout=60).json()
    assert not answer.get("kv_transfer_params")
    assert list((runs.work / "shared" / "in-flight").iterdir()) == []


def test_an_aborted_request_leaves_no_file_and_a_healthy_server(runs: Runs) -> None:
    payload = {
        "model": str(runs.verifier),
        "prompt": [5] * 300,
        "max_tokens": 1500,
        "ignore_eos": True,
        "kv_transfer_params": {"hidden_states_name": "aborted"},
    }
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{runs.url}/v1/completions", json=payload, timeout=1.5)
    src = source(runs)
    (found,) = src.states([random_row("a", 20, 4, 1000, 0)], {"a"})
    assert found.row_id == "a"
    when(lambda: list((runs.work / "shared" / "in-flight").iterdir()) == [], 20)
    src.close()


def test_a_write_that_fails_reaches_the_client(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "_FILE_WAIT_S", 2.0)
    src = source(runs)
    folder = runs.work / "shared" / "in-flight"
    folder.rmdir()  # neither the file nor its note can be written: only later answers can tell
    rows = [random_row(f"r{i}", 20, 4, 1000, i) for i in range(3)]
    with pytest.raises(EndpointError, match=r"did not appear|could not write"):
        list(src.states(rows, {row.row_id for row in rows}))
    folder.mkdir()
    src.close()
    src = source(runs)
    assert len(list(src.states(rows, {row.row_id for row in rows}))) == 3
    src.close()


def test_a_row_at_the_limit_is_served_and_one_past_it_is_named_before_the_run(runs: Runs, tmp_path: Path) -> None:
    src = source(runs)
    limit = src.max_tokens
    (found,) = src.states([random_row("a", limit, 4, 1000, 0)], {"a"})
    assert found.row_id == "a"
    assert not hasattr(found, "reason")
    src.close()
    longer = [i % 1000 + 3 for i in range(limit + 1)]
    line = {"id": "long", "input_ids": longer, "loss_mask": [0] * 4 + [1] * (limit - 3)}
    short = {"id": "short", "input_ids": longer[:50], "loss_mask": [0] * 4 + [1] * 46}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(short) + "\n")
    must(
        "prepare", "--model", runs.verifier, "--data", tmp_path / "rows.jsonl", "--output", tmp_path / "rows",
        "--seq-length", limit + 10,
    )  # fmt: skip
    said = must(
        "extract", "--preprocessed-data", tmp_path / "rows", "--endpoint", runs.url,
        "--hidden-states-path", runs.work / "shared", "--output", tmp_path / "out",
    )  # fmt: skip
    assert f"row long skipped: longer than the verifier takes ({limit} tokens)" in said
    assert "dropped 1" in said
