"""The store: whole rows or none, resumable, damage found and named."""

import hashlib
import json
import logging
import multiprocessing
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.data.records import TokenRow
from peagle.errors import DiskError, StoreError
from peagle.files import sha256_file
from peagle.hidden_states import writer as writer_module
from peagle.hidden_states.batch import StoredRow
from peagle.hidden_states.store import RowEntry, StoreReader, StoreSpec, all_finite, index_paths, read_spec
from peagle.hidden_states.writer import StoreWriter
from tests import fakes

HIDDEN = 8
SPEC = StoreSpec(
    verifier="verifier",
    verifier_fingerprint="f" * 64,
    model_type="qwen3",
    num_layers=8,
    hidden_size=HIDDEN,
    vocab_size=272,
    aux_layer_ids=(2, 4, 5),
    dtype="float32",
    tokenizer_sha256="t" * 64,
)


def stored_row(row_id, num_tokens, seed, dtype=torch.float32):
    row = fakes.random_row(row_id, num_tokens, 3, 260, seed)
    generator = torch.Generator().manual_seed(seed)
    label_pos = torch.tensor(row.label_positions(), dtype=torch.int64)
    aux = torch.randn(num_tokens, 3 * HIDDEN, generator=generator).to(dtype)
    return StoredRow(row, aux, label_pos, torch.randn(len(label_pos), HIDDEN, generator=generator).to(dtype))


ROWS = [stored_row(f"row-{i}", 6 + 3 * i, i) for i in range(12)]
SMALL = 6000  # bytes: about three rows a shard


def write(folder, rows, spec=SPEC, shard_bytes=SMALL, finish=True):
    with StoreWriter.open(folder, spec, shard_bytes) as writer:
        for stored in rows:
            if stored.row.row_id not in writer.entries:
                writer.add(stored)
        if finish:
            writer.finish()
    return StoreReader.open(folder)


def assert_same(reader, rows):
    assert sorted(reader.row_ids) == sorted(stored.row.row_id for stored in rows)
    for stored in rows:
        found = reader.read(stored.row.row_id)
        assert found.row == stored.row
        for name in ("aux_states", "label_pos", "last_states"):
            assert torch.equal(getattr(found, name), getattr(stored, name))


@pytest.fixture
def store(tmp_path):
    write(tmp_path / "store", ROWS)
    return tmp_path / "store"


def test_rows_come_back_as_they_were_stored_from_several_shards(store):
    reader = StoreReader.open(store)
    assert_same(reader, ROWS)
    assert len(index_paths(store)) >= 4
    assert reader.is_complete
    assert reader.spec == SPEC
    assert len(reader) == 12
    assert "row-3" in reader
    assert "row-99" not in reader


def test_half_precision_and_the_fields_of_a_cut_row_and_a_tail_survive(tmp_path):
    cut = TokenRow(
        row_id="cut", source="a", input_ids=[5, 6, 7, 8], loss_mask=[0, 1, 1, 1], next_is_supervised=True, tail_length=0
    )
    tail = TokenRow(
        row_id="tail",
        source="b",
        input_ids=[5, 6, 7, 8, 9],
        loss_mask=[0, 1, 1, 0, 0],
        next_is_supervised=False,
        tail_length=2,
    )
    rows = []
    for row in (cut, tail):
        labels = torch.tensor(row.label_positions())
        aux = torch.randn(len(row.input_ids), 24).bfloat16()
        rows.append(StoredRow(row, aux, labels, torch.randn(len(labels), 8).bfloat16()))
    spec = StoreSpec(**{**vars(SPEC), "dtype": "bfloat16"})
    assert_same(write(tmp_path, rows, spec=spec), rows)


def test_the_index_has_the_hash_of_each_rows_token_ids_and_the_shards_checksum(store):
    found = {}
    for path in index_paths(store):
        index = json.loads(path.read_text())
        assert index["sha256"] == sha256_file(store / index["file"])
        found |= {entry["row_id"]: entry["ids_sha256"] for entry in index["rows"]}
    packed = {s.row.row_id: struct.pack(f"<{len(s.row.input_ids)}q", *s.row.input_ids) for s in ROWS}
    assert found == {row_id: hashlib.sha256(ids).hexdigest() for row_id, ids in packed.items()}


