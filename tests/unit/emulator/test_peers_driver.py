"""What runs in a peer's environment: imports nothing of this project, and its own parts do what they say."""

from __future__ import annotations

import ast
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from emulator.peers import driver

PEERS = Path(driver.__file__).parent
OURS = {"common", "doca_shims", "dpu_app", "emulator", "host_agent"}
FOREIGN = [PEERS / "driver.py", *sorted((PEERS / "adapters").glob("[!_]*.py"))]


def imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("" if node.level else (node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_it_imports_nothing_of_this_project(path: Path) -> None:
    names = imported(ast.parse(path.read_text()))
    assert "" not in names, "a relative import finds nothing there"
    if path.stem != "entresol_client":  # Entresol's own adapter
        assert not names & OURS


def test_the_driver_needs_numpy_alone() -> None:
    assert imported(ast.parse((PEERS / "driver.py").read_text())) <= sys.stdlib_module_names | {"numpy"}


def test_a_pattern_tells_key_and_place() -> None:
    pattern = driver.Pattern(1 << 20)
    words = np.zeros((1 << 20) // 8, np.uint64)
    pattern.fill(b"one", words)
    assert pattern.first_mismatch(b"one", words) is None
    assert pattern.first_mismatch(b"two", words) == 0
    words[70_000] ^= np.uint64(1 << 63)
    assert pattern.first_mismatch(b"one", words) == 70_000 * 8
    pattern.fill(b"one", words)
    shifted = np.roll(words, 1)
    assert pattern.first_mismatch(b"one", shifted) == 0


def test_memory_is_whole_and_aligned() -> None:
    for huge in (False, True):
        memory = driver.allocate(3 << 20, huge)
        assert memory.nbytes == 3 << 20
        assert memory.ctypes.data % (2 << 20) == 0


def test_processor_seconds_are_of_the_processes_named() -> None:
    before_s, mine_s = driver.cpu_s([os.getpid()]), time.process_time()
    while time.process_time() - mine_s < 0.02:
        pass
    used_s = driver.cpu_s([os.getpid()]) - before_s
    assert used_s >= 0.02
    assert driver.cpu_s([os.getpid(), 2**22 + 1]) >= before_s, "a process that has ended counts nothing"
