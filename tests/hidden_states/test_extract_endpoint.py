"""`peagle extract --endpoint` against a stub with a real verifier's states: the same store as with Transformers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peagle.cli.main import main
from peagle.hidden_states.store import StoreReader
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from tests.fakes import random_rows, tiny_verifier
from tests.vllm.fake_vllm import FakeServer

COUNT = 20


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


@pytest.fixture(scope="module")
def model(verifier: Path) -> TransformersVerifier:
    return TransformersVerifier(load_verifier_config(str(verifier), False), "float32", "cpu")


@pytest.fixture(scope="module")
def prepared(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"id": row.row_id, "input_ids": row.input_ids, "loss_mask": row.loss_mask} for row in random_rows(COUNT, 272, 3)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["prepare", "--model", str(verifier), "--data", str(folder / "rows.jsonl"), "--seq-length", "512"]
    assert main([*arguments, "--output", str(folder / "prepared")]) == 0
    return folder / "prepared"


@pytest.fixture
def server(tmp_path: Path, model: TransformersVerifier) -> Iterator[FakeServer]:
    fake = FakeServer(tmp_path / "shared")
    fake.verifier = model
    fake.verifier_config = {"hidden_size": 64, "vocab_size": 272, "dtype": "float32"}
    yield fake
    fake.close()


def extract(prepared: Path, output: Path, *more: str) -> int:
    return main(["extract", "--preprocessed-data", str(prepared), "--output", str(output), *more])


def served(server: FakeServer, *more: str) -> list[str]:
    shared = str(server.folder.parent)
    limits = ["--restart-wait-s", "0.5", "--max-retries", "1"]
    return ["--endpoint", server.url, "--hidden-states-path", shared, *limits, *more]


def test_the_store_is_that_of_the_transformers_backend(prepared: Path, server: FakeServer, tmp_path: Path) -> None:
    assert extract(prepared, tmp_path / "here") == 0
    assert extract(prepared, tmp_path / "served", *served(server, "--validate-outputs")) == 0
    here, there = StoreReader.open(tmp_path / "here"), StoreReader.open(tmp_path / "served")
    assert here.spec == there.spec
    assert sorted(here.row_ids) == sorted(there.row_ids)
    assert len(here) == COUNT
    for row_id in here.row_ids:
        a, b = here.read(row_id), there.read(row_id)
        assert a.row == b.row
        assert torch.equal(a.label_pos, b.label_pos)
        torch.testing.assert_close(a.aux_states, b.aux_states, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a.last_states, b.last_states, rtol=1e-4, atol=1e-5)


def test_the_output_may_be_the_folder_that_the_server_writes_to(prepared: Path, server: FakeServer) -> None:
    shared = server.folder.parent
    assert extract(prepared, shared, "--endpoint", server.url) == 0
    assert len(StoreReader.open(shared)) == COUNT
    assert list(server.folder.iterdir()) == []


def test_H09_a_server_that_dies_stops_the_run_and_the_next_one_asks_only_for_the_rest(
    prepared: Path, server: FakeServer, tmp_path: Path, model: TransformersVerifier, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(fake: FakeServer, number: int, payload: dict) -> tuple[int, dict] | None:
        if number >= 7:  # one probe, five rows
            threading.Thread(target=fake.close).start()
            return 500, {"message": "out of memory"}
        return None

    server.fault = dies
    assert extract(prepared, tmp_path / "out", *served(server, "--concurrency", "1", "--shard-mb", "1")) == 2
    assert "run the same command" in capsys.readouterr().err
    kept = len(StoreReader.open(tmp_path / "out"))
    assert kept == 5
    again = FakeServer(server.folder.parent, port=server.port)
    again.verifier, again.verifier_config = model, server.verifier_config
    assert extract(prepared, tmp_path / "out", *served(again)) == 0
    assert len(again.rows()) == COUNT - kept
    assert len(StoreReader.open(tmp_path / "out")) == COUNT
    again.close()


def test_H16_last_states_with_the_norm_applied_already_are_refused(
    prepared: Path, server: FakeServer, tmp_path: Path, model: TransformersVerifier, capsys: pytest.CaptureFixture[str]
) -> None:
    def normed(fake: FakeServer, name: str, ids: list[int]) -> None:
        ((aux, last),) = model.states([ids], (2, 4, 5))
        last = model.decoder.norm(last).detach()
        fake.save(name, ids, torch.cat([aux.view(len(ids), 3, 64), last[:, None]], 1))

    server.write = normed
    assert extract(prepared, tmp_path / "out", *served(server, "--validate-outputs")) == 2
    error = (
        capsys.readouterr().err
    )  # of whichever row came first: its only choice known may be the same after two norms
    assert "wrong norm, head or layer" in error or "states of layer 8 are not what the verifier gives here" in error


def test_H06_states_that_are_not_finite_are_refused_by_name_or_counted(
    prepared: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []

    def broken(fake: FakeServer, name: str, ids: list[int]) -> None:
        seen.append(len(seen))
        ((aux, last),) = fake.verifier.states([ids], (2, 4, 5))
        states = torch.cat([aux.view(len(ids), 3, 64), last[:, None]], 1)
        if len(seen) in (4, 6):
            states[1, 2, 3] = float("nan") if len(seen) == 4 else float("inf")
        fake.save(name, ids, states)

    server.write = broken
    assert extract(prepared, tmp_path / "a", *served(server, "--concurrency", "1")) == 2
    assert "aux_states hold NaN or infinity, first at position 1" in capsys.readouterr().err
    seen.clear()
    assert extract(prepared, tmp_path / "b", *served(server, "--concurrency", "1", "--skip-bad-rows")) == 0
    assert len(StoreReader.open(tmp_path / "b")) == COUNT - 2
    assert list(server.folder.iterdir()) == []


def test_H20_rows_past_the_servers_limit_are_named_and_never_sent(
    prepared: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.max_model_len = 40
    assert extract(prepared, tmp_path / "out", *served(server)) == 0
    assert "skipped: longer than the verifier takes (39 tokens)" in capsys.readouterr().err
    assert max(map(len, server.rows())) <= 39
    assert len(StoreReader.open(tmp_path / "out")) == len(server.rows())
