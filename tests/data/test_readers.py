"""Reading data files row by row, what `--data` may name, and the identity of rows."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.data.readers import BENCHMARK_PARTS, HUB_SETS, hub_parts, read_conversations, read_file, read_rows
from peagle.data.records import Conversation, Rejected, UnusableRow
from peagle.errors import DataError
from tests.data.toys import chat, write_lines

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets shared with the project are not here")


def read(*specs, limit=None):
    return list(read_conversations([str(spec) for spec in specs], limit))


def test_row_ids_survive_shuffling_and_equal_rows_are_told_apart(tmp_path):
    rows = [{"id": i, **chat(f"ask {i}", "reply")} for i in range(20)]
    rows += [chat("same", "thing")] * 3 + [chat("no id", "here")]
    first = read(write_lines(tmp_path / "a.jsonl", rows))
    random.Random(0).shuffle(rows)
    second = read(write_lines(tmp_path / "b.jsonl", rows))
    by_id = {row.row_id: row.messages for row in first}
    assert len(by_id) == len(rows)
    assert by_id == {row.row_id: row.messages for row in second}
    twins = sorted(row.row_id for row in first if row.messages[0]["content"] == "same")
    assert twins == [twins[0], twins[0] + "#2", twins[0] + "#3"]


def test_one_id_with_two_contents_is_two_rows(tmp_path):
    rows = [{"id": "x", **chat("a", "b")}, {"id": "x", **chat("c", "d")}]
    ids = [row.row_id for row in read(write_lines(tmp_path / "a.jsonl", rows))]
    assert ids[0] != ids[1]
    assert all(row_id.startswith("x.") for row_id in ids)


def test_ready_rows_keep_their_own_ids(tmp_path):
    rows = [{"id": f"h{i}.abc/2", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]} for i in (1, 2, 1)]
    data = write_lines(tmp_path / "a.jsonl", rows)
    assert [row.row_id for row in read_rows([str(data)], None, "chat")] == ["h1.abc/2", "h2.abc/2", "h1.abc/2#2"]
    assert [type(row) for row in read(data)] == [Rejected] * 3


def test_a_limit_takes_rows_of_all_sources_in_turn(tmp_path):
    for name, number in (("a", 5), ("b", 1), ("c", 5)):
        write_lines(tmp_path / f"{name}.jsonl", [chat(f"{name}{i}", "reply") for i in range(number)])
    found = read(tmp_path, limit=7)
    assert [row.messages[0]["content"] for row in found] == ["a0", "b0", "c0", "a1", "c1", "a2", "c2"]


def test_sources_are_named_after_files_folders_categories_or_by_the_user(tmp_path):
    (tmp_path / "math").mkdir()
    write_lines(tmp_path / "math" / "test.jsonl", [chat("a", "b")])
    write_lines(tmp_path / "qa.jsonl", [chat("c", "d"), {"source": "own", **chat("e", "f")}])
    write_lines(tmp_path / "bench.jsonl", [{"question_id": 1, "category": "rag", "turns": ["one", "two"]}])
    found = read(
        tmp_path / "math" / "test.jsonl",
        tmp_path / "qa.jsonl",
        f"mine={tmp_path / 'qa.jsonl'}",
        tmp_path / "bench.jsonl",
    )
    assert [row.source for row in found] == ["math", "qa", "own", "mine", "own", "rag"]


def test_a_folder_written_by_datasets_is_read(tmp_path):
    datasets.Dataset.from_list([chat("a", "b"), chat("c", "d")]).save_to_disk(str(tmp_path / "set"))
    assert [row.messages[1]["content"] for row in read(tmp_path / "set")] == ["b", "d"]
    datasets.DatasetDict({"train": datasets.Dataset.from_list([chat("a", "b")])}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(DataError, match="has the splits train; name one"):
        read(tmp_path / "two")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing.jsonl", "no such file"),
        ("./nothing", "no such file"),
        ("sharegtp", "known names are .*sharegpt"),
        ("speculator-benchmarks:poems", "no part 'poems'"),
        ("", "names nothing"),
        ("mine=", "names nothing"),
    ],
)
def test_what_cannot_be_found_is_said_in_one_line(spec, message):
    with pytest.raises(DataError, match=message):
        read(spec)


def test_what_a_folder_holds_besides_data_is_named(tmp_path, caplog):
    write_lines(tmp_path / "a.jsonl", [chat("a", "b")])
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "more").mkdir()
    with caplog.at_level(logging.INFO, logger="peagle"):
        assert len(read(tmp_path)) == 1
    assert "read 1 files, skipped 2 others: more, notes.txt" in caplog.text


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match="not a regular file"):
        read(tmp_path / "d.jsonl")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="the folder has no"):
        read(tmp_path)


def test_hub_names_splits_and_parts_are_understood():
    assert [(p.hub_id, p.config, p.split) for p in hub_parts("gsm8k:test")] == [("openai/gsm8k", "main", "test")]
    assert [(p.source, p.hub_id, p.split) for p in hub_parts("hf:org/set:val")] == [("set", "org/set", "val")]
    assert [p.source for p in hub_parts("RedHatAI/speculator_benchmarks")] == list(BENCHMARK_PARTS)
    assert [(p.source, p.file) for p in hub_parts("speculator-benchmarks:qa")] == [("qa", "qa.jsonl")]
    assert hub_parts("nothing") is None
    assert set(HUB_SETS) >= {"sharegpt", "ultrachat", "gsm8k", "humaneval", "mt-bench", "spec-bench"}


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A folder in which hub ids are local folders of the true layout: `load_dataset` takes them instead of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def table(name: str, rows: list) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            write_lines(path, rows)

    return table


def test_sharegpt_is_loaded(mirror):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]
    mirror(
        "Aeala/ShareGPT_Vicuna_unfiltered/ShareGPT_V4.3_unfiltered_cleaned_split.json",
        [{"id": "QWJhYvA_0", "conversations": turns}, {"id": "i6IyJda_0", "conversations": turns[:2]}],
    )
    first, second = read("sharegpt")
    assert (first.source, len(first.messages), len(second.messages)) == ("sharegpt", 3, 2)
    assert first.row_id.startswith("QWJhYvA_0.")


def test_ultrachat_is_loaded(mirror):
    row = {"prompt": "a", "prompt_id": "f0e3", **chat("a", "b", "c", "d")}
    for split in ("train_sft", "test_sft"):
        mirror(f"HuggingFaceH4/ultrachat_200k/data/{split}-00000-of-00001.parquet", [row])
    (found,) = read("ultrachat")
    assert (found.source, len(found.messages), found.row_id[:5]) == ("ultrachat", 4, "f0e3.")


def test_gsm8k_is_loaded_without_its_calculator_marks(mirror):
    row = {"question": "How many?", "answer": "2+3 = <<2+3=5>>5\n#### 5"}
    for split in ("train", "test"):
        mirror(f"openai/gsm8k/main/{split}-00000-of-00001.parquet", [row])
    readme = "---\nconfigs:\n- config_name: main\n  data_files:\n" + "".join(
        f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test")
    )
    Path("openai/gsm8k/README.md").write_text(readme + "---\n")
    for spec in ("gsm8k", "gsm8k:test"):
        (found,) = read(spec)
        assert found.messages[1]["content"] == "2+3 = 5\n#### 5"
        assert found.source == "gsm8k"


def test_the_nine_benchmarks_are_loaded_each_as_its_own_source(mirror):
    for part in BENCHMARK_PARTS:
        mirror(f"RedHatAI/speculator_benchmarks/{part}.jsonl", [{"prompt": f"{part} one"}, {"prompt": f"{part} two"}])
    found = read("RedHatAI/speculator_benchmarks")
    assert [row.source for row in found] == [part for part in BENCHMARK_PARTS for _ in range(2)]
    assert all(row.is_prompt for row in found)
    assert [row.messages[0]["content"] for row in read("speculator-benchmarks:qa")] == ["qa one", "qa two"]
    assert [row.source for row in read("speculator-benchmarks", limit=9)] == list(BENCHMARK_PARTS)
    local = read("./RedHatAI/speculator_benchmarks")
    assert sorted({row.source for row in local}) == sorted(BENCHMARK_PARTS)


def test_human_eval_and_mt_bench_are_prompts(mirror):
    mirror(
        "openai/openai_humaneval/openai_humaneval/test-00000-of-00001.parquet",
        [
            {
                "task_id": "HumanEval/0",
                "prompt": "def f():\n",
                "canonical_solution": "  return 1",
                "test": "",
                "entry_point": "f",
            }
        ],
    )
    mirror(
        "HuggingFaceH4/mt_bench_prompts/data/train-00000-of-00001.parquet",
        [{"category": "writing", "prompt": ["Write.", "Again."], "prompt_id": 81, "reference": []}],
    )
    (code,) = read("humaneval")
    assert (code.source, code.messages) == ("humaneval", ({"role": "user", "content": "def f():\n"},))
    (bench,) = read("mt-bench")
    assert (bench.source, bench.next_turns) == ("writing", ("Again.",))


def test_a_set_that_cannot_be_loaded_is_one_line(mirror, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"nobody/nothing: cannot be loaded from the hub \(") as error:
        read("nobody/nothing")
    assert "\n" not in str(error.value)


@needs_shared
def test_the_true_files_of_three_sets_are_read():
    gsm8k = read(SHARED / "gsm8k" / "test.jsonl")
    assert len(gsm8k) == 1319
    assert all(isinstance(row, Conversation) and row.source == "gsm8k" for row in gsm8k)
    assert not any("<<" in row.messages[1]["content"] for row in gsm8k)
    code = read(SHARED / "human_eval" / "HumanEval.jsonl.gz")
    assert len(code) == 164
    assert all(row.is_prompt and row.source == "HumanEval" for row in code)
    bench = read(SHARED / "spec_bench" / "question.jsonl")
    assert len(bench) == 480
    by_source = {
        name: sum(row.source == name for row in bench) for name in ("translation", "summarization", "qa", "rag")
    }
    assert set(by_source.values()) == {80}
    assert sum(len(row.next_turns) for row in bench) == 80


def test_openings_and_answers_walk_through_a_conversation(tmp_path):
    (row,) = read(write_lines(tmp_path / "a.jsonl", [chat("one", "r1", "two", "r2", "three", system="s")]))
    opening = row.opening()
    assert [m["content"] for m in opening.messages] == ["s", "one"]
    assert opening.next_turns == ("two", "three")
    second = opening.answered({"role": "assistant", "content": "mine"})
    assert [m["content"] for m in second.messages] == ["s", "one", "mine", "two"]
    assert second.is_prompt
    assert second.next_turns == ("three",)


ROWS = [{"a": 1}, {"a": "two", "b": {"c": None}}, {"text": "x\u2028y"}]


def plain(path):
    return [(n, row.reason if isinstance(row, UnusableRow) else row) for n, row in read_file(path)]


@pytest.mark.parametrize("name", ["d.jsonl", "d.ndjson", "d.jsonl.gz", "d.json"])
def test_json_lines_are_read_under_every_name(tmp_path, name):
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    raw = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw, mtime=0) if name.endswith("gz") else raw)
    assert plain(tmp_path / name) == [(1, ROWS[0]), (2, ROWS[1]), (3, ROWS[2])]


def test_a_byte_order_mark_and_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n   \n{"a": 2}\n')
    assert plain(path) == [(1, {"a": 1}), (4, {"a": 2})]


def test_a_broken_line_is_a_row_with_a_reason(tmp_path):
    path = tmp_path / "d.jsonl"
    deep = b"[" * 100_000
    long = b"9" * 5000
    lines = [b'{"a": ', b"[1]", b'"x"', b"\xff\xfe{}", b'{"a": ' + deep, b'{"a": ' + long + b"}", b'{"a": 1}', b""]
    path.write_bytes(b"\n".join(lines))
    assert plain(path) == [
        (1, "broken JSON"),
        (2, "not an object"),
        (3, "not an object"),
        (4, "not UTF-8"),
        (5, "broken JSON"),
        (6, "broken JSON"),
        (7, {"a": 1}),
    ]


def test_an_array_gives_the_line_on_which_each_element_begins(tmp_path):
    path = tmp_path / "d.json"
    path.write_text('\n[\n {"a": 1},\n\n {"a":\n 2}, {"a": 3},\n 4\n]\n')
    assert plain(path) == [(3, {"a": 1}), (5, {"a": 2}), (6, {"a": 3}), (7, "not an object")]


@pytest.mark.parametrize("text", ['[{"a": 1},\n{"a": ', '[{"a": 1}\n{"a": 2}]', '[{"a": 1},\n]', '[{"a": 1}'])
def test_an_array_that_breaks_off_is_refused_with_its_line(tmp_path, text):
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"d\.json:[12]: the JSON array breaks off"):
        plain(path)


def test_an_object_that_holds_the_rows_and_one_row_alone_are_read(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1))
    assert [row for _, row in plain(path)] == ROWS
    path.write_text(json.dumps({"messages": [{"role": "user"}]}, indent=1))
    assert plain(path) == [(1, {"messages": [{"role": "user"}]})]


def test_parquet_gives_rows_without_the_nulls_of_other_rows(tmp_path):
    path = tmp_path / "d.parquet"
    rows = [{"m": [{"role": "user", "content": "a"}]}, {"m": [{"role": "tool", "content": "b", "tool_call_id": "1"}]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert plain(path) == [(1, rows[0]), (2, rows[1])]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b"", "the file is empty"),
        ("d.json", b"  \n", "the file is empty"),
        ("d.parquet", b"PAR1nothing", "not a readable Parquet file"),
        ("d.csv", b"a,b", "unknown kind of file"),
        ("d.json", b"\xff[]", "not UTF-8"),
        ("d.jsonl.gz", b"not gzip", "cannot be read"),
        ("d.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:10] + b"\xff" * 20, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        plain(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        plain(tmp_path / "none.jsonl")
