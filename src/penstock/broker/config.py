"""The settings of a broker and of its topics as typed values: where Kafka's names become attributes.

``BrokerConfig.load`` reads ``--set`` and the configuration file, refuses invalid settings, and warns of those that
have no effect. ``BrokerConfig.topic_config`` returns the effective settings of a topic, including those changed at
runtime. Topics with the same settings share one TopicConfig, so ten thousand cost no more than one.

``static`` holds only the settings that were set, as text; the defaults are in ``metadata/broker_settings.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from penstock.groups.settings import GroupSettings
from penstock.log.config import KEEP, LogConfig
from penstock.metadata import broker_settings
from penstock.metadata.authorizer import Authorizer, super_users
from penstock.metadata.configs import Layers, broker_value, layers_of, topic_value
from penstock.metadata.image import Image
from penstock.metadata.settings import LONG_MAX, InvalidSetting, Status, check, format_value
from penstock.metadata.topic_settings import CLEANUP_POLICY, COMPACT, DELETE, SYNONYMS, TOPIC
from penstock.raft.settings import RaftSettings
from penstock.replication.follower import FetchLimits
from penstock.transactions.settings import TransactionSettings

_MINUTE_MS = 60 * 1000

# Effective configs kept. Only reached when that many topics have settings of their own.
_TOPIC_CONFIGS_MAX = 20_000


class ConfigError(Exception):
    """The settings cannot be used; the message is one line that says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class TopicConfig:
    log: LogConfig
    max_message_bytes: int
    is_log_append_time: bool
    timestamp_before_max_ms: int
    timestamp_after_max_ms: int
    min_insync_replicas: int
    flush_messages: int
    flush_ms: int
    file_delete_delay_ms: int
    is_delete: bool
    is_compact: bool
    # A record counts only once it is on disk.
    is_flushed: bool


