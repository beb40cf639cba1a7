"""Finding the blocks that a batch names, in namespaces that its session may use. All block operations begin here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.status import Status
from common.wire import StatId
from dpu_app.regions.batch import Batch
from dpu_app.regions.catalogue import Slots
from dpu_app.regions.context import Context
from dpu_app.regions.memory_list import NAMESPACE

FEW = 16
"""Up to so many keys are looked up one by one: numpy's fixed cost is about that of 16 look-ups."""


def find(context: Context, batch: Batch) -> Sequence[int]:
    """`find_slots` for operations that handle a batch's entries one by one: plain ints."""
    slots = find_slots(context, batch)
    return slots if isinstance(slots, list) else slots.tolist()


def find_slots(context: Context, batch: Batch) -> list[int] | Slots:
    """Per entry the slot of its block, or -1. Entries of namespaces that the session has not opened are answered
    DENIED, and have no slot."""
    session = batch.connection.session
    entries = batch.capsule.entries
    slots: list[int] | Slots
    found = context.hot_path.find(entries, session) if context.hot_path is not None else None
    if found is not None:
        slots, denied = found
        slots = context.catalogue.without_expired(slots)
    elif len(entries) <= FEW:
        denied = [i for i, row in enumerate(batch.rows) if session.handles.get(row[NAMESPACE], -1) < 0]
        slots = context.catalogue.find_each(batch.rows, session.handles)
    else:
        namespaces = session.namespace_ids(entries["namespace"])
        denied = np.flatnonzero(namespaces < 0).tolist()
        slots = context.catalogue.find(entries, namespaces)
    if denied:
        context.stats.add(StatId.DENIED, len(denied))
        batch.resolve_all(denied, Status.DENIED)
    return slots
