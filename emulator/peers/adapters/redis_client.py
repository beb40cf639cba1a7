"""Redis: redis-py with hiredis (pipelines of SET, GET or EXISTS), and a raw pipelined client over one socket.

Values are asked for `window_bytes` at a time: the server copies all values that were asked for before it sends them, so
that a deeper pipeline is slower. The raw client sends a batch's commands with one gather of the caller's memory and
receives every value straight into its destination: what the protocol allows at best.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

_IOV_MAX = 1000
_READ_BYTES = 1 << 20
"""What redis-py asks the socket for at once: faster than its 64 KiB for values of that size, measured."""
_EXISTS = b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n"


class RedisPy:
    """The official client. It answers with bytes objects; putting them into place is part of a read."""

    def __init__(self, options: dict[str, Any]) -> None:
        import redis

        self._window_bytes = options["window_bytes"]
        where = {"unix_socket_path": options["unix"]} if "unix" in options else {"port": options["port"]}
        self._redis = redis.Redis(**where, socket_read_size=_READ_BYTES, socket_timeout=None)
        self._redis.ping()
        self._version = redis.__version__

    def about(self) -> dict[str, str]:
        try:
            import hiredis

            parser = f"hiredis {hiredis.__version__}"
        except ImportError:
            parser = "its Python parser"
        return {"version": f"redis-py {self._version} with {parser}, redis-server {self.server_version()}"}

    def server_version(self) -> str:
        return str(self._redis.info("server")["redis_version"])

    def prepare(self, block_bytes: int, _blocks: int, source: Any, destination: Any) -> None:
        self._bytes, self._source, self._to = block_bytes, source.data, destination.data

    def store(self, keys: list[bytes], first: int) -> int:
        size = self._bytes
        places = range(first * size, (first + len(keys)) * size, size)
        pipeline = self._redis.pipeline(transaction=False)
        for key, at in zip(keys, places):
            pipeline.set(key, self._source[at : at + size])
        return sum(map(bool, pipeline.execute()))

    def retrieve(self, keys: list[bytes], first: int) -> int:
        size, at, done = self._bytes, first * self._bytes, 0
        step = max(1, self._window_bytes // size)
        for start in range(0, len(keys), step):
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys[start : start + step]:
                pipeline.get(key)
            for value in pipeline.execute():
                if value is not None:
                    self._to[at : at + size] = value
                    done += 1
                at += size
        return done

    def lookup(self, keys: list[bytes]) -> int:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return int(sum(pipeline.execute()))

    def forget(self, keys: list[bytes]) -> None:
        self._redis.delete(*keys)

    def close(self) -> None:
        self._redis.close()


class Raw:
    """RESP over one blocking socket."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._window_bytes = options["window_bytes"]
        if "unix" in options:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(options["unix"])
        else:
            self._socket = socket.create_connection(("127.0.0.1", options["port"]))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")

    def about(self) -> dict[str, str]:
        self._socket.sendall(b"*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n")
        header = b""
        while not header.endswith(b"\r\n"):
            header += self._socket.recv(1)
        text = bytearray(int(header[1:]) + 2)
        self._receive([memoryview(text)])
        fields = dict(line.split(b":", 1) for line in bytes(text).split(b"\r\n") if b":" in line)
        return {"version": f"redis-server {fields[b'redis_version'].decode()}"}

    def prepare(self, block_bytes: int, _blocks: int, source: Any, destination: Any) -> None:
        self._bytes, self._source, self._to = block_bytes, source.data, destination.data
        self._value_header = b"$%d\r\n" % block_bytes

    def store(self, keys: list[bytes], first: int) -> int:
        size = self._bytes
        parts: list[Any] = []
        before = b""
        for number, key in enumerate(keys, first):
            parts += (
                b"%s*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n%s" % (before, len(key), key, self._value_header),
                self._source[number * size : (number + 1) * size],
            )
            before = b"\r\n"
        parts.append(before)
        self._send(parts)
        answer = bytearray(5 * len(keys))
        self._receive([memoryview(answer)])
        if answer != b"+OK\r\n" * len(keys):
            raise RuntimeError(f"SET was answered {bytes(answer[:80])!r}")
        return len(keys)

    def retrieve(self, keys: list[bytes], first: int) -> int:
        step = max(1, self._window_bytes // self._bytes)
        parts = [keys[start : start + step] for start in range(0, len(keys), step)]
        self._ask(parts[0])
        for number, part in enumerate(parts):
            if number + 1 < len(parts):
                self._ask(parts[number + 1])
            self._receive_values(part, first + number * step)
        return len(keys)

    def _ask(self, keys: list[bytes]) -> None:
        self._socket.sendall(b"".join([b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys]))

    def _receive_values(self, keys: list[bytes], first: int) -> None:
        size = self._bytes
        header, between = self._value_header, b"\r\n" + self._value_header
        frames = [memoryview(bytearray(len(header)))]
        frames += [memoryview(bytearray(len(between))) for _ in keys[1:]]
        views: list[memoryview] = []
        for number, frame in enumerate(frames, first):
            views += (frame, self._to[number * size : (number + 1) * size])
        end = memoryview(bytearray(2))
        self._receive([*views, end])
        if frames[0] != header or any(frame != between for frame in frames[1:]) or bytes(end) != b"\r\n":
            raise RuntimeError(f"GET was answered {bytes(frames[0])!r} and so on: a key was absent")

    def lookup(self, keys: list[bytes]) -> int:
        head = _EXISTS % len(keys[0])
        self._socket.sendall(head + (b"\r\n" + head).join(keys) + b"\r\n")
        answer = bytearray(4 * len(keys))
        self._receive([memoryview(answer)])
        return answer.count(b":1\r\n")

    def forget(self, keys: list[bytes]) -> None:
        parts = [b"*%d\r\n$3\r\nDEL\r\n" % (len(keys) + 1), *(b"$%d\r\n%s\r\n" % (len(key), key) for key in keys)]
        self._socket.sendall(b"".join(parts))
        while not self._socket.recv(64).endswith(b"\r\n"):
            continue

    def close(self) -> None:
        self._socket.close()

    def _send(self, parts: list[Any]) -> None:
        at = 0
        while at < len(parts):
            sent = self._socket.sendmsg(parts[at : at + _IOV_MAX])
            while at < len(parts) and sent >= len(parts[at]):
                sent -= len(parts[at])
                at += 1
            if sent:
                parts[at] = memoryview(parts[at])[sent:]

    def _receive(self, views: list[memoryview]) -> None:
        at = 0
        while at < len(views):
            count, _ancillary, _flags, _address = self._socket.recvmsg_into(
                views[at : at + _IOV_MAX], 0, socket.MSG_WAITALL
            )
            if not count:
                raise ConnectionResetError("the server closed the connection")
            while at < len(views) and count >= len(views[at]):
                count -= len(views[at])
                at += 1
            if count:
                views[at] = views[at][count:]


def Adapter(options: dict[str, Any]) -> Any:
    return {"redis-py": RedisPy, "raw": Raw}[options["client"]](options)