@dataclass(frozen=True, slots=True)
class CleanerSettings:
    """The settings of compaction on a broker (``log.cleaner.*``), including those changed at runtime."""

    is_enabled: bool
    backoff_ms: int
    dedupe_buffer_size: int
    io_buffer_load_factor: float
    io_buffer_size: int
    # DOUBLE_MAX: no limit.
    io_max_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Attributes are settings with underscores for dots, except the last ones."""

    auto_create_topics_enable: bool
    delete_topic_enable: bool
    num_partitions: int
    default_replication_factor: int
    log_retention_check_interval_ms: int
    log_flush_offset_checkpoint_interval_ms: int
    # As the broker was started. ``cleaner_settings`` knows the changes made since.
    log_cleaner_enable: bool
    log_cleaner_backoff_ms: int
    log_cleaner_dedupe_buffer_size: int
    log_cleaner_io_buffer_load_factor: float
    log_cleaner_io_buffer_size: int
    log_cleaner_io_max_bytes_per_second: float
    max_connections: int
    max_connections_per_ip: int
    # LONG_MAX: never.
    connections_max_idle_ms: int
    connection_failed_authentication_delay_ms: int
    socket_request_max_bytes: int
    # LONG_MAX: no limit.
    queued_max_request_bytes: int
    fetch_max_bytes: int
    max_incremental_fetch_session_cache_slots: int
    max_request_partition_size_limit: int
    broker_heartbeat_interval_ms: int
    broker_session_timeout_ms: int
    controller_quorum_election_timeout_ms: int
    controller_quorum_fetch_timeout_ms: int
    replica_lag_time_max_ms: int
    num_replica_fetchers: int
    replica_fetch_max_bytes: int
    replica_fetch_response_max_bytes: int
    replica_fetch_wait_max_ms: int
    replica_fetch_min_bytes: int
    replica_fetch_backoff_ms: int
    offsets_topic_num_partitions: int
    offsets_topic_replication_factor: int
    offsets_topic_segment_bytes: int
    transaction_state_log_num_partitions: int
    transaction_state_log_replication_factor: int
    transaction_state_log_min_isr: int
    transaction_state_log_segment_bytes: int
    authorizer_class_name: str
    super_users: str
    allow_everyone_if_no_acl_found: bool

    groups: GroupSettings
    transactions: TransactionSettings
    # The settings that were set, as text, by Kafka's names. Passwords are among them.
    static: Mapping[str, str] = field(repr=False)
    _topics: _TopicConfigs = field(repr=False, compare=False)

    @classmethod
    def load(
        cls,
        overrides: Mapping[str, str],
        file: str | None = None,
        *,
        options: Mapping[str, str] | None = None,
    ) -> tuple[BrokerConfig, list[str]]:
        """Return the configuration and warnings about it. Raises ConfigError.

        ``overrides`` win over the file. ``options`` are the settings that have their own command line option
        (``node.id``, ``log.dirs``, ...), so that clients can read them.
        """
        given = {**(_read(file) if file is not None else {}), **overrides}
        _check_short_forms(given, options or {})
        warnings = [warning for name, text in sorted(given.items()) for warning in _checked(name, text)]
        static = {**given, **(options or {})}
        config = cls(
            **_values(static),
            groups=_groups(static),
            transactions=_transactions(static),
            static=static,
            _topics=_TopicConfigs(static),
        )
        _check_together(config, static)
        return config, warnings

    def topic_config(self, image: Image, broker: int, topic: str) -> TopicConfig:
        """The effective settings of a topic on a broker. The same object as long as nothing changes."""
        return self._topics.get(image, broker, topic)

    def cleaner_settings(self, image: Image, broker: int) -> CleanerSettings:
        """The settings of compaction that are effective on a broker now."""
        layers = layers_of(image, broker, self.static)
        return CleanerSettings(
            is_enabled=self.log_cleaner_enable,
            backoff_ms=broker_value("log.cleaner.backoff.ms", layers),
            dedupe_buffer_size=broker_value("log.cleaner.dedupe.buffer.size", layers),
            io_buffer_load_factor=broker_value("log.cleaner.io.buffer.load.factor", layers),
            io_buffer_size=broker_value("log.cleaner.io.buffer.size", layers),
            io_max_bytes_per_second=broker_value("log.cleaner.io.max.bytes.per.second", layers),
        )

    def make_authorizer(self) -> Authorizer | None:
        """None: every client may do everything."""
        if not self.authorizer_class_name:
            return None
        return Authorizer(super_users(self.super_users), allow_everyone=self.allow_everyone_if_no_acl_found)

    @property
    def raft(self) -> RaftSettings:
        return RaftSettings(
            fetch_timeout_ms=self.controller_quorum_fetch_timeout_ms,
            election_timeout_ms=self.controller_quorum_election_timeout_ms,
        )

    @property
    def replica_fetch_limits(self) -> FetchLimits:
        return FetchLimits(
            max_wait_ms=self.replica_fetch_wait_max_ms,
            min_bytes=self.replica_fetch_min_bytes,
            max_bytes=self.replica_fetch_response_max_bytes,
            partition_max_bytes=self.replica_fetch_max_bytes,
            backoff_ms=self.replica_fetch_backoff_ms,
        )

    @property
    def follower_silence_max_ms(self) -> int:
        """How long a follower may go without a fetch. Each fetch may wait at the leader when there is no data."""
        return min(
            self.replica_lag_time_max_ms,
            max(self.broker_session_timeout_ms, 3 * self.replica_fetch_wait_max_ms),
        )


class _TopicConfigs:
    """Effective configs by the topics' own settings, for the broker settings of one image."""

    def __init__(self, static: Mapping[str, str]) -> None:
        self._static = static
        self._layers = Layers({}, {}, static)
        self._known: dict[frozenset[tuple[str, str]], TopicConfig] = {}

    def get(self, image: Image, broker: int, topic: str) -> TopicConfig:
        layers = layers_of(image, broker, self._static)
        if layers != self._layers or len(self._known) >= _TOPIC_CONFIGS_MAX:
            self._layers = layers
            self._known = {}
        overrides = image.topic_config(topic)
        key = frozenset(overrides.items())
        config = self._known.get(key)
        if config is None:
            config = self._known[key] = _topic_config(overrides, layers)
        return config


