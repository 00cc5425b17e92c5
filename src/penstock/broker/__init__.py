"""The shell around the cores and the logs: sockets, waiting requests, timers.

Each package imports only packages below it (pyproject.toml has the contract). From the top:

    process, node        one process; a node and its listeners
    handlers             the request handlers
    broker               assembles the parts below; with ``startup``, ``metadata_publisher``,
                         ``node_partition_host`` and ``dynamic_settings``
    coordination         coordinators stored in internal topics
    replication          following other brokers, and being followed
    membership           this broker's membership in the cluster
    controller           the active controller, and its client
    quorum               the metadata log and its quorum
    network              connections, in and out
    partition            hosted partitions
    clocks               the current time, checked against other brokers
    storage              data directories, and where each log is
    listener_settings    the listeners for clients, from the settings
    config, options, logs
"""
