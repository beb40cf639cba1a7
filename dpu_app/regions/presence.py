"""Finding the blocks that a batch names, in namespaces that its session may use. All block operations begin here."""

from __future__ import annotations

import numpy as np

from common.status import Status
from common.wire import StatId
from dpu_app.regions.batch import Batch
from dpu_app.regions.context import Context
from dpu_app.regions.memory_list import NAMESPACE

FEW = 16
"""Up to so many keys are looked up one by one: numpy's fixed cost is about that of 16 look-ups."""


def find(context: Context, batch: Batch) -> list[int]:
    """Per entry the slot of its block, or -1. Entries of namespaces that the session has not opened are answered
    DENIED, and have no slot."""
    session = batch.connection.session
    if len(batch.rows) <= FEW:
        denied = [i for i, row in enumerate(batch.rows) if session.handles.get(row[NAMESPACE], -1) < 0]
        slots = context.catalogue.find_each(batch.rows, session.handles)
    else:
        entries = batch.capsule.entries
        namespaces = session.namespace_ids(entries["namespace"])
        denied = np.flatnonzero(namespaces < 0).tolist()
        slots = context.catalogue.find(entries, namespaces).tolist()
    if denied:
        context.stats.add(StatId.DENIED, len(denied))
        batch.resolve_all(denied, Status.DENIED)
    return slots
