"""`peagle evaluate` as a user calls it, on a verifier of three layers."""

import json
from pathlib import Path

import pytest
import torch

from peagle.cli.main import main
from peagle.data.records import TokenRow
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.store import StoreReader, StoreSpec, write_spec
from peagle.hidden_states.writer import StoreWriter
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from tests.engine.helpers import random_drafter
from tests.fakes import tiny_verifier

LAYERS = (0, 1, 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """(verifier folder, checkpoint folder)"""
    root = tmp_path_factory.mktemp("pair")
    folder = tiny_verifier(root / "verifier", num_layers=3, seed=1)
    model = TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu").model
    drafter = random_drafter(
        model, num_layers=1, depth=3, verifier=str(folder), verifier_architectures=("Qwen3ForCausalLM",)
    )
    drafter_checkpoint.save(drafter, root / "run" / "checkpoint_best", "float32")
    (root / "run" / "run.yaml").write_text("train: {}\n")
    (root / "run" / "manifest.json").write_text(json.dumps({"stage": "train", "rows_trained": 20}))
    return folder, root / "run" / "checkpoint_best"


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"what is {i}?"}) for i in range(4)))
    return path


def evaluation(path: Path) -> dict:
    return json.loads((path / "evaluation.json").read_text())


def test_decoding_writes_every_figure(pair, questions, tmp_path):
    status = main(
        [
            "evaluate",
            str(pair[1]),
            "--data",
            f"sums={questions}",
            "--max-new-tokens",
            "12",
            "--output",
            str(tmp_path),
            "--quiet",
        ]
    )
    assert status == 0
    found = evaluation(tmp_path)
    assert found["lossless"]["checked"] == found["lossless"]["identical"] == 4
    assert found["replay"]["equal"] is True
    assert found["speed"]["tokens_per_s"] > 0
    assert found["speed"]["plain_tokens_per_s"] == max(
        found["speed"]["engine_tokens_per_s"], found["speed"]["transformers_tokens_per_s"]
    )
    for part in (found["pooled"], found["datasets"]["sums"]):
        assert len(part["acceptance_per_position"]) == 3
        assert part["verifier_passes"] > 20
        assert part["acceptance_length"] == pytest.approx(1 + sum(part["acceptance_per_position"]))
    assert found["pooled"]["generated_tokens"] == 48
    for name in ("evaluation.md", "run.yaml", "manifest.json"):
        assert (tmp_path / name).is_file()
    assert json.loads((tmp_path / "manifest.json").read_text())["stage"] == "evaluate"


def test_another_number_of_drafted_tokens_works_and_is_warned_about(pair, questions, tmp_path, capsys):
    arguments = ["evaluate", str(pair[1]), "--data", str(questions), "--max-new-tokens", "8", "--compare-samples", "0"]
    assert (
        main([*arguments, "--num-speculative-tokens", "5", "--output", str(tmp_path), "--batch-size", "3", "--quiet"])
        == 0
    )
    found = evaluation(tmp_path)
    assert len(found["pooled"]["acceptance_per_position"]) == 5
    assert "made for 3" in found["notes"][0]
    assert "never trained" in found["notes"][0]
    assert found["lossless"]["checked"] == found["lossless"]["identical"] == 4
    assert found["speed"]["tokens_per_s"] is None
    printed = capsys.readouterr().out
    assert printed.index("made for 3") < printed.index("Pooled")
    assert (tmp_path / "evaluation.md").read_text().startswith("> drafting 5 tokens per pass")


def test_sampling_has_no_identical_answers_to_check(pair, questions, tmp_path):
    arguments = ["evaluate", str(pair[1]), "--data", str(questions), "--max-new-tokens", "8", "--temperature", "0.8"]
    assert main([*arguments, "--compare-samples", "2", "--output", str(tmp_path / "e.json"), "--quiet"]) == 0
    found = json.loads((tmp_path / "e.json").read_text())
    assert found["lossless"]["checked"] is None
    assert found["replay"]["equal"] is None
    assert found["speed"]["tokens_per_s"] > 0


