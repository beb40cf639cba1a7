"""What one event looks like, for people and as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from common import log
from common.errors import UserError
from common.log import LogSettings


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_json_has_one_object_a_line_with_the_fields() -> None:
    stream = io.StringIO()
    log.configure(LogSettings(format="json"), stream, {})
    logger = logging.getLogger("dpu_app.x")
    logger.info("region %s opened", "r0", extra={"slots": 7, "path": "/a b"})
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    logger.debug("not shown")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["slots"], first["path"], first["level"], first["logger"]) == (
        "region r0 opened",
        7,
        "/a b",
        "info",
        "dpu_app.x",
    )
    assert "ValueError: why" in second["traceback"]


def test_people_get_fields_at_the_end_quoted_where_needed() -> None:
    stream = io.StringIO()
    log.configure(LogSettings(), stream, {})
    logging.getLogger("x").warning("opened", extra={"region": "r0", "path": "/a b", "none": "", "nasty": "\x1b[2J\n"})
    assert stream.getvalue().endswith('WARNING x: opened region=r0 path="/a b" none="" nasty="\\u001b[2J\\n"\n')


def test_the_environment_wins() -> None:
    stream = io.StringIO()
    log.configure(LogSettings(), stream, {log.LEVEL_VARIABLE: "debug", log.FORMAT_VARIABLE: "json"})
    logging.getLogger("x").debug("shown")
    assert json.loads(stream.getvalue())["event"] == "shown"
    with pytest.raises(UserError, match="ENTRESOL_LOG_LEVEL"):
        log.configure(LogSettings(), stream, {log.LEVEL_VARIABLE: "loud"})
    with pytest.raises(UserError, match="ENTRESOL_LOG_FORMAT"):
        log.configure(LogSettings(), stream, {log.FORMAT_VARIABLE: "xml"})
