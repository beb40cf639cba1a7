"""One attempt to connect a link to its region over one fabric, and to make sure that it is the region meant.

Called by `host_agent.session`, which decides when and over what. Leaves nothing behind when it fails.
"""

from __future__ import annotations

import logging
from typing import Any

from common import wire
from common.errors import UnavailableError
from doca_shims.api import QueueLimits, ShimError
from host_agent.capsules import CapsuleBuffers
from host_agent.link import SEND_QUEUE_SLOTS, SEND_SGES_MAX, RegionLink
from host_agent.registration import Grants

log = logging.getLogger(__name__)


def connect(
    link: RegionLink,
    info: Any,
    grants: Grants,
    address: str,
    private_data: bytes,
    capsules_in_flight: int,
    timeout_s: float,
) -> None:
    """Connect to the region that `info` (a `control_pb2.Region`) describes, and hand the connection to `link`.

    Raises ShimError where the fabric fails, UnavailableError where somebody else answers at the address.
    """
    domain = grants.domain
    caps = domain.fabric.caps
    count = min(capsules_in_flight, caps.max_recv_wr)
    limits = QueueLimits(min(count + SEND_QUEUE_SLOTS, caps.max_send_wr), count, min(SEND_SGES_MAX, caps.max_sge))
    buffers = CapsuleBuffers(domain.fabric, domain.pd, count)
    try:
        connection = domain.fabric.connect(address, domain.pd, limits, buffers.recvs, private_data, timeout_s)
    except ShimError:
        buffers.close()
        raise
    accepted = connection.private_data
    whole = len(accepted) == wire.ACCEPT_DATA.size
    granted, slot_bytes, uuid = wire.ACCEPT_DATA.unpack(accepted) if whole else (0, 0, b"")
    # Retrieving whole blocks trusts slot_bytes; the uuid tells a region from another that got its address.
    if not granted or (slot_bytes, uuid) != (info.slot_bytes, info.uuid):
        connection.close()
        buffers.close()
        raise UnavailableError(
            f"{link.name} is not what the DPU said: it grants {granted} credits and has slots of {slot_bytes} bytes "
            f"and uuid {uuid.hex()}, not {info.slot_bytes} and {info.uuid.hex()}"
        )
    link.attach(connection, buffers, granted, grants)
    log.info("connected to a region", extra={"region": link.name, "address": address})
