"""Which value of a setting counts, where it comes from, and the answer to DescribeConfigs.

A topic's setting may come from the topic, from this broker or from all brokers (both set while running), from
the command line or the file, or be Kafka's default; the first of these that says anything counts. What a
newcomer gets wrong: the place of origin goes before the name, so ``log.retention.hours`` set on the broker
while it runs beats ``log.retention.ms`` in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from penstock.metadata import broker_settings
from penstock.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, Image
from penstock.metadata.refusal import Refusal
from penstock.metadata.settings import (
    InvalidSetting,
    Kind,
    Setting,
    Status,
    documentation,
    format_value,
    long,
    parse,
)
from penstock.metadata.topic_settings import CREATED, SYNONYMS, TOPIC
from penstock.metadata.topics import name_error
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)

REPLICATION_FACTOR = "default.replication.factor"
# Replicas of a topic in a cluster, when nobody says otherwise.
REPLICATION_DEFAULT = 3
# As many as other topics have, unless it is set.
OFFSETS_REPLICATION_FACTOR = "offsets.topic.replication.factor"

# Settings in one answer. Ten thousand topics at once are what some consoles ask for; a request that repeats a
# topic a hundred thousand times would otherwise take the memory of the broker.
ENTRIES_MAX = 500_000

_CREATED = long(CREATED, None, "When the topic was created, in milliseconds since 1970. It cannot be set.")


class Source(IntEnum):
    """Where a value comes from, by Kafka's numbers. Smaller ones win."""

    TOPIC = 1
    BROKER = 2
    ALL_BROKERS = 3
    STATIC = 4
    DEFAULT = 5


class Layers(NamedTuple):
    """What is set for a broker, nearest first."""

    broker: Mapping[str, str]
    all_brokers: Mapping[str, str]
    # The command line and the file.
    static: Mapping[str, str]


class Origin(NamedTuple):
    """One of the places that say something about a setting."""

    # The setting that says it, in its own unit.
    name: str
    text: str
    source: Source
    # The same in the unit of the setting that was asked for.
    value: str


def layers_of(image: Image, broker: int, static: Mapping[str, str]) -> Layers:
    return Layers(image.broker_config(broker), image.broker_config(None), static)


def topic_value(name: str, overrides: Mapping[str, str], layers: Layers) -> Any:
    """The typed value that counts for a topic with these settings of its own."""
    return _counting(TOPIC[name], topic_origins(name, overrides, layers))


def broker_value(name: str, layers: Layers) -> Any:
    """The typed value of a broker setting; None when it has none."""
    return _counting(broker_settings.BROKER[name], broker_origins(name, layers))


def default_replication_factor(layers: Layers, brokers: int) -> int:
    """Of a topic created without one: what was set, or else as many as there are brokers, up to three."""
    if any(REPLICATION_FACTOR in layer for layer in layers):
        factor: int = broker_value(REPLICATION_FACTOR, layers)
        return factor
    return max(1, min(REPLICATION_DEFAULT, brokers))


def _counting(setting: Setting, origins: Iterable[Origin]) -> Any:
    for origin in origins:
        try:
            return parse(setting, origin.value)
        except InvalidSetting:
            # Only an older or newer release can have stored it. The next best beats not starting.
            continue
    return None if setting.default is None else parse(setting, setting.default)


def topic_origins(name: str, overrides: Mapping[str, str], layers: Layers) -> Iterator[Origin]:
    """All that is said about a topic's setting, what counts first."""
    if name in overrides:
        yield Origin(name, overrides[name], Source.TOPIC, overrides[name])
    for source, texts in _sources(layers):
        for synonym in SYNONYMS.get(name, ()):
            text = texts.get(synonym.name)
            if text is not None:
                yield Origin(synonym.name, text, source, synonym.convert(text))
    # As Kafka tells it: only the best synonym's, which has none where it has others in coarser units.
    for synonym in SYNONYMS.get(name, ())[:1]:
        default = broker_settings.BROKER[synonym.name].default
        if default is not None:
            yield Origin(synonym.name, default, Source.DEFAULT, synonym.convert(default))


def broker_origins(name: str, layers: Layers) -> Iterator[Origin]:
    for source, texts in _sources(layers):
        if name in texts:
            yield Origin(name, texts[name], source, texts[name])
    setting = broker_settings.find(name)
    if setting is not None and setting.default is not None:
        yield Origin(name, setting.default, Source.DEFAULT, setting.default)


def _sources(layers: Layers) -> tuple[tuple[Source, Mapping[str, str]], ...]:
    return (
        (Source.BROKER, layers.broker),
        (Source.ALL_BROKERS, layers.all_brokers),
        (Source.STATIC, layers.static),
    )


def no_settings(resource_type: int) -> str:
    """Why resources of a type, by Kafka's number, have no settings here."""
    match resource_type:
        case 8:
            return "The levels of a broker's loggers cannot be read or changed."
        case 16:
            return "Metrics of clients are not collected (KIP-714), so there are no settings for them."
        case 32:
            return (
                "Groups have no settings of their own: those are for the consumer protocol (KIP-848), and groups "
                "speak the classic protocol only. A member sets its session timeout itself."
            )
        case _:
            return f"Resources of type {resource_type} have no settings; topics are type 2, brokers type 4."


class Entry(NamedTuple):
    """A setting with the value that counts, as answers show it."""

    setting: Setting
    value: str | None
    source: Source
    is_read_only: bool
    origins: tuple[Origin, ...]


