"""Typed configuration: a YAML file into frozen dataclasses, or every mistake in it with file, line and key.

A dataclass declares the file: its fields are the keys, its annotations the types, its defaults what may be left out.
In the file the unit is in the value, so the key of a `SizeBytes` or `DurationS` field drops the field's suffix:
`slot_bytes: SizeBytes` is written `slot: 2MiB`, `session_ttl_s: DurationS` is written `session_ttl: 6s`.
Unknown, missing and duplicate keys, wrong types and bad units are errors, all reported at once.
Used by the DPU application, the host agent and the emulator; knows none of their settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import io
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import yaml

from common import units
from common.errors import UserError

T = TypeVar("T")


class _Unit(enum.Enum):
    BYTES = "_bytes"
    SECONDS = "_s"


SizeBytes = Annotated[int, _Unit.BYTES]
"""A size, written with its unit ("64KiB"); an int of bytes in the program."""
DurationS = Annotated[float, _Unit.SECONDS]
"""A duration, written with its unit ("500ms"); a float of seconds in the program."""


@dataclass(frozen=True)
class Between:
    """Bounds, both inclusive, for `Annotated[int, Between(1, 9)]` and the like."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Problem:
    """One mistake. `line` counts from 1; 0 where the values did not come from a file."""

    line: int
    key: str
    text: str


class ConfigError(UserError):
    """The configuration cannot be used. The message has one line per problem: ``file:line: key: what is wrong``."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(self._describe(problem) for problem in problems))

    def _describe(self, problem: Problem) -> str:
        place = f"{self.source}:{problem.line}" if problem.line else self.source
        return f"{place}: {problem.key}: {problem.text}" if problem.key else f"{place}: {problem.text}"


class FieldError(ValueError):
    """Raised by a dataclass's `__post_init__`: the named field has a value that does not fit the others."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def load_file(path: str | Path, cls: type[T]) -> T:
    """Read `cls` from the YAML file at `path`. Relative paths in it are relative to its directory.

    Raises ConfigError.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), [Problem(0, "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem(0, "", "is not UTF-8 text")]) from error
    return load_text(text, cls, source=str(path), directory=path.parent.resolve())


def load_text(text: str, cls: type[T], source: str = "configuration", directory: Path | None = None) -> T:
    """Read `cls` from YAML text; `source` names it in errors. Raises ConfigError."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(source, [Problem(line, "", f"is not YAML: {error.problem or error.context}")]) from error
    except yaml.YAMLError as error:
        raise ConfigError(source, [Problem(0, "", f"is not YAML: {error}")]) from error
    if root is None:
        root = yaml.MappingNode("tag:yaml.org,2002:map", [], yaml.Mark(source, 0, 0, 0, None, 0))
    return _build(root, cls, source, directory)


def from_plain(cls: type[T], values: Mapping[str, Any], source: str = "settings", directory: Path | None = None) -> T:
    """`cls` from a plain dict with the keys and units of the file, such as `to_plain` gives. Raises ConfigError."""
    root = yaml.SafeDumper(io.StringIO()).represent_data(dict(values))
    return _build(root, cls, source, directory)


def to_plain(settings: Any) -> dict[str, Any]:
    """The inverse of `from_plain`: plain values only (fit for JSON and YAML), with the keys and units of the file."""
    hints = _hints(type(settings))
    return {
        _key_of(field.name, hints[field.name]): _to_plain(getattr(settings, field.name), hints[field.name])
        for field in dataclasses.fields(settings)
    }


def to_yaml(settings: Any) -> str:
    """`settings` as a file that `load_file` reads back to the same value."""
    return yaml.safe_dump(to_plain(settings), sort_keys=False, allow_unicode=True)


