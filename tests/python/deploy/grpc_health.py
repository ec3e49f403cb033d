"""Asks `grpc.health.v1.Health` as a kubelet does, in the few frames of HTTP/2 that this takes."""

import socket
import ssl
import struct

SERVING = 1
NOT_SERVING = 2

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_PATH = "/grpc.health.v1.Health/Check"
_TIMEOUT_S = 5


def health_of(address: str, service: str, tls: ssl.SSLContext | None = None) -> int | None:
    """The status of a service at `host:port`; `None` if it does not answer, or knows no such service."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _TIMEOUT_S) as plain:
            if tls is None:
                return _ask(plain, "http", address, service)
            with tls.wrap_socket(plain, server_hostname=host) as encrypted:
                return _ask(encrypted, "https", address, service)
    except OSError:
        return None


def _ask(connection: socket.socket, scheme: str, authority: str, service: str) -> int | None:
    message = b"\x0a" + bytes([len(service)]) + service.encode()
    headers = {
        ":method": "POST",
        ":scheme": scheme,
        ":path": _PATH,
        ":authority": authority,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, 1, b"".join(_field(name, value) for name, value in headers.items()))
        + _frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message)
    )
    answer = b""
    while True:
        length, kind, flags, stream = struct.unpack(">IBBI", b"\0" + _read(connection, 9))
        payload = _read(connection, length)
        if kind == _SETTINGS and not flags & _ACK:
            connection.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        if kind == _DATA and stream == 1:
            answer += payload
        if kind in (_DATA, _HEADERS) and stream == 1 and flags & _END_STREAM:
            # The message is the field 1, a number; behind the five bytes that say how long it is.
            return answer[6] if answer[5:6] == b"\x08" else None


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _field(name: str, value: str) -> bytes:
    """A header, literal and not indexed; both parts are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    data = b""
    while len(data) < n_bytes:
        part = connection.recv(n_bytes - len(data))
        if not part:
            raise ConnectionResetError("the connection has ended")
        data += part
    return data