def topic_entries(overrides: Mapping[str, str], layers: Layers) -> list[Entry]:
    """Every setting of a topic, by name."""
    entries = []
    for name, setting in sorted(TOPIC.items()):
        origins = tuple(topic_origins(name, overrides, layers))
        value = format_value(_counting(setting, origins))
        entries.append(
            Entry(setting, value, origins[0].source if origins else Source.DEFAULT, False, origins)
        )
    return entries


def broker_entries(layers: Layers, brokers: int) -> list[Entry]:
    """Every broker setting that means something here or was set, by name, in a cluster of so many brokers."""
    names = {name for name, setting in broker_settings.BROKER.items() if setting.status is Status.IMPLEMENTED}
    names.update(layers.broker, layers.all_brokers, layers.static)
    entries = [_broker_entry(name, tuple(broker_origins(name, layers))) for name in sorted(names)]
    factor = str(default_replication_factor(layers, brokers))
    return [
        # Shown as it applies: their defaults depend on how many brokers there are.
        entry._replace(value=factor, origins=(Origin(entry.setting.name, factor, Source.DEFAULT, factor),))
        if entry.source is Source.DEFAULT
        and entry.setting.name in (REPLICATION_FACTOR, OFFSETS_REPLICATION_FACTOR)
        else entry
        for entry in entries
    ]


def _broker_entry(name: str, origins: tuple[Origin, ...]) -> Entry:
    setting = broker_settings.find(name) or Setting(name, Kind.STRING, None, "")
    value = origins[0].text if origins else None
    source = origins[0].source if origins else Source.DEFAULT
    return Entry(setting, value, source, not setting.is_dynamic, origins)


def describe_configs(
    request: DescribeConfigsRequest,
    image: Image,
    broker: int,
    static: Mapping[str, str],
    brokers_expected: int = 1,
) -> DescribeConfigsResponse:
    """Answer for ``broker``, which was started with the ``static`` settings."""
    answer = _Description(request, image, broker, static, brokers_expected)
    return DescribeConfigsResponse(results=[answer.result(resource) for resource in request.resources])


class _Description:
    """One answer. Topics with the same settings of their own share what is said about them."""

    def __init__(
        self,
        request: DescribeConfigsRequest,
        image: Image,
        broker: int,
        static: Mapping[str, str],
        brokers_expected: int,
    ) -> None:
        self._request = request
        self._image = image
        self._broker = broker
        self._layers = layers_of(image, broker, static)
        self._brokers_expected = brokers_expected
        self._topics: dict[frozenset[tuple[str, str]], list[DescribeConfigsResourceResult]] = {}
        self._entries_left = ENTRIES_MAX

    def result(self, resource: DescribeConfigsResource) -> DescribeConfigsResult:
        result = DescribeConfigsResult(
            error_code=ErrorCode.NONE,
            # Not null, as from Kafka.
            error_message="",
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
        )
        try:
            configs = self._configs(resource)
            # No names is how some clients ask for all of them.
            if resource.configuration_keys:
                wanted = set(resource.configuration_keys)
                configs = [config for config in configs if config.name in wanted]
            self._entries_left -= len(configs)
            if self._entries_left < 0:
                raise Refusal(ErrorCode.POLICY_VIOLATION, "Too many settings in one answer: ask for fewer.")
            result.configs = configs
        except Refusal as refusal:
            result.error_code = refusal.error
            result.error_message = refusal.message
        return result

    def _configs(self, resource: DescribeConfigsResource) -> list[DescribeConfigsResourceResult]:
        name = resource.resource_name
        if resource.resource_type == TOPIC_RESOURCE:
            return self._topic(name)
        if resource.resource_type != BROKER_RESOURCE:
            raise Refusal(ErrorCode.INVALID_REQUEST, no_settings(resource.resource_type))
        if not name:
            return [
                self._shown(_broker_entry(setting, (Origin(setting, text, Source.ALL_BROKERS, text),)))
                for setting, text in sorted(self._layers.all_brokers.items())
            ]
        if name != str(self._broker):
            raise Refusal(
                ErrorCode.INVALID_REQUEST,
                f"This is broker {self._broker}; it cannot speak for '{name[:80]}'.",
            )
        brokers = max(len(self._image.brokers), self._brokers_expected)
        return [self._shown(entry) for entry in broker_entries(self._layers, brokers)]

    def _topic(self, name: str) -> list[DescribeConfigsResourceResult]:
        topic = self._image.topics.get(name)
        if topic is None:
            reason = name_error(name)
            if reason is not None:
                raise Refusal(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        overrides = self._image.topic_config(name)
        key = frozenset(overrides.items())
        configs = self._topics.get(key)
        if configs is None:
            configs = [self._shown(entry) for entry in topic_entries(overrides, self._layers)]
            self._topics[key] = configs
        if topic.created_ms < 0:
            return configs
        created = Entry(_CREATED, str(topic.created_ms), Source.DEFAULT, True, ())
        return [*configs, self._shown(created)]

    def _shown(self, entry: Entry) -> DescribeConfigsResourceResult:
        synonyms = entry.origins if self._request.include_synonyms else ()
        return DescribeConfigsResourceResult(
            name=entry.setting.name,
            value=entry.value,
            read_only=entry.is_read_only,
            config_source=entry.source,
            synonyms=[
                DescribeConfigsSynonym(name=origin.name, value=origin.text, source=origin.source)
                for origin in synonyms
            ],
            config_type=entry.setting.kind,
            documentation=documentation(entry.setting) if self._request.include_documentation else None,
        )
