"""The effective value of a setting, where it comes from, and the DescribeConfigs response.

A topic's setting may come from the topic, from this broker or from all brokers (both set while running), from the
command line or the file, or be Kafka's default. The first of these sources that sets it wins. The source comes
before the name: ``log.retention.hours`` set on the running broker wins over ``log.retention.ms`` in the file.
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
# Default number of replicas of a topic in a cluster.
REPLICATION_DEFAULT = 3
# Default: as many as other topics have.
OFFSETS_REPLICATION_FACTOR = "offsets.topic.replication.factor"

# Settings in one response. Some consoles ask for ten thousand topics at once; a request that repeats a topic a
# hundred thousand times would otherwise use up the broker's memory.
ENTRIES_MAX = 500_000

_CREATED = long(CREATED, None, "When the topic was created, in milliseconds since 1970. It cannot be set.")


class Source(IntEnum):
    """Where a value comes from, with Kafka's numbers. Smaller numbers win."""

    TOPIC = 1
    BROKER = 2
    ALL_BROKERS = 3
    STATIC = 4
    DEFAULT = 5


class Layers(NamedTuple):
    """The settings of a broker by source, the winning source first."""

    broker: Mapping[str, str]
    all_brokers: Mapping[str, str]
    # The command line and the file.
    static: Mapping[str, str]


class Origin(NamedTuple):
    """One source's value of a setting."""

    # The setting with the value, in its own unit; it may be a synonym of the one asked for.
    name: str
    text: str
    source: Source
    # The same value in the unit of the setting that was asked for.
    value: str


def layers_of(image: Image, broker: int, static: Mapping[str, str]) -> Layers:
    return Layers(image.broker_config(broker), image.broker_config(None), static)


def topic_value(name: str, overrides: Mapping[str, str], layers: Layers) -> Any:
    """The typed effective value for a topic with these settings of its own."""
    return _counting(TOPIC[name], topic_origins(name, overrides, layers))


def broker_value(name: str, layers: Layers) -> Any:
    """The typed value of a broker setting; None when it has none."""
    return _counting(broker_settings.BROKER[name], broker_origins(name, layers))


def default_replication_factor(layers: Layers, brokers: int) -> int:
    """The replication factor of a topic created without one: as set, or else the number of brokers, at most 3."""
    if any(REPLICATION_FACTOR in layer for layer in layers):
        factor: int = broker_value(REPLICATION_FACTOR, layers)
        return factor
    return max(1, min(REPLICATION_DEFAULT, brokers))


def _counting(setting: Setting, origins: Iterable[Origin]) -> Any:
    for origin in origins:
        try:
            return parse(setting, origin.value)
        except InvalidSetting:
            # Only another release can have stored it. Taking the next value is better than not starting.
            continue
    return None if setting.default is None else parse(setting, setting.default)


def topic_origins(name: str, overrides: Mapping[str, str], layers: Layers) -> Iterator[Origin]:
    """The values of a topic's setting from all sources, the winning one first."""
    if name in overrides:
        yield Origin(name, overrides[name], Source.TOPIC, overrides[name])
    for source, texts in _sources(layers):
        for synonym in SYNONYMS.get(name, ()):
            text = texts.get(synonym.name)
            if text is not None:
                yield Origin(synonym.name, text, source, synonym.convert(text))
    # As in Kafka: only the default of the best synonym, which has none if there are synonyms in coarser units.
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
    """A setting with its effective value, as responses show it."""

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
    """Every broker setting that has an effect or was set, by name, in a cluster with this number of brokers."""
    names = {name for name, setting in broker_settings.BROKER.items() if setting.status is Status.IMPLEMENTED}
    names.update(layers.broker, layers.all_brokers, layers.static)
    entries = [_broker_entry(name, tuple(broker_origins(name, layers))) for name in sorted(names)]
    factor = str(default_replication_factor(layers, brokers))
    return [
        # The effective value: these defaults depend on the number of brokers.
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
    """One response. Topics with the same settings of their own share its entries."""

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
            # Kafka sends an empty string, not null.
            error_message="",
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
        )
        try:
            configs = self._configs(resource)
            # Some clients send no names to ask for all settings.
            if resource.configuration_keys:
                wanted = set(resource.configuration_keys)
                configs = [config for config in configs if config.name in wanted]
            self._entries_left -= len(configs)
            if self._entries_left < 0:
                raise Refusal(ErrorCode.POLICY_VIOLATION, "Too many settings in one response: ask for fewer.")
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
                f"This is broker {self._broker}: ask broker '{name[:80]}' itself.",
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
        is_sensitive = entry.setting.is_sensitive
        return DescribeConfigsResourceResult(
            name=entry.setting.name,
            value=None if is_sensitive else entry.value,
            is_sensitive=is_sensitive,
            read_only=entry.is_read_only,
            config_source=entry.source,
            synonyms=[
                DescribeConfigsSynonym(
                    name=origin.name, value=None if is_sensitive else origin.text, source=origin.source
                )
                for origin in synonyms
            ],
            config_type=entry.setting.kind,
            documentation=documentation(entry.setting) if self._request.include_documentation else None,
        )
