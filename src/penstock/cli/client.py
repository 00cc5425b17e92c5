"""The commands' connection to a broker, through librdkafka.

It checks that a broker is reachable, silences librdkafka's log, and turns its errors into one line. librdkafka
retries forever when no broker answers, so `connect` tries the port first.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    ConsumerGroupDescription,
    NewTopic,
    OffsetSpec,
    TopicDescription,
)

from penstock.addresses import parse_address
from penstock.cli.connection import Brokers
from penstock.cli.failures import Failure, WrongUsage, near_name

# How long to wait for the first answer of a broker.
CONNECT_TIMEOUT_S = 5.0
# How long one operation may take on a broker that has answered.
REQUEST_TIMEOUT_S = 30.0
# A new topic's leaders, or a new cluster's coordinators, need a moment.
READY_TIMEOUT_S = 15.0
RETRY_INTERVAL_S = 0.1

Result = TypeVar("Result")

_NOT_READY = frozenset(
    (
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
    )
)
_UNANSWERED = frozenset(
    (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE)
)


def settings(bootstrap: Brokers, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """librdkafka's settings for any client of ours."""
    return {
        "bootstrap.servers": bootstrap.servers,
        **bootstrap.security,
        "client.id": "penstock-cli",
        # Its log lines would break our rule of one line on stderr. Errors that matter arrive as return values.
        "log_level": 0,
        "error_cb": lambda error: None,
        **(extra or {}),
    }


def connect(bootstrap: Brokers) -> AdminClient:
    """An admin client of a cluster that has just answered. Raises Failure when no broker does.

    Keep it as long as its futures: they fail when it is garbage-collected.
    """
    if bootstrap.context is None and bootstrap.sasl is None:
        knock(bootstrap.servers, CONNECT_TIMEOUT_S)
    else:
        from penstock.cli.raw import RawClient  # noqa: PLC0415  # our own codec

        # librdkafka retries a handshake or a login that fails, and says why only in its log.
        with RawClient(bootstrap, timeout_s=CONNECT_TIMEOUT_S):
            pass
    admin = AdminClient(settings(bootstrap))
    try:
        admin.cluster_id(timeout=CONNECT_TIMEOUT_S)
    except KafkaException:
        if bootstrap.context is None and _speaks_tls(bootstrap.servers):
            raise Failure(
                f"the broker at {bootstrap} speaks TLS; write security.protocol=ssl and ssl.ca.location into a "
                "file and pass it with --config, or choose another listener with --bootstrap"
            ) from None
        if bootstrap.sasl is None and (mechanisms := _mechanisms(bootstrap)):
            protocol = "sasl_plaintext" if bootstrap.context is None else "sasl_ssl"
            raise Failure(
                f"the broker at {bootstrap} wants a user and password (it offers {', '.join(mechanisms)}); write "
                f"security.protocol={protocol}, sasl.mechanism, sasl.username and sasl.password into a file and "
                "pass it with --config"
            ) from None
        raise Failure(
            f"no broker answers at {bootstrap}, though the port is open; "
            "a node that waits for the other controllers does not answer yet"
        ) from None
    return admin


def settle(future: Future[Result]) -> Result:
    """The result of one admin operation. Raises KafkaException when the broker refused it."""
    return future.result(timeout=REQUEST_TIMEOUT_S + CONNECT_TIMEOUT_S)


def code_of(error: BaseException) -> int | None:
    """librdkafka's error code; None for another exception."""
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        return error.args[0].code()
    return None


def explain(error: BaseException) -> str | None:
    """One line for an exception of librdkafka; None for another."""
    if isinstance(error, TimeoutError):
        return "the broker did not answer in time; is it overloaded or stopped?"
    if not isinstance(error, KafkaException):
        return None
    cause = error.args[0] if error.args else None
    return explain_error(cause) if isinstance(cause, KafkaError) else str(error)


def explain_error(error: KafkaError) -> str:
    text = error.str() or error.name()
    for prefix in ("Broker: ", "Local: "):
        text = text.removeprefix(prefix)
    if error.code() in _UNANSWERED:
        return f"the broker did not answer: {text}"
    return text.rstrip(".")


def describe_topic(admin: AdminClient, topic: str) -> TopicDescription:
    """A topic's partitions. The request never creates the topic."""
    try:
        answers = admin.describe_topics(TopicCollection([topic]), request_timeout=REQUEST_TIMEOUT_S)
        description: TopicDescription = settle(answers[topic])
        return description
    except KafkaException as error:
        if code_of(error) == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise no_topic(admin, topic) from None
        raise


def create_topic(admin: AdminClient, new: NewTopic) -> bool:
    """Create a topic and wait until its partitions can be used; False if it exists already."""
    topic = str(new.topic)
    try:
        settle(admin.create_topics([new], request_timeout=REQUEST_TIMEOUT_S)[topic])
    except KafkaException as error:
        if code_of(error) == KafkaError.TOPIC_ALREADY_EXISTS:
            return False
        raise
    # The controller has answered; the broker we ask next may learn of the topic a moment later.
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _usable(admin, topic) and time.monotonic() < deadline:
        time.sleep(RETRY_INTERVAL_S)
    return True


