"""Changes of settings: AlterConfigs, which replaces all settings of a resource, and IncrementalAlterConfigs.

Both compute the new settings of a resource from its present ones, and then the records of the difference. A
resource succeeds or fails as a whole, but resources of the same request are independent. Unchanged values are not
checked again: they may have been set under other rules, and must not block other changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from penstock.metadata import broker_settings
from penstock.metadata.configs import no_settings
from penstock.metadata.features import COMPACTION, may_compact
from penstock.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, ConfigResource, Image, config_record
from penstock.metadata.refusal import Refusal
from penstock.metadata.settings import (
    TEXT_MAX,
    InvalidSetting,
    Kind,
    Setting,
    Status,
    check,
    format_value,
    parse,
    split_list,
)
from penstock.metadata.topic_settings import (
    CLEANUP_POLICY,
    COMPACT,
    CREATED,
    LOG_CLEANUP_POLICY,
    MIN_ISR,
    TOPIC,
)
from penstock.metadata.topics import is_internal, name_error
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.configs import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResource,
    IncrementalAlterConfigsResponse,
)
from penstock.protocol.messages.metadata_records import ConfigRecord


class Operation(IntEnum):
    """Operations of IncrementalAlterConfigs (KIP-339)."""

    SET = 0
    DELETE = 1
    # Lists only.
    APPEND = 2
    SUBTRACT = 3


def alter_configs(
    request: AlterConfigsRequest, image: Image
) -> tuple[list[ConfigRecord], AlterConfigsResponse]:
    changes, responses = _altered(request.resources, image, _replaced)
    return changes, AlterConfigsResponse(responses=responses)


def incremental_alter_configs(
    request: IncrementalAlterConfigsRequest, image: Image
) -> tuple[list[ConfigRecord], IncrementalAlterConfigsResponse]:
    changes, responses = _altered(request.resources, image, _adjusted)
    return changes, IncrementalAlterConfigsResponse(responses=responses)


def check_topic_settings(
    settings: Mapping[str, str],
    image: Image,
    *,
    before: Mapping[str, str] = MappingProxyType({}),
    internal: bool,
) -> None:
    """Refuse settings that a topic cannot have. Raises Refusal."""
    for name, text in settings.items():
        if before.get(name) != text:
            setting = _topic_setting(name)
            _check(setting, text, internal=internal)
            if name == CLEANUP_POLICY and not internal:
                _check_policy(setting, text, image)
    if internal and before.get(CLEANUP_POLICY) == COMPACT != settings.get(CLEANUP_POLICY):
        # Retention would remove the state of groups and of open transactions.
        raise Refusal(ErrorCode.INVALID_CONFIG, "cleanup.policy of an internal topic is always compact.")
    if "min.compaction.lag.ms" not in settings:
        return
    low, high = (
        parse(TOPIC[name], settings.get(name) or TOPIC[name].default or "")
        for name in ("min.compaction.lag.ms", "max.compaction.lag.ms")
    )
    if low > high:
        raise Refusal(
            ErrorCode.INVALID_CONFIG, f"min.compaction.lag.ms ({low}) exceeds max.compaction.lag.ms ({high})."
        )


def difference(
    resource: ConfigResource, before: Mapping[str, str], after: Mapping[str, str]
) -> list[ConfigRecord]:
    """The changes that lead from one set of settings to another."""
    changes = [
        config_record(resource, name, text) for name, text in after.items() if before.get(name) != text
    ]
    return changes + [config_record(resource, name, None) for name in before if name not in after]


def _altered(
    resources: Sequence[Any], image: Image, wanted: Callable[[Any, Mapping[str, str]], dict[str, str]]
) -> tuple[list[ConfigRecord], list[AlterConfigsResourceResponse]]:
    changes = []
    responses = []
    repeated = _repeated((resource.resource_type, resource.resource_name) for resource in resources)
    for asked in resources:
        resource = ConfigResource(asked.resource_type, asked.resource_name)
        response = AlterConfigsResourceResponse(
            error_code=ErrorCode.NONE,
            error_message=None,
            resource_type=resource.type,
            resource_name=resource.name,
        )
        try:
            if resource in repeated:
                raise Refusal(ErrorCode.INVALID_REQUEST, "Each resource may be named once.")
            names = _repeated(config.name for config in asked.configs)
            if names:
                raise Refusal(ErrorCode.INVALID_REQUEST, f"Each setting may be named once: {_listed(names)}.")
            _check_resource(resource, image)
            before = image.configs.get(resource, {})
            after = wanted(asked, before)
            _check_settings(resource, before, after, image)
            _check_min_isr_stays(resource, before, after, image)
            changes += difference(resource, before, after)
        except Refusal as refusal:
            response.error_code = refusal.error
            response.error_message = refusal.message
        responses.append(response)
    return changes, responses


def _replaced(asked: AlterConfigsResource, before: Mapping[str, str]) -> dict[str, str]:
    after = {}
    for config in asked.configs:
        if config.value is None:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"{config.name} has no value.")
        after[config.name] = config.value
    return after


def _adjusted(asked: IncrementalAlterConfigsResource, before: Mapping[str, str]) -> dict[str, str]:
    after = dict(before)
    for config in asked.configs:
        name, value, operation = config.name, config.value, config.config_operation
        if operation == Operation.DELETE:
            # Also works for unknown settings: this is how to get rid of them.
            after.pop(name, None)
            continue
        if value is None:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"{name} has no value.")
        if operation == Operation.SET:
            after[name] = value
            continue
        if operation not in (Operation.APPEND, Operation.SUBTRACT):
            raise Refusal(ErrorCode.INVALID_REQUEST, f"There is no operation {operation} on settings.")
        setting = _setting(asked.resource_type, name)
        if setting.kind is not Kind.LIST:
            raise Refusal(ErrorCode.INVALID_CONFIG, f"{name} is not a list: it can only be set or deleted.")
        if len(value) > TEXT_MAX:
            raise Refusal(ErrorCode.INVALID_CONFIG, f"{name}: a value has at most {TEXT_MAX} characters.")
        # As in Kafka, a list that is not set starts from its default.
        elements = split_list(after.get(name, setting.default or ""))
        named = split_list(value)
        if operation == Operation.APPEND:
            elements += [element for element in named if element not in elements]
        else:
            elements = [element for element in elements if element not in named]
        after[name] = ",".join(elements)
    return after


def _check_resource(resource: ConfigResource, image: Image) -> None:
    if resource.type == TOPIC_RESOURCE:
        reason = name_error(resource.name)
        if reason is not None:
            raise Refusal(ErrorCode.INVALID_TOPIC_EXCEPTION, reason)
        if resource.name not in image.topics:
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    elif resource.type == BROKER_RESOURCE:
        # Compare as text, so that "01" is not a second name of broker 1.
        if resource.name and not any(resource.name == str(broker) for broker in image.brokers):
            raise Refusal(ErrorCode.INVALID_REQUEST, f"There is no broker '{resource.name[:80]}'.")
    else:
        raise Refusal(ErrorCode.INVALID_REQUEST, no_settings(resource.type))


def _check_settings(
    resource: ConfigResource, before: Mapping[str, str], after: Mapping[str, str], image: Image
) -> None:
    if resource.type == TOPIC_RESOURCE:
        check_topic_settings(after, image, before=before, internal=is_internal(resource.name))
        return
    for name, text in after.items():
        if before.get(name) == text:
            continue
        setting = _setting(resource.type, name)
        if not setting.is_dynamic:
            raise Refusal(ErrorCode.INVALID_REQUEST, _why_fixed(setting))
        if name == MIN_ISR and resource.name:
            # The controller determines eligible leaders with it, so brokers must not differ (as in Kafka with
            # KIP-966).
            raise Refusal(ErrorCode.INVALID_CONFIG, f"{name} can only be set for a topic or for all brokers.")
        _check(setting, text)
        if name == LOG_CLEANUP_POLICY:
            _check_policy(setting, text, image)


def _check_policy(setting: Setting, text: str, image: Image) -> None:
    """Refuse compaction while a broker of an older release is registered, which does not understand such logs."""
    policies = parse(setting, text)
    if COMPACT in policies and not may_compact(image):
        raise Refusal(
            ErrorCode.INVALID_CONFIG,
            f"{setting.name}={format_value(policies)}: topics can be compacted once all brokers have been upgraded "
            f"(`penstock features` shows {COMPACTION}).",
        )


def _why_fixed(setting: Setting) -> str:
    if setting.status is Status.IMPLEMENTED:
        return f"{setting.name} can only be set when the broker is started."
    return f"{setting.name} cannot be changed, it has no effect here: {setting.reason}."


def _check_min_isr_stays(
    resource: ConfigResource, before: Mapping[str, str], after: Mapping[str, str], image: Image
) -> None:
    """Refuse to remove the cluster-wide min.insync.replicas if there are several brokers (as Kafka with KIP-966).

    Without it each broker would use the value of its own file. So would the controller, and it could treat
    replicas as eligible that a leader with a smaller value has committed without.
    """
    if (
        resource == ConfigResource(BROKER_RESOURCE, "")
        and MIN_ISR in before
        and MIN_ISR not in after
        and len(image.brokers) > 1
    ):
        raise Refusal(
            ErrorCode.INVALID_CONFIG,
            f"{MIN_ISR} of all brokers cannot be removed: set it to another value.",
        )


def _check(setting: Setting, text: str, *, internal: bool = False) -> None:
    try:
        check(setting, text, internal=internal)
    except InvalidSetting as invalid:
        raise Refusal(ErrorCode.INVALID_CONFIG, str(invalid)) from None


def _setting(resource_type: int, name: str) -> Setting:
    if resource_type == TOPIC_RESOURCE:
        return _topic_setting(name)
    setting = broker_settings.find(name)
    if setting is None:
        raise _unknown("broker", name, broker_settings.BROKER)
    return setting


def _topic_setting(name: str) -> Setting:
    setting = TOPIC.get(name)
    if setting is None:
        if name == CREATED:
            raise Refusal(ErrorCode.INVALID_CONFIG, f"{name} cannot be set.")
        raise _unknown("topic", name, TOPIC)
    return setting


def _unknown(kind: str, name: str, known: Iterable[str]) -> Refusal:
    shown = name[:80]
    near = get_close_matches(shown, list(known), n=1, cutoff=0.75)
    hint = f" Did you mean {near[0]}?" if near else ""
    return Refusal(ErrorCode.INVALID_CONFIG, f"There is no {kind} setting named '{shown}'.{hint}")


def _repeated(keys: Iterable[Any]) -> set[Any]:
    seen: set[Any] = set()
    repeated: set[Any] = set()
    for key in keys:
        (repeated if key in seen else seen).add(key)
    return repeated


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))[:200]
