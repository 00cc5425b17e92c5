"""Passes each new committed image to the parts of a node, in the order they need."""

from __future__ import annotations

from collections.abc import Callable

from penstock.broker.controller.controller_client import ControllerClient
from penstock.broker.coordination.coordinators import CoordinatorRegistry
from penstock.broker.dynamic_settings import DynamicSettings
from penstock.broker.membership.freshness import Freshness
from penstock.broker.membership.membership import Membership
from penstock.broker.network.metadata_pages import MetadataPages
from penstock.broker.network.peers import Peers
from penstock.broker.network.throttling import Throttling
from penstock.broker.partition.partition_lifecycle import PartitionLifecycle
from penstock.broker.storage.storage import Storage
from penstock.metadata.image import BROKER_RESOURCE, Delta, Image


class MetadataPublisher:
    def __init__(
        self,
        storage: Storage,
        peers: Peers,
        metadata_pages: MetadataPages,
        lifecycle: PartitionLifecycle,
        settings: DynamicSettings,
        coordinators: CoordinatorRegistry,
        membership: Membership,
        freshness: Freshness,
        controller: ControllerClient,
        throttling: Throttling,
        *,
        node_id: int,
        on_credentials_changed: Callable[[], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._on_credentials_changed = on_credentials_changed
        self._storage = storage
        self._peers = peers
        self._metadata_pages = metadata_pages
        self._lifecycle = lifecycle
        self._settings = settings
        self._coordinators = coordinators
        self._membership = membership
        self._freshness = freshness
        self._controller = controller
        self._throttling = throttling
        self._node_id = node_id
        self._fail = on_failure
        # As published last.
        self._credentials: object = None

    def publish_first(self, image: Image) -> None:
        """Publish the image that was loaded from a snapshot: its changes are not published otherwise."""
        self.publish(image, Delta(created=tuple(image.topics), brokers_changed=tuple(image.brokers)))
        self._settings.apply(image)
        self._throttling.apply(image.security.quotas)

    def publish(self, image: Image, delta: Delta) -> None:
        self._metadata_pages.moved(delta)
        storage = self._storage
        if image.cluster_id and storage.cluster_id != image.cluster_id:
            if storage.cluster_id is not None:
                self._fail(
                    f"{storage.path} belongs to the cluster {storage.cluster_id}, but the controllers belong "
                    f"to {image.cluster_id}; choose another --data-dir"
                )
                return
            storage.adopt_cluster_id(image.cluster_id)
        for broker in delta.brokers_changed:
            known = image.brokers.get(broker)
            if known is not None and known.internal is not None and broker != self._node_id:
                self._peers.set_address(broker, known.internal.host, known.internal.port)
        self._lifecycle.apply(image, delta)
        if any(resource.type == BROKER_RESOURCE for resource in delta.configs_changed):
            self._settings.apply(image)
        if delta.security.has_quotas:
            self._throttling.apply(image.security.quotas)
        if delta.deleted:
            self._coordinators.topics_deleted()
        # Not by the delta: that of a snapshot does not name users.
        if image.security.credentials is not self._credentials:
            self._credentials = image.security.credentials
            self._on_credentials_changed()
        self._membership.image_moved()
        self._freshness.image_moved()
        self._controller.image_moved()
