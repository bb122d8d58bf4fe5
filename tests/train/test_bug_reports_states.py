"""Training on demand judges every answer, and needs no more of the verifier's files than it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peagle.errors import StoreError
from peagle.hidden_states.store import StoreReader
from peagle.train.config import TrainConfig
from peagle.train.run import train
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import TensorFiles
from tests.train.files import Files, make_files
from tests.train.test_states_on_demand import RealServer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("files"), 16, hidden_size=32)


def short(files: Files, save_path: Path, **values: object) -> TrainConfig:
    return files.config(save_path, **{"epochs": 2, "restart_wait_s": 0.3, "max_retries": 1, "concurrency": 2, **values})


class MixedUp(RealServer):
    """Its first rows are right; then it hands out other states for what it reads.

    `how`: "repeated" are those of the first row, cut or filled up by the row's own; "reversed" those of its tokens in
    another order; "wholly" those, and their next token; "late" the aux states one token late; "zero".
    """

    def __init__(self, files: Files, folder: Path, how: str) -> None:
        super().__init__(files, folder)
        right, self.how, self.rows_written, self.first = self.write, how, 0, torch.empty(0)

        def write(fake: MixedUp, name: str, ids: list[int]) -> None:
            right(fake, name, ids)
            if ids == [0, 1, 0]:
                return
            self.rows_written += 1
            states = self.states(ids)
            if self.rows_written == 1:
                self.first = states
            if self.rows_written > 3:
                fake.save(name, ids, self.spoiled(states, ids))

        self.write = write

    def states(self, ids: list[int]) -> torch.Tensor:
        own = self.own.layer_states(ids)
        return torch.stack([own[layer] for layer in self.layer_ids], 1)

    def spoiled(self, states: torch.Tensor, ids: list[int]) -> torch.Tensor:
        if self.how == "repeated":
            return torch.cat([self.first[: len(ids)], states[len(self.first) :]])
        if self.how in ("reversed", "wholly"):
            return self.states(ids[::-1])
        if self.how == "late":
            states[1:, :3] = states[:-1, :3].clone()
        else:
            states[len(ids) // 2 :, 1] = 0
        return states

    def complete(self, payload):  # type: ignore[no-untyped-def]
        status, body = super().complete(payload)
        if self.how == "wholly" and self.rows_written > 3:
            ids = payload["prompt"][::-1]
            body["choices"][0]["token_ids"] = self.own.run([ids], (0,), [[len(ids) - 1]])[0].choice_ids
        return status, body


@pytest.mark.parametrize("mode", ["online", "hybrid"])
@pytest.mark.parametrize("how", ["repeated", "reversed", "wholly", "late", "zero"])
def test_H03_every_answer_of_a_run_is_judged_not_only_the_first(
    files: Files, tmp_path: Path, how: str, mode: str
) -> None:
    if mode == "hybrid" and how != "reversed":
        pytest.skip("the same maker")
    server = MixedUp(files, tmp_path / "states", how)
    given = {"hidden_states": mode, "hidden_states_path": tmp_path / "states", "endpoint": (server.url,)}
    with pytest.raises(StoreError, match=r"^row [^ ]+: "):
        train(short(files, tmp_path / "out", **given, epochs=40 if how == "wholly" else 2))
    server.close()
    assert server.rows_written > 3


def test_F14_the_files_of_norm_head_and_embedding_alone_are_enough_to_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_files(tmp_path / "files", 12, hidden_size=32, max_shard_size="20KB", tie_word_embeddings=False)
    verifier = load_verifier_config(str(files.verifier), False)
    table = TensorFiles.open(str(files.verifier)).file_of
    needed = {table[name] for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight")}
    others = set(table.values()) - needed
    assert len(others) > 3
    for file in others:
        (files.verifier / file).unlink()
    with caplog.at_level("INFO"):
        train(files.config(tmp_path / "out", max_steps=1))
    assert f"the drafter's MLP is {verifier.intermediate_size} wide" in caplog.text
    # what is there still has to be what the store was made with
    assert StoreReader.open(files.states).spec.verifier_fingerprint.count(".") == len(set(table.values()))
    head = files.verifier / table["lm_head.weight"]
    content = bytearray(head.read_bytes())
    content[-40:] = bytes(40)
    head.write_bytes(bytes(content))
    with pytest.raises(StoreError, match="made by other weights"):
        train(files.config(tmp_path / "again", max_steps=1))
    assert verifier.vocab_size == 272
