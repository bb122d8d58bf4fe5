"""`peagle train` with states made on demand: the same losses in each mode, a server that dies, and warm starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peagle.drafter.checkpoint import load
from peagle.errors import EndpointError, PeagleError, StoreError
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.extract import extract
from peagle.hidden_states.store import StoreReader
from peagle.train.config import TrainConfig
from peagle.train.run import train
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from tests.train.files import Files, make_files
from tests.vllm.fake_vllm import FakeServer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    """Rows stored one at a time, as they are asked for on demand: the same bits; batches would round otherwise."""
    made = make_files(tmp_path_factory.mktemp("files"), 16, hidden_size=32)
    singly = made.states.with_name("singly")
    values = {"preprocessed_data": made.data, "output": singly, "device": "cpu", "batch_size": 1}
    extract(ExtractConfig.build(values))
    return Files(made.verifier, made.data, singly)


class RealServer(FakeServer):
    """The stub, answering with the verifier's own states."""

    def __init__(self, files: Files, folder: Path, port: int = 0, fault=None) -> None:
        super().__init__(folder, str(files.verifier), port, fault)
        verifier_config = load_verifier_config(str(files.verifier), False)
        self.own = TransformersVerifier(verifier_config, "float32", "cpu")
        aux = StoreReader.open(files.states).spec.aux_layer_ids
        self.layer_ids = [*aux, verifier_config.num_layers]
        self.verifier_config = {
            "num_layers": verifier_config.num_layers,
            "hidden_size": verifier_config.hidden_size,
            "vocab_size": verifier_config.vocab_size,
        }
        self.max_model_len = 512

        def write(fake: FakeServer, name: str, ids: list[int]) -> None:
            with fake._lock:
                found = self.own.run([ids], aux, [[]])
            (states,) = found
            aux_states = states.aux_states.view(len(ids), len(aux), verifier_config.hidden_size)
            fake.save(name, ids, torch.cat([aux_states, states.last_states[:, None]], 1).contiguous())

        self.write = write

    def complete(self, payload):
        status, body = super().complete(payload)
        if status == 200:
            ids = payload["prompt"]
            with self._lock:
                (states,) = self.own.run([ids], (0,), [[len(ids) - 1]])
            body["choices"][0]["token_ids"] = states.choice_ids
        return status, body


