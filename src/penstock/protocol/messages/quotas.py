"""Client quotas: DescribeClientQuotas and AlterClientQuotas (KIP-546)."""

from __future__ import annotations

from penstock.protocol.messages.metadata_records import QuotaEntityPart
from penstock.protocol.schema import Message, Response, array, boolean, float64, int8, int16, int32, string

# How a component of a filter matches.
MATCH_EXACT, MATCH_DEFAULT, MATCH_SPECIFIED = 0, 1, 2


class QuotaFilterComponent(Message):
    entity_type: str = string()
    match_type: int = int8()
    match: str | None = string(nullable=True)


class DescribeClientQuotasRequest(Message, key=48, versions="0-1", flexible="1+"):
    components: list[QuotaFilterComponent] = array(QuotaFilterComponent)
    # Only entities that have no other types than those of the components.
    strict: bool = boolean()


class QuotaValue(Message):
    key: str = string()
    value: float = float64()


class QuotaEntry(Message):
    entity: list[QuotaEntityPart] = array(QuotaEntityPart)
    values: list[QuotaValue] = array(QuotaValue)


class DescribeClientQuotasResponse(Response, key=48, versions="0-1", flexible="1+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    entries: list[QuotaEntry] | None = array(QuotaEntry, nullable=True)


class QuotaOp(Message):
    key: str = string()
    value: float = float64()
    remove: bool = boolean()


class QuotaAlteration(Message):
    entity: list[QuotaEntityPart] = array(QuotaEntityPart)
    ops: list[QuotaOp] = array(QuotaOp)


class AlterClientQuotasRequest(Message, key=49, versions="0-1", flexible="1+"):
    entries: list[QuotaAlteration] = array(QuotaAlteration)
    validate_only: bool = boolean()


class QuotaAlterationResult(Message):
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    entity: list[QuotaEntityPart] = array(QuotaEntityPart)


class AlterClientQuotasResponse(Response, key=49, versions="0-1", flexible="1+"):
    throttle_time_ms: int = int32()
    entries: list[QuotaAlterationResult] = array(QuotaAlterationResult)

    @classmethod
    def for_error(
        cls, request: AlterClientQuotasRequest, version: int, error: int, message: str | None = None
    ) -> AlterClientQuotasResponse:
        return cls(
            entries=[
                QuotaAlterationResult(error_code=error, error_message=message, entity=entry.entity)
                for entry in request.entries
            ]
        )
