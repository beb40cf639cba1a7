"""Every kind of mistake in a configuration file names file, line and key; what is right comes back unchanged."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import config
from common.config import Between, DurationS, FieldError, SizeBytes


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    name: str
    size_bytes: Annotated[SizeBytes, Between(1, 1 << 40)]
    limit_bytes: SizeBytes | None = None
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    path: Path = Path("/tmp")
    wait_s: Annotated[DurationS, Between(0.001, None)] = 1.0
    count: Annotated[int, Between(1, 9)] = 1
    ratio: float = 0.5
    on: bool = False
    mode: Literal["fast", "safe"] = "safe"
    colour: Colour = Colour.RED
    first: str | None = None

    def __post_init__(self) -> None:
        if self.first is not None and self.first not in [part.name for part in self.parts]:
            raise FieldError("first", f"no part is called {self.first!r}")


GOOD = """\
# a comment
parts:
  - name: a
    size: 64KiB
    limit: 1MiB
    options: {k: v}
  - {name: b, size: 2GB}
path: data/x
wait: 250ms
count: 3
ratio: 2
"on": true
mode: fast
colour: blue
first: b
"""


def problems(text: str) -> list[tuple[int, str, str]]:
    with pytest.raises(config.ConfigError) as caught:
        config.load_text(text, Whole, "pod.yaml")
    for problem, line in zip(caught.value.problems, str(caught.value).splitlines()):
        assert line.startswith(f"pod.yaml:{problem.line}: {problem.key}")
    return [(problem.line, problem.key, problem.text) for problem in caught.value.problems]


def test_a_good_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "whole.yaml"
    file.write_text(GOOD)
    whole = config.load_file(file, Whole)
    assert whole == Whole(
        (Part("a", 65536, 1 << 20, {"k": "v"}), Part("b", 2 * 10**9)),
        tmp_path / "data/x",
        0.25,
        3,
        2.0,
        True,
        "fast",
        Colour.BLUE,
        "b",
    )


@pytest.mark.parametrize(
    ("change", "line", "key", "part"),
    [
        (("count: 3", "coutn: 3"), 10, "coutn", "unknown key; did you mean 'count'?"),
        (("wait: 250ms", "wait_s: 250ms"), 9, "wait_s", "unknown key; did you mean 'wait'?"),
        (("    size: 64KiB\n", ""), 3, "parts[0].size", "is missing"),
        (("size: 64KiB", "size: 64K"), 4, "parts[0].size", "no known unit"),
        (("size: 64KiB", "size: 65536"), 4, "parts[0].size", "has no unit"),
        (("size: 64KiB", "size: [1]"), 4, "parts[0].size", "single value, not a list"),
        (("size: 2GB", "size: 0"), 7, "parts[1].size", "0 is too small: at least 1B"),
        (("size: 2GB", "size: 2TiB"), 7, "parts[1].size", "2TiB is too large: at most 1TiB"),
        (("wait: 250ms", "wait: 250"), 9, "wait", "has no unit"),
        (("wait: 250ms", "wait: 1us"), 9, "wait", "1us is too small: at least 1ms"),
        (("count: 3", "count: 3\ncount: 4"), 11, "count", "is given twice (first in line 10)"),
        (("count: 3", "count: three"), 10, "count", "must be a whole number, not 'three'"),
        (("count: 3", "count: 1:30"), 10, "count", "must be a whole number, not '1:30'"),
        (("count: 3", "count: 10"), 10, "count", "10 is too large: at most 9"),
        (("ratio: 2", "ratio: 'two'"), 11, "ratio", "must be a number, not 'two'"),
        (('"on": true', '"on": 1'), 12, "on", "must be true or false, not '1'"),
        (("mode: fast", "mode: fats"), 13, "mode", "'fats' is none of fast, safe; did you mean 'fast'?"),
        (("colour: blue", "colour: green"), 14, "colour", "'green' is none of red, blue"),
        (("name: a", "name: no"), 3, "parts[0].name", "must be text; write 'no' in quotes"),
        (("first: b", "first: c"), 15, "first", "no part is called 'c'"),
        (("path: data/x", "path:"), 8, "path", "is empty"),
        (("options: {k: v}", "options: {k: [v]}"), 6, "parts[0].options.k", "single value, not a list"),
        (("options: {k: v}", "options: 7"), 6, "parts[0].options", "must be a mapping of keys to values, not '7'"),
        (("ratio: 2", "? [a]\n: 2"), 11, "", "a key must be a plain word"),
    ],
)
def test_a_mistake_is_named_with_line_and_key(change: tuple[str, str], line: int, key: str, part: str) -> None:
    assert change[0] in GOOD
    [(found_line, found_key, text)] = problems(GOOD.replace(*change))
    assert (found_line, found_key) == (line, key)
    assert part in text


def test_all_mistakes_are_reported_at_once() -> None:
    found = problems(GOOD.replace("count: 3", "count: x").replace("size: 64KiB", "size: 1").replace("mode", "moed"))
    assert [line for line, _, _ in found] == [4, 10, 13]


def test_text_that_is_not_yaml_names_its_line() -> None:
    [(line, _, text)] = problems("parts:\n  - {name: a\nmode: fast\n")
    assert line in (2, 3)
    assert "not YAML" in text


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file_lacks_what_is_required(text: str) -> None:
    assert problems(text) == [(1, "parts", "is missing")]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match=r"absent.yaml: cannot be read: No such file"):
        config.load_file(tmp_path / "absent.yaml", Whole)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(config.ConfigError, match="UTF-8"):
        config.load_file(tmp_path / "bytes.yaml", Whole)


def test_plain_values_come_back_the_same() -> None:
    whole = config.load_text(GOOD, Whole)
    plain = json.loads(json.dumps(config.to_plain(whole)))
    assert plain["wait"] == "250ms"
    assert plain["parts"][0] == {"name": "a", "size": "64KiB", "limit": "1MiB", "options": {"k": "v"}}
    assert config.from_plain(Whole, plain) == whole
    assert config.load_text(config.to_yaml(whole), Whole) == whole


def test_plain_values_are_validated_without_a_line() -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.from_plain(Part, {"name": "a", "size": 5}, "the request")
    assert str(caught.value).startswith("the request: size: '5' has no unit")


@settings(deadline=None)
@given(
    st.builds(
        Whole,
        parts=st.lists(
            st.builds(
                Part,
                name=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1),
                size_bytes=st.integers(1, 1 << 40),
                limit_bytes=st.none() | st.integers(0, 1 << 50),
                options=st.dictionaries(st.text("abc-_", min_size=1), st.text("xyz 01:", max_size=5)),
            )
        ).map(tuple),
        path=st.just(Path("/a b")),
        count=st.integers(1, 9),
        on=st.booleans(),
        colour=st.sampled_from(Colour),
        first=st.none(),
    )
)
def test_any_settings_survive_the_file(whole: Whole) -> None:
    assert config.load_text(config.to_yaml(whole), Whole) == whole


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(config.ConfigError):
        assert dataclasses.is_dataclass(config.load_text(text, Whole))
