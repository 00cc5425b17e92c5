"""The process of a node: its event loop, signals and limits, from start to stop."""

from __future__ import annotations

import gc
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

from penstock.addresses import format_address
from penstock.broker.config import BrokerConfig, ConfigError
from penstock.broker.internal_settings import (
    InternalSecurity,
    check_internal,
    internal_advice,
    internal_security,
)
from penstock.broker.listener_settings import check_reach, client_listeners, unused_settings
from penstock.broker.logs import Logger
from penstock.broker.node import Bound, Node
from penstock.broker.options import BROKER, ServeError, ServeOptions
from penstock.environment import Clock
from penstock.protocol.listeners import CLIENTS

if TYPE_CHECKING:
    from penstock.broker.metrics.process_figures import ProcessFigures

# A node that has not found its cluster by then logs what it is waiting for.
FOUND_WITHIN_S = 5.0

# How long a thread keeps the interpreter when the loop wants it. Python's 5 ms made the loop three to four times
# slower while a thread checked a compacted file.
SWITCH_INTERVAL_S = 0.0005


def run(options: ServeOptions) -> int:
    """Run a node until it is told to stop. Raises ServeError with one line when it cannot start or continue."""
    try:
        config, warnings = BrokerConfig.load(
            options.settings, options.config_file, options=_as_settings(options)
        )
        listeners = client_listeners(options, config.static) if BROKER in options.roles else ()
        check_reach(listeners, options)
        internal = internal_security(config.static) if options.controllers else InternalSecurity()
        check_internal(internal, listeners, options)
        advice = list(internal_advice(internal))
        if internal.tls is None:
            advice += unused_settings(listeners, config.static)
    except ConfigError as error:
        raise ServeError(str(error)) from None
    logger = Logger(node=options.node_id)
    for warning in (*warnings, *advice):
        logger.warning(warning)

    loop = _event_loop()
    from penstock.machine import machine_environment  # noqa: PLC0415 - with the loop

    environment = machine_environment(loop)
    failure: list[str] = []
    is_ready = False

    def fail(reason: str) -> None:
        failure.append(reason)
        loop.stop()

    def crash(_: Any, context: dict[str, Any]) -> None:
        # First, so that the broker stops even if reporting fails.
        fail("an internal error; see the lines above")
        error = context.get("exception")
        if error is not None:
            traceback.print_exception(error, file=sys.stderr)
        logger.error("stopping after an internal error", error=repr(error), message=context.get("message"))

    def ready(bound: Bound) -> None:
        nonlocal is_ready
        is_ready = True
        metrics = "" if node.metrics_address is None else f" metrics={format_address(*node.metrics_address)}"
        line = f"penstock node {options.node_id} ready kafka={_shown(bound)} http=off{metrics}"
        print(line, flush=True)  # noqa: T201

    def remark_on_waiting() -> None:
        if is_ready or stopping or node.broker.consensus.leader_id is not None:
            return
        if options.controllers:
            why = "waiting for the cluster: the first time all controllers must be there, later a majority"
        else:
            why = "waiting for the cluster that this data directory belongs to: give --controllers and --internal"
        logger.warning(why, controllers=list(options.controllers))

    loop.set_exception_handler(crash)
    # Imported modules stay. Freezing them saves the garbage collector 10 ms per collection while the loop waits.
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        node = Node(
            environment,
            options,
            config,
            logger,
            on_ready=ready,
            on_failure=fail,
            connections_max=_connections_max(),
            process_figures=_process_figures(environment.clock) if options.metrics is not None else None,
        )
    except OSError as error:
        raise ServeError(f"cannot use the data directory {options.data_dirs[0]}: {error}") from error
    stopping: list[int] = []

    def stop() -> None:
        if stopping:
            # Signalled twice: stop without waiting.
            loop.stop()
            return
        stopping.append(1)
        node.broker.stop(loop.stop)

    def start() -> None:
        # On the running loop: uvloop loses a signal that arrives before it runs.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        try:
            node.start()
        except ServeError as error:
            failure.append(str(error))
            loop.stop()
        loop.call_later(FOUND_WITHIN_S, remark_on_waiting)

    loop.call_soon(start)
    loop.run_forever()
    node.close_listeners()
    if failure:
        # The disk may differ from our state: leave no clean shutdown marker, so that the next start recovers.
        raise ServeError(failure[0])
    try:
        node.close()
    except OSError as error:
        raise ServeError(f"could not stop cleanly, the next start will check the logs: {error}") from error
    return 0


def _shown(bound: Bound) -> str:
    """The addresses of clients for the ready line: only the address if there is one listener, as by default."""
    if not bound:
        return "off"
    if len(bound) == 1 and bound[0][0] == CLIENTS:
        return format_address(*bound[0][1])
    return ",".join(listener.url(address) for listener, address in bound)


def _process_figures(clock: Clock) -> ProcessFigures:
    from penstock.broker.metrics.process_figures import ProcessFigures  # noqa: PLC0415 - not every node has them

    return ProcessFigures(clock)


def _connections_max() -> int | None:
    """Half of the descriptors that the system allows, or all that the logs leave if that is more.

    Without this limit a flood of connections would take the descriptors that the next append or fsync needs.
    """
    import resource  # noqa: PLC0415 - Unix only

    from penstock.machine import OPEN_FILES_MAX, RESERVED_DESCRIPTORS  # noqa: PLC0415 - with the loop

    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return None
    return max(1, allowed // 2, allowed - OPEN_FILES_MAX - RESERVED_DESCRIPTORS)


def _as_settings(options: ServeOptions) -> dict[str, str]:
    """The options by the names of Kafka's settings, for clients that describe the broker."""
    settings = {
        "node.id": str(options.node_id),
        "broker.id": str(options.node_id),
        "log.dirs": ",".join(options.data_dirs),
    }
    if options.listen is not None:
        settings["listeners"] = CLIENTS.url(options.listen)
    if options.controllers:
        settings["controller.quorum.voters"] = ",".join(
            f"{node}@{voter[0]}:{voter[1]}" for node, voter in options.controllers.items()
        )
        settings["process.roles"] = ",".join(options.roles)
    if options.advertise is not None:
        settings["advertised.listeners"] = CLIENTS.url(options.advertise)
    if options.rack is not None:
        settings["broker.rack"] = options.rack
    return settings


def _event_loop() -> Any:
    try:
        import uvloop  # noqa: PLC0415 - optional on some systems

        return uvloop.new_event_loop()
    except ImportError:
        import asyncio  # noqa: PLC0415

        return asyncio.new_event_loop()
