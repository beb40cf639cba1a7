"""Frames that are in use are passed by, quickly, however many they are."""

from __future__ import annotations

import random

import pytest

from dpu_app.regions.window import FrameState, Window, WindowLayout
from tests.unit.dpu_app.work import instructions

FRAME_BYTES = 4096


def full_window(frames: int) -> Window:
    """Slot n in frame `frame_of[n]`, all clean; slot 0 was used longest ago."""
    layout = WindowLayout(frames, FRAME_BYTES)
    window = Window(layout, 0, memoryview(bytearray(layout.memory_bytes)))
    for slot in range(frames):
        window.settle(window.take(slot, FrameState.LOADING))
    return window


def test_the_frame_used_longest_ago_is_taken_first() -> None:
    window = full_window(8)
    window.touch(window.frame_of[0])
    window.hold(window.frame_of[1])
    taken = []
    for slot in range(100, 107):
        before = list(window.slot)
        taken.append(before[window.take(slot, FrameState.LOADING)])
    assert taken == [2, 3, 4, 5, 6, 7, 0]
    assert window.take(107, FrameState.LOADING) == -1
    window.unhold(window.frame_of[1])
    assert window.take(107, FrameState.LOADING) >= 0


@pytest.mark.parametrize("held", [100, 999, 1000])
def test_leased_frames_are_never_taken_and_all_others_are(held: int) -> None:
    window = full_window(1000)
    numbers = random.Random(held)
    leased = set(numbers.sample(range(1000), held)) if held < 1000 else set(range(1000))
    for slot in leased:
        window.hold(window.frame_of[slot])
    frames = {window.frame_of[slot] for slot in leased}
    taken = []
    while (frame := window.take(5000, FrameState.FILLING)) >= 0:
        taken.append(frame)
    assert len(set(taken)) == len(taken) == 1000 - held
    assert not frames & set(taken)
    assert all(window.frame_of.get(slot, -1) in frames for slot in leased)


def test_a_search_takes_no_longer_the_more_frames_are_leased() -> None:

    work = []
    for frames in (1_000, 8_000):
        window = full_window(frames)
        for slot in range(frames - 100):
            window.hold(window.frame_of[slot])
        work.append([instructions(lambda window=window: window.take(9_999, FrameState.LOADING)) for _ in range(50)])  # type: ignore[misc]
    assert max(work[1]) == max(work[0])
