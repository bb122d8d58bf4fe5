"""`peagle extract`: every prepared row stored once, checked, resumable; or a line that says why not."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peagle.cli.main import main
from peagle.errors import DataError, DiskError, EndpointError, StoreError
from peagle.hidden_states import extract as extract_module
from peagle.hidden_states import writer as writer_module
from peagle.hidden_states.config import ExtractConfig
from peagle.hidden_states.extract import extract
from peagle.hidden_states.store import StoreReader
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.source import RowRefused, RowStates
from tests import fakes
from tests.hidden_states.conftest import prepare_rows

ROOT = Path(__file__).resolve().parents[2]


def config(prepared, output, **changes):
    return ExtractConfig(preprocessed_data=prepared, output=output, **{"batch_size": 4, **changes})


@pytest.fixture(scope="session")
def store(tmp_path_factory, prepared):
    folder = tmp_path_factory.mktemp("store")
    assert extract(config(prepared, folder, validate_outputs=True)) == 0
    return folder


def assert_equal_stores(one, other):
    first, second = StoreReader.open(one), StoreReader.open(other)
    assert sorted(first.row_ids) == sorted(second.row_ids)
    for row_id in first.row_ids:
        a, b = first.read(row_id), second.read(row_id)
        assert a.row == b.row
        assert torch.equal(a.aux_states, b.aux_states)
        assert torch.equal(a.last_states, b.last_states)


class FakeSource:
    """A source made of a list of answers, or of an error in its place."""

    max_tokens = 10_000

    def __init__(self, model, answer):
        self.model, self.answer = model, answer
        self.asked, self.closed = [], False

    def states(self, rows, wanted):
        for row in rows:
            if row.row_id in wanted:
                self.asked.append(row.row_id)
                yield self.answer(self.sound(row), len(self.asked))

    def sound(self, row):
        ((aux, last),) = self.model.states([row.input_ids], (2, 4, 5))
        return RowStates(
            row_id=row.row_id,
            input_ids=row.input_ids,
            aux_states=aux,
            last_states=last,
            choice_pos=[],
            choice_ids=[],
        )

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def model(verifier):
    return TransformersVerifier(load_verifier_config(str(verifier), False), "float32", "cpu")


@pytest.fixture
def use_source(monkeypatch, model):
    def use(answer):
        source = FakeSource(model, answer)
        monkeypatch.setattr(extract_module, "open_source", lambda **arguments: source)
        return source

    return use


def fail_on(call, error):
    def answer(states, number):
        if number == call:
            raise error
        return states

    return answer


def test_states_are_the_verifiers_own_for_every_row(store, verifier, rows):
    reader = StoreReader.open(store)
    assert sorted(reader.row_ids) == sorted(row.row_id for row in rows)
    model = TransformersVerifier(load_verifier_config(str(verifier), False), "float32", "cpu")
    for row, (aux, last) in zip(rows, model.states([row.input_ids for row in rows], (2, 4, 5))):
        found = reader.read(row.row_id)
        assert found.row == row
        assert torch.allclose(found.aux_states, aux, rtol=1e-4, atol=1e-5)
        assert found.label_pos.tolist() == row.label_positions()
        assert torch.allclose(found.last_states, last[found.label_pos], rtol=1e-4, atol=1e-5)


def test_the_run_is_recorded_with_counts_that_add_up(store):
    import json

    record = json.loads((store / "manifest.json").read_text())
    assert record["rows_read"] == record["rows_written"] == 20
    assert record["aux_layer_ids"] == [2, 4, 5]
    assert (store / "run.yaml").exists()
    assert StoreReader.open(store).is_complete


def test_the_command_line_takes_the_published_flags(tmp_path, prepared, capsys):
    arguments = ["extract", "--preprocessed-data", str(prepared), "--output", str(tmp_path / "s"), "--max-samples", "3"]
    assert main([*arguments, "--target-layer-ids", "2", "4", "8", "--validate-outputs", "--dtype", "bfloat16"]) == 0
    reader = StoreReader.open(tmp_path / "s")
    assert (len(reader), reader.spec.aux_layer_ids, reader.spec.dtype) == (3, (2, 4, 8), "bfloat16")
    assert main([*arguments, "--target-layer-ids", "2", "4", "6"]) == 2
    assert "the store was made with other layer ids: 2, 4, 8, now 2, 4, 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--target-layer-ids", "2,4,9"], "layer id 9 does not exist"),
        (["--target-layer-ids", "2,2,4"], "given twice"),
        (["--max-disk-gb", "0.0000001"], "--max-disk-gb allows"),
        (["--model", "/nowhere/model"], "no such folder"),
        (["--batch-size", "0"], "--batch-size"),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_bad_settings_are_answered_in_one_line_before_the_verifier_loads(tmp_path, prepared, capsys, changes, message):
    assert main(["extract", "--preprocessed-data", str(prepared), "--output", str(tmp_path / "s"), *changes]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_killed_extraction_equals_unkilled(tmp_path, prepared, store):
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from peagle.hidden_states import writer\n"
        "from peagle.hidden_states.config import ExtractConfig\n"
        "from peagle.hidden_states.extract import extract\n"
        "writer.FLUSH_EVERY_S = -1.0\n"  # a shard per row
        "real, count = writer.write_json, []\n"
        "def write_json(path, value):\n"
        "    count.append(path)\n"
        "    if len(count) == int(sys.argv[3]):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(path, value)\n"
        "writer.write_json = write_json\n"
        "extract(ExtractConfig(preprocessed_data=Path(sys.argv[1]), output=Path(sys.argv[2]), batch_size=4))\n"
    )
    folder = tmp_path / "store"
    for kill_at in (3, 6):
        done = subprocess.run([sys.executable, "-c", code, str(prepared), str(folder), str(kill_at)], check=False)
        assert done.returncode == -signal.SIGKILL
    before = len(StoreReader.open(folder))
    assert 0 < before < 20
    assert extract(config(prepared, folder)) == 0
    assert_equal_stores(folder, store)


def test_a_damaged_shard_is_named_and_made_again(tmp_path, prepared, store, caplog):
    extract(config(prepared, tmp_path))
    (shard,) = tmp_path.glob("shard-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    reader = StoreReader.open(tmp_path)
    with pytest.raises(StoreError, match=shard.name):
        list(map(reader.read, reader.row_ids))
    with caplog.at_level(logging.WARNING, "peagle"):
        assert extract(config(prepared, tmp_path)) == 0
    assert shard.name in caplog.text
    assert_equal_stores(tmp_path, store)


def test_H10_a_resumed_run_asks_only_for_what_the_disk_lacks(tmp_path, prepared, use_source):
    use_source(fail_on(13, EndpointError("the server is gone")))
    with pytest.raises(EndpointError):
        extract(config(prepared, tmp_path))
    source = use_source(lambda states, number: states)
    assert extract(config(prepared, tmp_path)) == 0
    assert len(source.asked) == 8
    assert source.closed
    assert len(StoreReader.open(tmp_path)) == 20


def test_H09_a_dead_source_ends_the_run_and_keeps_what_was_done(tmp_path, prepared, use_source, capsys):
    source = use_source(fail_on(6, EndpointError("http://localhost:1: gone")))
    assert main(["extract", "--preprocessed-data", str(prepared), "--output", str(tmp_path)]) == 2
    assert "http://localhost:1: gone" in capsys.readouterr().err
    assert source.closed
    assert len(StoreReader.open(tmp_path)) == 5


def test_H01_and_H19_refused_rows_are_named_counted_and_asked_for_again(tmp_path, prepared, use_source, caplog):
    def refuse(states, number):
        return RowRefused(states.row_id, "fewer states than tokens", "28 of 60") if number in (2, 5) else states

    source = use_source(refuse)
    with caplog.at_level(logging.INFO, "peagle"):
        assert extract(config(prepared, tmp_path)) == 0
    refused = {source.asked[1], source.asked[4]}
    assert "dropped 2 (2 fewer states than tokens)" in caplog.text
    assert all(f"row {row_id} skipped: fewer states than tokens (28 of 60)" in caplog.text for row_id in refused)
    assert refused.isdisjoint(StoreReader.open(tmp_path).row_ids)
    again = use_source(lambda states, number: states)
    assert extract(config(prepared, tmp_path)) == 0
    assert set(again.asked) == refused


def spoil(part, value):
    def answer(states, number):
        if number == 4:
            getattr(states, part)[3, 2] = value
        return states

    return answer


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["aux_states", "last_states"])
def test_H06_nan_or_inf_from_the_verifier_stops_at_the_named_row_or_is_skipped_and_counted(
    tmp_path, prepared, use_source, part, value, caplog
):
    source = use_source(spoil(part, value))
    with pytest.raises(
        StoreError, match=rf"{part} hold NaN or infinity, first at position 3.*--skip-bad-rows"
    ) as caught:
        extract(config(prepared, tmp_path))
    assert source.asked[3] in str(caught.value)
    with caplog.at_level(logging.INFO, "peagle"):
        use_source(lambda states, number: spoil(part, value)(states, 4 if states.row_id == source.asked[3] else 0))
        assert extract(config(prepared, tmp_path, skip_bad_rows=True)) == 0
    assert f"dropped 1 (1 {part} hold NaN or infinity)" in caplog.text
    reader = StoreReader.open(tmp_path)
    assert len(reader) == 19
    assert source.asked[3] not in reader


def test_validate_outputs_stops_at_a_row_whose_states_do_not_give_the_verifiers_choice(tmp_path, prepared, use_source):
    def contradict(states, number):
        return RowStates(
            row_id=states.row_id,
            input_ids=states.input_ids,
            aux_states=states.aux_states,
            last_states=states.last_states,
            choice_pos=[4],
            choice_ids=[number % 7],
        )

    use_source(contradict)
    with pytest.raises(StoreError, match=r"after position 4, the verifier itself \d .*wrong norm, head or layer"):
        extract(config(prepared, tmp_path, validate_outputs=True))


def test_a_source_that_forgets_or_repeats_a_row_is_found_out(tmp_path, prepared, use_source):
    source = use_source(lambda states, number: states)
    real = source.states
    source.states = lambda rows, wanted: list(real(rows, wanted))[:-2]
    with pytest.raises(StoreError, match="no states came for 2 rows"):
        extract(config(prepared, tmp_path / "a"))
    source.states = lambda rows, wanted: [*real(rows, wanted)] * 2
    with pytest.raises(StoreError, match="came twice"):
        extract(config(prepared, tmp_path / "b"))


def test_H20_rows_beyond_the_verifiers_limit_are_named_with_their_length_and_the_rest_is_done(
    tmp_path, verifier, caplog
):
    rows = [fakes.random_row(f"of-{n}", n, 10, 259, n) for n in (100, 255, 256, 300)]
    prepared = prepare_rows(tmp_path / "prepared", verifier, rows)
    with caplog.at_level(logging.WARNING, "peagle"):
        assert extract(config(prepared, tmp_path / "store")) == 0
    assert sorted(StoreReader.open(tmp_path / "store").row_ids) == ["of-100", "of-255", "of-256"]
    assert "row of-300 skipped: longer than the verifier takes (256 tokens) (300 tokens)" in caplog.text


def test_H20_if_no_row_fits_the_run_fails(tmp_path, verifier):
    prepared = prepare_rows(tmp_path / "p", verifier, [fakes.random_row("long", 300, 10, 259, 1)])
    with pytest.raises(DataError, match=r"no row could be stored \(1 longer than the verifier takes"):
        extract(config(prepared, tmp_path / "store"))


def test_token_ids_beyond_the_models_vocabulary_are_refused(tmp_path, prepared):
    small = fakes.tiny_verifier(tmp_path / "small", "qwen3", vocab_size=200)
    with pytest.raises(DataError, match=r"token id \d+ is beyond the vocabulary of .*small \(200 rows\)"):
        extract(config(prepared, tmp_path / "store", model=str(small)))


def test_data_of_another_tokenizer_is_refused(tmp_path, prepared):
    other = fakes.tiny_verifier(tmp_path / "other", "qwen3", tokenizer=fakes.word_tokenizer(200, eos_token="w0"))
    with pytest.raises(DataError, match="prepared with the tokenizer of"):
        extract(config(prepared, tmp_path / "store", verifier_name_or_path=str(other)))


def test_data_that_was_prepared_again_does_not_mix_with_the_old_states(tmp_path, verifier, rows):
    first = prepare_rows(tmp_path / "a", verifier, rows[:4])
    changed = [fakes.random_row(row.row_id, len(row.input_ids), 3, 259, 77) for row in rows[:4]]
    second = prepare_rows(tmp_path / "b", verifier, changed)
    assert extract(config(first, tmp_path / "store")) == 0
    with pytest.raises(StoreError, match="is in the store with other tokens or another loss mask"):
        extract(config(second, tmp_path / "store"))


def test_a_larger_max_samples_adds_to_the_store(tmp_path, prepared, store):
    assert extract(config(prepared, tmp_path, max_samples=6)) == 0
    assert len(StoreReader.open(tmp_path)) == 6
    assert extract(config(prepared, tmp_path)) == 0
    assert sorted(StoreReader.open(tmp_path).row_ids) == sorted(StoreReader.open(store).row_ids)


def test_K07_the_estimate_is_said_and_checked_before_anything_is_run(tmp_path, prepared, store, monkeypatch, caplog):
    real = sum(path.stat().st_size for path in store.glob("shard-*"))
    monkeypatch.setattr(extract_module, "open_source", lambda **arguments: pytest.fail("the verifier was loaded"))
    with pytest.raises(DiskError, match="--max-disk-gb allows"):
        extract(config(prepared, tmp_path / "a", max_disk_gb=real * 0.9 / 1e9))
    monkeypatch.setattr("peagle.hidden_states.extract.free_bytes", lambda path: (64 << 20) + int(real * 0.9))
    with pytest.raises(DiskError, match=r"20 rows need .* the disk has .* free"):
        extract(config(prepared, tmp_path / "b"))
    monkeypatch.undo()
    with caplog.at_level(logging.INFO, "peagle"):
        assert extract(config(prepared, tmp_path / "c", max_disk_gb=real * 1.1 / 1e9)) == 0
    assert "20 rows to extract: about" in caplog.text


def test_K07_a_disk_that_fills_half_way_stops_cleanly_and_the_next_run_goes_on(tmp_path, prepared, store, monkeypatch):
    monkeypatch.setattr("peagle.hidden_states.writer.FLUSH_EVERY_S", -1.0)
    real, calls = writer_module.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(writer_module, "save_file", full)
    with pytest.raises(DiskError, match="no space left on the disk; free some and run the same command again"):
        extract(config(prepared, tmp_path))
    assert len(StoreReader.open(tmp_path)) == 3
    assert not list(tmp_path.glob(".shard*"))
    assert extract(config(prepared, tmp_path)) == 0
    assert_equal_stores(tmp_path, store)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_K07_a_really_full_disk_is_one_line(tmp_path, prepared, capfd):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        code = (
            "import peagle.hidden_states.extract as disk\n"
            "disk._SPARE_BYTES = 0\n"
            "disk.free_bytes = lambda path: 10**12\n"  # as if another process filled the disk meanwhile
            "import sys\n"
            "from peagle.cli.main import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        command = [
            sys.executable,
            "-c",
            code,
            "extract",
            "--preprocessed-data",
            str(prepared),
            "--output",
            f"{disk}/store",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "no space left on the disk" in done.stderr
        assert "Traceback" not in done.stderr
        assert not list((disk / "store").glob("*.safetensors"))
        assert not list((disk / "store").glob(".shard*"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def extract_command(tmp_path, verifier, rows, *flags):
    """`peagle extract` on rows prepared for a verifier: the exit status and the store's folder."""
    prepared = prepare_rows(tmp_path / "prepared", verifier, rows)
    output = tmp_path / "store"
    arguments = ["extract", "--preprocessed-data", str(prepared), "--output", str(output), "--model", str(verifier)]
    return main([*arguments, *flags]), output


