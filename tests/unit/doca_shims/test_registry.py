"""The registry finds backends, refuses those of another version of the seam, and says what there is."""

from __future__ import annotations

import errno
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from doca_shims import registry
from doca_shims.api import API_VERSION, ShimError


def test_the_emulated_backends_are_installed() -> None:
    assert {"emu-shm", "emu-tcp"} <= set(registry.backends("fabric"))


def test_an_unknown_backend_is_refused_with_the_list_of_those_there_are() -> None:
    with pytest.raises(ShimError, match=r"'verbz'.*emu-shm, emu-tcp") as caught:
        registry.create_fabric("verbz", {})
    assert caught.value.errno == errno.ENODEV


def test_an_unknown_kind_has_no_backends() -> None:
    assert registry.backends("teapot") == []
    with pytest.raises(ShimError, match="io_uring"):
        registry.create_flash("nothing", "/nowhere", {})


@pytest.mark.parametrize("version", [API_VERSION, (API_VERSION[0], 0)])
def test_same_major_and_no_newer_minor_is_taken(version: tuple[int, int]) -> None:
    registry.check_version("x", version)


@pytest.mark.parametrize(
    "version",
    [
        None,
        "1.0",
        (1,),
        (1, 0, 0),
        (1.0, 0),
        (True, 0),
        (API_VERSION[0] + 1, 0),
        (0, 9),
        (API_VERSION[0], API_VERSION[1] + 1),
    ],
)
def test_every_other_version_is_refused(version: object) -> None:
    with pytest.raises(ShimError) as caught:
        registry.check_version("x", version)
    assert caught.value.errno == errno.EPROTO


def _install(monkeypatch: pytest.MonkeyPatch, **attributes: object) -> None:
    module = types.ModuleType("a_backend_of_this_test")
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = EntryPoint("mine", f"{module.__name__}:create", "entresol.fabric")
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [entry] if group == entry.group else [])


def test_a_factory_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, API_VERSION=API_VERSION, create=lambda options: ("made", options))
    assert registry.create_fabric("mine", {"a": "b"}) == ("made", {"a": "b"})  # type: ignore[comparison-overlap]


def test_a_backend_of_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    _install(monkeypatch, API_VERSION=(API_VERSION[0] + 1, 0), create=calls.append)
    with pytest.raises(ShimError, match="mine was written for version"):
        registry.create_fabric("mine", {})
    assert calls == []


def test_a_backend_whose_libraries_are_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "no_such_module_anywhere:create", "entresol.fabric")
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [entry])
    with pytest.raises(ShimError, match="broken cannot be used here"):
        registry.create_fabric("broken", {})
