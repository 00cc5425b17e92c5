"""The client of the active controller, which may be on this node or on another.

Everything on this node that needs the controller uses it: handlers forward clients' requests, and other parts send
the broker's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.broker.controller import authorized
from penstock.broker.controller.active_controller import ActiveController
from penstock.broker.controller.envelopes import VERSION as ENVELOPE_VERSION
from penstock.broker.controller.envelopes import BadEnvelope, disclosed, enclosed, sealed, unsealed
from penstock.broker.network.authorization import Requester
from penstock.broker.network.connection import WAITING, Call
from penstock.broker.network.peers import Peers
from penstock.broker.quorum.consensus import Consensus
from penstock.environment import Environment
from penstock.metadata.features import may_secure
from penstock.protocol.apis import error_response
from penstock.protocol.errors import ErrorCode
from penstock.protocol.messages.forwarding import EnvelopeRequest, EnvelopeResponse
from penstock.protocol.messages.topics import CreatableTopic, CreateTopicsRequest
from penstock.protocol.schema import Message

CREATE_TOPICS_VERSION = 7
# A forwarded request waits this long for a controller.
FORWARD_TIMEOUT_MS = 20_000
FORWARD_RETRY_MS = 50
# How long a client that created a topic waits for this broker to know it.
SEEN_TIMEOUT_MS = 2_000


class ControllerClient:
    def __init__(
        self,
        environment: Environment,
        consensus: Consensus,
        active_controller: ActiveController,
        peers: Peers,
        *,
        node_id: int,
    ) -> None:
        self._environment = environment
        self._consensus = consensus
        self._active_controller = active_controller
        self._peers = peers
        self._node_id = node_id
        # Callbacks that wait until this broker's image has newly created topics.
        self._on_image: list[Callable[[], None]] = []

    def ask(
        self,
        request: Message,
        version: int,
        done: Callable[[Any | None], None],
        *,
        channel: str = "forward",
        timeout_ms: int = FORWARD_TIMEOUT_MS,
        requester: Requester | None = None,
    ) -> None:
        """Ask the active controller, here or on another node; ``done(None)`` when there is no answer.

        ``requester``: the client that asks; None: this node does.
        """
        leader = self._consensus.leader_id
        if self._consensus.is_active:
            self._active_controller.handle(
                request, version, done, from_broker=requester is None, requester=requester
            )
        elif leader is None or leader == self._node_id:
            self._environment.spawn.soon(lambda: done(None))
        elif requester is not None and may_secure(self._consensus.image):
            self._peers.call(
                leader,
                channel,
                sealed(request, version, requester),
                ENVELOPE_VERSION,
                lambda envelope: done(disclosed(envelope, request, version)),
                timeout_ms=timeout_ms,
            )
        else:
            # Without the feature there are no rights to check, and another node may not know envelopes.
            self._peers.call(leader, channel, request, version, done, timeout_ms=timeout_ms)

    def decide(self, request: Message, call: Call) -> Any:
        """Have the controller handle a request: this node's own for other nodes, the active one for clients."""
        if call.is_internal:
            self._active_controller.handle(request, call.version, call.answer, from_broker=True)
        else:
            self.forward_checked(request, call, call.answer)
        return WAITING

    def open(self, envelope: EnvelopeRequest, call: Call) -> Any:
        """Have this node's controller handle the request of a client that another broker sent in an envelope."""
        try:
            request, version, requester = unsealed(envelope)
        except BadEnvelope as bad:
            return EnvelopeResponse(error_code=bad.error)
        self._active_controller.handle(
            request,
            version,
            lambda response: call.answer(enclosed(response, version)),
            requester=requester,
        )
        return WAITING

    def forward_checked(self, request: Message, call: Call, answer: Callable[[Any], None]) -> None:
        """Forward a client's request without what the client may not do, and add the refusals to the response."""
        requester = Requester(call.principal, call.host)
        if call.authorizer is None:
            self.forward(request, call.version, answer, requester)
            return
        checked = authorized.check(request, call.version, self._consensus.image, call.allows)
        if checked.request is None:
            answer(checked.complete(None))
            return
        self.forward(
            checked.request,
            call.version,
            lambda response: answer(checked.complete(response)),
            requester,
        )

    def forward(
        self,
        request: Message,
        version: int,
        answer: Callable[[Any], None],
        requester: Requester | None = None,
    ) -> None:
        """Call ``answer(response)`` with the active controller's response, waiting until there is a controller."""
        deadline_ms = self._environment.clock.now_ms() + FORWARD_TIMEOUT_MS

        def ask() -> None:
            leader = self._consensus.leader_id
            was_known = self._consensus.is_active or (leader is not None and leader != self._node_id)

            def done(response: Any | None) -> None:
                if response is not None and response.first_error() != ErrorCode.NOT_CONTROLLER:
                    answer(response)
                elif self._environment.clock.now_ms() >= deadline_ms:
                    answer(response or error_response(request, version, ErrorCode.NOT_CONTROLLER))
                elif (
                    response is not None
                    or not was_known
                    or (leader is not None and self._peers.is_refused(leader, "forward"))
                ):
                    # It was certainly not carried out. Try again when there is another controller.
                    self._environment.spawn.later(FORWARD_RETRY_MS, ask)
                else:
                    # It may have been carried out. Only the client knows whether it may be repeated.
                    answer(error_response(request, version, ErrorCode.NOT_CONTROLLER))

            self.ask(request, version, done, requester=requester)

        ask()

    def create_topics(
        self, names: list[str], connected_ms: int, done: Callable[[dict[str, int]], None]
    ) -> None:
        """Create topics with the broker's defaults, for a client that connected at ``connected_ms``."""
        topics = [CreatableTopic(name=name, num_partitions=-1, replication_factor=-1) for name in names]
        self._create(
            topics,
            lambda response: done({topic.name: topic.error_code for topic in response.topics}),
            connected_for_ms=self._environment.clock.now_ms() - connected_ms,
        )

    def create_internal_topic(self, topic: CreatableTopic, done: Callable[[int], None]) -> None:
        self._create([topic], lambda response: done(response.topics[0].error_code))

    def _create(
        self, topics: list[CreatableTopic], done: Callable[[Any], None], *, connected_for_ms: int = -1
    ) -> None:
        def created(response: Any) -> None:
            for topic in response.topics:
                if topic.error_code == ErrorCode.TOPIC_ALREADY_EXISTS:
                    # Another broker created it at the same moment.
                    topic.error_code = ErrorCode.NONE
            made = [topic.name for topic in response.topics if not topic.error_code]
            self.when_seen(made, lambda: done(response))

        request = CreateTopicsRequest(topics=topics, connected_for_ms=connected_for_ms)
        self.forward(request, CREATE_TOPICS_VERSION, created)

    def when_seen(self, names: list[str], then: Callable[[], None]) -> None:
        """Call ``then`` when this broker knows the topics, so that the client that created them finds them here."""
        deadline_ms = self._environment.clock.now_ms() + SEEN_TIMEOUT_MS

        def look() -> None:
            topics = self._consensus.image.topics
            if all(name in topics for name in names) or self._environment.clock.now_ms() >= deadline_ms:
                then()
            else:
                self._on_image.append(look)

        look()

    def image_moved(self) -> None:
        """The image has changed: check the waiting callbacks."""
        if self._on_image:
            waiting, self._on_image = self._on_image, []
            for look in waiting:
                look()