def no_topic(asked: Any, topic: str) -> Failure:
    """The error for a topic that ``asked`` (an admin client or a producer) does not find."""
    near = near_name(topic, asked.list_topics(timeout=REQUEST_TIMEOUT_S).topics)
    if near is not None:
        return Failure(f"there is no topic {topic}; did you mean {near}?")
    return Failure(
        f"there is no topic {topic}; see `penstock topics list`, or create it: `penstock topics create {topic}`"
    )


def partition_numbers(admin: AdminClient, topic: str) -> list[int]:
    return sorted(partition.id for partition in describe_topic(admin, topic).partitions)


def start_offsets(admin: AdminClient, topic: str, partitions: Iterable[int]) -> dict[int, int]:
    return _offsets(admin, topic, partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]


def end_offsets(
    admin: AdminClient, topic: str, partitions: Iterable[int], *, read_committed: bool = False
) -> dict[int, int]:
    """The high watermarks; with ``read_committed`` the last stable offsets."""
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    return _offsets(admin, topic, partitions, latest, read_committed=read_committed)


def offsets_at_time(
    admin: AdminClient,
    topic: str,
    partitions: Iterable[int],
    timestamp_ms: int,
    *,
    read_committed: bool = False,
) -> dict[int, int]:
    """Each partition's first offset at or after a time; its end if every record is older."""
    spec = OffsetSpec.for_timestamp(timestamp_ms)
    found = _offsets(admin, topic, partitions, spec, read_committed=read_committed)
    late = [partition for partition, offset in found.items() if offset < 0]
    return {**found, **end_offsets(admin, topic, late, read_committed=read_committed)}


def describe_group(admin: AdminClient, group: str) -> ConsumerGroupDescription:
    """A group's state and members. Waits until its coordinator is ready.

    Call this before any other request about a group: librdkafka crashes when the coordinator refuses to list
    offsets, as it does while it loads them.
    """
    description: ConsumerGroupDescription = when_ready(
        lambda: settle(admin.describe_consumer_groups([group], request_timeout=REQUEST_TIMEOUT_S)[group])
    )
    return description


def when_ready(ask: Callable[[], Result]) -> Result:
    """Retry until the partition's leader or the group's coordinator is known and has loaded its state."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            if code_of(error) not in _NOT_READY or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_INTERVAL_S)


def _usable(admin: AdminClient, topic: str) -> bool:
    try:
        partitions = describe_topic(admin, topic).partitions
    except Failure:
        return False
    return all(partition.leader is not None and partition.leader.id >= 0 for partition in partitions)


def _offsets(
    admin: AdminClient,
    topic: str,
    partitions: Iterable[int],
    spec: OffsetSpec,
    *,
    read_committed: bool = False,
) -> dict[int, int]:
    level = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel.READ_UNCOMMITTED
    asked = {TopicPartition(topic, partition): spec for partition in partitions}
    if not asked:
        return {}

    def ask() -> dict[int, int]:
        answers = admin.list_offsets(asked, isolation_level=level, request_timeout=REQUEST_TIMEOUT_S)
        return {place.partition: settle(answer).offset for place, answer in answers.items()}

    return when_ready(ask)


def knock(bootstrap: str, timeout_s: float) -> None:
    """Open and close a connection, to notice a closed port at once."""
    deadline = time.monotonic() + timeout_s
    for address in bootstrap.split(","):
        try:
            host, port = parse_address(address.strip())
        except ValueError as error:
            raise WrongUsage(f"--bootstrap: {error}") from None
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())):
                return
        except OSError:
            continue
    raise Failure(
        f"no broker answers at {bootstrap}; start one with `penstock serve` or choose another with --bootstrap"
    )


def _speaks_tls(servers: str) -> bool:
    """Whether the first broker that can be reached answers a TLS handshake, whatever its certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for address in servers.split(","):
        try:
            with (
                socket.create_connection(parse_address(address.strip()), timeout=1.0) as connection,
                context.wrap_socket(connection),
            ):
                return True
        except OSError:
            continue
    return False


def _mechanisms(bootstrap: Brokers) -> list[str]:
    """The SASL mechanisms of the first broker that can be reached; none if it has no SASL."""
    from penstock.cli.raw import RawClient  # noqa: PLC0415  # our own codec

    try:
        with RawClient(bootstrap, timeout_s=1.0) as raw:
            return raw.mechanisms()
    except Failure:
        return []


def collect(producer: Any, timeout_s: float) -> None:
    """Run a producer's delivery callbacks. Ctrl-C inside a callback raises KeyboardInterrupt."""
    with _interruptible():
        producer.poll(timeout_s)


def flush(producer: Any, timeout_s: float) -> None:
    """Wait until every record is acknowledged or has failed. Ctrl-C as in ``collect``."""
    with _interruptible():
        producer.flush(timeout_s)


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except SystemError:
        # confluent-kafka replaces a KeyboardInterrupt raised in a callback by this error.
        raise KeyboardInterrupt from None
