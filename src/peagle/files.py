"""Writing so that a kill, a full disk or a power cut leaves either the old file or the new one, never half of one."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from peagle.errors import DiskError, PeagleError

_MOVE = "choose another place, or move"
# What a path that a user gave can meet, and what to do about it. Other errors are ours, and keep their traceback.
_REFUSALS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions, or choose another place"),
    errno.EROFS: "choose a place that can be written",
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), f"a file stands where a folder is needed; {_MOVE} the file"),
    errno.EISDIR: f"a folder stands where a file is needed; {_MOVE} the folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "it is gone, or cannot be made there; choose another place, or run the same command again",
    errno.EIO: "the disk reports a fault; check it, and run the same command again",
    errno.ESTALE: "the network disk lost it; run the same command again",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`), and run the same command again",
}
_FULL = "no space left on the disk; free some and run the same command again"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.\d+\.(?P<kind>tmp|old)")
_UMASK = os.umask(0)
os.umask(_UMASK)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed to `path`.

    Raises:
        DiskError: no space, or the write failed; the temporary file is gone and an older `path` is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _settle(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise DiskError(f"{path}: {_FULL}") from error
        raise


def sweep(folder: Path) -> list[str]:
    """Remove what killed processes left of `whole_file` and `whole_folder` in `folder`; returns the names removed.

    A folder that was put aside for a successor that never came is put back. The caller holds a lock, so that nobody
    else writes here.
    """
    removed = []
    for place in sorted(folder.glob(".*")):
        named = _LEFTOVER.fullmatch(place.name)
        if named is None:
            continue
        if named["kind"] == "old" and not (folder / named["name"]).exists():
            os.replace(place, folder / named["name"])
            continue
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()
        removed.append(place.name)
    return removed


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it replaces `path` (an older one is removed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _settle(file)
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not path.exists():
            os.replace(old, path)
        if is_disk_full(error):
            raise DiskError(f"{path}: {_FULL}") from error
        raise


def _settle(file: Path) -> None:
    """Flush a file to the disk, with the permissions of new files: safetensors makes its files private."""
    with open(file, "rb+") as handle:
        os.fsync(handle.fileno())
    file.chmod(0o666 & ~_UMASK)


def is_disk_full(error: BaseException) -> bool:
    """Tell whether an error means that the disk is full; safetensors reports it as text only."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left" in str(error) or "os error 28" in str(error)


def os_error_line(error: OSError) -> str | None:
    """One line for what the file system refuses (full, read-only, no right, a file in the way); None for the rest."""
    where = f"{error.filename}: " if isinstance(error.filename, str) and error.filename else ""
    if is_disk_full(error):
        return f"{where}{_FULL}"
    advice = _REFUSALS.get(error.errno or 0)
    if advice is None or not where:
        return None
    return f"{where}{(error.strerror or type(error).__name__).lower()}; {advice}"


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON whole; NaN and infinity are refused (they are not JSON)."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def lock_file(path: Path, doing: str) -> BinaryIO:
    """Lock `path` until the handle is closed or this process ends; its children do not inherit the lock.

    Raises:
        PeagleError: another process holds it; `doing` says what that does: "preparing into OUTPUT".
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open(path, "wb")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            handle.close()
            raise PeagleError(f"another process is {doing}; wait for it, or choose another folder") from None
        # a network disk without locks: nothing keeps a second process away
    return handle


def free_bytes(path: Path) -> int:
    """Free space, in bytes, on the disk that holds `path` (or its nearest existing parent)."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def available_memory() -> float | None:
    """Bytes of host memory that are free: of the machine or, if less, of the control group; None if unknown."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")))
    except (OSError, StopIteration, ValueError):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(float(limit) - float(used))
    except (OSError, ValueError):
        pass
    return min(found) if found else None
