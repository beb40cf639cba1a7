"""What the commands of `entresol-agent` share: options, where the pod is, which blocks are meant, how they end.

Parses and prints; the commands themselves are in `host_agent.cli`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from common import config, log, units
from common.errors import EntresolError, UserError
from common.status import Status
from doca_shims.api import ShimError
from host_agent import config as agent_config
from host_agent.client import Client
from host_agent.config import AgentSettings
from host_agent.manifest import Manifest, parse_key
from host_agent.namespace import Namespace

SOME_FAILED = 1
LOWER_LAYER = 4


class Quantity(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click only
    """A size or duration with its unit, or several: what `parse` makes of it, which raises UserError."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except UserError as error:
            self.fail(str(error), param, ctx)


SIZE = Quantity("size", units.parse_size)
DURATION = Quantity("duration", units.parse_duration)


class Commands(click.Group):
    """Errors meant for people are printed without a traceback, and become exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EntresolError as error:
            click.echo(f"entresol-agent: {error}", err=True)
            sys.exit(error.exit_code)
        except ShimError as error:
            click.echo(f"entresol-agent: {error}", err=True)
            sys.exit(LOWER_LAYER)


@dataclasses.dataclass(frozen=True)
class Where:
    """What the options before the command said."""

    config_file: Path | None
    dpus: tuple[str, ...]
    tenant: str | None

    def settings(self) -> AgentSettings:
        """Raises UserError."""
        given = {"dpus": self.dpus, "tenant": self.tenant}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value}
        if self.config_file is None and not self.dpus:
            raise UserError(
                "say where the DPUs are: --config FILE, or --dpu ADDRESS (ENTRESOL_AGENT_CONFIG, ENTRESOL_DPU)"
            )
        try:
            if self.config_file is not None:
                return dataclasses.replace(agent_config.load(self.config_file), **changes)
            return AgentSettings(**{"tenant": "default", **changes})
        except config.FieldError as error:
            raise UserError(f"--{error.field.rstrip('s')}: {error}") from error


json_option = click.option("--json", "as_json", is_flag=True, help="For scripts.")
keys_option = click.option("--key", "key_texts", multiple=True, metavar="HEX", help="A block key; repeat it for more.")
manifest_argument = click.argument("manifest_file", required=False, type=click.Path(path_type=Path, allow_dash=True))


@contextmanager
def connected(where: Where) -> Iterator[Client]:
    """A client of the DPUs that answer. Who does not is told: its blocks are neither listed nor found."""
    settings = where.settings()
    log.configure(settings.log)
    with Client(settings) as client:
        for address, reason in unreachable_dpus(client).items():
            click.echo(f"entresol-agent: goes on without {address}: {reason}", err=True)
        yield client


def unreachable_dpus(client: Client) -> dict[str, str]:
    return {session.address: str(session.error) for session in client.core.sessions if session.error is not None}


def read_manifest(path: Path) -> Manifest:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a manifest") from None
    return Manifest.from_json(text, str(path))


def require_place(file: Path) -> None:
    """Before anything is moved: raises UserError where no file can be made by that name."""
    directory = file.absolute().parent
    if not directory.is_dir():
        raise UserError(f"{directory}: there is no such directory")
    if file.is_dir():
        raise UserError(f"{file}: is a directory")
    if not file.exists() and not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f"{directory}: no file can be made in it")


def write_manifest(manifest: Manifest, path: Path) -> None:
    try:
        path.write_text(manifest.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the manifest cannot be written: {error.strerror}") from error


def whole_seconds(duration_s: float) -> int:
    """Of a time to live: rounded up, since 0 would mean without end."""
    return math.ceil(duration_s)


def selection(client: Client, manifest_file: Path | None, key_texts: tuple[str, ...]) -> tuple[Namespace, list[bytes]]:
    """The blocks that a command is about: those of a manifest, or keys in the configuration's namespace."""
    if manifest_file is not None:
        if key_texts:
            raise UserError("give either a manifest or --key")
        manifest = read_manifest(manifest_file)
        return client.namespace(manifest.record, manifest.block_bytes), manifest.keys
    if not key_texts:
        raise UserError("say which blocks: a MANIFEST that `put` printed, or --key HEX")
    return configured_namespace(client), [parse_key(text) for text in key_texts]


def configured_namespace(client: Client) -> Namespace:
    settings = client.settings
    return client.namespace(settings.namespace.record(settings.tenant), settings.namespace.block_bytes)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _by_name(counts: Counter[Status] | dict[Status, int]) -> dict[str, int]:
    return {status.name.lower(): count for status, count in sorted(counts.items())}


def finish(values: dict[str, Any], counts: Counter[Status] | dict[Status, int], as_json: bool, verb: str) -> None:
    """Print what became of the blocks, and exit 1 unless all are well."""
    values["blocks"] = sum(counts.values())
    values["statuses"] = _by_name(counts)
    if as_json:
        click.echo(json.dumps(values))
    else:
        listed = ", ".join(f"{count} {name}" for name, count in values["statuses"].items())
        click.echo(f"{counted(values['blocks'], 'block')} {verb}: {listed or 'none'}", err=True)
    if not all(status.success for status in counts):
        sys.exit(SOME_FAILED)


@contextmanager
def progress_bar(length_bytes: int | None, label: str, quiet: bool) -> Iterator[Callable[[int], None]]:
    if quiet or length_bytes is None or not sys.stderr.isatty():
        yield lambda _done: None
        return
    with click.progressbar(length=length_bytes, label=label, file=sys.stderr) as bar:
        yield bar.update