def plain_scalar(text: str) -> Any:
    """What `text` means as a value in a file: a number, a truth value, else text. For `from_plain`."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, int) and not isinstance(value, bool) and not _INT.fullmatch(text.strip()):
        return text  # YAML 1.1 reads 1:30 as 90 and 010 as 8
    return value if isinstance(value, (bool, int, float)) else text


def _build(root: yaml.Node, cls: type[T], source: str, directory: Path | None) -> T:
    reader = _Reader(directory)
    result = reader.read(root, cls, "")
    if reader.problems:
        raise ConfigError(source, sorted(reader.problems, key=lambda problem: problem.line))
    return typing.cast(T, result)


# ------------------------------------------------------------------------------------------------- annotations


def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _unwrap(annotation: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """(type, what Annotated adds, whether None is allowed)."""
    optional = False
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(members) != 1:
            raise TypeError(f"a configuration field can be one type or None, not {annotation}")
        annotation, optional = members[0], True
    extras: tuple[Any, ...] = ()
    if typing.get_origin(annotation) is Annotated:
        annotation, *rest = typing.get_args(annotation)
        extras = tuple(rest)
    return annotation, extras, optional


def _unit_of(annotation: Any) -> _Unit | None:
    return next((extra for extra in _unwrap(annotation)[1] if isinstance(extra, _Unit)), None)


def _key_of(field_name: str, annotation: Any) -> str:
    unit = _unit_of(annotation)
    return field_name.removesuffix(unit.value) if unit else field_name


def _to_plain(value: Any, annotation: Any) -> Any:
    annotation, extras, _ = _unwrap(annotation)
    if value is None:
        return None
    if _Unit.BYTES in extras:
        return units.format_size(value)
    if _Unit.SECONDS in extras:
        return units.format_duration(value)
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    arguments = typing.get_args(annotation)
    if isinstance(value, tuple):
        return [_to_plain(item, arguments[0]) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_plain(item, arguments[1]) for key, item in value.items()}
    return value


# ----------------------------------------------------------------------------------------------------- reading

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9A-Fa-f_]+)")
_BAD = object()
"""What a reader returns after noting a problem."""


class _Reader:
    """Walks nodes against annotations, noting problems instead of stopping at the first."""

    def __init__(self, directory: Path | None) -> None:
        self.problems: list[Problem] = []
        self._directory = directory

    def _note(self, node: yaml.Node | None, key: str, text: str) -> Any:
        line = node.start_mark.line + 1 if node is not None and node.start_mark is not None else 0
        self.problems.append(Problem(line, key, text))
        return _BAD

    def read(self, node: yaml.Node, annotation: Any, key: str) -> Any:
        annotation, extras, optional = _unwrap(annotation)
        if optional and node.tag == "tag:yaml.org,2002:null":
            return None
        if dataclasses.is_dataclass(annotation):
            return self._read_dataclass(node, typing.cast("type[Any]", annotation), key)
        origin = typing.get_origin(annotation)
        if origin is tuple:
            return self._read_tuple(node, typing.get_args(annotation)[0], key)
        if origin is dict:
            return self._read_dict(node, typing.get_args(annotation)[1], key)
        if not isinstance(node, yaml.ScalarNode):
            return self._note(node, key, f"must be a single value, not {_kind(node)}")
        return self._read_scalar(node, annotation, extras, key)

    def _pairs(self, node: yaml.MappingNode, key: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """(key, key node, value node), each key once."""
        seen: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._note(key_node, key, "a key must be a plain word")
                continue
            name = key_node.value
            if name in seen:
                first = seen[name].start_mark
                where = f" (first in line {first.line + 1})" if first is not None else ""
                self._note(key_node, _join(key, name), f"is given twice{where}")
                continue
            seen[name] = key_node
            yield name, key_node, value_node

    def _read_dataclass(self, node: yaml.Node, cls: type[Any], key: str) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self._note(node, key, f"must be a mapping of keys to values, not {_kind(node)}")
        hints = _hints(cls)
        fields = {_key_of(field.name, hints[field.name]): field for field in dataclasses.fields(cls) if field.init}
        values: dict[str, Any] = {}
        nodes: dict[str, yaml.Node] = {}
        sound = True
        for name, key_node, value_node in self._pairs(node, key):
            if name not in fields:
                self._note(key_node, _join(key, name), f"unknown key{_did_you_mean(name, fields, hints)}")
                sound = False
                continue
            field = fields[name]
            nodes[field.name] = key_node
            values[field.name] = self.read(value_node, hints[field.name], _join(key, name))
            sound = sound and values[field.name] is not _BAD
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and field.name not in nodes:
                self._note(node, _join(key, name), "is missing")
                sound = False
        if not sound:
            return _BAD
        try:
            return cls(**values)
        except FieldError as error:
            place = _join(key, _key_of(error.field, hints[error.field]))
            return self._note(nodes.get(error.field, node), place, str(error))
        except (ValueError, UserError) as error:
            return self._note(node, key, str(error))

    def _read_tuple(self, node: yaml.Node, item: Any, key: str) -> Any:
        if not isinstance(node, yaml.SequenceNode):
            return self._note(node, key, f"must be a list, not {_kind(node)}")
        items = tuple(self.read(child, item, f"{key}[{index}]") for index, child in enumerate(node.value))
        return _BAD if any(value is _BAD for value in items) else items

    def _read_dict(self, node: yaml.Node, item: Any, key: str) -> Any:
        if not isinstance(node, yaml.MappingNode):
            return self._note(node, key, f"must be a mapping of keys to values, not {_kind(node)}")
        items = {name: self.read(child, item, _join(key, name)) for name, _, child in self._pairs(node, key)}
        return _BAD if any(value is _BAD for value in items.values()) else items

    def _read_scalar(self, node: yaml.ScalarNode, annotation: Any, extras: tuple[Any, ...], key: str) -> Any:
        try:
            value = self._convert(node, annotation, extras)
        except UserError as error:
            return self._note(node, key, str(error))
        for bounds in extras:
            if not isinstance(bounds, Between):
                continue
            if bounds.low is not None and value < bounds.low:
                return self._note(node, key, f"{node.value} is too small: at least {_amount(bounds.low, extras)}")
            if bounds.high is not None and value > bounds.high:
                return self._note(node, key, f"{node.value} is too large: at most {_amount(bounds.high, extras)}")
        return value

    def _convert(self, node: yaml.ScalarNode, annotation: Any, extras: tuple[Any, ...]) -> Any:
        text, kind = node.value, node.tag.rpartition(":")[2]
        if _Unit.BYTES in extras:
            return units.parse_size(text)
        if _Unit.SECONDS in extras:
            return units.parse_duration(text)
        if typing.get_origin(annotation) is Literal:
            return _choice(text, typing.get_args(annotation))
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return annotation(_choice(text, tuple(member.value for member in annotation)))
        if annotation is bool:
            if kind != "bool":
                raise UserError(f"must be true or false, not {text!r}")
            return text.lower() in ("true", "yes", "on")
        if annotation is int:
            if kind != "int" or not _INT.fullmatch(text):
                raise UserError(f"must be a whole number, not {text!r}")
            return int(text.replace("_", ""), 0)
        if annotation is float:
            return _float(text, kind)
        if annotation is str or annotation is Path:
            if kind != "str":
                raise UserError(f"must be text; write {text!r} in quotes if it is meant" if text else "is empty")
            return text if annotation is str else self._path(text)
        raise TypeError(f"no way to read a {annotation} from a file")

    def _path(self, text: str) -> Path:
        path = Path(text).expanduser()
        return Path(os.path.normpath(self._directory / path)) if self._directory is not None else path


def _float(text: str, kind: str) -> float:
    if kind not in ("int", "float") or ":" in text:
        raise UserError(f"must be a number, not {text!r}")
    try:
        return float(text.replace("_", ""))
    except ValueError:
        raise UserError(f"must be a plain number, not {text!r}") from None


def _choice(text: str, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if text == str(choice):
            return choice
    listed = ", ".join(str(choice) for choice in choices)
    raise UserError(f"{text!r} is none of {listed}{_closest(text, [str(choice) for choice in choices])}")


def _amount(bound: float, extras: tuple[Any, ...]) -> str:
    if _Unit.BYTES in extras:
        return units.format_size(int(bound))
    return units.format_duration(bound) if _Unit.SECONDS in extras else f"{bound:g}"


def _closest(word: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _did_you_mean(name: str, fields: Mapping[str, Any], hints: Mapping[str, Any]) -> str:
    for field_name, annotation in hints.items():
        if name == field_name:  # the program's name of a size or duration, with its unit
            return f"; did you mean {_key_of(field_name, annotation)!r}?"
    return _closest(name, list(fields)) or f"; known here: {', '.join(fields)}"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return f"{node.value!r}" if node.value else "nothing"
