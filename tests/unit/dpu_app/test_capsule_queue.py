"""Requests that came at once are handled turn by turn, connection by connection, each in its order."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from dpu_app import capsule_queue
from dpu_app.capsule_queue import CapsuleQueue


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capsule_queue, "TURN_BYTES", 100)


def views(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def test_what_fits_the_turn_is_handled_at_once() -> None:
    queue = CapsuleQueue()
    queue.begin_turn()
    assert len(list(queue.take(1, views(40, 40, 40)))) == 3  # the last is begun
    assert not queue
    assert len(list(queue.take(2, views(1)))) == 0
    assert 2 in queue
    queue.begin_turn()
    assert [connection_id for connection_id, _ in queue.next()] == [2]
    assert not queue


def test_what_waits_is_a_copy_and_keeps_its_place() -> None:
    """The buffer of a capsule is given to the next one when another's is answered."""
    queue = CapsuleQueue()
    queue.begin_turn()
    first, second = views(200, 3)
    assert len(list(queue.take(1, [first, second]))) == 1
    second[:] = b"xyz"
    queue.begin_turn()
    assert len(list(queue.take(1, views(1)))) == 0  # behind what waits
    assert [capsule for _, capsule in queue.next()] == [bytes(3), bytes(1)]


def test_nothing_is_begun_in_a_turn_that_was_ended() -> None:
    queue = CapsuleQueue()
    queue.begin_turn()
    queue.end_turn()
    assert len(list(queue.take(1, views(1)))) == 0
    assert list(queue.next()) == []
    queue.begin_turn()
    for _ in queue.next():
        queue.end_turn()
    assert not queue


def test_connections_take_turns() -> None:
    queue = CapsuleQueue()
    queue.end_turn()
    for connection_id in (1, 2, 3):
        list(queue.take(connection_id, views(*[100] * (2 * connection_id))))
    order = []
    while queue:
        queue.begin_turn()
        order += [connection_id for connection_id, _ in queue.next()]
    assert order == [1, 2, 3, 1, 2, 3, 2, 3, 2, 3, 3, 3]


def test_a_connection_that_is_gone_is_forgotten() -> None:
    queue = CapsuleQueue()
    assert list(queue.take(1, views(5))) == []
    queue.drop(1)
    queue.drop(2)
    queue.begin_turn()
    assert list(queue.next()) == []


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_nor_out_of_order_and_turns_are_bounded(seed: int) -> None:
    numbers = random.Random(seed)
    queue = CapsuleQueue()
    sent: dict[int, list[bytes]] = defaultdict(list)
    got: dict[int, list[bytes]] = defaultdict(list)
    for turn in range(300):
        queue.begin_turn()
        begun = []
        for connection_id, capsule in queue.next():
            got[connection_id].append(capsule)
            begun.append(len(capsule))
        for connection_id in range(4):
            if turn < 100 and numbers.random() < 0.3:
                capsules = [numbers.randbytes(numbers.randrange(1, 80)) for _ in range(numbers.randrange(1, 4))]
                sent[connection_id] += capsules
                for taken in queue.take(connection_id, [memoryview(capsule) for capsule in capsules]):
                    got[connection_id].append(bytes(taken))
                    begun.append(len(taken))
        assert sum(begun[:-1]) < 100
    assert got == sent


def test_a_turn_that_is_ended_meanwhile_leaves_the_rest() -> None:
    queue = CapsuleQueue()
    queue.begin_turn()
    handled = 0
    for _ in queue.take(1, views(1, 2, 3)):
        handled += 1
        queue.end_turn()
    assert handled == 1
    queue.begin_turn()
    assert [len(capsule) for _, capsule in queue.next()] == [2, 3]
