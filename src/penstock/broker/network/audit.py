"""The audit log: a line for each request that was denied or administers the cluster, and for each failed login.

A line has the principal, its address, the API, what the request is about, and the result. It never has values:
settings and credentials may be secret. A client that is denied all the time must not fill the disk, so the lines
about denials and logins are limited, each for themselves, so that strangers cannot hide what a user was denied; how
many are missing is said. Administrative requests that are not wholly denied are few, and are all there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from penstock.broker.logs import Logger
from penstock.broker.network.response_errors import error_finder, error_name
from penstock.environment import Clock
from penstock.metadata.authorizer import Operation, ResourceType
from penstock.protocol.apis import APIS
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schema import Message

WINDOW_MS = 10_000
DENIALS_PER_WINDOW = 100
FAILED_LOGINS_PER_WINDOW = 100
# Names and characters of each in one line.
NAMES_MAX = 20
NAME_LENGTH_MAX = 249

REFUSED = frozenset(
    (
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    )
)

Subject = Callable[[Any], Iterable[object]]

# What an administrative request is about, by API. All of them change something for others.
SUBJECTS: dict[int, Subject] = {
    19: lambda request: (topic.name for topic in request.topics),  # CreateTopics
    20: lambda request: (
        *request.topic_names,
        *(topic.name or topic.topic_id.hex() for topic in request.topics),
    ),  # DeleteTopics
    21: lambda request: (topic.name for topic in request.topics),  # DeleteRecords
    27: lambda request: (
        topic.name for marker in request.markers for topic in marker.topics
    ),  # WriteTxnMarkers
    30: lambda request: (_acl(each) for each in request.creations),  # CreateAcls
    31: lambda request: (_acl_filter(each) for each in request.filters),  # DeleteAcls
    33: lambda request: map(_config, request.resources),  # AlterConfigs
    37: lambda request: (topic.name for topic in request.topics),  # CreatePartitions
    42: lambda request: request.groups_names,  # DeleteGroups
    43: lambda request: (topic.topic for topic in request.topic_partitions or ()),  # ElectLeaders
    44: lambda request: map(_config, request.resources),  # IncrementalAlterConfigs
    45: lambda request: (topic.name for topic in request.topics),  # AlterPartitionReassignments
    47: lambda request: (request.group_id,),  # OffsetDelete
    49: lambda request: map(_quota, request.entries),  # AlterClientQuotas
    51: lambda request: (
        *(each.name for each in request.deletions),
        *(each.name for each in request.upsertions),
    ),  # AlterUserScramCredentials
    57: lambda request: (each.feature for each in request.feature_updates),  # UpdateFeatures
    64: lambda request: (request.broker_id,),  # UnregisterBroker
    80: lambda request: (request.voter_id,),  # AddRaftVoter
    81: lambda request: (request.voter_id,),  # RemoveRaftVoter
}


class _Limit:
    """Limits the lines of one kind in a window of time."""

    def __init__(self, logger: Logger, clock: Clock, kind: str, lines_max: int) -> None:
        self._logger = logger
        self._clock = clock
        self._kind = kind
        self._lines_max = lines_max
        self._window_ends_ms = 0
        self._count = 0

    @property
    def is_exceeded(self) -> bool:
        return self._count > self._lines_max

    def take(self) -> bool:
        """Whether one more line is to be written. The first one of a while says how many were not before it."""
        now_ms = self._clock.now_ms()
        if now_ms >= self._window_ends_ms:
            if self.is_exceeded:
                self._logger.warning(f"not all {self._kind} were logged", count=self._count - self._lines_max)
            self._window_ends_ms = now_ms + WINDOW_MS
            self._count = 0
        self._count += 1
        return not self.is_exceeded


class Audit:
    def __init__(self, logger: Logger, clock: Clock) -> None:
        self._logger = logger
        self._denials = _Limit(logger, clock, "denials", DENIALS_PER_WINDOW)
        self._failed_logins = _Limit(logger, clock, "failed authentications", FAILED_LOGINS_PER_WINDOW)

    def denied(
        self, principal: object, host: str, api: int, operation: Operation, resource: ResourceType, name: str
    ) -> None:
        if self._denials.take():
            self._logger.warning(
                "denied",
                principal=shown_name(str(principal)),
                host=host,
                api=api_name(api),
                operation=operation.name,
                resource=resource.name,
                name=shown_name(name),
            )

    def login_failed(self, claimed: str, host: str, listener: str, mechanism: str, reason: str) -> None:
        """``claimed``: who the client said it was; empty if it did not."""
        if self._failed_logins.take():
            self._logger.warning(
                "authentication failed",
                user=shown_name(claimed),
                host=host,
                listener=listener,
                mechanism=mechanism,
                reason=shown_name(reason),
            )

    def done(self, principal: object, host: str, api: int, subject: str, response: Any) -> None:
        """An administrative request was answered."""
        if self._denials.is_exceeded and _is_refused(response):
            # It has done nothing, and is among the denials that are counted.
            return
        self._logger.info(
            "administered",
            principal=shown_name(str(principal)),
            host=host,
            api=api_name(api),
            subject=subject,
            result=_result(response),
        )


def shown_subject(names: Iterable[object]) -> str:
    """The names in one line; not all if there are many."""
    found = iter(names)
    shown = [shown_name(str(name)) for name in islice(found, NAMES_MAX)]
    return ", ".join(shown) + (", ..." if next(found, None) is not None else "")


def _result(response: Any) -> str:
    """The names of all errors in a response; OK if there is none."""
    if not isinstance(response, Message):
        return "CLOSED"
    find = error_finder(type(response))
    errors = {} if find is None else dict.fromkeys(find(response))
    return ", ".join(map(error_name, errors)) or "OK"


def _is_refused(response: Any) -> bool:
    """Whether all that was asked for is refused because rights are missing."""
    if not isinstance(response, Message):
        return False
    error = getattr(response, "error_code", 0)
    if error:
        return error in REFUSED
    items = [
        item
        for field in response.FIELDS
        if field.kind == "array"
        for item in getattr(response, field.name) or ()
        if isinstance(item, Message)
    ]
    return bool(items) and all(map(_is_refused, items))


def api_name(key: int) -> str:
    return APIS[key].name if key in APIS else str(key)


def shown_name(name: str) -> str:
    """A name that cannot end the line or control a terminal."""
    name = name if len(name) <= NAME_LENGTH_MAX else name[:NAME_LENGTH_MAX] + "..."
    return name if name.isprintable() else ascii(name)


def _acl(acl: Any) -> str:
    return f"{acl.principal} on {acl.resource_name}"


def _acl_filter(each: Any) -> str:
    return f"{each.principal_filter or 'anybody'} on {each.resource_name_filter or 'anything'}"


def _config(resource: Any) -> str:
    # The names of settings; their values may be secret.
    names = ", ".join(config.name for config in resource.configs[:NAMES_MAX])
    return f"{resource.resource_name or 'all brokers'} ({names})"


def _quota(entry: Any) -> str:
    return " and ".join(f"{part.entity_type} {part.entity_name or 'default'}" for part in entry.entity)
