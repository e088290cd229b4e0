"""Separate home and temporary folders for this test process, so that no test sees files of an earlier run.

It must be imported before the libraries that read these environment variables. Files that libraries keep in the home
or temporary folder go to `SCRATCH`, which conftest.py removes at the end. `tmp_path` stays at pytest's default
location, so that the files of a failed test can be inspected.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())

# The path is short and not nested in that of another test process, because Ray creates sockets there.
SCRATCH = Path(tempfile.mkdtemp(prefix="t", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
SCRATCH.chmod(0o755)  # the sandbox runs programs as another user
tempfile.tempdir = os.environ["TMPDIR"] = str(SCRATCH)
LIBRARIES = ("HF_HOME", "TRACKIO_DIR", "WANDB_DIR", "HYPOTHESIS_STORAGE_DIRECTORY")
for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", *LIBRARIES):
    os.environ[name] = str(SCRATCH / name.lower())
    os.mkdir(os.environ[name])
