"""Authentication and access control: SaslHandshake, SaslAuthenticate, and the three APIs of ACLs."""

from __future__ import annotations

from penstock.protocol.schema import Message, Response, array, binary, int8, int16, int32, int64, string

# Pattern type: the pattern is the resource's name.
LITERAL = 3


class SaslHandshakeRequest(Message, key=17, versions="0-1"):
    mechanism: str = string()


class SaslHandshakeResponse(Response, key=17, versions="0-1"):
    error_code: int = int16()
    mechanisms: list[str] = array(string)


class SaslAuthenticateRequest(Message, key=36, versions="0-2", flexible="2+"):
    auth_bytes: bytes = binary()


class SaslAuthenticateResponse(Response, key=36, versions="0-2", flexible="2+"):
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    auth_bytes: bytes = binary()
    session_lifetime_ms: int = int64("1+")


class DescribeAclsRequest(Message, key=29, versions="1-3", flexible="2+"):
    resource_type_filter: int = int8()
    resource_name_filter: str | None = string(nullable=True)
    pattern_type_filter: int = int8(default=LITERAL)
    principal_filter: str | None = string(nullable=True)
    host_filter: str | None = string(nullable=True)
    operation: int = int8()
    permission_type: int = int8()


class AclDescription(Message):
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


class DescribeAclsResource(Message):
    resource_type: int = int8()
    resource_name: str = string()
    pattern_type: int = int8(default=LITERAL)
    acls: list[AclDescription] = array(AclDescription)


class DescribeAclsResponse(Response, key=29, versions="1-3", flexible="2+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resources: list[DescribeAclsResource] = array(DescribeAclsResource)


class AclCreation(Message):
    resource_type: int = int8()
    resource_name: str = string()
    resource_pattern_type: int = int8(default=LITERAL)
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


class CreateAclsRequest(Message, key=30, versions="1-3", flexible="2+"):
    creations: list[AclCreation] = array(AclCreation)


class AclCreationResult(Message):
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class CreateAclsResponse(Response, key=30, versions="1-3", flexible="2+"):
    throttle_time_ms: int = int32()
    results: list[AclCreationResult] = array(AclCreationResult)

    @classmethod
    def for_error(
        cls, request: CreateAclsRequest, version: int, error: int, message: str | None = None
    ) -> CreateAclsResponse:
        refused = AclCreationResult(error_code=error, error_message=message)
        return cls(results=[refused] * len(request.creations))


class DeleteAclsFilter(Message):
    resource_type_filter: int = int8()
    resource_name_filter: str | None = string(nullable=True)
    pattern_type_filter: int = int8(default=LITERAL)
    principal_filter: str | None = string(nullable=True)
    host_filter: str | None = string(nullable=True)
    operation: int = int8()
    permission_type: int = int8()


class DeleteAclsRequest(Message, key=31, versions="1-3", flexible="2+"):
    filters: list[DeleteAclsFilter] = array(DeleteAclsFilter)


class DeleteAclsMatchingAcl(Message):
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resource_type: int = int8()
    resource_name: str = string()
    pattern_type: int = int8(default=LITERAL)
    principal: str = string()
    host: str = string()
    operation: int = int8()
    permission_type: int = int8()


class DeleteAclsFilterResult(Message):
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    matching_acls: list[DeleteAclsMatchingAcl] = array(DeleteAclsMatchingAcl)


class DeleteAclsResponse(Response, key=31, versions="1-3", flexible="2+"):
    throttle_time_ms: int = int32()
    filter_results: list[DeleteAclsFilterResult] = array(DeleteAclsFilterResult)

    @classmethod
    def for_error(
        cls, request: DeleteAclsRequest, version: int, error: int, message: str | None = None
    ) -> DeleteAclsResponse:
        refused = DeleteAclsFilterResult(error_code=error, error_message=message)
        return cls(filter_results=[refused] * len(request.filters))


class UserName(Message):
    name: str = string()


class DescribeUserScramCredentialsRequest(Message, key=50, versions="0", flexible="0+"):
    # None or empty: all users.
    users: list[UserName] | None = array(UserName, nullable=True)


class ScramCredentialInfo(Message):
    mechanism: int = int8()
    iterations: int = int32()


class DescribeUserScramCredentialsResult(Message):
    user: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    credential_infos: list[ScramCredentialInfo] = array(ScramCredentialInfo)


class DescribeUserScramCredentialsResponse(Response, key=50, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    results: list[DescribeUserScramCredentialsResult] = array(DescribeUserScramCredentialsResult)


class ScramCredentialDeletion(Message):
    name: str = string()
    mechanism: int = int8()


class ScramCredentialUpsertion(Message):
    name: str = string()
    mechanism: int = int8()
    iterations: int = int32()
    salt: bytes = binary()
    salted_password: bytes = binary()


class AlterUserScramCredentialsRequest(Message, key=51, versions="0", flexible="0+"):
    deletions: list[ScramCredentialDeletion] = array(ScramCredentialDeletion)
    upsertions: list[ScramCredentialUpsertion] = array(ScramCredentialUpsertion)


class AlterUserScramCredentialsResult(Message):
    user: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)


class AlterUserScramCredentialsResponse(Response, key=51, versions="0", flexible="0+"):
    throttle_time_ms: int = int32()
    results: list[AlterUserScramCredentialsResult] = array(AlterUserScramCredentialsResult)

    @classmethod
    def for_error(
        cls, request: AlterUserScramCredentialsRequest, version: int, error: int, message: str | None = None
    ) -> AlterUserScramCredentialsResponse:
        """One result for each user that the request names, as Kafka gives."""
        users = dict.fromkeys(
            [each.name for each in request.deletions] + [each.name for each in request.upsertions]
        )
        return cls(
            results=[
                AlterUserScramCredentialsResult(user=user, error_code=error, error_message=message)
                for user in users
            ]
        )
