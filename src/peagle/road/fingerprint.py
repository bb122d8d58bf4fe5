"""What a stage read and wrote, as hashes of contents: equal hashes mean that nothing has to be done again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from peagle.files import sha256_file, write_json

# Differ between runs that made the same thing: times, versions, logs, locks.
_NOT_CONTENT = {"manifest.json", "run.yaml", "metrics.jsonl", "README.md", "recipe.json"}
_STORE = "store.json"


class Fingerprints:
    """Hashes of files and folders; a file is read again only if its size or its time of change differ."""

    def __init__(self, cache_file: Path) -> None:
        self._file = cache_file
        self._known: dict[str, list[Any]] = {}
        try:
            known = json.loads(cache_file.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            pass  # a cache: without it every file is read once more

    def of(self, path: Path) -> str | None:
        """The hash of a file's content, or of everything that a folder holds; None if nothing is there.

        A hidden-state store stands for itself by its JSON files, which have the checksum of every shard.
        """
        if path.is_file():
            return self._file_hash(path)
        if not path.is_dir():
            return None
        is_store = (path / _STORE).is_file()
        digest = hashlib.sha256()
        found = False
        for file in sorted(path.rglob("*")):
            relative = file.relative_to(path)
            hidden = any(part.startswith(".") or part == "training_state" for part in relative.parts)
            if hidden or not file.is_file() or file.name in _NOT_CONTENT or (is_store and file.suffix != ".json"):
                continue
            found = True
            digest.update(f"{relative.as_posix()}\0{self._file_hash(file)}\n".encode())
        return digest.hexdigest() if found else None

    def save(self) -> None:
        """Keep the cache for the next run."""
        write_json(self._file, self._known)

    def _file_hash(self, path: Path) -> str:
        stat = path.stat()
        key = str(path.resolve())
        known = self._known.get(key)
        if isinstance(known, list) and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return str(known[2])
        digest = sha256_file(path)
        self._known[key] = [stat.st_size, stat.st_mtime_ns, digest]
        return digest


def key_of(stage: str, settings: dict[str, Any], inputs: dict[str, str], root: Path) -> str:
    """The identity of a stage's work: its settings and the hashes of what it reads.

    The run's own folder (`root`) is left out of it, so that a run that was moved is still up to date.
    """
    text = json.dumps([stage, settings, inputs], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.replace(str(root), "{output}").encode()).hexdigest()
