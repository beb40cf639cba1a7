"""The agent's pure parts: back-off, topology, manifests, configuration, results."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import wire
from common.config import ConfigError, load_text
from common.errors import UnavailableError, UserError
from common.identity import UNKNOWN
from common.status import BlockState, Status
from host_agent import config
from host_agent.backoff import NS_PER_S, Backoff
from host_agent.config import AgentSettings, ReconnectSettings
from host_agent.manifest import Manifest, ManifestBlock, content_key, parse_key
from host_agent.results import BlockResults, LookupResult
from host_agent.session import RegionFacts
from host_agent.topology import Topology
from tests.unit.host_agent.scripted_dpu import key, record

AGENT_YAML = Path(__file__).parents[3] / "configs" / "agent.yaml"


# ------------------------------------------------------------------------------------------------------ back-off


def test_pauses_double_up_to_the_bound_with_jitter() -> None:
    settings = ReconnectSettings(pause_first_s=0.1, pause_max_s=1.0)
    backoff = Backoff(settings, random.Random(7))
    now_ns, pauses_s = 0, []
    for _ in range(8):
        backoff.failed(now_ns)
        assert backoff.due_ns is not None
        pauses_s.append((backoff.due_ns - now_ns) / NS_PER_S)
        assert not backoff.is_due(now_ns)
        now_ns = backoff.due_ns
        assert backoff.is_due(now_ns)
    for pause_s, bound_s in zip(pauses_s, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0]):
        assert bound_s / 2 <= pause_s <= bound_s
    assert len(set(pauses_s)) == len(pauses_s)
    backoff.succeeded()
    assert backoff.is_due(0)
    backoff.failed(0)
    assert backoff.due_ns is not None
    assert backoff.due_ns <= 0.1 * NS_PER_S


def test_giving_up_is_possible_but_not_the_default() -> None:
    tireless = Backoff(ReconnectSettings(), random.Random(1))
    mortal = Backoff(ReconnectSettings(give_up_s=10.0), random.Random(1))
    for second in range(0, 100, 5):
        tireless.failed(second * NS_PER_S)
        mortal.failed(second * NS_PER_S)
    assert tireless.due_ns is not None
    assert mortal.due_ns is None
    assert not mortal.is_due(1 << 62)


# ------------------------------------------------------------------------------------------------------ topology


def _facts(number: int, slot_bytes: int, weight: float = 1.0) -> RegionFacts:
    link: Any = None
    return RegionFacts(f"r{number}", key(number), slot_bytes, weight, link)


def test_slots_that_fit_best_are_used() -> None:
    topology = Topology(1, [_facts(1, 65536), _facts(2, 4096), _facts(3, 65536), _facts(4, 1 << 20, weight=0)])
    assert [r.name for r in topology.slot_class(4096).regions] == ["r2"]
    assert [r.name for r in topology.slot_class(4097).regions] == ["r1", "r3"]
    assert [r.name for r in topology.slot_class(1 << 20).regions] == ["r1", "r3"]
    assert [r.name for r in topology.slot_class(None).regions] == ["r1", "r3"]
    with pytest.raises(UnavailableError):
        Topology(1, []).slot_class(None)


def test_a_region_named_twice_counts_once() -> None:
    assert len(Topology(1, [_facts(1, 4096), _facts(1, 4096)]).regions) == 1


# ------------------------------------------------------------------------------------------------------ manifests


def _manifest() -> Manifest:
    blocks = tuple(ManifestBlock(key(n), 100 if n < 2 else 7, n) for n in range(3))
    return Manifest(record(model_id="files"), 100, blocks, "a file")


def test_a_manifest_round_trips() -> None:
    manifest = _manifest()
    assert Manifest.from_json(manifest.to_json(), "here") == manifest
    assert manifest.length_bytes == 207
    assert manifest.record.weights_revision is UNKNOWN


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"entresol_manifest": 1', '"entresol_manifest": 2'),
        ('"block_bytes": 100', '"block_bytes": 0'),
        ('"block_bytes": 100', '"block_bytes": 50'),
        ('"length_bytes": 7', '"length_bytes": "7"'),
        ('"key": "', '"key": "00'),
        ('"namespace_record": "', '"namespace_record": "00'),
        ('"blocks"', '"stones"'),
        ("{", ""),
    ],
)
def test_a_damaged_manifest_is_refused(old: str, new: str) -> None:
    text = _manifest().to_json()
    assert old in text
    with pytest.raises(UserError, match=r"here|key|record"):
        Manifest.from_json(text.replace(old, new, 1), "here")


def test_equal_beginnings_share_keys_and_nothing_else_does() -> None:
    digest = record().digest()
    first = content_key(digest, None, memoryview(b"one"))
    assert first == content_key(digest, None, memoryview(b"one"))
    assert content_key(digest, first, memoryview(b"two")) != content_key(digest, None, memoryview(b"two"))
    assert parse_key(first.hex()) == first
    with pytest.raises(UserError, match="hexadecimal"):
        parse_key("xyz")


# ------------------------------------------------------------------------------------------------------ configuration


def test_the_shipped_configuration_is_sound() -> None:
    settings = config.load(AGENT_YAML)
    assert settings.namespace.record(settings.tenant).model_id == "files"
    commented = [line.strip("# \n") for line in AGENT_YAML.read_text().splitlines()]
    assert "timeout: 2s" in " ".join(commented)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tenant: t", "dpus: is missing"),
        ("dpus: []\ntenant: t", "names no DPU"),
        ("dpus: [a]\ntenant: t", "neither host:port"),
        ("dpus: ['a:1', 'a:1']\ntenant: t", "twice"),
        ("dpus: ['a:1']\ntenant: ''", "must be given"),
        ("dpus: ['a:1']\ntenant: t\ntimeout: 5", "no unit"),
        ("dpus: ['a:1']\ntenant: t\ntimeuot: 5s", "did you mean 'timeout'"),
        ("dpus: ['a:1']\ntenant: t\npage: 5KiB", "power of two"),
        ("dpus: ['a:1']\ntenant: t\nnamespace: {tp_rank: 2, tp_size: 2}", "tp_rank 2"),
        ("dpus: ['a:1']\ntenant: t\nreconnect: {pause_first: 2s, pause_max: 1s}", "at least pause_first"),
    ],
)
def test_mistakes_are_named(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_text(text, AgentSettings, "agent.yaml")


def test_what_is_left_out_of_a_namespace_is_unknown() -> None:
    settings = load_text("dpus: ['a:1']\ntenant: t\nnamespace: {lora_id: ''}", AgentSettings)
    known = settings.namespace.record("t")
    assert known.lora_id == ""
    assert known.layers is UNKNOWN


# ------------------------------------------------------------------------------------------------------ results


def test_results_are_arrays_and_rows() -> None:
    answers = np.zeros(3, wire.RESULT)
    answers["status"] = [Status.OK, Status.MISS, Status.EXISTS]
    answers["length"] = [5, 0, 7]
    answers["state"] = [BlockState.STAGED, 0, BlockState.FLASH]
    results = BlockResults(answers)
    assert results.ok.tolist() == [True, False, True]
    assert not results.all_ok
    assert results.counts() == {Status.OK: 1, Status.EXISTS: 1, Status.MISS: 1}
    assert [row.status for row in results] == [Status.OK, Status.MISS, Status.EXISTS]
    assert results[0].state is BlockState.STAGED
    assert "1 MISS" in repr(results)
    assert BlockResults(answers[:0]).all_ok


@pytest.mark.parametrize(("statuses", "prefix"), [([], 0), ([0, 0], 2), ([0, 2, 0], 1), ([21, 0], 0)])
def test_the_prefix_ends_at_the_first_gap(statuses: list[int], prefix: int) -> None:
    answers = np.zeros(len(statuses), wire.LOOKUP_RESULT)
    answers["status"] = statuses
    assert LookupResult(answers).prefix_blocks == prefix
