from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from peagle.config import ServerSettings
from peagle.data.records import TokenRow
from peagle.errors import DiskError, EndpointError
from peagle.verifier.model_config import VerifierConfig
from peagle.verifier.source import RowRefused, RowStates
from peagle.vllm.client import Endpoint, EndpointPool
from peagle.vllm.states import EndpointSource, states_request
from tests.vllm.fake_vllm import HIDDEN, LAYERS, VOCAB, FakeServer, states_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    fake = FakeServer(tmp_path / "shared")
    yield fake
    fake.close()


def verifier_config(name: str = "verifier") -> VerifierConfig:
    values = {field.name: None for field in dataclasses.fields(VerifierConfig)}
    values |= {"name_or_path": name, "num_layers": LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    return VerifierConfig(**(values | {"max_position_embeddings": 512}))


def rows(*lengths: int) -> list[TokenRow]:
    return [
        TokenRow(
            row_id=f"row-{i}",
            source="x",
            input_ids=[(7 * i + k) % VOCAB for k in range(length)],
            loss_mask=[1] * length,
            next_is_supervised=False,
            tail_length=0,
        )
        for i, length in enumerate(lengths)
    ]


def waits(timeout_s: float, max_retries: int, restart_wait_s: float) -> dict[str, Any]:
    return {"request_timeout_s": timeout_s, "max_retries": max_retries, "restart_wait_s": restart_wait_s}


def source(
    server: FakeServer,
    *more: FakeServer,
    policy: dict[str, Any] | None = None,
    concurrency: int = 4,
    folder: Path | None = None,
    name: str = "verifier",
    aux: tuple[int, ...] = (2, 4, 5),
    check: bool = False,
) -> EndpointSource:
    urls = tuple(fake.url for fake in (server, *more))
    return EndpointSource(
        verifier=verifier_config(name),
        aux_layer_ids=aux,
        dtype="float32",
        servers=ServerSettings(endpoint=urls, concurrency=concurrency, **(policy or waits(10.0, 3, 1.0))),
        hidden_states_path=folder or server.folder.parent,
        store="store",
        check_all_positions=check,
    )


def run(src: EndpointSource, wanted: list[TokenRow]) -> dict[str, RowStates | RowRefused]:
    found = {result.row_id: result for result in src.states(wanted, {row.row_id for row in wanted})}
    src.close()
    return found


def assert_right(row: TokenRow, result: RowStates | RowRefused) -> None:
    assert isinstance(result, RowStates), result
    expected = states_of(row.input_ids, 4)
    assert result.input_ids == row.input_ids
    assert torch.equal(result.aux_states, expected[:, :3].flatten(1))
    assert torch.equal(result.last_states, expected[:, 3])


def test_H02_every_row_gets_its_own_states_whatever_the_order_of_answers(server: FakeServer) -> None:
    def slow(fake: FakeServer, number: int, payload: dict) -> None:
        time.sleep(0.02 * (number % 3))

    server.fault = slow
    job = rows(*range(5, 61, 3))
    found = run(source(server), job)
    for row in job:
        assert_right(row, found[row.row_id])
    assert server.most_open > 1
    assert list(server.folder.iterdir()) == []


def test_only_wanted_rows_are_asked_for(server: FakeServer) -> None:
    job = rows(5, 6, 7)
    src = source(server)
    assert [r.row_id for r in src.states(job, {"row-1"})] == ["row-1"]
    assert server.rows() == [job[1].input_ids]
    src.close()


def test_layers_are_picked_in_ascending_order_from_a_server_that_hands_out_more(server: FakeServer) -> None:
    server.layer_ids = [1, 2, 4, 5, 8]
    (result,) = run(source(server, aux=(2, 5)), rows(6)).values()
    expected = states_of(rows(6)[0].input_ids, 5)
    assert isinstance(result, RowStates)
    assert torch.equal(result.aux_states, expected[:, [1, 3]].flatten(1))
    assert torch.equal(result.last_states, expected[:, 4])


def test_the_last_position_of_every_row_is_checked_and_the_first_row_at_all(server: FakeServer) -> None:
    job = rows(6, 5)
    found = run(source(server, concurrency=1), job)
    first, second = found["row-0"], found["row-1"]
    assert isinstance(first, RowStates)
    assert isinstance(second, RowStates)
    assert first.choice_pos == [0, 1, 2, 3, 4, 5]
    assert first.choice_ids == [sum(job[0].input_ids[: i + 1]) % VOCAB for i in range(6)]
    assert (second.choice_pos, second.choice_ids) == ([4], [sum(job[1].input_ids) % VOCAB])
    assert all(request["temperature"] == 0 and request["repetition_penalty"] == 1.0 for request in server.requests)


def test_H01_fewer_states_than_ids_are_asked_for_again_and_never_returned(server: FakeServer) -> None:
    seen: list[int] = []

    def short_once(fake: FakeServer, name: str, ids: list[int]) -> None:
        seen.append(len(ids))
        keep = len(ids) - 2 if seen.count(7) == 1 and len(ids) == 7 else len(ids)
        fake.save(name, ids, states_of(ids, 4)[:keep])

    server.write = short_once
    job = rows(7)
    assert_right(job[0], run(source(server), job)["row-0"])
    assert seen.count(7) == 2


def test_H01_states_that_stay_short_are_refused(server: FakeServer) -> None:
    server.write = lambda fake, name, ids: fake.save(name, ids, states_of(ids, 4)[: len(ids) - (len(ids) > 3)])
    result = run(source(server), rows(7))["row-0"]
    assert isinstance(result, RowRefused)
    assert "6 states for 7 ids" in result.detail


def test_H04_a_reader_never_sees_a_part_of_a_file(server: FakeServer) -> None:
    """The server answers first; half the file lies aside until the rest is written."""

    def late(fake: FakeServer, name: str, ids: list[int]) -> None:
        aside = fake.folder / f".{name}.tmp"
        tensors = {"hidden_states": states_of(ids, 4), "token_ids": torch.tensor(ids)}
        content = safetensors.torch.save(tensors, fake.metadata())
        aside.write_bytes(content[: len(content) // 2])

        def finish() -> None:
            aside.write_bytes(content)
            aside.rename(fake.folder / f"{name}.safetensors")

        threading.Timer(0.1, finish).start()

    server.write = late
    job = rows(9, 10, 11)
    found = run(source(server), job)
    for row in job:
        assert_right(row, found[row.row_id])


def test_H09_a_dying_server_stops_the_run_and_keeps_what_came(server: FakeServer) -> None:
    def dies(fake: FakeServer, number: int, payload: dict) -> tuple[int, dict] | None:
        if number >= 7:  # one probe, five rows
            threading.Thread(target=fake.close).start()
            return 500, {"message": "out of memory"}
        return None

    server.fault = dies
    src = source(server, concurrency=1, policy=waits(5.0, 8, 0.5))
    got: list[str] = []
    results = src.states(rows(*range(5, 15)), {f"row-{i}" for i in range(10)})
    with pytest.raises(EndpointError, match="same command"):
        got.extend(result.row_id for result in results)
    src.close()
    assert got == [f"row-{i}" for i in range(5)]
    assert list(server.folder.iterdir()) == []


def test_a_restarted_server_is_waited_for(tmp_path: Path) -> None:
    fake = FakeServer(tmp_path)
    src = source(fake, policy=waits(5.0, 3, 20.0), concurrency=2)
    job = rows(*range(5, 15))
    results = src.states(job, {row.row_id for row in job})
    found = {r.row_id: r for r in (next(results), next(results))}
    fake.close()
    later = threading.Timer(1.0, lambda: revived.append(FakeServer(tmp_path, port=fake.port)))
    revived: list[FakeServer] = []
    later.start()
    found |= {result.row_id: result for result in results}
    src.close()
    for row in job:
        assert_right(row, found[row.row_id])
    revived[0].close()


def test_a_connection_that_breaks_is_tried_again_but_not_for_ever(server: FakeServer) -> None:
    server.fault = lambda fake, number, payload: "drop" if number == 2 else None
    job = rows(5)
    assert_right(job[0], run(source(server), job)["row-0"])
    server.fault = lambda fake, number, payload: "drop" if payload["prompt"] != [0, 1, 0] else None
    with pytest.raises(EndpointError, match="connection was lost 5 times during one request"):
        run(source(server), job)


def test_H11_passing_answers_are_tried_again_and_refusals_are_not(server: FakeServer) -> None:
    job = rows(5, 6, 7, 8)
    answers = {5: iter([429, 503, None]), 6: iter([408, 425, 409, None]), 7: iter([400])}

    def fault(fake: FakeServer, number: int, payload: dict) -> tuple[int, dict] | None:
        status = next(answers.get(len(payload["prompt"]), iter([None])), None)
        return (status, {"error": {"message": "no"}}) if status else None

    server.fault = fault
    src = source(server)
    found = run(src, job)
    for i in (0, 1, 3):
        assert_right(job[i], found[f"row-{i}"])
    refused = found["row-2"]
    assert isinstance(refused, RowRefused)
    assert refused.reason == "refused by the server"
    assert "status 400: no" in refused.detail
    assert [len(ids) for ids in server.rows()].count(7) == 1
    assert len(server.rows()) == 4 + 5


def test_retries_are_bounded(server: FakeServer) -> None:
    server.fault = lambda fake, number, payload: (503, {"message": "busy"}) if number > 1 else None
    with pytest.raises(EndpointError, match=r"status 503: busy \(tried 2 times\)"):
        run(source(server, policy=waits(5.0, 1, 1.0)), rows(5))


def test_another_refusal_than_of_a_row_stops_at_once(server: FakeServer) -> None:
    server.fault = lambda fake, number, payload: (401, {"message": "who are you"}) if number > 1 else None
    with pytest.raises(EndpointError, match="status 401: who are you"):
        run(source(server), rows(5, 6))
    assert len(server.rows()) <= 2


def test_twenty_refusals_in_a_row_stop(server: FakeServer) -> None:
    server.fault = lambda fake, number, payload: (400, {"message": "no"}) if number > 1 else None
    with pytest.raises(EndpointError, match="20 rows in a row"):
        run(source(server), rows(*[5] * 40))


def test_H12_a_late_answer_costs_one_try(server: FakeServer) -> None:
    def late(fake: FakeServer, number: int, payload: dict) -> None:
        if number == 2:
            time.sleep(1.5)

    server.fault = late
    job = rows(5)
    src = source(server, policy=waits(0.7, 2, 1.0))
    assert_right(job[0], run(src, job)["row-0"])
    assert len(server.rows()) == 2


def test_H19_other_ids_are_refused_with_the_first_difference_and_three_in_a_row_stop(server: FakeServer) -> None:
    def with_bos(fake: FakeServer, name: str, ids: list[int]) -> None:
        fake.write_states(name, [1, *ids] if len(ids) == 6 else ids)

    server.write = with_bos
    result = run(source(server), rows(5, 6, 7))["row-1"]
    assert isinstance(result, RowRefused)
    assert result.reason == "the server read other ids"
    assert "first difference at index 0 (sent [7], read [1])" in result.detail
    with pytest.raises(EndpointError, match="3 rows in a row"):
        run(source(server, concurrency=1), rows(6, 6, 6, 6, 6))
    assert list(server.folder.iterdir()) == []


def test_H20_the_limit_leaves_room_for_the_generated_token(server: FakeServer) -> None:
    src = source(server)
    assert src.max_tokens == 255
    found = run(src, rows(100, 255))
    assert all(isinstance(result, RowStates) for result in found.values())


def test_H10_no_file_stays_behind_when_rows_fail(server: FakeServer) -> None:
    server.write = lambda fake, name, ids: fake.write_states(name, ids[:-1] if len(ids) in (6, 8) else ids)
    run(source(server, concurrency=1), rows(5, 6, 7, 8, 9))
    assert list(server.folder.iterdir()) == []


def test_files_of_a_killed_run_of_the_same_store_are_swept_and_no_others(server: FakeServer) -> None:
    first = source(server)
    ours = first._folder.new_name()
    server.write_states(ours, [1, 2])
    server.write_states("someone-else", [1, 2])
    source(server).close()
    assert [path.name for path in server.folder.iterdir()] == ["someone-else.safetensors"]
    first.close()


def test_a_failed_write_reaches_the_client(server: FakeServer) -> None:
    def full(fake: FakeServer, name: str, ids: list[int]) -> None:
        if len(ids) == 6:
            (fake.folder / f"{name}.safetensors.error").write_text("OSError: [Errno 28] No space left on device")
        else:
            fake.write_states(name, ids)

    server.write = full
    with pytest.raises(DiskError, match="No space left"):
        run(source(server, concurrency=1), rows(5, 6))
    server.write = lambda fake, name, ids: (
        (fake.folder / f"{name}.safetensors.error").touch() if len(ids) == 6 else fake.write_states(name, ids)
    )
    with pytest.raises(EndpointError, match="could not write hidden states: no reason given"):
        run(source(server, concurrency=1), rows(5, 6))
    assert list(server.folder.iterdir()) == []


def test_several_endpoints_share_the_work_and_one_may_die(tmp_path: Path) -> None:
    one, two = FakeServer(tmp_path), FakeServer(tmp_path)

    def slow(fake: FakeServer, number: int, payload: dict) -> None:
        time.sleep(0.01)

    one.fault = two.fault = slow
    src = source(one, two, folder=tmp_path, policy=waits(5.0, 3, 20.0))
    job = rows(*[5 + i % 20 for i in range(60)])
    results = src.states(job, {row.row_id for row in job})
    found = {result.row_id: result for result in (next(results) for _ in range(20))}
    two.close()
    found |= {result.row_id: result for result in results}
    src.close()
    for row in job:
        assert_right(row, found[row.row_id])
    assert len(one.rows()) > 10
    assert len(two.rows()) > 3
    one.close()


@pytest.mark.parametrize(
    "broken", ["no server", "not ready", "no list", "connector", "layers", "model", "size", "dtype", "folder"]
)
def test_what_cannot_work_is_refused_in_one_line_before_the_run(
    server: FakeServer, tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle.vllm.states._PROBE_WAIT_S", 0.2)
    server.write_delay_s = 0.0 if broken == "folder" else 0.05
    said = {
        "no server": "nobody answers there; start a server",
        "not ready": "not ready \\(503\\)",
        "no list": "is it a vLLM server",
        "connector": "runs without peagle's hidden-states connector",
        "layers": r"hands out layers \[2, 3, 5, 8\], wanted are \[2, 4, 5, 8\]; start it with --target-",
        "model": "serves verifier, not owner/other",
        "size": "serves another model, verifier, whose hidden_size is 16; verifier has 8",
        "dtype": "computes in bfloat16, wanted is float32; start it with `-- --dtype float32`",
        "folder": "both must see one folder",
    }[broken]
    if broken == "no server":
        server.close()
    if broken in ("not ready", "no list"):
        server.health = 503 if broken == "not ready" else 418
    if broken == "connector":
        server.has_connector = False
    if broken == "layers":
        server.layer_ids = [2, 3, 5, 8]
    if broken == "dtype":
        server.verifier_config = {"dtype": "bfloat16"}
    if broken == "size":
        server.verifier_config = {"hidden_size": 16}
    with pytest.raises(EndpointError, match=said) as caught:
        source(
            server,
            name="owner/other" if broken == "model" else "verifier",
            folder=tmp_path / "elsewhere" if broken == "folder" else None,
        )
    assert "\n" not in str(caught.value)
    if broken in ("layers", "model", "size", "dtype"):
        assert list(server.folder.iterdir()) == []
    if broken == "no server":
        server.close = lambda: None  # type: ignore[method-assign]


def test_H13_a_server_restarted_with_other_layers_stops_the_run(server: FakeServer) -> None:
    src = source(server)
    server.layer_ids = [2, 4, 6, 8]
    with pytest.raises(EndpointError, match="hands out layers"):
        run(src, rows(5))


@pytest.mark.parametrize("is_kept", [False, True], ids=["a first request", "a kept connection"])
def test_requests_under_way_end_when_the_pool_is_closed(tmp_path: Path, is_kept: bool) -> None:
    """Though the server holds its answer back: nothing may wait out the time of a request."""
    asked, answers = threading.Event(), threading.Event()

    def hold(fake: FakeServer, number: int, payload: dict[str, Any]) -> None:
        if number > is_kept:
            asked.set()
            answers.wait(60)

    server = FakeServer(tmp_path, fault=hold)
    settings = ServerSettings(request_timeout_s=300.0)
    pool = EndpointPool([Endpoint(server.url, settings)], settings)
    try:
        if is_kept:
            pool.post("/v1/completions", states_request([1, 2], "first", False))
        with ThreadPoolExecutor(1) as workers:
            job = workers.submit(pool.post, "/v1/completions", states_request([1, 2, 3], "held", False))
            assert asked.wait(30)
            pool.close()
            with pytest.raises(EndpointError, match="stopped"):
                job.result(timeout=30)
        assert not answers.is_set()
    finally:
        answers.set()
        server.close()