def test_an_interrupted_store_goes_on_and_equals_an_uninterrupted_one(tmp_path):
    def rows():
        yield from ROWS[:5]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", rows())
    partial = StoreReader.open(tmp_path / "a")
    assert not partial.is_complete
    assert_same(partial, ROWS[:5])
    assert_same(write(tmp_path / "a", ROWS), ROWS)


def _killed(folder, count):
    import os
    import signal

    with StoreWriter.open(folder, SPEC, SMALL) as writer:
        for stored in ROWS[:count]:
            writer.add(stored)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("count", [1, 4, 11])
def test_a_store_killed_at_any_time_goes_on_with_no_row_lost_or_doubled(tmp_path, count):
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path, count))
    process.start()
    process.join()
    assert process.exitcode == -9
    assert_same(write(tmp_path, ROWS), ROWS)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == len(index_paths(tmp_path))


def test_what_a_kill_left_behind_is_swept(store):
    (store / "shard-00099.safetensors").write_bytes(b"tensors without an index")
    (store / ".shard-00100.safetensors.123.tmp").write_bytes(b"half")
    write(store, ROWS)
    assert not (store / "shard-00099.safetensors").exists()
    assert not list(store.glob(".shard-*"))


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # states are most of a shard
    path.write_bytes(content)


def test_a_damaged_row_is_named_when_it_is_read_and_others_still_read(store):
    shard = store / "shard-00001.safetensors"
    damage(shard)
    reader = StoreReader.open(store)
    inside = [entry["row_id"] for entry in json.loads(shard.with_suffix(".json").read_text())["rows"]]
    refused = {}
    for stored in ROWS:
        try:
            reader.read(stored.row.row_id)
        except StoreError as error:
            refused[stored.row.row_id] = str(error)
    ((row_id, message),) = refused.items()
    assert row_id in inside
    assert f"shard-00001.safetensors holds other states for row {row_id}" in message
    assert "peagle extract" in message


def test_a_damaged_shard_of_an_earlier_store_is_refused_whole(store):
    shard = store / "shard-00001.safetensors"
    _forget_row_checksums(shard)
    assert_same(StoreReader.open(store), ROWS)
    damage(shard)
    inside = [entry["row_id"] for entry in json.loads(shard.with_suffix(".json").read_text())["rows"]]
    reader = StoreReader.open(store)
    for stored in ROWS:
        if stored.row.row_id in inside:
            with pytest.raises(StoreError, match=r"shard-00001\.safetensors has another checksum.*peagle extract"):
                reader.read(stored.row.row_id)
        else:
            reader.read(stored.row.row_id)


def _forget_row_checksums(shard_path):
    """The index as earlier versions wrote it."""
    index = json.loads(shard_path.with_suffix(".json").read_text())
    for entry in index["rows"]:
        assert len(entry.pop("states_xxh3", "0" * 32)) == 32
    shard_path.with_suffix(".json").write_text(json.dumps(index))


@pytest.mark.parametrize("how", ["bit", "cut", "gone", "index"])
def test_a_damaged_shard_is_named_removed_and_made_again(store, caplog, how):
    shard = store / "shard-00001.safetensors"
    if how == "bit":
        damage(shard)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif how == "gone":
        shard.unlink()
    else:
        shard.with_suffix(".json").write_text("{")
    with caplog.at_level(logging.WARNING, "peagle"), StoreWriter.open(store, SPEC, SMALL) as writer:
        assert 0 < len(writer.entries) < len(ROWS)
    assert "shard-00001.safetensors" in caplog.text
    assert "made again" in caplog.text
    assert_same(write(store, ROWS), ROWS)


@pytest.mark.parametrize("how", ["cut", "gone", "index"])
def test_a_missing_or_short_shard_is_found_when_the_store_is_opened(store, how):
    shard = store / "shard-00002.safetensors"
    if how == "cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif how == "gone":
        shard.unlink()
    else:
        shard.with_suffix(".json").write_text('{"rows": 3}')
    with pytest.raises(StoreError, match="shard-00002"):
        StoreReader.open(store)


def _reseal(shard_path):
    """Make the index agree with an edited shard, as a store whose writer did not look would be."""
    from peagle.files import sha256_file

    index = json.loads(shard_path.with_suffix(".json").read_text())
    index |= {"bytes": shard_path.stat().st_size, "sha256": sha256_file(shard_path)}
    shard_path.with_suffix(".json").write_text(json.dumps(index))
    _forget_row_checksums(shard_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["aux_states", "last_states"])
