"""Settings of topics and brokers: DescribeConfigs, AlterConfigs (replaces all), IncrementalAlterConfigs (some).

In Kafka, AlterConfigs and IncrementalAlterConfigs have structs of the same names; the latter's also have
``config_operation`` and are prefixed Incremental here. ``resource_type`` is 2 for a topic and 4 for a broker.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.schema import Message, Response, array, boolean, int8, int16, int32, string


class DescribeConfigsResource(Message):
    resource_type: int = int8()
    resource_name: str = string()
    configuration_keys: list[str] | None = array(string, nullable=True)


class DescribeConfigsRequest(Message, key=32, versions="1-4", flexible="4+"):
    resources: list[DescribeConfigsResource] = array(DescribeConfigsResource)
    include_synonyms: bool = boolean()
    include_documentation: bool = boolean("3+")


class DescribeConfigsSynonym(Message):
    name: str = string()
    value: str | None = string(nullable=True)
    source: int = int8()


class DescribeConfigsResourceResult(Message):
    name: str = string()
    value: str | None = string(nullable=True)
    read_only: bool = boolean()
    config_source: int = int8(default=-1)
    is_sensitive: bool = boolean()
    synonyms: list[DescribeConfigsSynonym] = array(DescribeConfigsSynonym)
    config_type: int = int8("3+")
    documentation: str | None = string("3+", nullable=True)


class DescribeConfigsResult(Message):
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resource_type: int = int8()
    resource_name: str = string()
    configs: list[DescribeConfigsResourceResult] = array(DescribeConfigsResourceResult)


class DescribeConfigsResponse(Response, key=32, versions="1-4", flexible="4+"):
    throttle_time_ms: int = int32()
    results: list[DescribeConfigsResult] = array(DescribeConfigsResult)

    @classmethod
    def for_error(
        cls, request: DescribeConfigsRequest, version: int, error: int, message: str | None = None
    ) -> DescribeConfigsResponse:
        return cls(
            results=[
                DescribeConfigsResult(
                    error_code=error,
                    error_message=message,
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
                for resource in request.resources
            ]
        )


class AlterableConfig(Message):
    name: str = string()
    value: str | None = string(nullable=True)


class AlterConfigsResource(Message):
    resource_type: int = int8()
    resource_name: str = string()
    configs: list[AlterableConfig] = array(AlterableConfig)


class AlterConfigsRequest(Message, key=33, versions="0-2", flexible="2+"):
    resources: list[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = boolean()


class AlterConfigsResourceResponse(Message):
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resource_type: int = int8()
    resource_name: str = string()


class AlterConfigsResponse(Response, key=33, versions="0-2", flexible="2+"):
    throttle_time_ms: int = int32()
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)

    @classmethod
    def for_error(
        cls, request: AlterConfigsRequest, version: int, error: int, message: str | None = None
    ) -> AlterConfigsResponse:
        return cls(responses=_refused(request.resources, error, message))


class IncrementalAlterableConfig(Message):
    name: str = string()
    # 0: set; 1: delete; 2: append to a list; 3: subtract from it (KIP-339).
    config_operation: int = int8()
    value: str | None = string(nullable=True)


class IncrementalAlterConfigsResource(Message):
    resource_type: int = int8()
    resource_name: str = string()
    configs: list[IncrementalAlterableConfig] = array(IncrementalAlterableConfig)


class IncrementalAlterConfigsRequest(Message, key=44, versions="0-1", flexible="1+"):
    resources: list[IncrementalAlterConfigsResource] = array(IncrementalAlterConfigsResource)
    validate_only: bool = boolean()


class IncrementalAlterConfigsResponse(Response, key=44, versions="0-1", flexible="1+"):
    throttle_time_ms: int = int32()
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)

    @classmethod
    def for_error(
        cls, request: IncrementalAlterConfigsRequest, version: int, error: int, message: str | None = None
    ) -> IncrementalAlterConfigsResponse:
        return cls(responses=_refused(request.resources, error, message))


class ListConfigResourcesRequest(Message, key=74, versions="0-1", flexible="0+"):
    """Version 0 lists only client metrics resources."""

    # Empty: all types.
    resource_types: list[int] = array(int8, "1+")


class ListConfigResourcesResponseConfigResource(Message):
    resource_name: str = string()
    resource_type: int = int8("1+", default=16)


class ListConfigResourcesResponse(Response, key=74, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    config_resources: list[ListConfigResourcesResponseConfigResource] = array(
        ListConfigResourcesResponseConfigResource
    )


def _refused(
    resources: Sequence[AlterConfigsResource | IncrementalAlterConfigsResource],
    error: int,
    message: str | None,
) -> list[AlterConfigsResourceResponse]:
    return [
        AlterConfigsResourceResponse(
            error_code=error,
            error_message=message,
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
        )
        for resource in resources
    ]
