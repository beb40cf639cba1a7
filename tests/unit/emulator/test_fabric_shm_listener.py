"""Where emu-shm listens: private files, dead listeners replaced, living ones respected, strangers ignored."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from doca_shims.api import QueueLimits, ShimError
from emulator import fabric_shm


def _errno(path: str) -> int | None:
    fabric = fabric_shm.create({})
    try:
        fabric.listen(path).close()
    except ShimError as error:
        return error.errno
    finally:
        fabric.close()
    return None


def test_socket_and_new_directory_are_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "s.sock"
    fabric = fabric_shm.create({})
    listener = fabric.listen(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(ShimError) as caught:
        fabric.close()
    assert caught.value.errno == errno.EBUSY
    listener.close()
    assert not path.exists()
    fabric.close()


def test_the_file_of_a_dead_listener_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(path)
    dead.close()
    assert _errno(path) is None


def test_a_living_listener_and_other_files_are_left_alone(tmp_path: Path) -> None:
    living = fabric_shm.create({})
    listener = living.listen(str(tmp_path / "s.sock"))
    assert _errno(str(tmp_path / "s.sock")) == errno.EADDRINUSE
    plain = tmp_path / "plain"
    plain.write_text("mine")
    assert _errno(str(plain)) == errno.EADDRINUSE
    assert plain.read_text() == "mine"
    listener.close()
    living.close()


def test_a_file_that_is_not_ours_any_more_survives_close(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    fabric = fabric_shm.create({})
    listener = fabric.listen(str(path))
    path.unlink()
    path.write_text("someone else's")
    listener.close()
    assert path.read_text() == "someone else's"
    fabric.close()


@pytest.mark.parametrize("path", ["", "x" * 108, "a\0b"])
def test_bad_paths(path: str) -> None:
    assert _errno(path) == errno.EINVAL


def test_strangers_do_not_hold_up_others(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    fabric = fabric_shm.create({})
    listener = fabric.listen(path)
    strangers = []
    for greeting in (b"", b"GET / HTTP/1.1", b"entresol-shm-1 hello"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(path)
        if greeting:
            stranger.send(greeting)
        strangers.append(stranger)
    assert listener.accept() is None
    # The one who said nothing is still waited for; those who said nonsense are gone.
    assert strangers[1].recv(1) == strangers[2].recv(1) == b""
    pd = fabric.alloc_pd()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ShimError) as caught:
        fabric.connect(path, pd, QueueLimits(), timeout_s=0.01)
    assert caught.value.errno == errno.ETIMEDOUT
    assert len(os.listdir("/proc/self/fd")) == before
    listener.close()
    for stranger in strangers:
        stranger.close()
    pd.close()
    fabric.close()


def test_a_peer_that_left_before_it_was_accepted(tmp_path: Path) -> None:
    fabric = fabric_shm.create({})
    listener = fabric.listen(str(tmp_path / "s.sock"))
    pd = fabric.alloc_pd()
    with pytest.raises(ShimError):
        fabric.connect(listener.address, pd, QueueLimits(), timeout_s=0.01)
    request = listener.accept()
    assert request is not None
    with pytest.raises(ShimError) as caught:
        request.accept(pd, QueueLimits())
    assert caught.value.errno == errno.ECONNRESET
    with pytest.raises(ShimError):
        request.reject("twice answered")
    pd.close()
    listener.close()
    fabric.close()


@pytest.mark.parametrize("options", [{"colour": "red"}, {"rnr_timeout_s": "soon"}, {"transport_timeout_s": "0"}])
def test_bad_options(options: dict[str, str]) -> None:
    with pytest.raises(ShimError) as caught:
        fabric_shm.create(options)
    assert caught.value.errno == errno.EINVAL
