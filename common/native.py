"""Native modules: small C extensions that do the plain case of something written out in Python, and do it faster.

Each is optional: where there was no compiler, or ENTRESOL_NATIVE=0 is in the environment, `load` gives None and the
Python beside it serves alone, under the same tests (docs/adr/0006-native-hot-path.md). Used by whoever owns such a
module, once, when it is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def load(name: str) -> ModuleType | None:
    """The extension module of this full name, or None: not built, switched off, or for another order of bytes."""
    if os.environ.get("ENTRESOL_NATIVE", "1") == "0" or sys.byteorder != "little":
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