def _topic_config(overrides: Mapping[str, str], layers: Layers) -> TopicConfig:
    def value(name: str) -> Any:
        return topic_value(name, overrides, layers)

    cleanup_policy = value(CLEANUP_POLICY)
    is_compact, is_delete = COMPACT in cleanup_policy, DELETE in cleanup_policy
    flush_messages = value("flush.messages")
    return TopicConfig(
        log=LogConfig(
            segment_bytes=value("segment.bytes"),
            # As in Kafka: otherwise a record could stay in the active segment for longer than that.
            segment_ms=min(value("segment.ms"), value("max.compaction.lag.ms"))
            if "compact" in cleanup_policy
            else value("segment.ms"),
            segment_index_bytes=value("segment.index.bytes"),
            index_interval_bytes=value("index.interval.bytes"),
            # Without the delete policy everything is kept, whatever its age and size.
            retention_ms=value("retention.ms") if is_delete else KEEP,
            retention_bytes=value("retention.bytes") if is_delete else KEEP,
            producer_expiration_ms=broker_value("producer.id.expiration.ms", layers),
            is_compacted=is_compact,
            min_cleanable_dirty_ratio=value("min.cleanable.dirty.ratio"),
            min_compaction_lag_ms=value("min.compaction.lag.ms"),
            max_compaction_lag_ms=value("max.compaction.lag.ms"),
            delete_retention_ms=value("delete.retention.ms"),
        ),
        max_message_bytes=value("max.message.bytes"),
        is_log_append_time=value("message.timestamp.type") == "LogAppendTime",
        timestamp_before_max_ms=value("message.timestamp.before.max.ms"),
        timestamp_after_max_ms=value("message.timestamp.after.max.ms"),
        min_insync_replicas=value("min.insync.replicas"),
        flush_messages=flush_messages,
        flush_ms=value("flush.ms"),
        file_delete_delay_ms=value("file.delete.delay.ms"),
        is_delete=is_delete,
        is_compact=is_compact,
        is_flushed=flush_messages == 1,
    )


def _values(static: Mapping[str, str]) -> dict[str, Any]:
    layers = Layers({}, {}, static)
    values = {}
    for attribute in fields(BrokerConfig):
        name = attribute.name.replace("_", ".")
        if name in broker_settings.BROKER:
            values[attribute.name] = broker_value(name, layers)
    for name in ("connections_max_idle_ms", "queued_max_request_bytes"):
        if values[name] <= 0:
            values[name] = LONG_MAX
    return values


def _groups(static: Mapping[str, str]) -> GroupSettings:
    layers = Layers({}, {}, static)
    return GroupSettings(
        session_timeout_ms_min=broker_value("group.min.session.timeout.ms", layers),
        session_timeout_ms_max=broker_value("group.max.session.timeout.ms", layers),
        initial_rebalance_delay_ms=broker_value("group.initial.rebalance.delay.ms", layers),
        members_max=broker_value("group.max.size", layers),
        offset_metadata_max=broker_value("offset.metadata.max.bytes", layers),
        offsets_retention_ms=broker_value("offsets.retention.minutes", layers) * _MINUTE_MS,
        offsets_retention_check_interval_ms=broker_value("offsets.retention.check.interval.ms", layers),
    )


def _transactions(static: Mapping[str, str]) -> TransactionSettings:
    layers = Layers({}, {}, static)
    return TransactionSettings(
        timeout_ms_max=broker_value("transaction.max.timeout.ms", layers),
        id_expiration_ms=broker_value("transactional.id.expiration.ms", layers),
        abort_timed_out_interval_ms=broker_value(
            "transaction.abort.timed.out.transaction.cleanup.interval.ms", layers
        ),
        remove_expired_interval_ms=broker_value(
            "transaction.remove.expired.transaction.cleanup.interval.ms", layers
        ),
    )


def _check_short_forms(given: Mapping[str, str], options: Mapping[str, str]) -> None:
    """Refuse an option together with the setting that it is the short form of."""
    for name, option in broker_settings.SHORT_FORMS.items():
        if name in options and name in given:
            raise ConfigError(f"{option} and the setting {name} are both given; use one of them")
    if "advertised.listeners" in options and "listeners" in given:
        raise ConfigError(
            "--advertise goes with --listen; with the setting listeners use advertised.listeners"
        )


