"""Scripted DPUs for the agent's tests, ended whatever happens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from host_agent import native_batches
from host_agent.client import Client
from tests.unit.host_agent.scripted_dpu import SLOT_BYTES, ScriptedDpu

MakeDpu = Callable[..., ScriptedDpu]
MakeClient = Callable[..., Client]


@pytest.fixture(params=["native", "python"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients have the native way of plain batches, or are without it."""
    if request.param == "python":
        monkeypatch.setattr(native_batches, "MODULE", None)
    elif native_batches.MODULE is None:
        pytest.skip("the native module is not built")


@pytest.fixture
def make_dpu() -> Iterator[MakeDpu]:
    started: list[ScriptedDpu] = []
    with tempfile.TemporaryDirectory(prefix="entresol-") as directory:

        def make(
            regions: int = 1, credits: int = 8, slot_bytes: tuple[int, ...] = (SLOT_BYTES,), start: bool = True
        ) -> ScriptedDpu:
            dpu = ScriptedDpu(Path(directory), f"dpu{len(started)}", regions, credits, slot_bytes)
            started.append(dpu)
            if start:
                dpu.start()
            return dpu

        yield make
        for dpu in started:
            dpu.stop()


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    opened: list[Client] = []

    def make(*dpus: ScriptedDpu, **settings: Any) -> Client:
        settings.setdefault("timeout_s", 10.0)
        client = Client([dpu.address for dpu in dpus], tenant="acme", **settings)
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()