def losses(save_path: Path) -> list[float]:
    lines = [json.loads(line) for line in (save_path / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def short(files: Files, save_path: Path, **values) -> TrainConfig:
    return files.config(save_path, **{"epochs": 2, "restart_wait_s": 0.3, "max_retries": 1, "concurrency": 4, **values})


@pytest.fixture(scope="module")
def offline(files, tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("offline")
    train(short(files, folder))
    return losses(folder)


@pytest.mark.parametrize("mode", ["online", "hybrid"])
@pytest.mark.parametrize("through", ["server", "process"])
def test_all_modes_give_the_same_losses(files, offline, tmp_path, mode, through):
    server = RealServer(files, tmp_path / "states") if through == "server" else None
    values = {"hidden_states": mode, "hidden_states_path": tmp_path / "states"}
    if server is not None:
        values["endpoint"] = (server.url,)
    train(short(files, tmp_path / "out", **values))
    assert losses(tmp_path / "out") == offline
    if server is not None:
        server.close()
        assert not list(server.folder.iterdir())
        asked = [tuple(ids) for ids in server.rows()]
        num_rows = len(set(asked))
        initial = 1 if mode == "online" else 0  # `mask_hidden` starts from a look at real states
        assert len(asked) == (num_rows if mode == "hybrid" else len(asked))
        assert len(asked) >= num_rows * (2 if mode == "online" else 1) + initial
        assert server.most_open > 1
    if mode == "hybrid":
        store = StoreReader.open(tmp_path / "states")
        assert store.is_complete
        assert set(store.row_ids) == set(StoreReader.open(files.states).row_ids)


def test_offline_with_generate_asks_only_for_what_the_store_lacks(files, offline, tmp_path):
    store = tmp_path / "states"
    store.mkdir()
    from peagle.hidden_states.writer import StoreWriter

    reader = StoreReader.open(files.states)
    with StoreWriter.open(store, reader.spec, 10**8) as writer:
        for row_id in reader.row_ids[:10]:
            writer.add(reader.read(row_id))
    server = RealServer(files, tmp_path / "exchange")
    (store / "in-flight").symlink_to(server.folder)
    with pytest.raises(StoreError, match="--on-missing generate"):
        train(short(files, tmp_path / "none", hidden_states_path=store))
    train(short(files, tmp_path / "out", hidden_states_path=store, on_missing="generate", endpoint=(server.url,)))
    server.close()
    assert losses(tmp_path / "out") == offline
    assert len({tuple(ids) for ids in server.rows()}) == len(reader) - 10
    assert len(StoreReader.open(store)) == 10


@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
def test_a_server_that_dies_stops_the_run_at_a_step_and_the_same_command_goes_on_there(files, tmp_path, kind):
    kinds = {} if kind == "peagle" else {"speculator_type": "eagle3", "num_depths": 3}
    plain = {"total_seq_len": 128, "hidden_states": "online", "hidden_states_path": tmp_path / "states", **kinds}
    whole = RealServer(files, tmp_path / "states")
    train(short(files, tmp_path / "whole", **plain, endpoint=(whole.url,)))
    whole.close()

    def dies(fake: FakeServer, number: int, _payload):
        # Not before the first step is done: on a busy machine the requests run far ahead of it.
        metrics = tmp_path / "out" / "metrics.jsonl"
        if number > 13 and metrics.exists() and losses(tmp_path / "out"):
            fake.health = 503
            return "drop"
        return None

    first = RealServer(files, tmp_path / "states", fault=dies)
    with pytest.raises(EndpointError, match=r"gone for 0.3 s|connection was lost"):
        train(short(files, tmp_path / "out", **plain, endpoint=(first.url,)))
    first.close()
    so_far = losses(tmp_path / "out")
    assert 0 < len(so_far) < len(losses(tmp_path / "whole"))
    assert (tmp_path / "out" / "interrupted").is_dir()

    again = RealServer(files, tmp_path / "states")
    train(short(files, tmp_path / "out", **plain, endpoint=(again.url,)))
    again.close()
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    ends = [load(str(tmp_path / run / "checkpoint_last"), torch.float32, CPU) for run in ("whole", "out")]
    for (name, one), other in zip(ends[0].state_dict().items(), ends[1].state_dict().values()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_no_server_at_the_address_is_one_clear_line_before_anything_is_trained(files, tmp_path):
    with pytest.raises(EndpointError, match="nobody answers there"):
        train(short(files, tmp_path / "out", hidden_states="online", endpoint=("http://127.0.0.1:9",)))
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_eagle3_trains_saves_what_loads_and_starts_a_peagle_drafter(files, tmp_path, caplog):
    result = train(short(files, tmp_path / "chain", speculator_type="eagle3", ttt_steps=3, epochs=4, lr=4e-3))
    assert result.steps[-1].loss < result.steps[0].loss
    chain = load(str(tmp_path / "chain" / "checkpoint_best"), torch.float32, CPU)
    assert chain.config.speculators_model_type == "eagle3"
    assert chain.config.num_speculative_tokens == 3
    with caplog.at_level("INFO"):
        train(
            short(
                files, tmp_path / "parallel", from_pretrained=str(tmp_path / "chain" / "checkpoint_best"), num_layers=2
            )
        )
    assert "new: embed_tokens.weight[" in caplog.text
    assert "mask_hidden (like a real state); layers.1 (random, output projections zero)" in caplog.text
    parallel = load(str(tmp_path / "parallel" / "checkpoint_last"), torch.float32, CPU)
    assert parallel.config.num_layers == 2
    begun = json.loads((tmp_path / "parallel" / "metrics.jsonl").read_text().splitlines()[0])["accuracy"][0]
    cold = json.loads((tmp_path / "chain" / "metrics.jsonl").read_text().splitlines()[0])["accuracy"][0]
    assert begun > cold


def test_a_checkpoint_of_another_verifier_or_of_other_layers_is_refused(files, tmp_path):
    from peagle.drafter.checkpoint import save
    from peagle.drafter.model_config import DrafterConfig
    from peagle.drafter.network import Drafter

    train(short(files, tmp_path / "one", max_steps=1))
    made = load(str(tmp_path / "one" / "checkpoint_last"), torch.float32, CPU)
    for name, changes, message in (
        ("wide", {"hidden_size": 48}, "its hidden size is 48, that of .* is 32"),
        ("large", {"vocab_size": 300, "draft_vocab_size": 300}, "its vocabulary is 300"),
        ("deep", {"aux_layer_ids": (1, 2, 4)}, "it reads layers 1, 2, 4 of the verifier"),
    ):
        shape = DrafterConfig.build({**made.config.model_dump(), **changes})
        save(Drafter(shape), tmp_path / name, "float32")
        with pytest.raises(PeagleError, match=message):
            train(short(files, tmp_path / "two", from_pretrained=str(tmp_path / name)))