def _checked(name: str, text: str) -> Iterator[str]:
    """Yield warnings about one setting. Raises ConfigError when it is invalid."""
    option = broker_settings.OPTIONS.get(name)
    if option is not None:
        raise ConfigError(f"{name} is set with the option {option}")
    setting = broker_settings.find(name)
    if setting is None:
        raise ConfigError(_unknown(name))
    try:
        check(setting, text)
    except InvalidSetting as error:
        raise ConfigError(str(error)) from None
    if setting.status is Status.WITHOUT_MEANING:
        yield f"{name} has no effect: {setting.reason}"


def _unknown(name: str) -> str:
    if name in TOPIC:
        synonyms = SYNONYMS.get(name)
        if synonyms is None:
            return f"{name} is a setting of topics, not of brokers"
        return f"{name} is a setting of topics; the broker's default for it is {synonyms[0].name}"
    from difflib import get_close_matches  # noqa: PLC0415 - only for the one who mistyped

    close = get_close_matches(name, broker_settings.BROKER, n=1, cutoff=0.75)
    return f"there is no setting named {name}" + (f"; did you mean {close[0]}?" if close else "")


def _check_together(config: BrokerConfig, static: Mapping[str, str]) -> None:
    """Refuse settings that contradict each other."""
    groups = config.groups
    if groups.session_timeout_ms_min > groups.session_timeout_ms_max:
        raise ConfigError(
            f"group.min.session.timeout.ms ({groups.session_timeout_ms_min}) exceeds"
            f" group.max.session.timeout.ms ({groups.session_timeout_ms_max})"
        )
    if config.queued_max_request_bytes < config.socket_request_max_bytes:
        raise ConfigError(
            f"queued.max.request.bytes ({config.queued_max_request_bytes}) must hold a request of"
            f" socket.request.max.bytes ({config.socket_request_max_bytes})"
        )
    if config.broker_session_timeout_ms <= config.broker_heartbeat_interval_ms:
        raise ConfigError(
            f"broker.session.timeout.ms ({config.broker_session_timeout_ms}) must exceed"
            f" broker.heartbeat.interval.ms ({config.broker_heartbeat_interval_ms})"
        )
    _check_authorizer(config)


def _check_authorizer(config: BrokerConfig) -> None:
    """Refuse a class that is not implemented, and settings that would seem to protect and do not."""
    if config.authorizer_class_name not in broker_settings.AUTHORIZERS:
        raise ConfigError(
            f"{broker_settings.AUTHORIZER}={config.authorizer_class_name}: there is no JVM to load a class into; "
            f"use {broker_settings.STANDARD_AUTHORIZER} or acls, which decide by the cluster's ACLs"
        )
    try:
        super_users(config.super_users)
    except ValueError as error:
        raise ConfigError(f"{broker_settings.SUPER_USERS}: {error}") from None
    if config.super_users and not config.authorizer_class_name:
        raise ConfigError(
            f"{broker_settings.SUPER_USERS} is set, but everybody may do everything; set"
            f" {broker_settings.AUTHORIZER}=acls too"
        )


def _read(path: str) -> dict[str, str]:
    """The settings in a TOML file, by their full names. Raises ConfigError."""
    import tomllib  # noqa: PLC0415 - only for those who have a file

    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # "max.connections" and "max.connections.per.ip" cannot both be dotted keys, of which one is a table.
        raise ConfigError(f'{path}: {error}. Names may need quotes, as in "max.connections" = 100') from None
    return dict(_flattened(path, "", content))


def _flattened(path: str, prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        name = prefix + key
        match value:
            case dict():
                yield from _flattened(path, f"{name}.", value)
            case list() if all(isinstance(element, str) for element in value):
                yield name, ",".join(value)
            case bool() | int() | float() | str():
                yield name, format_value(value)
            case _:
                raise ConfigError(
                    f"{path}: {name} must be a text, a number, true or false, or a list of texts"
                )
