"""The stage around the loop: what is refused before a weight is loaded."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest

from peagle.errors import ConfigError, PeagleError
from peagle.train.config import TrainConfig
from peagle.train.run import _prepare_save_path, train


def config(folder, **values):
    given = {"verifier_name_or_path": "v", "data_path": folder / "data", "save_path": folder / "save", **values}
    return TrainConfig.build(given)


def test_two_trainings_into_one_folder_at_once_are_refused(tmp_path):
    code = "import sys; from pathlib import Path; from peagle.files import lock_file; "
    code += f"lock = lock_file(Path({str(tmp_path / 'save' / '.lock')!r}), ''); print('held', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    with contextlib.ExitStack() as held:
        with pytest.raises(PeagleError, match="another process is training into"):
            _prepare_save_path(config(tmp_path), held)
        holder.communicate(b"\n")
        _prepare_save_path(config(tmp_path), held)


def test_sharding_over_one_process_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no others to shard over"):
        train(config(tmp_path, fsdp_shard=True))
