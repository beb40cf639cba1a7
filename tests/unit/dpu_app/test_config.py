"""The DPU's settings: the example is sound, mistakes are named with their line, workers get what is meant for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common import config
from dpu_app.config import (
    ADMISSION_POLICIES,
    DpuConfig,
    RegionSettings,
    WorkerConfig,
    region_from_text,
    worker_config,
)
from dpu_app.regions import admission

EXAMPLE = Path(__file__).parents[3] / "configs/dpu.yaml"
BASE = """\
name: dpu0
state_dir: /s
fabric: {name: emu-shm, listen: "{state_dir}/{region}.sock"}
regions:
  - name: r0
    path: /d/r0
    slot: 64KiB
    window: 1MiB
  - {name: r1, path: /d/r1, slot: 64KiB, window: 1MiB}
"""


def one_problem(text: str) -> tuple[int, str, str]:
    with pytest.raises(config.ConfigError) as caught:
        config.load_text(text, DpuConfig, "dpu.yaml")
    [problem] = caught.value.problems
    assert str(caught.value).startswith(f"dpu.yaml:{problem.line}: {problem.key}: ")
    return problem.line, problem.key, problem.text


def test_the_example_is_sound_and_says_the_defaults() -> None:
    loaded = config.load_file(EXAMPLE, DpuConfig)
    text = EXAMPLE.read_text()
    for key in config.to_plain(loaded):
        assert f"{key}:" in text, f"configs/dpu.yaml does not mention {key}"
    for key in config.to_plain(loaded.regions[0]):
        assert f" {key}:" in text, f"configs/dpu.yaml does not mention regions' {key}"


@pytest.mark.parametrize(
    ("change", "line", "key", "part"),
    [
        (("state_dir: /s", "state_dir: /s\nlisten: 0.0.0.0:7000"), 3, "listen", "set allow_remote"),
        (("state_dir: /s", "state_dir: /s\nlisten: dpu.pod:7000"), 3, "listen", "beyond this machine"),
        (("state_dir: /s", "state_dir: /s\nlisten: somewhere"), 3, "listen", "neither host:port nor unix:PATH"),
        (("state_dir: /s", "state_dir: /s\nlisten: '127.0.0.1:99999'"), 3, "listen", "neither"),
        (("state_dir: /s", f"state_dir: /{'s' * 99}"), 1, "listen", "longer than 107 bytes"),
        (("state_dir: /s", "state_dir: /s\nlisten: 'unix:{home}/x'"), 3, "listen", "{home}"),
        (("state_dir: /s", "state_dir: /s\nlisten: 'unix:x.sock'"), 3, "listen", "is relative"),
        (("slot: 64KiB\n", "slot: 64KiB\n    eviction: random\n"), 8, "regions[0].eviction", "none of s3fifo, lru"),
        (
            ("slot: 64KiB\n", "slot: 64KiB\n    admission: {policy: none}\n"),
            8,
            "regions[0].admission.policy",
            "none of all, second_request",
        ),
        (("{region}", "{regoin}"), 3, "fabric.listen", "{regoin}"),
        (("name: dpu0", "name: 'dpu 0'"), 1, "name", "'dpu 0' is no name"),
        (("name: r1", "name: r0"), 4, "regions", "two have the name 'r0'"),
        (("path: /d/r1", "path: /d/r0"), 4, "regions", "two have the path '/d/r0'"),
        (("slot: 64KiB\n", "slot: 65KiB\n"), 7, "regions[0].slot", "multiple of 4096"),
        (("window: 1MiB\n", "window: 128KiB\n"), 8, "regions[0].window", "at least 4 frames"),
        (("slot: 64KiB\n", "slot: 64KiB\n    format: force\n"), 4, "regions", "would empty it at every start"),
        (("slot: 64KiB\n", "slot: 64KiB\n    lease_max: 1s\n"), 5, "regions[0].lease_default", "at most lease_max"),
        (("slot: 64KiB\n", "slot: 64KiB\n    page: 5KiB\n"), 8, "regions[0].page", "power of two"),
        (("slot: 64KiB\n", "slot: 64KiB\n    capacity: 5KiB\n"), 8, "regions[0].capacity", "multiple of 4096"),
        (("slot: 64KiB\n", "slot: 64KiB\n    dirty_fraction: 1.5\n"), 8, "regions[0].dirty_fraction", "too large"),
        (("name: dpu0", "name: dpu0\nsession_ttl: 1ms"), 2, "session_ttl", "too small: at least 100ms"),
        (("name: dpu0", "name: dpu0\ntenants: [{name: a}, {name: a}]"), 2, "tenants", "two have the name 'a'"),
    ],
)
def test_a_mistake_is_named(change: tuple[str, str], line: int, key: str, part: str) -> None:
    assert change[0] in BASE
    found_line, found_key, text = one_problem(BASE.replace(*change, 1))
    assert (found_line, found_key) == (line, key)
    assert part in text


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:70", "[::1]:70", "unix:/a/b"])
def test_addresses_on_this_machine_need_no_leave(address: str) -> None:
    loaded = config.load_text(f"{BASE}listen: '{address}'\n", DpuConfig)
    assert loaded.listen_address() == address


def test_an_address_beyond_it_is_taken_where_allowed() -> None:
    loaded = config.load_text(f"{BASE}listen: 0.0.0.0:7000\nallow_remote: true\n", DpuConfig)
    assert loaded.listen_address() == "0.0.0.0:7000"


def test_a_worker_gets_its_region_its_address_and_quotas_over_the_channel() -> None:
    text = f"{BASE}tenants: [{{name: acme, quota_per_region: 1GiB}}]\nother_tenants_quota_per_region: 5MiB\n"
    loaded = config.load_text(text, DpuConfig)
    made = worker_config(loaded, loaded.regions[1])
    received = WorkerConfig.from_dict(json.loads(json.dumps(made.to_dict())))
    assert received == made
    assert received.region.name == "r1"
    assert received.fabric.listen == "/s/r1.sock"
    assert (received.quotas_bytes, received.quota_default_bytes) == ({"acme": 1 << 30}, 5 << 20)


def test_region_settings_survive_as_plain_values() -> None:
    region = config.load_text(BASE, DpuConfig).regions[0]
    assert RegionSettings.from_dict(json.loads(json.dumps(region.to_dict()))) == region


def test_settings_of_a_call_are_text_as_in_the_file() -> None:
    region = region_from_text(
        "r2",
        Path("/d/r2"),
        {"slot": "64KiB", "window": "1MiB", "credits": "7", "flash.preallocate": "true", "flash.options.depth": "x:1"},
    )
    assert (region.slot_bytes, region.credits, region.flash.preallocate) == (65536, 7, True)
    assert region.flash.options == {"depth": "x:1"}


def test_policies_that_the_file_may_name_are_those_there_are() -> None:
    for name in ADMISSION_POLICIES:
        admission.create(name)
