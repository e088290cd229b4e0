"""Folders of this test process, so that no test finds what an earlier run left behind. Imported before what it is for.

What libraries keep in the home, temporary or current folder goes to `SCRATCH`, which conftest.py removes at the end.
`tmp_path` stays where pytest has it, for a look at what a failed test left.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())

# A short name, and not below that of another test process: Ray puts sockets there.
SCRATCH = Path(tempfile.mkdtemp(prefix="t", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))
SCRATCH.chmod(0o755)  # the sandbox runs programs as another user
tempfile.tempdir = os.environ["TMPDIR"] = str(SCRATCH)
LIBRARIES = ("HF_HOME", "TRACKIO_DIR", "WANDB_DIR", "HYPOTHESIS_STORAGE_DIRECTORY")
for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", *LIBRARIES):
    os.environ[name] = str(SCRATCH / name.lower())
    os.mkdir(os.environ[name])
