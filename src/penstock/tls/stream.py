"""A TLS connection as an ``environment.Stream`` around another stream.

OpenSSL works on two memory buffers, so there is no thread and nothing blocks. Ciphertext from the inner stream goes
into ``_incoming``; what OpenSSL has to send comes out of ``_outgoing``.

The inner stream says when it is readable or writable, but it does not know everything:

- Plaintext may be left when the socket is empty, because the owner paused or its buffer was full. Then the owner is
  called through ``Spawn.soon`` until ``recv_into`` has nothing to return.
- Ciphertext may be left when the owner has nothing to send. Then this stream waits until the inner one is writable,
  and the owner notices nothing.
- Before the handshake is done the owner can neither read nor write. The handshake proceeds by itself, unless the
  owner wants to decide when: a step may cost as much as a dozen small requests.

An error is kept and raised by every later call. If OpenSSL wrote an alert for the peer, the alert is still sent.
But a stream closed after an error, or before the handshake is done, does not wait until the peer has read.
"""

from __future__ import annotations

import errno
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import cast

from penstock.environment import Buffer, File, Spawn, Stream, Timer
from penstock.tls.x509 import subject_name

# Ciphertext that waits for the peer to read. Above this, no plaintext is taken.
UNSENT_BYTES_MAX = 256 * 1024
# What OpenSSL itself answers comes on top, and is little unless the peer provokes it and does not read.
UNSENT_ANSWERS_MAX = 64 * 1024
# Plaintext taken in one call; then the loop serves other connections.
TAKEN_BYTES_PER_CALL = 256 * 1024
# Plaintext whose ciphertext is sent in one call.
PORTION_BYTES = 64 * 1024
# The largest TLS record. Smaller buffers are joined, because each record costs a header, a tag and a call. OpenSSL
# is not given much more than this at once: its memory buffers keep the size they grew to, in every connection.
RECORD_BYTES = 16 * 1024
# Ciphertext received at once, and how much more of it than the plaintext that is wanted. More than can be decrypted
# would have to be copied and kept.
RECEIVED_BYTES = 68 * 1024
RECEIVED_OVERHEAD_BYTES = 1024
# Records decrypted in one call; then the loop serves other connections. OpenSSL handles all the records that it has
# until one contains data, and a key update of 27 bytes takes it 40 microseconds.
RECORDS_PER_CALL = 64
# Ciphertext in a row without a byte of plaintext, or in a handshake. A record has less than 17 KB, and OpenSSL
# limits the certificates in a handshake to 100 KB, so a peer that sends more than this is an attacker.
BARREN_BYTES_MAX = 256 * 1024
# How long a closed stream waits for the peer to read what was taken from the owner.
LINGER_MS = 5_000.0

CLOSED_IN_HANDSHAKE = "the peer closed the connection during the TLS handshake"

# Buffers for received ciphertext, each used within one call. Usually there is one for the whole process.
_scratches: list[memoryview] = []


class TlsError(OSError):
    """The peer broke the rules of TLS, or one side refused the other. The message is one line."""


