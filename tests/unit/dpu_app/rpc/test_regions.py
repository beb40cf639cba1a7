"""The Regions service: what is made is served and remembered, what is destroyed is what the caller meant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from common.errors import AlreadyExistsError, NotFoundError, PreconditionError, UserError
from common.proto.entresol.v1 import control_pb2
from dpu_app.region_worker import RegionState

if TYPE_CHECKING:
    from tests.unit.dpu_app.conftest import Dpu

SETTINGS = {"slot": "4KiB", "window": "64KiB", "capacity": "1MiB"}


async def create(dpu: Dpu, name: str, path: Path | str, **settings: str) -> control_pb2.Region:
    request = control_pb2.CreateRegionRequest(name=name, path=str(path), settings={**SETTINGS, **settings})
    region: control_pb2.Region = await dpu.call(dpu.regions.CreateRegion, request)
    return region


async def names(dpu: Dpu) -> list[str]:
    response = await dpu.call(dpu.regions.ListRegions, control_pb2.ListRegionsRequest())
    return [region.name for region in response.regions]


def delete(region: control_pb2.Region, **fields: Any) -> control_pb2.DeleteRegionRequest:
    return control_pb2.DeleteRegionRequest(**{"name": region.name, "uuid": region.uuid, **fields})


async def test_a_region_is_found_by_its_name(start_dpu: Any) -> None:
    dpu = await start_dpu()
    await dpu.until_state("r1", RegionState.SERVING)
    region = await dpu.call(dpu.regions.GetRegion, control_pb2.GetRegionRequest(name="r1"))
    assert (region.name, region.dynamic, len(region.uuid)) == ("r1", False, 16)
    with pytest.raises(NotFoundError, match="there is: r0, r1"):
        await dpu.call(dpu.regions.GetRegion, control_pb2.GetRegionRequest(name="r2"))


async def test_a_region_made_is_served_again_after_a_restart(start_dpu: Any, short_dir: Path) -> None:
    dpu = await start_dpu({})
    made = await create(dpu, "extra", short_dir / "extra.flash", eviction="lru", weight="2.5")
    assert (made.dynamic, made.weight, made.state) == (True, 2.5, control_pb2.REGION_STATE_SERVING)
    assert await dpu.stop() == 0
    again = await start_dpu({})
    await again.until_state("extra", RegionState.SERVING)
    region = await again.call(again.regions.GetRegion, control_pb2.GetRegionRequest(name="extra"))
    assert (region.uuid, region.dynamic) == (made.uuid, True)
    assert again.region("extra").settings.eviction == "lru"


async def test_a_region_that_clashes_is_refused(start_dpu: Any, short_dir: Path) -> None:
    dpu = await start_dpu({"r0": {}})
    await dpu.until_state("r0", RegionState.SERVING)
    with pytest.raises(AlreadyExistsError, match="'r0'"):
        await create(dpu, "r0", short_dir / "other.flash")
    (short_dir / "link").symlink_to(short_dir / "r0.flash")
    for path in (short_dir / "r0.flash", short_dir / "link", short_dir / "x" / ".." / "r0.flash"):
        with pytest.raises(AlreadyExistsError, match="is on"):
            await create(dpu, "new", path)
    assert await names(dpu) == ["r0"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slto": "4KiB"}, "slto: unknown key; did you mean 'slot'?"),
        ({"slot": "4"}, "slot: '4' has no unit"),
        ({"slot": "5KiB"}, "not a multiple of 4096"),
        ({"window": "4KiB"}, "window: must hold at least 4 frames"),
        ({"format": "force"}, "'force' is for the Format call"),
        ({"flash.driver": "x", "flash": "y"}, "flash"),
        ({"credits": "many"}, "credits: must be a whole number"),
    ],
)
async def test_settings_are_validated_as_in_the_file(
    start_dpu: Any, short_dir: Path, settings: dict[str, str], message: str
) -> None:
    dpu = await start_dpu({})
    with pytest.raises(UserError, match="settings of region 'new'") as caught:
        await create(dpu, "new", short_dir / "new.flash", **settings)
    assert message in str(caught.value)
    assert list(short_dir.glob("*.flash")) == []


async def test_what_entresol_did_not_format_is_left_alone(start_dpu: Any, short_dir: Path) -> None:
    dpu = await start_dpu({})
    foreign = short_dir / "precious"
    foreign.write_bytes(b"photographs" * 1000)
    with pytest.raises(PreconditionError, match="did not write"):
        await create(dpu, "new", foreign)
    with pytest.raises(PreconditionError, match="neither a file nor"):
        await create(dpu, "new", short_dir)
    with pytest.raises(UserError, match="absolute"):
        await create(dpu, "new", "relative.flash")
    assert foreign.read_bytes() == b"photographs" * 1000
    assert await names(dpu) == []


async def test_a_region_that_cannot_be_opened_is_not_made(start_dpu: Any, short_dir: Path) -> None:
    dpu = await start_dpu({})
    with pytest.raises(PreconditionError, match="no good"):
        await create(
            dpu, "new", short_dir / "new.flash", **{"flash.options.fail": "user", "flash.options.message": "no good"}
        )
    assert await names(dpu) == []
    assert list((short_dir / "state/regions").iterdir()) == []
    assert not (short_dir / "new.flash").exists()
    await create(dpu, "new", short_dir / "new.flash")


async def test_deleting_forgets_and_erases_only_when_asked(start_dpu: Any, short_dir: Path) -> None:
    dpu = await start_dpu({})
    file = short_dir / "extra.flash"
    made = await create(dpu, "extra", file)
    await dpu.call(dpu.regions.DeleteRegion, delete(made))
    assert await names(dpu) == []
    assert file.exists()
    adopted = await create(dpu, "extra", file)
    assert adopted.uuid == made.uuid
    with pytest.raises(PreconditionError, match="was there before"):
        await dpu.call(dpu.regions.DeleteRegion, delete(adopted, erase=True))
    await dpu.call(dpu.regions.DeleteRegion, delete(adopted))
    file.unlink()
    made = await create(dpu, "extra", file)
    await dpu.call(dpu.regions.DeleteRegion, delete(made, erase=True))
    assert not file.exists()
    assert await dpu.stop() == 0
    again = await start_dpu({})
    assert await names(again) == []


async def test_a_configured_region_is_not_deleted(start_dpu: Any) -> None:
    dpu = await start_dpu({"r0": {}})
    await dpu.until_state("r0", RegionState.SERVING)
    uuid = dpu.region("r0").worker.facts.uuid
    with pytest.raises(PreconditionError, match="configuration file"):
        await dpu.call(dpu.regions.DeleteRegion, control_pb2.DeleteRegionRequest(name="r0", uuid=uuid))


async def test_formatting_gives_a_new_uuid_and_needs_the_old_one(start_dpu: Any) -> None:
    dpu = await start_dpu({"r0": {}})
    await dpu.until_state("r0", RegionState.SERVING)
    old = dpu.region("r0").worker.facts.uuid
    for uuid in (b"", bytes(16)):
        with pytest.raises(PreconditionError, match=old.hex()):
            await dpu.call(dpu.regions.FormatRegion, control_pb2.FormatRegionRequest(name="r0", uuid=uuid))
    region = await dpu.call(dpu.regions.FormatRegion, control_pb2.FormatRegionRequest(name="r0", uuid=old))
    assert region.uuid not in (b"", old)
    assert region.state == control_pb2.REGION_STATE_SERVING
    assert dpu.region("r0").settings.format == "if-blank"


async def test_a_region_in_use_is_formatted_by_force_only(start_dpu: Any) -> None:
    dpu = await start_dpu({"r0": {"hold": "3"}})
    await dpu.until_state("r0", RegionState.SERVING)
    uuid = dpu.region("r0").worker.facts.uuid
    request = control_pb2.FormatRegionRequest(name="r0", uuid=uuid)
    with pytest.raises(PreconditionError, match="3 blocks leased"):
        await dpu.call(dpu.regions.FormatRegion, request)
    request.force = True
    assert (await dpu.call(dpu.regions.FormatRegion, request)).uuid != uuid


async def test_formatting_refuses_a_file_that_became_something_else(start_dpu: Any, short_dir: Path) -> None:
    dpu = await start_dpu({"r0": {}})
    await dpu.until_state("r0", RegionState.SERVING)
    uuid = dpu.region("r0").worker.facts.uuid
    (short_dir / "r0.flash").write_bytes(b"a file system" * 500)
    with pytest.raises(PreconditionError, match="did not write"):
        await dpu.call(dpu.regions.FormatRegion, control_pb2.FormatRegionRequest(name="r0", uuid=uuid, force=True))
    assert (short_dir / "r0.flash").read_bytes().startswith(b"a file system")
