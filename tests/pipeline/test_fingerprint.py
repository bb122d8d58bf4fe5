from __future__ import annotations

import os

from peagle.pipeline.recipe import Fingerprints, key_of


def test_equal_contents_have_equal_hashes_wherever_and_whenever(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "x.json").write_text("1")
    os.utime(tmp_path / "b" / "sub" / "x.json", (1, 1))
    prints = Fingerprints(tmp_path / "cache.json")
    assert prints.of(tmp_path / "a") == prints.of(tmp_path / "b")
    (tmp_path / "b" / "sub" / "x.json").write_text("2")
    assert prints.of(tmp_path / "a") != prints.of(tmp_path / "b")


def test_a_renamed_file_changes_the_folder_and_what_only_tells_about_a_run_does_not(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "x").write_text("1")
    prints = Fingerprints(tmp_path / "cache.json")
    before = prints.of(folder)
    (folder / "manifest.json").write_text("{}")
    (folder / ".lock").write_text("")
    assert prints.of(folder) == before
    (folder / "x").rename(folder / "y")
    assert prints.of(folder) != before


def test_nothing_there_has_no_hash(tmp_path):
    prints = Fingerprints(tmp_path / "cache.json")
    assert prints.of(tmp_path / "gone") is None
    (tmp_path / "empty").mkdir()
    assert prints.of(tmp_path / "empty") is None


def test_a_file_is_read_again_only_if_size_or_time_changed(tmp_path, monkeypatch):
    import peagle.pipeline.recipe as fingerprint

    read = []
    real = fingerprint.sha256_file
    monkeypatch.setattr(fingerprint, "sha256_file", lambda path: read.append(path.name) or real(path))
    file = tmp_path / "big"
    file.write_text("1")
    first = Fingerprints(tmp_path / "cache.json")
    digest = first.of(file)
    first.save()
    assert Fingerprints(tmp_path / "cache.json").of(file) == digest
    assert read == ["big"]
    (tmp_path / "cache.json").write_text("not json")
    assert Fingerprints(tmp_path / "cache.json").of(file) == digest


def test_a_key_follows_settings_and_inputs_but_not_the_place_of_the_run(tmp_path):
    key = key_of("train", {"lr": 1, "save_path": "/x/run/c"}, {"/x/run/prepared": "h"}, "/x/run")
    assert key == key_of("train", {"lr": 1, "save_path": "/y/c"}, {"/y/prepared": "h"}, "/y")
    assert key != key_of("train", {"lr": 2, "save_path": "/x/run/c"}, {"/x/run/prepared": "h"}, "/x/run")
    assert key != key_of("train", {"lr": 1, "save_path": "/x/run/c"}, {"/x/run/prepared": "i"}, "/x/run")


def test_a_store_stands_for_itself_by_its_checksums(tmp_path):
    (tmp_path / "store.json").write_text("{}")
    (tmp_path / "shard-0.json").write_text('{"sha256": "a"}')
    (tmp_path / "shard-0.safetensors").write_bytes(b"large")
    prints = Fingerprints(tmp_path.parent / "cache.json")
    before = prints.of(tmp_path)
    (tmp_path / "shard-0.safetensors").write_bytes(b"never read")
    assert prints.of(tmp_path) == before
    (tmp_path / "shard-0.json").write_text('{"sha256": "bb"}')
    assert prints.of(tmp_path) != before