class TlsStream:
    __slots__ = (
        "_barren_bytes",
        "_engine",
        "_error",
        "_has_ended",
        "_has_more",
        "_header",
        "_held",
        "_incoming",
        "_inner",
        "_inner_ended",
        "_is_closed",
        "_is_drained",
        "_is_driven",
        "_is_soon",
        "_is_watching_reads",
        "_is_watching_writes",
        "_linger",
        "_on_readable",
        "_on_writable",
        "_outgoing",
        "_record_bytes_left",
        "_records_left",
        "_scratch",
        "_send_error",
        "_spawn",
        "_unsent",
        "_unsent_bytes",
        "is_established",
        "is_gone",
        "on_established",
        "on_gone",
        "peer",
        "peer_name",
    )

    def __init__(
        self,
        stream: Stream,
        context: ssl.SSLContext,
        spawn: Spawn,
        *,
        server_side: bool,
        server_hostname: str | None = None,
        is_driven: bool = False,
    ) -> None:
        """Start the handshake. On the client's side, ``server_hostname`` is what the certificate has to be for.

        With ``is_driven``, the owner watches the inner stream until the handshake is done, and calls ``proceed``.
        """
        self._inner = stream
        self._spawn = spawn
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._engine = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self.peer = stream.peer
        # Called once, after the handshake.
        self.on_established: Callable[[], None] | None = None
        self.is_established = False
        self._is_driven = is_driven
        # The subject of the peer's certificate as Kafka writes it; None if the peer showed no certificate.
        self.peer_name: str | None = None
        # Raised by every call from now on.
        self._error: OSError | None = None
        self._is_closed = False
        self._linger: Timer | None = None
        # The inner stream is closed too, which may be later. Then ``on_gone`` is called, once.
        self.is_gone = False
        self.on_gone: Callable[[], None] | None = None
        # Input.
        self._on_readable: Callable[[], None] | None = None
        self._is_watching_reads = False
        # ``recv_into`` has something to return although the inner stream may have nothing to read.
        self._has_more = False
        self._is_soon = False
        self._inner_ended = False
        # The inner stream gave less than there was room for, so it has no more now.
        self._is_drained = False
        # The peer has closed its side, and everything it sent was read.
        self._has_ended = False
        # Where the next record begins in the ciphertext to come, and the bytes of its header that have come.
        self._record_bytes_left = 0
        self._header = b""
        # That this call may decrypt.
        self._records_left = 0
        # Received ciphertext that OpenSSL has not got yet. During a call it is in the scratch buffer.
        self._held: memoryview | None = None
        self._scratch: memoryview | None = None
        # Since the last plaintext.
        self._barren_bytes = 0
        # Output: ciphertext that the inner stream has not taken.
        self._on_writable: Callable[[], None] | None = None
        self._is_watching_writes = False
        self._unsent: deque[Buffer] = deque()
        self._unsent_bytes = 0
        # The inner stream cannot send any more. What the peer sent before can still be read.
        self._send_error: OSError | None = None
        self._watch_reads()
        if not server_side and not is_driven:
            # Not now, because the owner has not set ``on_established`` yet.
            spawn.soon(self._inner_readable)

    # For the owner

    def proceed(self) -> bool:
        """Take the next step of a driven handshake: the inner stream has bytes, or has ended.

        Returns whether there is another step to take without waiting for the inner stream. Raises the error that
        ended the handshake.
        """
        if self._error is None and not self._is_closed and not self.is_established:
            self._shake_hands()
        if self._error is not None:
            raise self._error
        return self._held is not None and not self.is_established

    def recv_into(self, buffer: memoryview) -> int | None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            return 0
        if not self.is_established:
            return None
        count = 0 if self._has_ended else self._decrypt(buffer)
        if self._outgoing.pending:
            self._answer()
        if self._has_ended or self._error is not None:
            # Also when there are bytes to return first.
            self._has_more = True
            self._watch_reads()
        if self._has_more:
            self._call_soon()
        if count:
            return count
        if self._error is not None:
            raise self._error
        return 0 if self._has_ended else None

    def send(self, buffers: Sequence[Buffer]) -> int:
        self._check_sending()
        if not self.is_established or self._unsent_bytes >= UNSENT_BYTES_MAX:
            return 0
        size = sum(map(len, buffers))
        if size <= RECORD_BYTES:
            if size:
                self._encrypt(buffers[0] if len(buffers) == 1 else b"".join(buffers))
            return size
        taken = 0
        for portion in _portions(buffers):
            self._encrypt(portion)
            taken += len(portion)
            if taken >= TAKEN_BYTES_PER_CALL or self._unsent_bytes >= UNSENT_BYTES_MAX:
                break
        return taken

    def send_file(self, file: File, position: int, size: int) -> int:
        self._check_sending()
        if not self.is_established:
            return 0
        taken = 0
        size = min(size, TAKEN_BYTES_PER_CALL)
        while taken < size and self._unsent_bytes < UNSENT_BYTES_MAX:
            data = file.read_at(position + taken, min(PORTION_BYTES, size - taken))
            if not data:
                if taken:
                    break
                raise OSError(errno.EIO, "the file is shorter than the range to send", file.path)
            self._encrypt(data)
            taken += len(data)
        return taken

    def on_readable(self, callback: Callable[[], None] | None) -> None:
        if self._is_closed:
            return
        self._on_readable = callback
        self._watch_reads()
        if self._has_more:
            self._call_soon()

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        if self._is_closed:
            return
        self._on_writable = callback
        self._watch_writes()
        if self._error is not None:
            self._call_soon()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.on_established = self._on_readable = self._on_writable = None
        self._watch_reads()
        if self._error is None and self.is_established:
            # This raises when the peer has not sent close_notify yet. We do not wait for that.
            with suppress(OSError):
                self._engine.unwrap()
            self._collect()
        self._flush()
        if self._unsent and self.is_established and self._error is None:
            self._linger = self._spawn.later(LINGER_MS, self._finish)
            self._watch_writes()
        else:
            self._finish()

    # Callbacks

    def _inner_readable(self) -> None:
        if self._is_closed or self._error is not None:
            return
        if not self.is_established:
            self._shake_hands()
        elif self._on_readable is not None and not self._is_soon:
            self._on_readable()

    def _inner_writable(self) -> None:
        self._flush()
        if self._is_closed:
            if not self._unsent:
                self._finish()
            return
        if self._on_writable is not None and self._is_writable():
            self._on_writable()
        self._watch_writes()

    def _soon(self) -> None:
        self._is_soon = False
        if self._has_more and self._on_readable is not None:
            self._on_readable()
        elif self._error is not None and self._on_writable is not None:
            self._on_writable()
        if self._has_more or self._error is not None:
            self._call_soon()

    def _call_soon(self) -> None:
        wanted = self._on_readable is not None or (self._error is not None and self._on_writable is not None)
        if wanted and not self._is_soon:
            self._is_soon = True
            self._spawn.soon(self._soon)

    def _watch_reads(self) -> None:
        """Have the inner stream call when it is readable, if bytes from it are wanted."""
        wanted = (
            not self._is_closed
            and self._error is None
            and not self._has_ended
            and (self._on_readable is not None if self.is_established else not self._is_driven)
        )
        if wanted != self._is_watching_reads:
            self._is_watching_reads = wanted
            self._inner.on_readable(self._inner_readable if wanted else None)

    def _watch_writes(self) -> None:
        wanted = bool(self._unsent) or (self._on_writable is not None and self._is_writable())
        if wanted != self._is_watching_writes:
            self._is_watching_writes = wanted
            self._inner.on_writable(self._inner_writable if wanted else None)

    def _is_writable(self) -> bool:
        if self._send_error is not None:
            return True
        return self.is_established and self._error is None and self._unsent_bytes < UNSENT_BYTES_MAX

    # Input

    def _shake_hands(self) -> None:
        self._records_left = RECORDS_PER_CALL
        try:
            while True:
                try:
                    self._engine.do_handshake()
                except ssl.SSLWantReadError:
                    self._answer()
                else:
                    break
                if self._records_left == 0 and self._held is not None:
                    if not self._is_driven:
                        self._spawn.soon(self._inner_readable)
                    return
                if self._records_left == 0 or self._error is not None or not self._feed(RECEIVED_BYTES):
                    return
                if self._inner_ended:
                    raise TlsError(CLOSED_IN_HANDSHAKE)
            certificate = self._engine.getpeercert(True)
            if certificate is not None:
                self.peer_name = subject_name(certificate)
        except (OSError, ValueError) as error:
            self._fail(error)
            return
        finally:
            self._return_scratch()
        self.is_established = True
        self._barren_bytes = 0
        self._answer()
        established, self.on_established = self.on_established, None
        if established is not None:
            established()
        if self._is_closed:
            return
        # The peer's first data may have come with the end of its handshake.
        self._has_more = self._incoming.pending > 0 or self._held is not None
        self._watch_reads()
        self._watch_writes()
        self._call_soon()

    def _decrypt(self, buffer: memoryview) -> int:
        """Fill the buffer as far as possible. Returns the bytes in it."""
        engine, incoming = self._engine, self._incoming
        count, size = 0, len(buffer)
        if size == 0:
            return 0
        self._records_left = RECORDS_PER_CALL
        self._has_more = self._is_drained = False
        try:
            while True:
                # Each call returns one record at most. Without ciphertext it would only raise SSLWantReadError.
                while incoming.pending or engine.pending() or self._inner_ended:
                    try:
                        # With a buffer, what is returned is a number.
                        received = cast(int, engine.read(size - count, cast(bytearray, buffer[count:])))
                    except ssl.SSLWantReadError:
                        break
                    if received == 0:
                        self._has_ended = True
                        return count
                    count += received
                    self._barren_bytes = 0
                    if count == size:
                        self._has_more = (
                            self._held is not None
                            or self._inner_ended
                            or incoming.pending > 0
                            or engine.pending() > 0
                        )
                        return count
                # OpenSSL has a part of a record at most.
                if self._records_left == 0:
                    self._has_more = self._held is not None
                    return count
                if self._is_drained and self._held is None:
                    return count
                if not self._feed(size - count + RECEIVED_OVERHEAD_BYTES):
                    return count
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            # The second is an end without close_notify. A frame of Kafka's has a length, so a cut is not mistaken
            # for the end of one.
            self._has_ended = True
        except OSError as error:
            self._fail(error)
        finally:
            self._return_scratch()
        return count

    def _feed(self, size: int) -> bool:
        """Give more ciphertext to OpenSSL. False if there is none now: the inner stream calls when there is."""
        held = self._held
        if held is None:
            scratch = self._scratch
            if scratch is None:
                try:
                    scratch = self._scratch = _scratches.pop()
                except IndexError:
                    scratch = self._scratch = memoryview(bytearray(RECEIVED_BYTES))
            count = self._inner.recv_into(scratch[:size])
            if count is None:
                return False
            if count == 0:
                self._inner_ended = True
                self._incoming.write_eof()
                return True
            self._is_drained = count < min(size, RECEIVED_BYTES)
            held = scratch[:count]
        fed = self._boundary(held)
        self._incoming.write(held[:fed])
        self._held = held[fed:] if fed < len(held) else None
        self._barren_bytes += fed
        if self._barren_bytes > BARREN_BYTES_MAX:
            raise TlsError(f"the peer sent {BARREN_BYTES_MAX // 1024} KB of TLS messages without any data")
        return True

    def _return_scratch(self) -> None:
        if self._scratch is not None:
            if self._held is not None:
                self._held = memoryview(bytes(self._held))
            _scratches.append(self._scratch)
            self._scratch = None

    def _boundary(self, data: memoryview) -> int:
        """Count the records that begin in these bytes. Returns how many bytes to give to OpenSSL now.

        Records are framed in the clear: a type, a version and two bytes of length.
        """
        size = len(data)
        position = self._record_bytes_left
        left = self._records_left
        if self._header:
            position = 5 - len(self._header)
            self._header += bytes(data[:position])
            if len(self._header) < 5:
                return size
            position += self._header[3] << 8 | self._header[4]
            self._header = b""
            left -= 1
        while position + 5 <= size and position < RECORD_BYTES and left > 0:
            position += 5 + (data[position + 3] << 8 | data[position + 4])
            left -= 1
        self._records_left = left
        if position < size and (left == 0 or position >= RECORD_BYTES):
            self._record_bytes_left = 0
            return position
        self._record_bytes_left = max(0, position - size)
        if position < size:
            self._header = bytes(data[position:])
        return size

    # Output

    def _check_sending(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise OSError(errno.EBADF, "the stream is closed")
        if self._send_error is not None:
            raise self._send_error

    def _encrypt(self, data: Buffer) -> None:
        """Take all of the data, and send what the inner stream accepts."""
        ciphertexts = []
        size = len(data)
        try:
            if size <= RECORD_BYTES:
                self._engine.write(data)
                ciphertexts.append(self._outgoing.read())
            else:
                view = memoryview(data)
                # OpenSSL takes all of it, because its memory buffer cannot be full.
                for start in range(0, size, RECORD_BYTES):
                    self._engine.write(view[start : start + RECORD_BYTES])
                    ciphertexts.append(self._outgoing.read())
        except OSError as error:
            self._fail(error)
            assert self._error is not None
            raise self._error from None
        ciphertext_bytes = sum(map(len, ciphertexts))
        sent = 0
        if not self._unsent:
            # The usual case, and so without the queue.
            try:
                sent = self._inner.send(ciphertexts)
            except OSError as error:
                self._send_error = error
                raise
            if sent == ciphertext_bytes:
                return
        self._unsent += ciphertexts
        self._unsent_bytes += ciphertext_bytes
        self._drop(sent)
        self._watch_writes()

    def _answer(self) -> None:
        """Send what OpenSSL itself has to say: handshakes, alerts, key updates."""
        self._collect()
        self._flush()
        self._watch_writes()
        if self._unsent_bytes > UNSENT_BYTES_MAX + UNSENT_ANSWERS_MAX and self._error is None:
            self._fail(TlsError("the peer does not read the answers to its TLS messages"))

    def _collect(self) -> None:
        if self._outgoing.pending:
            data = self._outgoing.read()
            self._unsent.append(data)
            self._unsent_bytes += len(data)

    def _flush(self) -> None:
        unsent = self._unsent
        try:
            if unsent:
                self._drop(self._inner.send(list(unsent)))
        except OSError as error:
            self._send_error = error
            unsent.clear()
            self._unsent_bytes = 0
            if not self.is_established:
                self._fail(error)

    def _drop(self, sent: int) -> None:
        """The inner stream has taken the first bytes of the queue."""
        unsent = self._unsent
        self._unsent_bytes -= sent
        while unsent and sent >= len(unsent[0]):
            sent -= len(unsent.popleft())
        if sent:
            unsent[0] = memoryview(unsent[0])[sent:]

    # The end

    def _fail(self, error: OSError | ValueError) -> None:
        if self._error is not None:
            return
        self._error = plain_error(error)
        self._has_more = True
        self._watch_reads()
        if self._send_error is None:
            # An alert for the peer.
            self._collect()
            self._flush()
        self._watch_writes()
        self._call_soon()

    def _finish(self) -> None:
        """Close the inner stream: everything is sent, or will not be."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._error is not None and not self._inner_ended:
            # A socket with unread bytes is closed with a reset, which may overtake the alert.
            with suppress(OSError):
                self._inner.recv_into(memoryview(bytearray(RECEIVED_BYTES)))
        self._is_watching_writes = False
        self._inner.close()
        self.is_gone = True
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()


def plain_error(error: OSError | ValueError) -> OSError:
    """The error in one line, for somebody who does not know OpenSSL."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(f"the peer's certificate is not accepted: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError):
        return TlsError(CLOSED_IN_HANDSHAKE)
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "unknown error"
        if reason in _REASONS:
            return TlsError(_REASONS[reason])
        words = reason.replace("_", " ").lower()
        if "ALERT" in reason:
            return TlsError(f"the peer refused the TLS connection: {words.partition('alert ')[2]}")
        return TlsError(f"TLS failed: {words}")
    if isinstance(error, OSError):
        return error
    return TlsError(f"the peer's certificate cannot be read: {error}")


_NOT_TLS = "the peer does not speak TLS; it may be configured for a plaintext listener"
_NO_VERSION = "the peer offers no version of TLS that is enabled here"
_REASONS = {
    "HTTP_REQUEST": f"{_NOT_TLS} (it sent HTTP)",
    "HTTPS_PROXY_REQUEST": f"{_NOT_TLS} (it sent HTTP)",
    "WRONG_VERSION_NUMBER": _NOT_TLS,
    "UNKNOWN_PROTOCOL": _NOT_TLS,
    "PACKET_LENGTH_TOO_LONG": _NOT_TLS,
    "UNSUPPORTED_PROTOCOL": _NO_VERSION,
    "VERSION_TOO_LOW": _NO_VERSION,
    "NO_SHARED_CIPHER": "the peer offers no cipher suite that is enabled here",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client sent no certificate, and ssl.client.auth is required",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the broker requires a client certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer refused our certificate: it does not trust its authority",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the peer refused our certificate: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer refused our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the peer refused our certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer supports none of our versions of TLS",
}


def _portions(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """The same bytes in pieces of whole records, except for the last. Only small buffers are copied."""
    small: list[Buffer] = []
    small_bytes = 0
    for buffer in buffers:
        size = len(buffer)
        if small_bytes + size < RECORD_BYTES:
            small.append(buffer)
            small_bytes += size
            continue
        view = memoryview(buffer)
        start = 0
        if small:
            start = RECORD_BYTES - small_bytes
            small.append(view[:start])
            yield b"".join(small)
        while size - start >= RECORD_BYTES:
            end = start + min(PORTION_BYTES, (size - start) // RECORD_BYTES * RECORD_BYTES)
            yield view[start:end]
            start = end
        small, small_bytes = [view[start:]], size - start
    if small_bytes:
        yield b"".join(small)