def test_E03_an_empty_prompt_file_gives_nulls_and_a_failing_status(pair, tmp_path, capsys):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    status = main(["evaluate", str(pair[1]), "--data", str(path), "--output", str(tmp_path / "out"), "--quiet"])
    assert status != 0
    found = evaluation(tmp_path / "out")
    assert found["pooled"]["acceptance_length"] is None
    assert found["pooled"]["acceptance_per_position"] is None
    assert found["pooled"]["verifier_passes"] == 0
    assert "nothing was drafted" in capsys.readouterr().out


def test_E03_answers_of_one_token_draft_nothing(pair, questions, tmp_path):
    arguments = ["evaluate", str(pair[1]), "--data", str(questions), "--max-new-tokens", "1", "--output", str(tmp_path)]
    assert main([*arguments, "--quiet"]) == 1
    found = evaluation(tmp_path)
    assert found["datasets"]["questions"]["acceptance_length"] is None
    assert found["average"]["acceptance_length"] is None
    assert found["lossless"]["identical"] == 4


def test_E11_nothing_accepted_is_said_with_the_number_of_training_rows(pair, questions, tmp_path, capsys):
    arguments = ["evaluate", str(pair[1]), "--data", str(questions), "--max-new-tokens", "5", "--max-samples", "1"]
    main([*arguments, "--compare-samples", "0", "--output", str(tmp_path), "--quiet"])
    found = evaluation(tmp_path)["pooled"]
    assert found["accepted_tokens"] == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"0/{found['drafted_tokens']} drafted tokens were accepted" in printed
    assert "20 rows" in printed


def recorded_rows(folder: Path, depth: int) -> list[TokenRow]:
    """The verifier's own greedy answers with a tail, as `regenerate --tail-tokens` writes them."""
    from peagle.engine import Engine, Request, Sampling

    verifier = TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")
    plain = Engine(verifier.model, None, 0, [], Sampling(temperature=0.0, top_p=1.0), 4)
    prompts = [[10 + i, 20, 30 + i] for i in range(5)]
    answers = plain.generate([Request(prompt, 14 + depth) for prompt in prompts])
    return [
        TokenRow(
            row_id=f"r{i}",
            source=f"s{i % 2}",
            input_ids=[*prompt, *answer.ids],
            loss_mask=[0] * 3 + [1] * 14 + [0] * depth,
            next_is_supervised=False,
            tail_length=depth,
        )
        for i, (prompt, answer) in enumerate(zip(prompts, answers))
    ]


def write_prepared(rows: list[TokenRow], path: Path) -> Path:
    path.write_text(
        "\n".join(
            json.dumps(
                {
                    "id": r.row_id,
                    "source": r.source,
                    "input_ids": r.input_ids,
                    "loss_mask": r.loss_mask,
                    "tail_length": r.tail_length,
                }
            )
            for r in rows
        )
    )
    return path


def test_replay_of_recorded_answers_counts_as_decoding_them_does(pair, tmp_path):
    rows = recorded_rows(pair[0], 4)
    data = write_prepared(rows, tmp_path / "rows.jsonl")
    common = ["evaluate", str(pair[1]), "--data", str(data), "--num-speculative-tokens", "4", "--quiet", "--output"]
    assert main([*common, str(tmp_path / "decode"), "--mode", "decode", "--compare-samples", "0"]) == 0
    assert main([*common, str(tmp_path / "replay"), "--mode", "replay"]) == 0
    decoded, replayed = evaluation(tmp_path / "decode"), evaluation(tmp_path / "replay")
    assert set(decoded["datasets"]) == {"s0", "s1"}
    assert replayed["datasets"] == decoded["datasets"]
    assert replayed["pooled"] == decoded["pooled"]
    assert replayed["by_context_length"] == decoded["by_context_length"]
    assert len(replayed["notes"]) == len(decoded["notes"])  # no tail missing, no token off policy


