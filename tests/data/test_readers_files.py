"""Reading data files row by row."""

from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from peagle.data.readers import read_file
from peagle.data.records import UnusableRow
from peagle.errors import DataError

ROWS = [{"a": 1}, {"a": "two", "b": {"c": None}}, {"text": "x\u2028y"}]


def plain(path):
    return [(n, row.reason if isinstance(row, UnusableRow) else row) for n, row in read_file(path)]


@pytest.mark.parametrize("name", ["d.jsonl", "d.ndjson", "d.jsonl.gz", "d.json"])
def test_json_lines_are_read_under_every_name(tmp_path, name):
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    raw = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
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
        ("d.jsonl.gz", gzip.compress(b"{}\n" * 99)[:10] + b"\xff" * 20, "cannot be read"),
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
