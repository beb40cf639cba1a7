"""The fabric contract on the emulated backends, with real processes for the peers that die and stop."""

from __future__ import annotations

import os
import select
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from doca_shims import contract
from doca_shims.api import WcStatus
from doca_shims.contract_harness import Pair, collect, statuses
from doca_shims.registry import create_fabric
from emulator import fabric_shm_pages

_OPTIONS = {"rnr_timeout_s": "0.3", "transport_timeout_s": "0.6"}


@pytest.fixture(params=["emu-shm native", "emu-shm python", "emu-tcp"])
def harness(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> contract.FabricHarness:
    backend, _, code = request.param.partition(" ")
    if code == "native" and fabric_shm_pages.NATIVE is None:
        pytest.skip("the native module is not built")
    if code == "python":
        monkeypatch.setattr(fabric_shm_pages, "NATIVE", None)
        monkeypatch.setenv("ENTRESOL_NATIVE", "0")  # for peer processes
    numbers = iter(range(10_000))

    def new_address() -> str:
        return "127.0.0.1:0" if backend == "emu-tcp" else str(tmp_path / f"{next(numbers)}.sock")

    make: Callable[[], str] = new_address
    return contract.FabricHarness(backend, _OPTIONS, lambda: create_fabric(backend, _OPTIONS), make, 5.0)


def test_a_forked_child_keeps_no_connection_and_no_address_alive(harness: contract.FabricHarness) -> None:
    with Pair(harness, recvs=1) as pair:
        listener = pair.fabric.listen(harness.new_address())
        ours, childs = os.pipe()
        started, start = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike fork beside threads
            child = os.fork()
        if child == 0:
            os.close(childs)
            os.write(start, b"1")  # what a forked child lets go of, it has let go of by now
            os.read(ours, 1)  # until the parent has seen enough
            os._exit(0)
        try:
            assert select.select([started], [], [], 20)[0], "the child did not start"
            pair.a.connection.close()
            assert statuses(collect(pair.b.connection, 1)) == [WcStatus.WR_FLUSH_ERR]
            address = listener.address
            listener.close()
            pair.fabric.listen(address).close()
        finally:
            for descriptor in (childs, ours, started, start):
                os.close(descriptor)
            os.waitpid(child, 0)


@pytest.mark.parametrize("name", list(contract.CHECKS))
def test_contract(name: str, harness: contract.FabricHarness) -> None:
    result = contract.run_check(name, harness)
    if result.outcome == "skipped":
        pytest.skip(result.detail)
    assert result.outcome == "passed", result.detail
