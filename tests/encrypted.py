"""Has clusters of tests speak TLS, where ``DASKINFER_TEST_TLS`` asks for that.

``all`` tests of a cluster run so, or about a ``tenth`` of them: which, depends on their
names alone. Dask then takes, in each process, certificates made for this run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

import yaml

_SHARES = {"": 0, "tenth": 1, "all": 10}
_SCRIPT = Path(__file__).parents[1] / "deploy" / "tls" / "make-certificates.sh"


def tenths() -> int:
    """How many tenths of the tests are asked for."""
    asked = os.environ.get("DASKINFER_TEST_TLS", "")
    if asked not in _SHARES:
        raise ValueError(f"DASKINFER_TEST_TLS={asked} is neither 'tenth' nor 'all'")
    return _SHARES[asked]


def encrypt() -> Path:
    """Make certificates, and have this process and those that it starts use them.

    Returns
    -------
    pathlib.Path
        The directory that is to be removed in the end.

    Notes
    -----
    To be called before Dask is imported.
    """
    directory = Path(tempfile.mkdtemp())
    made = subprocess.run([_SCRIPT, directory], capture_output=True, text=True)
    if made.returncode:
        shutil.rmtree(directory)
        raise RuntimeError(f"{_SCRIPT} failed; is openssl there?\n{made.stderr}")
    # Encryption is required there: Dask refuses to listen, or to connect, without it.
    # A test may have a DASK_CONFIG of its own, and variables go before that.
    told = yaml.safe_load((directory / "dask.yaml").read_text())
    os.environ.update(_as_variables("DASK", told))
    return directory


def _as_variables(name: str, setting: Any) -> dict[str, str]:
    if not isinstance(setting, dict):
        return {name: str(setting)}
    found = {}
    for key, value in setting.items():
        joint = "_" if name == "DASK" else "__"
        found |= _as_variables(name + joint + key.upper().replace("-", "_"), value)
    return found


def is_drawn(name: str) -> bool:
    """Whether a test of this name is among those that run encrypted."""
    return zlib.crc32(name.encode()) % 10 < tenths()
