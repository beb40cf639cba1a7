"""The simulated flash keeps the contract when nothing is planned, breaks it as planned, and repeats by its seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from doca_shims import flash_contract
from doca_shims.api import FlashCompletion, FlashOp, FlashRequest
from dpu_app.flash.anonymous_memory import AnonymousMemory
from emulator.sim_flash import SECTOR_BYTES, Fault, FaultKind, FaultPlan, Media, SimFlash

CAPACITY_BYTES = 1 << 20
PLANNED = [
    field.name for field in dataclasses.fields(FaultPlan) if field.name not in ("delay_polls_max", "protected_bytes")
]


def _plan(chance: float, *faults: str) -> FaultPlan:
    chances: dict[str, Any] = dict.fromkeys(faults, chance)
    return dataclasses.replace(FaultPlan(), **chances)


def _contract_violations(plan: FaultPlan, seed: int) -> int:
    media = Media(CAPACITY_BYTES)
    target = flash_contract.FlashUnderTest(lambda: SimFlash(media, seed, plan), AnonymousMemory)
    count = 0
    for check in flash_contract.CHECKS:
        try:
            check(target)
        except flash_contract.ContractViolation:
            count += 1
    return count


@pytest.mark.parametrize("delay_polls_max", [0, 3])
def test_keeps_the_contract_without_faults(delay_polls_max: int) -> None:
    plan = FaultPlan(delay_polls_max=delay_polls_max)
    assert [_contract_violations(plan, seed) for seed in range(5)] == [0] * 5


@pytest.mark.parametrize("fault", PLANNED)
def test_the_contract_sees_each_planned_fault(fault: str) -> None:
    assert sum(_contract_violations(_plan(0.1, fault), seed) for seed in range(3)) > 0


def _workload(seed: int, plan: FaultPlan) -> tuple[list[FlashCompletion], list[Fault], dict[int, bytearray]]:
    device = SimFlash(Media(CAPACITY_BYTES), seed, plan)
    memory = AnonymousMemory(1 << 16)
    device.register_memory(memory)
    memory.view[:] = bytes(index * 7 % 251 for index in range(1 << 16))
    done: list[FlashCompletion] = []
    for tag in range(64):
        op = FlashOp.READ if tag % 5 == 4 else FlashOp.WRITE
        device.submit([FlashRequest(tag, op, tag % 16 * 8192, memory.address + tag % 8 * 4096, 4096)])
        done += device.poll()
    media = device.crash()
    return done, device.faults, media.pages


def test_a_seed_repeats() -> None:
    plan = dataclasses.replace(_plan(0.05, *PLANNED), delay_polls_max=4)
    assert _workload(5, plan) == _workload(5, plan)
    assert _workload(5, plan) != _workload(6, plan)


def test_a_crash_tears_by_sectors_what_was_in_flight() -> None:
    shapes = set()
    for seed in range(60):
        device = SimFlash(Media(CAPACITY_BYTES), seed)
        memory = AnonymousMemory(4096)
        device.register_memory(memory)
        memory.view[:] = b"\xff" * 4096
        device.submit([FlashRequest(1, FlashOp.WRITE, 0, memory.address, 4096)])
        image = device.crash().read(0, 4096)
        sectors = [image[start : start + SECTOR_BYTES] for start in range(0, 4096, SECTOR_BYTES)]
        assert all(sector in (bytes(SECTOR_BYTES), b"\xff" * SECTOR_BYTES) for sector in sectors)
        assert [fault.kind for fault in device.faults] == [FaultKind.TORN_WRITE]
        shapes.add(sum(sector[0] == 0xFF for sector in sectors))
    assert {0, 8} < shapes


def test_memory_that_changes_under_a_write_is_told() -> None:
    device = SimFlash(Media(CAPACITY_BYTES), 1)
    memory = AnonymousMemory(4096)
    device.register_memory(memory)
    device.submit([FlashRequest(1, FlashOp.WRITE, 8192, memory.address, 4096)])
    memory.view[7] = 1
    assert device.poll() == [FlashCompletion(1, 4096)]
    assert device.faults == [Fault(FaultKind.MEMORY_CHANGED, 8192, 4096)]
