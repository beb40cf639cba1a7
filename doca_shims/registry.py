"""Finds backends of the seam by entry-point group and makes devices from them.

A backend is an entry point `module:factory`; the module states the version of the seam it was written for as
`API_VERSION`. Nothing here knows a backend's name: the composition root passes what the configuration says.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from doca_shims.api import API_VERSION, Fabric, FlashDevice, ShimError

GROUP_PREFIX = "entresol."


def backends(kind: str) -> list[str]:
    """Names of the installed backends of one kind (``"fabric"``, ``"flash"``), sorted."""
    return sorted({entry.name for entry in entry_points(group=GROUP_PREFIX + kind)})


def create_fabric(name: str, options: Mapping[str, str]) -> Fabric:
    """Open the fabric device of backend `name`. The caller closes it.

    Raises ShimError: ENODEV (no such backend), EPROTO (another version of the seam), or what the backend raises.
    """
    return cast(Fabric, _factory("fabric", name)(options))


def create_flash(name: str, path: str, options: Mapping[str, str]) -> FlashDevice:
    """Open `path` by the flash backend `name`. The caller closes it. Raises as `create_fabric` does."""
    return cast(FlashDevice, _factory("flash", name)(path, options))


def check_version(name: str, version: object) -> None:
    """Refuse a backend whose `API_VERSION` this seam cannot serve: another major, or a newer minor."""
    is_pair = isinstance(version, tuple) and len(version) == 2 and all(type(part) is int for part in version)
    if not is_pair:
        raise ShimError(errno.EPROTO, "load", f"backend {name} states no API_VERSION of the form (major, minor)")
    major, minor = cast(tuple[int, int], version)
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        raise ShimError(
            errno.EPROTO,
            "load",
            f"backend {name} was written for version {major}.{minor} of the seam; this is "
            f"{API_VERSION[0]}.{API_VERSION[1]} (the major must be equal, the minor not newer)",
        )


def _factory(kind: str, name: str) -> Callable[..., Any]:
    entry = _entry(kind, name)
    try:
        module = import_module(entry.module)
    except ImportError as error:
        raise ShimError(errno.ENODEV, "load", f"{kind} backend {name} cannot be used here: {error}") from error
    check_version(name, getattr(module, "API_VERSION", None))
    factory: Any = entry.load()
    return cast(Callable[..., Any], factory)


def _entry(kind: str, name: str) -> EntryPoint:
    for entry in entry_points(group=GROUP_PREFIX + kind):
        if entry.name == name:
            return entry
    known = ", ".join(backends(kind)) or "none is installed"
    raise ShimError(errno.ENODEV, "load", f"no {kind} backend is called {name!r}; there are: {known}")
