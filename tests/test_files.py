"""What killed processes leave behind."""

from __future__ import annotations

from pathlib import Path

from peagle.files import sweep


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    for name in (".0.123.tmp", ".1.9.old", "1", "0.7.tmp", ".lock.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    (tmp_path / ".metrics.jsonl.44.tmp").write_text("half")
    (tmp_path / ".checkpoint_last.44.tmp").symlink_to("1")
    (tmp_path / ".lock").write_text("")
    assert sorted(sweep(tmp_path)) == [".0.123.tmp", ".1.9.old", ".checkpoint_last.44.tmp", ".metrics.jsonl.44.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", ".lock.tmp", "0.7.tmp", "1"]
    assert (tmp_path / "1" / "weights").read_text() == "1"


def test_what_was_put_aside_for_a_successor_that_never_came_is_put_back(tmp_path: Path) -> None:
    (tmp_path / ".interrupted.12.old").mkdir()
    (tmp_path / ".interrupted.12.old" / "weights").write_text("whole")
    assert sweep(tmp_path) == []
    assert (tmp_path / "interrupted" / "weights").read_text() == "whole"
