"""A region worker: the process that owns one region. Composition root; opens everything, serves, closes it in order.

Started by the supervisor as ``python -m dpu_app.worker --channel-fd N --parent-pid P``; its first message says what
to serve. Exit codes: 0 stopped as told, 4 a lower layer failed, 2 a setting is wrong, 70 our bug.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import sys
from pathlib import Path

import click

from common.clock import SystemClock
from common.errors import EntresolError, InternalError, UnavailableError
from common.log import configure
from doca_shims.api import Fabric, FlashDevice, Memory, ShimError
from doca_shims.registry import create_fabric
from dpu_app.busy_poll import BusyPoll, limit_of
from dpu_app.config import RegionSettings, WorkerConfig
from dpu_app.flash.open import create_flash_file, open_flash
from dpu_app.garbage import GarbageCollection
from dpu_app.peer import Peer, PeerLeases
from dpu_app.region_server import NS_PER_S, RegionFacts, RegionServer
from dpu_app.regions import admission
from dpu_app.regions.context import EngineSettings
from dpu_app.regions.engine import RegionEngine
from dpu_app.regions.quota import FixedQuotas
from dpu_app.regions.recovery import OpenRegion, close_region, format_region, open_region
from dpu_app.regions.superblock import BlankError
from dpu_app.regions.window import Window, WindowLayout
from dpu_app.worker_channel import ChannelClosedError, WorkerEnd, die_with_parent

START_TIMEOUT_S = 10.0
ORDER_LATER_ABOVE_SLOTS = 1 << 20
"""Regions with more blocks serve look-ups and loads while their eviction order is being restored; a smaller one's is
restored in the time that its first agent needs to connect."""
_LOG = logging.getLogger(__name__)


def serve(config: WorkerConfig, channel: WorkerEnd) -> None:
    """Open the region, say `ready`, serve until stopped, close. Raises what kept it from opening."""
    settings = config.region
    clock = SystemClock()
    with contextlib.ExitStack() as stack:
        fabric = create_fabric(config.fabric.name, config.fabric.options)
        stack.callback(fabric.close)
        layout = WindowLayout.fit(settings.window_bytes, settings.slot_bytes)
        window_memory = fabric.allocate(layout.memory_bytes, settings.page_bytes)
        stack.callback(window_memory.close)
        flash = _open_flash(settings)
        stack.callback(flash.close)
        flash.register_memory(window_memory)
        region = _open_region(settings, flash, window_memory)
        for message in region.messages:
            _LOG.warning(message, extra={"region": settings.name})
        engine_settings = _engine_settings(settings, fabric)
        geometry = region.superblock.geometry
        # A frame holds whole blocks of the region as it was formatted, which the configuration may not say any more.
        frames = WindowLayout.fit(layout.frames * layout.frame_bytes, geometry.slot_bytes)
        window = Window(frames, window_memory.address, window_memory.view)
        peers: dict[int, Peer] = {}
        engine = RegionEngine(
            engine_settings,
            region,
            window,
            flash.caps,
            clock,
            PeerLeases(peers),
            admission.create(
                settings.admission.policy,
                keys=settings.admission.keys,
                window_s=int(settings.admission.window_s),
            ),
            FixedQuotas(config.quotas_bytes, config.quota_default_bytes),
        )
        listener = fabric.listen(config.fabric.listen)
        stack.callback(listener.close)
        facts = RegionFacts(
            name=settings.name,
            uuid=region.superblock.uuid.hex(),
            slot_bytes=geometry.slot_bytes,
            slots=geometry.slots,
            capacity_bytes=geometry.slots * geometry.slot_bytes,
            generation=region.superblock.generation,
        )
        server = RegionServer(
            facts,
            engine,
            peers,
            fabric,
            listener,
            flash,
            window_memory,
            channel,
            clock,
            settings.credits,
            engine_settings.send_wrs_max,
            BusyPoll(limit_of(int(settings.busy_poll_s * NS_PER_S))),
        )
        stack.callback(server.close)
        garbage = GarbageCollection()  # before anybody is served: it takes a while
        stack.callback(garbage.close)
        channel.event(
            "ready",
            address=listener.address,
            uuid=facts.uuid,
            slot_bytes=facts.slot_bytes,
            slots=facts.slots,
            capacity_bytes=facts.capacity_bytes,
            generation=facts.generation,
            recovered=region.recovered,
            recovery_s=region.duration_s,
        )
        server.run(region.restore_order, garbage.tick)
        if server.drained:
            close_region(flash, window_memory, region)
        else:
            _LOG.warning("stopped before everything was on flash", extra={"region": facts.name})


def _open_flash(settings: RegionSettings) -> FlashDevice:
    path = Path(settings.path)
    if settings.capacity_bytes is not None and (path.is_file() or not path.exists()):
        create_flash_file(str(path), settings.capacity_bytes, settings.flash.preallocate)
    return open_flash(str(path), settings.flash.driver, settings.flash.options)


def _open_region(settings: RegionSettings, flash: FlashDevice, memory: Memory) -> OpenRegion:
    """As `settings.format` says: "if-blank" formats flash that holds nothing, "force" whatever it holds."""
    if settings.format == "force":
        format_region(flash, memory, settings.name, settings.slot_bytes, force=True)
    try:
        region = open_region(flash, memory, settings.eviction, order_later_above_slots=ORDER_LATER_ABOVE_SLOTS)
    except BlankError:
        if settings.format == "never":
            raise
        format_region(flash, memory, settings.name, settings.slot_bytes)
        region = open_region(flash, memory, settings.eviction, order_later_above_slots=ORDER_LATER_ABOVE_SLOTS)
    found = region.superblock.geometry.slot_bytes
    if found != settings.slot_bytes:
        region.messages.append(
            f"the region was formatted with slots of {found} bytes; "
            f"slot_bytes {settings.slot_bytes} of the configuration needs a new format"
        )
    return region


def _engine_settings(settings: RegionSettings, fabric: Fabric) -> EngineSettings:
    return EngineSettings(
        dirty_fraction=settings.dirty_fraction,
        deadline_default_ms=int(settings.deadline_default_s * 1000),
        deadline_max_ms=int(settings.deadline_max_s * 1000),
        lease_default_ms=int(settings.lease_default_s * 1000),
        lease_max_ms=int(settings.lease_max_s * 1000),
        pins_fraction=settings.pins_fraction,
        ttl_default_s=int(settings.ttl_default_s),
        send_wrs_max=min(EngineSettings.send_wrs_max, fabric.caps.max_send_wr - settings.credits),
    )


def _start_config(channel: WorkerEnd) -> WorkerConfig:
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    if not poller.poll(START_TIMEOUT_S * 1000):
        raise UnavailableError(f"the supervisor said nothing for {START_TIMEOUT_S:g} s")
    messages = channel.recv()
    if len(messages) != 1 or messages[0].get("event") != "start":
        raise InternalError("the supervisor's first message is not the start event")
    return WorkerConfig.from_dict(messages[0]["config"])


@click.command()
@click.option("--channel-fd", type=int, required=True, help="The inherited end of the supervisor's channel.")
@click.option("--parent-pid", type=int, required=True, help="The supervisor's process id.")
def main(channel_fd: int, parent_pid: int) -> None:
    """Serve one region for the supervisor that started this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group: the supervisor acts
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = WorkerEnd.from_fd(channel_fd)
    try:
        die_with_parent(parent_pid)
        config = _start_config(channel)
        configure(config.log)
        serve(config, channel)
    except ChannelClosedError:
        sys.exit(UnavailableError.exit_code)
    except (EntresolError, ShimError) as error:
        _LOG.error("%s", error)
        with contextlib.suppress(ChannelClosedError):
            channel.failed(error)
        sys.exit(error.exit_code if isinstance(error, EntresolError) else 4)


if __name__ == "__main__":
    main()
