"""What each client may use of this broker: the quotas that apply to it, and how much of them it has used.

A core: the quotas of the metadata and the time go in, delays come out. ``throttling.py`` is its shell.

**Which quota applies.** For a client, the first of these entities that has the quota (KIP-55):

    user and client id, user and any client id, user, any user and client id, any user and any client id,
    any user, client id, any client id

"Any" is the default, an entity without a name. Clients for which the same name decides share one usage: a quota of
a user (or of any user) is shared by all connections of a user, one of a client id by all connections with this
client id, one of both by all that have both.

**How usage is measured.** With one token bucket for each usage. It gets tokens at the rate of the quota, up to what
comes in ``BURST_S`` seconds, and every request takes its cost out of it when the cost is known. It may take more
than there is: the rest is a debt, and the client is delayed until the debt is paid. So over any time the cost of
what was served is at most rate * time, one burst, and one request of each connection. Kafka averages over eleven
windows of a second instead, which lets a client that has just begun send for ten seconds what it likes.

A debt is limited to what is paid in ``DEBT_S``, which is also the longest delay: a client that waits longer than
its request timeout closes the connection and sends the request again, so nothing would be gained.

**Memory.** A client can invent client ids. Only ``BUCKETS_MAX`` buckets are kept; the least recently used one makes
room, which is full again if it was idle, and then nothing is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from penstock.metadata.quotas import (
    CLIENT_ID,
    CONNECTION_CREATION_RATE,
    CONTROLLER_MUTATION_RATE,
    IP,
    NAME_MAX,
    REQUEST_PERCENTAGE,
    USER,
)
from penstock.metadata.security import QuotaEntity

BURST_S = 1.0
# Creating a topic with many partitions is one request; Kafka's controller.quota.window.num, in seconds.
MUTATION_BURST_S = 11.0
# Below the request timeout of Kafka's clients, 30 s.
DEBT_S = 25.0
BUCKETS_MAX = 20_000

# Milliseconds of the loop's time per second and percent.
MS_PER_PERCENT = 10.0

# What was asked for: a key, and the user and client id whose usage it is. None where it does not matter.
UsageKey: TypeAlias = tuple[str, str | None, str | None]
Quotas: TypeAlias = Mapping[QuotaEntity, Mapping[str, float]]


class Bucket:
    """A token bucket: the usage of one quota. A negative level is a debt."""

    __slots__ = ("_at_ms", "_level", "burst_s", "is_kept", "key", "rate")

    def __init__(self, key: UsageKey, rate: float, now_ms: int) -> None:
        self.key = key
        # Units per second.
        self.rate = rate
        self.burst_s = MUTATION_BURST_S if key[0] == CONTROLLER_MUTATION_RATE else BURST_S
        self._level = self.burst
        self._at_ms = now_ms
        # False once it was replaced, or no quota has this usage any more. It is then not used again.
        self.is_kept = True

    @property
    def burst(self) -> float:
        return self.rate * self.burst_s

    def level(self, now_ms: int) -> float:
        elapsed_ms = now_ms - self._at_ms
        # The clock of a machine that was suspended may step back: time that is over counts once.
        if elapsed_ms > 0:
            self._level = min(self.burst, self._level + self.rate * elapsed_ms / 1000)
        self._at_ms = now_ms
        return self._level

    def charge(self, cost: float, now_ms: int) -> None:
        self._level = max(self.level(now_ms) - cost, -self.rate * DEBT_S)

    def has_room(self, cost: float, now_ms: int) -> bool:
        """Whether the debt can become larger by so much."""
        return self.level(now_ms) - cost >= -self.rate * DEBT_S

    def delay_ms(self, now_ms: int) -> int:
        """How long until the debt is paid; 0 without one."""
        level = self.level(now_ms)
        return 0 if level >= 0 else int(-level * 1000 / self.rate) + 1

    def set_rate(self, rate: float, now_ms: int) -> None:
        """Another quota from now on. A debt stays as large as it is, but may take another time to pay."""
        level = self.level(now_ms)
        self.rate = rate
        self._level = max(min(level, self.burst), -rate * DEBT_S)

    def check(self) -> None:
        assert self.rate > 0, self.key
        assert -self.rate * DEBT_S <= self._level <= self.burst, (self.key, self._level, self.rate)


class ClientQuotas:
    def __init__(self) -> None:
        self._quotas: Quotas = {}
        # Least recently used first.
        self._buckets: dict[UsageKey, Bucket] = {}
        # The keys for which there is any quota.
        self.keys: frozenset[str] = frozenset()
        # Changes with the quotas: what was looked up before is out of date.
        self.version = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def apply(self, quotas: Quotas, now_ms: int) -> None:
        """The quotas of the metadata have changed."""
        self._quotas = quotas
        self.keys = frozenset(key for values in quotas.values() for key in values)
        self.version += 1
        for key, bucket in list(self._buckets.items()):
            rate = self._rate_of(key)
            if rate is None:
                bucket.is_kept = False
                del self._buckets[key]
            else:
                bucket.set_rate(rate, now_ms)

    def find(self, key: str, user: str, client_id: str, now_ms: int) -> Bucket | None:
        """The usage of a client that a quota limits; None if none does."""
        if key not in self.keys:
            return None
        quotas = self._quotas
        # A longer one is in no quota, and is not kept as it is: a client may invent thousands of 32 KB each.
        client_id = client_id[: NAME_MAX + 1]
        for entity, usage in (
            (((CLIENT_ID, client_id), (USER, user)), (key, user, client_id)),
            (((CLIENT_ID, None), (USER, user)), (key, user, client_id)),
            (((USER, user),), (key, user, None)),
            (((CLIENT_ID, client_id), (USER, None)), (key, user, client_id)),
            (((CLIENT_ID, None), (USER, None)), (key, user, client_id)),
            (((USER, None),), (key, user, None)),
            (((CLIENT_ID, client_id),), (key, None, client_id)),
            (((CLIENT_ID, None),), (key, None, client_id)),
        ):
            if key in quotas.get(entity, ()):
                rate = self._rate_of(usage)
                assert rate is not None
                return self._bucket(usage, rate, now_ms)
        return None

    def find_address(self, address: str, now_ms: int) -> Bucket | None:
        """The connections of an address, if a quota limits them."""
        # Listeners for both families have such names for clients that came over IPv4.
        usage = (CONNECTION_CREATION_RATE, address.removeprefix("::ffff:"), None)
        rate = self._rate_of(usage)
        return None if rate is None else self._bucket(usage, rate, now_ms)

    def touch(self, bucket: Bucket) -> None:
        """The bucket is used: others make room before it."""
        if bucket.is_kept:
            del self._buckets[bucket.key]
            self._buckets[bucket.key] = bucket

    def check(self) -> None:
        assert len(self._buckets) <= BUCKETS_MAX
        for key, bucket in self._buckets.items():
            assert bucket.is_kept and bucket.key == key
            assert bucket.rate == self._rate_of(key), (key, bucket.rate)
            bucket.check()

    def _bucket(self, key: UsageKey, rate: float, now_ms: int) -> Bucket:
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            if len(self._buckets) >= BUCKETS_MAX:
                oldest = next(iter(self._buckets))
                self._buckets.pop(oldest).is_kept = False
            bucket = Bucket(key, rate, now_ms)
        self._buckets[key] = bucket
        return bucket

    def _rate_of(self, usage: UsageKey) -> float | None:
        """Units per second of the quota that has this usage, if a client's quota has."""
        key, user, client_id = usage
        entities: tuple[QuotaEntity, ...]
        if key == CONNECTION_CREATION_RATE:
            entities = (((IP, user),), ((IP, None),))
        elif client_id is None:
            entities = (((USER, user),), ((USER, None),))
        elif user is None:
            entities = (((CLIENT_ID, client_id),), ((CLIENT_ID, None),))
        else:
            entities = (
                ((CLIENT_ID, client_id), (USER, user)),
                ((CLIENT_ID, None), (USER, user)),
                ((CLIENT_ID, client_id), (USER, None)),
                ((CLIENT_ID, None), (USER, None)),
            )
        for entity in entities:
            value = self._quotas.get(entity, {}).get(key)
            if value is not None:
                return value * MS_PER_PERCENT if key == REQUEST_PERCENTAGE else value
        return None
