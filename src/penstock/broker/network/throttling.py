"""Delays clients that have used more than their quotas (``quotas.py``): the shell around that core.

A request is served and answered at once, with ``throttle_time_ms``. Then its connection is muted: it neither reads
nor handles further requests, also those that it has received already, until the delay is over (KIP-219). Nothing is
refused or lost. A Fetch of a client that is over its quota is answered empty, so that it costs nothing.

Clients that share a quota get their turns one after the other: a connection that has waited out its delay is
served, whatever the others have used meanwhile.

Delays are limited. Members of a group have to send their heartbeats, often on the same connection, and no session
timeout is shorter than 6 s (``group.min.session.timeout.ms``). For request time the limit is Kafka's, a second.

Nothing here is used on the internal listener: quotas do not slow down replication.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.broker.network.authorization import Principal
from penstock.broker.network.connection import Call, Connection
from penstock.broker.network.quotas import Bucket, ClientQuotas, Quotas
from penstock.environment import Environment, Timer
from penstock.metadata.quotas import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
)

MEMBER_DELAY_MS_MAX = 5_000
REQUEST_DELAY_MS_MAX = 1_000
# A debt is never larger.
DELAY_MS_MAX = 25_000


class ClientUsage:
    """What a connection remembers of its quotas. Valid for one client id, principal and version of the quotas."""

    __slots__ = ("buckets", "client_id", "has_turn", "principal", "version")

    def __init__(self, version: int, principal: Principal, client_id: str) -> None:
        self.version = version
        self.principal = principal
        self.client_id = client_id
        self.buckets: dict[str, Bucket | None] = {}
        # It has waited out a delay: its next Fetch is served, even if others have used what came in meanwhile.
        self.has_turn = False


class _Delay:
    __slots__ = ("bucket", "limit_ms", "rate", "timer", "until_ms")

    def __init__(self, bucket: Bucket, until_ms: int, limit_ms: int, timer: Timer) -> None:
        self.bucket = bucket
        # The bucket's when the delay was computed.
        self.rate = bucket.rate
        self.until_ms = until_ms
        self.limit_ms = limit_ms
        self.timer = timer


class Throttling:
    def __init__(self, environment: Environment) -> None:
        self._clock = environment.clock
        self._spawn = environment.spawn
        self.quotas = ClientQuotas()
        # The connections that are muted.
        self._delays: dict[Connection, _Delay] = {}
        # How often one was muted.
        self.count = 0
        # Whether any client has a quota of the kind: all that a request pays for if none has.
        self.limits_produce = False
        self.limits_fetch = False
        self.limits_requests = False
        self.limits_mutations = False
        self.limits_connections = False

    @property
    def delayed(self) -> int:
        """The number of connections that are muted."""
        return len(self._delays)

    def apply(self, quotas: Quotas) -> None:
        """The quotas have changed: also for those who are delayed."""
        now_ms = self._clock.now_ms()
        self.quotas.apply(quotas, now_ms)
        keys = self.quotas.keys
        self.limits_produce = PRODUCER_BYTE_RATE in keys
        self.limits_fetch = CONSUMER_BYTE_RATE in keys
        self.limits_requests = REQUEST_PERCENTAGE in keys
        self.limits_mutations = CONTROLLER_MUTATION_RATE in keys
        self.limits_connections = CONNECTION_CREATION_RATE in keys
        for connection, delay in list(self._delays.items()):
            usage = connection.usage
            assert usage is not None
            key, _, _ = delay.bucket.key
            now = self.quotas.find(key, usage.principal.name, usage.client_id, now_ms)
            if now is not delay.bucket:
                self._end(connection)
            elif now.rate != delay.rate:
                left_ms = max(0, delay.until_ms - now_ms) * delay.rate / now.rate
                delay.timer.cancel()
                del self._delays[connection]
                self._mute(connection, now, min(int(left_ms), delay.limit_ms), delay.limit_ms)

    def produced(self, call: Call, size: int) -> None:
        bucket = self._bucket(call, PRODUCER_BYTE_RATE)
        if bucket is not None:
            bucket.charge(size, self._clock.now_ms())
            self._delay(call, bucket)

    def must_wait_to_fetch(self, call: Call) -> bool:
        """Whether a Fetch is answered empty, and its connection delayed: the client has used up its quota."""
        bucket = self._bucket(call, CONSUMER_BYTE_RATE)
        usage = call.connection.usage
        if bucket is None or usage is None:
            return False
        if usage.has_turn:
            usage.has_turn = False
            return False
        return self._delay(call, bucket)

    def must_end_empty(self, call: Call) -> bool:
        """Whether a Fetch that has waited is answered empty: others of its connection have used up the quota."""
        if not call.connection.is_muted:
            return False
        bucket = self._bucket(call, CONSUMER_BYTE_RATE)
        return bucket is not None and self._delay(call, bucket)

    def fetch_bytes_max(self, call: Call) -> int | None:
        """The size of a response to a Fetch that is paid in one burst; None without a quota. At least one byte."""
        bucket = self._bucket(call, CONSUMER_BYTE_RATE)
        return None if bucket is None else max(1, min(2**31 - 1, int(bucket.burst)))

    def fetched(self, call: Call, size: int) -> None:
        bucket = self._bucket(call, CONSUMER_BYTE_RATE)
        if bucket is not None:
            bucket.charge(size, self._clock.now_ms())
            self._delay(call, bucket)

    def timed(self, broker: Any, request: Any, call: Call) -> Any:
        """Have a request handled, and charge the time that the loop spends on it."""
        began_us = self._clock.work_us()
        response = call.route.handle(broker, request, call)
        bucket = self._bucket(call, REQUEST_PERCENTAGE)
        if bucket is not None:
            bucket.charge((self._clock.work_us() - began_us) / 1000, self._clock.now_ms())
            self._delay(call, bucket, REQUEST_DELAY_MS_MAX)
        return response

    def may_mutate(self, call: Call, partitions: int, *, is_strict: bool) -> bool:
        """Whether the client may create or delete these partitions now (KIP-599).

        Requests of versions that know THROTTLING_QUOTA_EXCEEDED are strict: they are refused while there is a debt.
        Others are carried out, and their connection is delayed.
        """
        bucket = self._bucket(call, CONTROLLER_MUTATION_RATE)
        if bucket is None:
            return True
        now_ms = self._clock.now_ms()
        if is_strict and bucket.delay_ms(now_ms):
            self._delay(call, bucket)
            return False
        bucket.charge(partitions, now_ms)
        if not is_strict:
            self._delay(call, bucket)
        return True

    def accepted(self, address: str) -> int | None:
        """A connection was accepted. It is served after this delay, in ms; None: it is closed.

        A debt does not grow for ever, so if all of them were served at last, an address that goes on connecting too
        often would get each of its connections, only later.
        """
        now_ms = self._clock.now_ms()
        bucket = self.quotas.find_address(address, now_ms)
        if bucket is None:
            return 0
        if not bucket.has_room(1, now_ms):
            return None
        bucket.charge(1, now_ms)
        return bucket.delay_ms(now_ms)

    def closed(self, connection: Connection) -> None:
        delay = self._delays.pop(connection, None)
        if delay is not None:
            delay.timer.cancel()

    def check(self) -> None:
        self.quotas.check()
        for connection, delay in self._delays.items():
            assert connection.is_muted and not connection.is_closed
            assert delay.until_ms - self._clock.now_ms() <= delay.limit_ms

    def _bucket(self, call: Call, key: str) -> Bucket | None:
        """The usage that is charged for a request, if there is a quota. Client id and principal may change."""
        connection = call.connection
        usage = connection.usage
        quotas = self.quotas
        if (
            usage is None
            or usage.version != quotas.version
            or usage.client_id != call.client_id
            or usage.principal != connection.principal
        ):
            has_turn = usage is not None and usage.has_turn
            usage = connection.usage = ClientUsage(quotas.version, connection.principal, call.client_id)
            usage.has_turn = has_turn
        buckets = usage.buckets
        bucket = buckets.get(key)
        if bucket is None and key in buckets:
            return None
        if bucket is None or not bucket.is_kept:
            bucket = buckets[key] = quotas.find(
                key, connection.principal.name, call.client_id, self._clock.now_ms()
            )
        else:
            quotas.touch(bucket)
        return bucket

    def _delay(self, call: Call, bucket: Bucket, limit_ms: int = DELAY_MS_MAX) -> bool:
        """Mute the connection until the debt is paid; False without one."""
        connection = call.connection
        now_ms = self._clock.now_ms()
        delay_ms = bucket.delay_ms(now_ms)
        if not delay_ms or connection.is_closed:
            return False
        if connection.is_of_member:
            limit_ms = min(limit_ms, MEMBER_DELAY_MS_MAX)
        delay_ms = min(delay_ms, limit_ms)
        call.throttle_ms = max(call.throttle_ms, delay_ms)
        known = self._delays.get(connection)
        if known is None or known.until_ms < now_ms + delay_ms:
            if known is not None:
                known.timer.cancel()
            self.count += 1
            self._mute(connection, bucket, delay_ms, limit_ms)
        return True

    def _mute(self, connection: Connection, bucket: Bucket, delay_ms: int, limit_ms: int) -> None:
        timer = self._spawn.later(delay_ms, partial(self._end, connection))
        self._delays[connection] = _Delay(bucket, self._clock.now_ms() + delay_ms, limit_ms, timer)
        connection.mute()

    def _end(self, connection: Connection) -> None:
        self._delays.pop(connection).timer.cancel()
        if connection.usage is not None:
            connection.usage.has_turn = True
        connection.unmute()
