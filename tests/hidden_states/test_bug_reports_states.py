"""Stored states are the verifier's own, shown per row: what servers and models have got wrong, and its neighbours."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle.cli.main import main
from peagle.hidden_states.proof import StateProof, choice_fault, row_fault
from peagle.hidden_states.store import StoreReader, StoreSpec
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.source import RowStates
from peagle.verifier.weights import VerifierHead, load_head
from tests.fakes import random_row, random_rows, tiny_verifier
from tests.hidden_states.conftest import prepare_rows
from tests.vllm.fake_vllm import FakeServer

AUX = (2, 4, 5)
Spoil = Callable[[Tensor, TransformersVerifier, list[int]], Tensor]


@pytest.fixture(scope="module")
def model(verifier: Path) -> TransformersVerifier:
    return TransformersVerifier(load_verifier_config(str(verifier), False), "float32", "cpu")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, verifier: Path) -> Path:
    """Eight prepared rows, one of four tokens."""
    rows = [*random_rows(7, 259, 5), random_row("row-of-four", 4, 1, 259, 6)]
    return prepare_rows(tmp_path_factory.mktemp("few") / "prepared", verifier, rows)


def all_states(model: TransformersVerifier, ids: list[int], layers: tuple[int, ...] = (*AUX, 8)) -> Tensor:
    own = model.layer_states(ids)
    return torch.stack([own[layer] for layer in layers], 1)


def serve(folder: Path, model: TransformersVerifier) -> FakeServer:
    fake = FakeServer(folder, model.verifier_config.name_or_path)
    fake.verifier = model
    fake.verifier_config = {"hidden_size": 64, "vocab_size": 272, "dtype": "float32"}
    return fake


@pytest.fixture
def server(tmp_path: Path, model: TransformersVerifier) -> Iterator[FakeServer]:
    fake = serve(tmp_path / "shared", model)
    yield fake
    fake.close()


def spoil(server: FakeServer, how: Spoil, after: int = 0) -> None:
    """Have a server spoil the states of every row but the first `after` (the client's probe is left alone)."""
    seen: list[int] = []

    def write(fake: FakeServer, name: str, ids: list[int]) -> None:
        states = all_states(fake.verifier, ids)
        if ids != [0, 1, 0]:
            seen.append(len(ids))
            states = how(states, fake.verifier, ids) if len(seen) > after else states
        fake.save(name, ids, states.contiguous())

    server.write = write


def extract(data: Path, output: Path, *servers: FakeServer, more: tuple[str, ...] = ()) -> int:
    endpoints = [part for one in servers for part in ("--endpoint", one.url)]
    shared = ["--hidden-states-path", str(servers[0].folder.parent), "--max-retries", "1"] if servers else []
    arguments = ["--preprocessed-data", str(data), "--output", str(output), *endpoints, *shared, *more]
    return main(["extract", *arguments])


def stored(output: Path) -> int:
    return len(StoreReader.open(output)) if list(output.glob("shard-*.json")) else 0


def on_aux(change: Callable[[Tensor], Tensor]) -> Spoil:
    return lambda states, model, ids: torch.cat([change(states[:, :3]), states[:, 3:]], 1)


def most_positions_zero(states: Tensor, model: TransformersVerifier, ids: list[int]) -> Tensor:
    states[int(0.3 * len(ids)) :] = 0
    return states


def most_dimensions_zero(states: Tensor, model: TransformersVerifier, ids: list[int]) -> Tensor:
    states[..., 20:] = 0
    return states


SPOILED: dict[str, Spoil] = {
    "70 % of the positions are zero": most_positions_zero,
    "70 % of the dimensions are zero": most_dimensions_zero,
    "all are zero": lambda states, model, ids: torch.zeros_like(states),
    "last is zero": lambda states, model, ids: torch.cat([states[:, :3], 0 * states[:, 3:]], 1),
    "aux is zero": on_aux(torch.zeros_like),
    "one aux layer is zero": on_aux(lambda aux: aux * torch.tensor([1.0, 0.0, 1.0])[:, None]),
    "aux is one": on_aux(torch.ones_like),
    "aux is that of the first token": on_aux(lambda aux: aux[:1].expand_as(aux)),
    "aux is late by one token": on_aux(lambda aux: torch.cat([aux[:1], aux[:-1]])),
    "aux is late by one token, and the first one random": on_aux(
        lambda aux: torch.cat([torch.randn(aux[:1].shape, generator=torch.Generator().manual_seed(0)), aux[:-1]])
    ),
    "aux is early by one token": on_aux(lambda aux: aux.roll(-1, 0)),
    "aux layers are one another": on_aux(lambda aux: aux[:, :1].expand_as(aux)),
    "aux layers are in another order": on_aux(lambda aux: aux.flip(1)),
    "the last layer is an aux layer": lambda states, model, ids: torch.cat([states[:, :3], states[:, 2:3]], 1),
    "half of the row repeats a block of four": on_aux(
        lambda aux: torch.cat([aux[: len(aux) // 2], aux[: len(aux) - len(aux) // 2]])
    ),
    "random numbers": lambda states, model, ids: torch.randn(
        states.shape, generator=torch.Generator().manual_seed(len(ids))
    ),
    "scaled": on_aux(lambda aux: 1.3 * aux),
}


@pytest.mark.parametrize("name", SPOILED)
def test_H07_and_N02_states_that_are_no_verifiers_are_refused_and_the_row_is_named(
    few: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil(server, SPOILED[name])
    assert extract(few, tmp_path / "out", server, more=("--concurrency", "1")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("peagle: error: row row-0: ")
    assert stored(tmp_path / "out") == 0
    assert list(server.folder.iterdir()) == []


@pytest.mark.parametrize("name", ["all are zero", "aux is zero", "aux is one", "aux is late by one token"])
def test_H07_a_later_row_is_judged_as_the_first_and_counted_where_asked(
    few: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil(server, SPOILED[name], after=5)
    more = ("--concurrency", "1", "--validate-outputs", "--skip-bad-rows")
    assert extract(few, tmp_path / "out", server, more=more) == 0
    assert "dropped 3" in capsys.readouterr().err
    assert stored(tmp_path / "out") == 5


def test_N02_a_row_is_judged_alone_where_nothing_can_be_computed_again() -> None:
    """Every rule that needs no weights, on one row, in each dtype; sound rows pass."""
    row = random_row("r", 40, 5, 272, 0)
    generator = torch.Generator().manual_seed(0)
    for dtype in ("float32", "bfloat16", "float16"):
        spec = StoreSpec(
            verifier="v", verifier_fingerprint="", model_type="qwen3", num_layers=8, hidden_size=64, vocab_size=272,
            aux_layer_ids=AUX, dtype=dtype, tokenizer_sha256="",
        )  # fmt: skip
        sound = torch.randn(40, 4, 64, generator=generator).to(spec.torch_dtype)

        def judged(states: Tensor, spec: StoreSpec = spec) -> str | None:
            aux, last = states[:, :3].flatten(1), states[:, 3]
            return row_fault(
                RowStates(
                    row_id="r",
                    input_ids=row.input_ids,
                    aux_states=aux,
                    last_states=last,
                    choice_pos=[],
                    choice_ids=[],
                ),
                row,
                spec,
            )

        assert judged(sound) is None
        for at in (0, 17, 39):
            for layer in range(4):
                one = sound.clone()
                one[at, layer] = 0
                assert f"are 0 throughout, first at position {at}" in str(judged(one))
        twice = sound.clone()
        twice[31, 1] = twice[7, 1]
        assert row.input_ids[7] != row.input_ids[31]
        assert "layer 4 repeat: those of positions 7 and 31" in str(judged(twice))
        equal = sound.clone()
        equal[12, 0] = equal[12, 2]
        assert "states of layers 2 and 5 are equal, first at position 12" in str(judged(equal))
        holes = sound.clone()
        holes[:, 1, :9] = 0
        assert "states of layer 4 are zero in 14% of their numbers" in str(judged(holes))


def test_N02_a_tie_proves_no_choice() -> None:
    head = VerifierHead(
        norm_weight=torch.ones(4), norm_eps=1e-6, weight=torch.randn(50, 4), logit_scale=1.0, logit_softcap=None
    )
    states = RowStates(
        row_id="r",
        input_ids=[1, 2],
        aux_states=torch.zeros(2, 12),
        last_states=torch.zeros(2, 4),
        choice_pos=[1],
        choice_ids=[7],
    )
    assert "most of its logits tie" in str(choice_fault(states, head, torch.float32, None))
    flat = dataclasses.replace(head, weight=torch.ones(50, 4))
    full = dataclasses.replace(states, last_states=torch.rand(2, 4) + 1)
    assert "most of its logits tie" in str(choice_fault(full, flat, torch.bfloat16, None))
    but_one = torch.ones(50, 4)
    but_one[7] *= 2
    assert choice_fault(full, dataclasses.replace(head, weight=but_one), torch.float32, None) is None


def test_N02_a_choice_is_judged_by_a_sample_of_the_vocabulary_where_the_whole_takes_too_long() -> None:
    generator = torch.Generator().manual_seed(0)
    head = VerifierHead(
        norm_weight=torch.ones(8),
        norm_eps=1e-6,
        weight=torch.randn(5000, 8, generator=generator),
        logit_scale=1.0,
        logit_softcap=None,
    )
    last = torch.randn(50, 8, generator=generator)
    best = head.logits(head.normed(last)).argmax(-1).tolist()
    states = RowStates(
        row_id="r",
        input_ids=[0] * 50,
        aux_states=last,
        last_states=last,
        choice_pos=list(range(50)),
        choice_ids=best,
    )
    sample = head.restricted(torch.arange(0, 5000, 4))
    assert choice_fault(states, head, torch.float32, sample) is None
    wrong = dataclasses.replace(states, choice_ids=[best[1], *best[1:]])
    assert "after position 0" in str(choice_fault(wrong, head, torch.float32, sample))


LAYERS = {
    "one lower": (1, 3, 4, 8),
    "one higher": (3, 5, 6, 8),
    "only the second": (2, 3, 5, 8),
    "the first": (0, 4, 5, 8),
}


@pytest.mark.parametrize("name", LAYERS)
def test_H15_a_server_that_extracts_other_layers_than_it_says_is_refused(
    few: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    spoil(server, lambda states, model, ids: all_states(model, ids, LAYERS[name]))
    assert extract(few, tmp_path / "out", server) == 2
    wanted, its = next((a, b) for a, b in zip((*AUX, 8), LAYERS[name]) if a != b)
    assert f"what came as layer {wanted} is the verifier's layer {its}" in capsys.readouterr().err


def test_H15_each_of_several_servers_is_judged_by_its_own_first_row(
    few: Path, server: FakeServer, tmp_path: Path, model: TransformersVerifier, capsys: pytest.CaptureFixture[str]
) -> None:
    other = serve(tmp_path / "shared", model)
    spoil(other, lambda states, model, ids: all_states(model, ids, (1, 3, 4, 8)))
    assert extract(few, tmp_path / "out", server, other, more=("--concurrency", "4")) == 2
    assert "is the verifier's layer 1 (error" in (error := capsys.readouterr().err)
    assert f"({other.url})" in error
    other.close()


def test_H15_without_the_verifiers_weights_a_second_server_is_asked(
    few: Path, verifier: Path, server: FakeServer, tmp_path: Path, model: TransformersVerifier,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bare = tmp_path / "bare" / verifier.name  # what a client has that leaves the weights to its servers
    bare.mkdir(parents=True)
    for file in verifier.glob("*.json"):
        shutil.copy(file, bare)
    other = serve(tmp_path / "shared", model)
    for fake in (server, other):
        fake.name = verifier.name
    more = ("--model", str(bare), "--concurrency", "4")
    assert extract(few, tmp_path / "right", server, other, more=more) == 0
    assert stored(tmp_path / "right") == 8
    assert re.search(r"8 rows proved, [2-8] of them computed again", capsys.readouterr().err)
    spoil(other, lambda states, model, ids: all_states(model, ids, (1, 3, 4, 8)))
    assert extract(few, tmp_path / "wrong", server, other, more=more) == 2
    assert "states of layer 2 are not what the verifier gives here" in capsys.readouterr().err
    assert extract(few, tmp_path / "alone", server, more=more) == 0
    assert "rests on the server's word" in capsys.readouterr().err
    other.close()


def test_H17_a_file_is_read_by_what_its_metadata_says_or_refused(
    few: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def case(name: str, change: Callable[[Tensor], Tensor], message: str, **metadata: str) -> None:
        def write(fake: FakeServer, file: str, ids: list[int]) -> None:
            states = all_states(fake.verifier, ids)
            if ids == [0, 1, 0]:
                return fake.save(file, ids, states)
            return fake.save(file, ids, change(states).contiguous(), **metadata)

        server.write = write
        assert extract(few, tmp_path / name, server, more=("--concurrency", "1", "--max-retries", "0")) == 2
        assert message in capsys.readouterr().err
        assert stored(tmp_path / name) == 0

    swap = "layers tokens hidden"
    case("transposed", lambda states: states.transpose(0, 1), f"as {swap}, expected is [56, 4, 64] as", axes=swap)
    case("three", lambda states: states[:, :3], "the file holds layers [2, 4, 5], the server", layer_ids="[2, 4, 5]")
    case("unsaid", lambda states: states[:, :3], "3, 64] as tokens layers hidden, expected is [")
    case("five", lambda states: torch.cat([states, states[:, :1]], 1), "5, 64] as tokens layers hidden, expected is [")
    case("half", lambda states: states.bfloat16(), "the file holds bfloat16, the server computes in float32")
    case("mute", lambda states: states, "does not say its layers and axes", axes="", layer_ids="")


def test_H17_a_transposed_file_that_says_otherwise_is_found_by_its_states(
    server: FakeServer, verifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = prepare_rows(tmp_path / "prepared", verifier, [random_row("row-of-four", 4, 1, 259, 6)])
    spoil(server, lambda states, model, ids: states.transpose(0, 1))
    assert extract(data, tmp_path / "out", server) == 2
    assert "row row-of-four: " in capsys.readouterr().err


def test_the_cost_is_printed_and_bounded(
    few: Path, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extract(few, tmp_path / "here") == 0
    assert "8 rows proved, " in (said := capsys.readouterr().err)
    assert "of the time)" in said
    assert extract(few, tmp_path / "there", server, more=("--concurrency", "2")) == 0
    assert "8 rows proved, " in capsys.readouterr().err


def test_rows_are_computed_again_only_as_long_as_that_is_cheap(model: TransformersVerifier) -> None:
    spec = StoreSpec.of(model.verifier_config, aux_layer_ids=AUX, dtype="auto", tokenizer_sha256="", is_served=False)
    asked: list[int] = []

    def again(ids: list[int], origin: str) -> dict[int, Tensor]:
        asked.append(len(ids))
        own = model.layer_states(ids)
        if len(asked) == 2:
            time.sleep(0.3)
        return own

    proof = StateProof(spec=spec, head=None, again=again, is_quantised=False, checks_all=False)
    for row in random_rows(10, 259, 1):
        ((aux, last),) = model.states([row.input_ids], AUX)
        states = RowStates(
            row_id=row.row_id, input_ids=row.input_ids, aux_states=aux, last_states=last, choice_pos=[], choice_ids=[]
        )
        assert proof.fault(states, row) is None
    assert len(asked) in (1, 2)
    assert f"10 rows proved, {len(asked)} of them computed again" in proof.summary()


# ---- models in this process


@pytest.mark.parametrize("family", ["llama4_text", "llama4"])
def test_F07_llama_4_is_extracted_though_its_decoder_has_the_head(tmp_path: Path, family: str) -> None:
    folder = tiny_verifier(tmp_path / "verifier", family)
    data = prepare_rows(tmp_path / "prepared", folder, random_rows(3, 259, 0))
    assert extract(data, tmp_path / "out", more=("--validate-outputs",)) == 0
    assert stored(tmp_path / "out") == 3


def bidirectional(folder: Path, family: str) -> Path:
    if family == "paligemma":
        tiny_verifier(folder, "paligemma")
    else:
        tiny_verifier(folder, family, use_bidirectional_attention=True)
    return folder


@pytest.mark.parametrize("family", ["paligemma", "gemma3_text"])
def test_F07_a_model_that_sees_later_tokens_is_refused_by_name(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bidirectional(tmp_path / "verifier", family)
    data = prepare_rows(tmp_path / "prepared", folder, random_rows(3, 259, 0))
    assert extract(data, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "is not causal: with more tokens behind them the same tokens have other states" in error
    assert main(["doctor", str(folder), "--output", str(tmp_path / "d")]) == 1
    assert "is not causal" in capsys.readouterr().out


def test_N06_a_family_whose_logits_are_scaled_otherwise_is_refused_though_its_best_token_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_verifier(tmp_path / "verifier", "hyperclovax")
    data = prepare_rows(tmp_path / "prepared", folder, random_rows(4, 259, 0))
    model = TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")
    server = serve(tmp_path / "shared", model)
    assert extract(data, tmp_path / "right", server) == 0
    monkeypatch.setattr("peagle.verifier.model_config._LOGITS_SCALING_MULTIPLIES", ())
    for output, servers in (("served", (server,)), ("here", ())):
        assert extract(data, tmp_path / output, *servers) == 2
        assert "peagle does not know how the hyperclovax family computes them" in capsys.readouterr().err
        assert stored(tmp_path / output) == 0
    server.close()


@pytest.mark.parametrize("change", ["norm", "head", "layer"])
def test_validate_outputs_compares_norm_and_head_with_the_models_own(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """What `check_head` would find on the first row is left out: the rows themselves must show it."""
    monkeypatch.setattr(TransformersVerifier, "check_head", lambda self, head, ids: None)
    real = load_head

    def other(verifier: object) -> VerifierHead:
        head = real(verifier)  # type: ignore[arg-type]
        if change == "norm":
            return dataclasses.replace(head, norm_weight=head.norm_weight.roll(1))
        return dataclasses.replace(head, logit_scale=-1.0) if change == "head" else head

    monkeypatch.setattr("peagle.hidden_states.extract.load_head", other)
    if change == "layer":  # last states of one layer too early
        begin = TransformersVerifier.begin

        def early(self, rows, aux, positions, head):  # type: ignore[no-untyped-def]
            layers, self.layers = self.layers, torch.nn.ModuleList([*self.layers[:7], self.layers[6]])
            try:
                return begin(self, rows, aux, positions, head)
            finally:
                self.layers = layers

        monkeypatch.setattr(TransformersVerifier, "begin", early)
    assert extract(few, tmp_path / "out", more=("--validate-outputs",)) == 2
    assert "differs from the verifier's own" in (error := capsys.readouterr().err)
    assert json.dumps(error).count("error: row") == 1