@pytest.mark.parametrize("how", ["one file", "three shards", "tied"])
def test_F01_every_way_to_store_weights_can_be_extracted_from(tmp_path, rows, how):
    verifier = fakes.tiny_verifier(
        tmp_path / "verifier",
        "llama",
        num_layers=3,
        tie_word_embeddings=how == "tied",
        max_shard_size="60KB" if how == "three shards" else "5GB",
    )
    status, store = extract_command(tmp_path, verifier, rows[:3], "--target-layer-ids", "0,1,2", "--validate-outputs")
    assert status == 0
    assert len(StoreReader.open(store)) == 3


def test_F05_a_packed_head_is_refused_by_name_before_anything_is_stored(tmp_path, rows, capsys):
    from safetensors.torch import load_file, save_file

    verifier = fakes.tiny_verifier(tmp_path / "verifier", "llama", num_layers=3, tie_word_embeddings=False)
    tensors = load_file(verifier / "model.safetensors")
    tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight").to(torch.int32)
    save_file(tensors, verifier / "model.safetensors", {"format": "pt"})
    status, store = extract_command(tmp_path, verifier, rows[:3], "--target-layer-ids", "0,1,2")
    assert status == 2
    assert "lm_head.weight_packed is quantised (compressed-tensors, packed)" in capsys.readouterr().err
    assert not list(store.glob("shard-*"))


@pytest.mark.parametrize("num_layers", [1, 4, 6])
def test_H18_a_shallow_verifier_is_asked_for_its_layers_in_one_line(tmp_path, rows, capsys, num_layers):
    verifier = fakes.tiny_verifier(tmp_path / "verifier", "llama", num_layers=num_layers)
    status, _ = extract_command(tmp_path, verifier, rows[:3])
    assert status == 2
    assert f"collide for a verifier of {num_layers} layers" in capsys.readouterr().err


def test_two_names_for_two_verifiers_are_refused(prepared, tmp_path):
    from peagle.errors import ConfigError

    with pytest.raises(ConfigError, match="name two verifiers"):
        ExtractConfig.build(
            {"preprocessed_data": prepared, "output": tmp_path, "model": "a", "verifier_name_or_path": "b"}
        )


def test_an_interrupted_run_keeps_its_rows(tmp_path, prepared, use_source):
    use_source(fail_on(9, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        extract(config(prepared, tmp_path))
    assert len(StoreReader.open(tmp_path)) == 8