def test_H06_one_nan_or_inf_in_a_stored_row_is_refused_by_the_rows_name(store, part, value):
    shard = store / "shard-00000.safetensors"
    tensors = load_file(shard)
    tensors[f"{part}.1"][2, 3] = value
    save_file(tensors, shard)
    _reseal(shard)
    reader = StoreReader.open(store)
    reader.read("row-0")
    with pytest.raises(StoreError, match=f"row row-1: {part} hold NaN or infinity"):
        reader.read("row-1")


def test_R02_a_state_that_nothing_reads_may_be_nan(store):
    """Nothing is drafted from a row's last token; the one before it counts."""
    shard = store / "shard-00000.safetensors"
    tensors = load_file(shard)
    tensors["aux_states.1"][-1, 3] = float("nan")
    save_file(tensors, shard)
    _reseal(shard)
    assert StoreReader.open(store).read("row-1").aux_states[-1, 3].isnan()
    tensors["aux_states.1"][-2, 3] = float("nan")
    save_file(tensors, shard)
    _reseal(shard)
    with pytest.raises(StoreError, match="row row-1: aux_states hold NaN"):
        StoreReader.open(store).read("row-1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_finite_by_bits_is_what_torch_says(dtype):
    numbers = torch.tensor([0.0, -0.0, 1e-8, -1e-8, 1.5, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    assert all_finite(numbers)
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        for place in range(len(numbers)):
            changed = numbers.clone()
            changed[place] = bad
            assert not all_finite(changed[None].expand(3, -1))


def test_a_rows_tokens_are_checked_against_their_own_hashes(store):
    assert StoreReader.open(store).read("row-4").row == ROWS[4].row
    shard = store / "shard-00000.safetensors"
    tensors = load_file(shard)
    tensors["input_ids.0"][1] += 1
    save_file(tensors, shard)
    _reseal(shard)
    with pytest.raises(StoreError, match="holds other tokens for row row-0"):
        StoreReader.open(store).read("row-0")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("aux_layer_ids", (2, 4, 6), "layer ids: 2, 4, 5, now 2, 4, 6"),
        ("dtype", "bfloat16", "dtype: float32, now bfloat16"),
        ("verifier_fingerprint", "0" * 64, "verifier weights"),
        ("tokenizer_sha256", "0" * 64, "tokenizer"),
        ("hidden_size", 16, "hidden size: 8, now 16"),
    ],
)
def test_H13_a_store_made_otherwise_is_refused_in_one_line(store, field, value, message):
    other = StoreSpec(**{**vars(SPEC), field: value})
    with pytest.raises(StoreError, match=message) as caught:
        StoreWriter.open(store, other, SMALL)
    assert "\n" not in str(caught.value)
    assert_same(write(store, ROWS), ROWS)  # the refusal left it as it was


def test_a_moved_verifier_with_the_same_weights_goes_on(store):
    with StoreWriter.open(store, StoreSpec(**{**vars(SPEC), "verifier": "/elsewhere"}), SMALL) as writer:
        assert len(writer.entries) == 12


def test_two_writers_at_once_are_refused(store):
    with StoreWriter.open(store, SPEC, SMALL), pytest.raises(StoreError, match="another process"):
        StoreWriter.open(store, SPEC, SMALL)
    write(store, ROWS)


def test_a_row_is_added_once_and_with_the_specs_shapes_and_dtype(tmp_path):
    with StoreWriter.open(tmp_path, SPEC, SMALL) as writer:
        writer.add(ROWS[0])
        with pytest.raises(ValueError, match="already in the store"):
            writer.add(ROWS[0])
        with pytest.raises(ValueError, match=r"expected .* in torch\.float32"):
            writer.add(stored_row("half", 8, 0, torch.bfloat16))
        short = ROWS[1]
        with pytest.raises(ValueError, match="shape"):
            writer.add(StoredRow(short.row, short.aux_states[1:], short.label_pos, short.last_states))


def test_K07_a_full_disk_stops_cleanly_and_the_run_goes_on_later(tmp_path, monkeypatch):
    real, written = writer_module.save_file, []

    def full(tensors, path):
        if len(written) == 2:
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        written.append(path)
        real(tensors, path)

    monkeypatch.setattr(writer_module, "save_file", full)
    with pytest.raises(DiskError, match=r"shard-00002\.safetensors: no space left"):
        write(tmp_path, ROWS)
    assert sorted(path.name for path in tmp_path.iterdir() if "shard" in path.name) == [
        f"shard-0000{i}.{end}" for i in range(2) for end in ("json", "safetensors")
    ]
    monkeypatch.setattr(writer_module, "save_file", real)
    kept = StoreReader.open(tmp_path)
    assert 0 < len(kept) < 12
    assert_same(write(tmp_path, ROWS), ROWS)


def test_K07_the_estimate_is_within_five_percent_of_the_real_size(tmp_path):
    rows = [stored_row(f"row-{i:04d}", 20 + 5 * i, i) for i in range(20)]
    write(tmp_path, rows, shard_bytes=10**9)
    real = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    estimate = sum(SPEC.row_bytes(RowEntry.of(stored.row)) for stored in rows)
    assert estimate == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no hidden-state store"), ("{", "cannot be read"), ("[]", "not a store"), ('{"format": 9}', "format 1")],
)
def test_a_folder_that_is_no_store_is_said_to_be_none(tmp_path, content, message):
    if content is not None:
        (tmp_path / "store.json").write_text(content)
    with pytest.raises(StoreError, match=message):
        read_spec(tmp_path)


def test_an_empty_store_and_an_unknown_row_are_refused(tmp_path, store):
    with StoreWriter.open(tmp_path / "empty", SPEC, SMALL):
        pass
    with pytest.raises(StoreError, match="holds no rows"):
        StoreReader.open(tmp_path / "empty")
    with pytest.raises(StoreError, match="no row row-77"):
        StoreReader.open(store).read("row-77")


def test_an_unfinished_store_is_said_to_be_unfinished(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "peagle"):
        write(tmp_path, ROWS, finish=False)
    assert "has not run to its end" in caplog.text


def test_a_slow_verifiers_rows_are_written_before_a_shard_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "FLUSH_EVERY_S", -1.0)
    with StoreWriter.open(tmp_path, SPEC, 10**9) as writer:
        writer.add(ROWS[0])
        writer.add(ROWS[1])
        assert len(index_paths(tmp_path)) >= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.reverse(),
        lambda rows: rows[0].update(num_tokens=10**9),
        lambda rows: rows[0].update(num_tokens="9"),
        lambda rows: rows[0].update(row_id=["a"]),
        lambda rows: rows[0].update(more=1),
    ],
)
def test_a_changed_index_is_found_and_its_rows_are_made_again(store, change, caplog):
    path = index_paths(store)[1]
    index = json.loads(path.read_text())
    change(index["rows"])
    path.write_text(json.dumps(index))
    with pytest.raises(StoreError, match="peagle extract"):
        assert_same(StoreReader.open(store), ROWS)
    assert_same(write(store, ROWS), ROWS)
    assert "are made again" in caplog.text


