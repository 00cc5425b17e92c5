"""The shell: sockets, waiting requests and timers around the cores and the logs.

Its packages are rooms, and a room imports only rooms below it (pyproject.toml has the contract). From the top:

    process, node        one process; a node and its listeners
    handlers             what is done with each request
    broker               the parts below, put together, and what moves all of them: ``startup``,
                         ``metadata_publisher``, ``node_partition_host``, ``dynamic_settings``
    coordination         coordinators on internal topics
    replication          following other brokers, and being followed
    membership           this broker's place in the cluster
    controller           the active controller, and the way to it
    quorum               the metadata log and its quorum
    network              connections, in and out
    partition            hosted partitions
    clocks               what time it is
    storage              data directories, and which log lies where
    config, options, logs
"""
