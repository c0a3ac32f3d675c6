import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.storage.errors import StorageIOError
from headrace.storage.kernel_folder import ensure_kernel_folder

NOWHERE = Path("/proc/self/nowhere")  # not even root can make a folder there
SETTING = "NUMBA_CACHE_DIR"


def test_a_usual_folder_is_left_to_numba(monkeypatch, tmp_path):
    monkeypatch.delenv(SETTING, raising=False)
    ensure_kernel_folder([NOWHERE, tmp_path / "cache"])
    assert SETTING not in os.environ


def test_a_folder_that_was_set_stays(monkeypatch):
    monkeypatch.setenv(SETTING, "/somewhere")
    ensure_kernel_folder([NOWHERE])
    assert os.environ[SETTING] == "/somewhere"


def test_without_any_folder_the_error_says_what_to_set(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(NOWHERE))
    with pytest.raises(StorageIOError, match="set NUMBA_CACHE_DIR"):
        ensure_kernel_folder([NOWHERE])


def test_a_process_without_a_usual_folder_has_its_own_while_it_lives(tmp_path):
    script = (
        "import os, pathlib, headrace.storage.kernel_folder as folder\n"
        "os.environ.pop('NUMBA_CACHE_DIR', None)\n"
        f"folder.ensure_kernel_folder([pathlib.Path({str(NOWHERE)!r})])\n"
        "from headrace.storage.read._cache_kernels import count_uses\n"
        "import numpy as np\n"
        "score = np.zeros(2, dtype=np.int64)\n"
        "count_uses(score, np.array([1, 1], dtype=np.int32))\n"
        "kept = pathlib.Path(os.environ['NUMBA_CACHE_DIR'])\n"
        "print(score[1], any(kept.rglob('*.nbi')), kept)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    uses, compiled, folder = done.stdout.split()
    assert (uses, compiled) == ("2", "True")
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists()