def test_a_row_that_its_index_forgot_is_made_again(store):
    path = index_paths(store)[1]
    index = json.loads(path.read_text())
    index["rows"].pop()
    path.write_text(json.dumps(index))
    assert len(StoreReader.open(store)) == len(ROWS) - 1
    assert_same(write(store, ROWS), ROWS)


def test_shards_without_a_spec_are_not_taken_over(store):
    (store / "store.json").unlink()
    with pytest.raises(StoreError, match=r"shards without store\.json"):
        StoreWriter.open(store, SPEC, SMALL)
    assert index_paths(store)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", "x"), ("aux_layer_ids", ["a", "b"]), ("aux_layer_ids", "245"), ("dtype", "zorg"), ("more", 1)],
)
def test_a_spec_that_no_writer_wrote_is_damaged(store, field, value):
    found = json.loads((store / "store.json").read_text())
    found["spec"][field] = value
    (store / "store.json").write_text(json.dumps(found))
    with pytest.raises(StoreError, match=r"store\.json: damaged"):
        StoreReader.open(store)


@pytest.mark.parametrize(("field", "value"), [("aux_layer_ids", [2, 4]), ("dtype", "bfloat16"), ("hidden_size", 4)])
def test_states_of_another_store_are_refused_by_shape_and_dtype(store, field, value):
    found = json.loads((store / "store.json").read_text())
    found["spec"][field] = value
    (store / "store.json").write_text(json.dumps(found))
    with pytest.raises(StoreError, match=r"row row-0: aux_states of shape .* by store\.json"):
        StoreReader.open(store).read("row-0")