def test_replay_of_a_store_equals_replay_on_the_spot(pair, tmp_path):
    from peagle.data.config import PrepareConfig
    from peagle.data.prepare import prepare

    rows = recorded_rows(pair[0], 3)
    data = write_prepared(rows, tmp_path / "rows.jsonl")
    prepare(PrepareConfig.build({"model": str(pair[0]), "data": [str(data)], "output": tmp_path / "prepared"}))
    store = make_store(pair[0], rows, tmp_path / "store", LAYERS)
    common = ["evaluate", str(pair[1]), "--data-path", str(tmp_path / "prepared"), "--quiet"]
    stored = ["--hidden-states-path", str(store)]
    assert main([*common, *stored, "--mode", "replay", "--output", str(tmp_path / "stored")]) == 0
    assert main([*common, "--mode", "replay", "--output", str(tmp_path / "spot")]) == 0
    assert main([*common, *stored, "--output", str(tmp_path / "both"), "--compare-samples", "0"]) == 0
    found = [evaluation(tmp_path / name) for name in ("stored", "spot", "both")]
    assert found[0]["pooled"] == found[1]["pooled"] == found[2]["pooled"]
    assert found[2]["replay"]["equal"] is True
    assert main([*common, *stored, "--mode", "replay", "--temperature", "1", "--output", str(tmp_path / "warm")]) == 0
    assert evaluation(tmp_path / "warm")["pooled"]["acceptance_length"] > 1


def test_a_store_of_other_layers_is_refused(pair, tmp_path, capsys):
    rows = recorded_rows(pair[0], 3)
    data = write_prepared(rows, tmp_path / "rows.jsonl")
    from peagle.data.config import PrepareConfig
    from peagle.data.prepare import prepare

    prepare(PrepareConfig.build({"model": str(pair[0]), "data": [str(data)], "output": tmp_path / "prepared"}))
    store = make_store(pair[0], rows, tmp_path / "store", (0, 2, 3))
    arguments = [
        "evaluate",
        str(pair[1]),
        "--data-path",
        str(tmp_path / "prepared"),
        "--hidden-states-path",
        str(store),
    ]
    assert main([*arguments, "--mode", "replay", "--output", str(tmp_path / "o"), "--quiet"]) == 2
    assert "layers [0, 2, 3], the drafter reads [0, 1, 3]" in capsys.readouterr().err


def make_store(folder: Path, rows: list[TokenRow], path: Path, layers: tuple[int, ...]) -> Path:
    verifier_config = load_verifier_config(str(folder), False)
    verifier = TransformersVerifier(verifier_config, "float32", "cpu")
    spec = StoreSpec(
        verifier=str(folder),
        verifier_fingerprint="",
        model_type=verifier_config.model_type,
        num_layers=verifier_config.num_layers,
        hidden_size=verifier_config.hidden_size,
        vocab_size=verifier_config.vocab_size,
        aux_layer_ids=layers,
        dtype="float32",
        tokenizer_sha256="",
    )
    with StoreWriter.open(path, spec, 1 << 20) as writer:
        for row, (aux, last) in zip(rows, verifier.states([row.input_ids for row in rows], layers)):
            positions = torch.tensor(row.label_positions())
            writer.add(StoredRow(row, aux, positions, last[positions]))
    write_spec(path, spec, True)
    assert len(StoreReader.open(path)) == len(rows)
    return path


def test_replay_of_prompts_alone_is_refused(pair, questions, tmp_path, capsys):
    arguments = ["evaluate", str(pair[1]), "--data", str(questions), "--mode", "replay", "--output", str(tmp_path)]
    assert main([*arguments, "--quiet"]) == 2
    assert "answers on record" in capsys.readouterr().err


def test_replay_says_when_tails_are_missing_or_tokens_are_not_the_verifiers(pair, tmp_path, capsys):
    rows = [{"id": f"r{i}", "input_ids": [3 + i] * 30, "loss_mask": [0] * 4 + [1] * 26} for i in range(3)]
    path = tmp_path / "human.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    main(
        ["evaluate", str(pair[1]), "--data", str(path), "--mode", "replay", "--output", str(tmp_path / "o"), "--quiet"]
    )
    notes = " ".join(evaluation(tmp_path / "o")["notes"])
    assert "not the verifier's own greedy choice" in notes
    assert "--tail-tokens 3" in notes
