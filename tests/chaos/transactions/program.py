"""What the client programs in Python have in common: their arguments, their words, and how they insist.

A program is a process of its own, so that it can be killed and paused. It says on its standard output what it
was promised, a line at a time; what it did not say before it was killed is neither yes nor no:

    ready                 the transactional id is ours: whoever had it before is fenced
    committed NUMBER      the coordinator said yes to the commit of this transaction
    aborted NUMBER        it said yes to the abort, or the commit was never asked for
    unknown NUMBER        the commit was asked for, and the client library does not know what became of it
    fenced WHY            the last line: this producer is of no more use
    hung                  the last line: the library did not come back from a call, long after its time-out

It ends when its standard input does, so that it does not outlive the test.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from tests.chaos.cluster_clients import REQUEST_MS, cluster_settings

# The status of a program that was fenced, or timed out: it is to be started again.
FENCED = 3
# A call that is not answered is repeated for so long: longer than any fault and the recovery from it.
INSISTENCE_S = 240.0
CALL_S = 10.0
# librdkafka's send_offsets_to_transaction may ignore its time-out and never come back when the group's coordinator
# goes away (its issues 5456 and 5511, in 2.16 still open). Whatever brokers do, that is not theirs to mend.
HUNG_S = 20.0


class Fenced(Exception):
    """The producer can do no more."""


class Abort(Exception):
    """The transaction is to be aborted."""


def options(arguments: list[str]) -> dict[str, str]:
    """The words ``name=value`` of the command line."""
    return dict(word.split("=", 1) for word in arguments)


def say(word: str, what: object = "") -> None:
    sys.stdout.write(f"{word} {what}\n".replace(" \n", "\n"))
    sys.stdout.flush()


def end_with_standard_input() -> None:
    def wait() -> None:
        # Not through sys.stdin, whose lock this thread would hold when the program ends.
        while os.read(0, 1024):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def complain(error: object) -> None:
    """For whoever looks into a run that failed."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} again after {error!r}\n")
    sys.stderr.flush()


def run(main: Callable[[dict[str, str]], None]) -> None:
    end_with_standard_input()
    # What it waits for can be asked.
    faulthandler.register(signal.SIGUSR1)
    try:
        main(options(sys.argv[1:]))
    except Fenced as why:
        say("fenced", why)
        # Nothing is to be flushed by a producer that is of no more use.
        os._exit(FENCED)


def producer(given: dict[str, str], **more: Any) -> Producer:
    """A transactional producer whose id is ours now."""
    timeout_ms = int(given["timeout_ms"])
    made = Producer(
        cluster_settings(
            given["bootstrap"],
            transactional_id=given["id"],
            transaction_timeout_ms=timeout_ms,
            message_timeout_ms=timeout_ms,
            request_timeout_ms=min(REQUEST_MS, timeout_ms),
            retry_backoff_ms=20,
            retry_backoff_max_ms=200,
            **more,
        )
    )
    insist(lambda: made.init_transactions(CALL_S))
    say("ready")
    return made


class Watch:
    """Ends the program when a call does not come back."""

    def __init__(self) -> None:
        self.began: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(1)
            now = time.monotonic()
            if now - before > HUNG_S / 4 and self.began is not None:
                # The program itself was paused.
                self.began += now - before
            before = now
            if self.began is not None and now - self.began > HUNG_S:
                faulthandler.dump_traceback()
                say("hung")
                os._exit(FENCED)


@cache
def watch() -> Watch:
    return Watch()


def insist(call: Callable[[], object]) -> None:
    """Make a call that librdkafka allows to be repeated until it is answered. Raises Fenced or Abort."""
    deadline = time.monotonic() + INSISTENCE_S
    while True:
        try:
            watch().began = time.monotonic()
            try:
                call()
            finally:
                watch().began = None
            return
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.fatal():
                raise Fenced(error) from None
            if error.txn_requires_abort():
                raise Abort(error) from None
            if not error.retriable() or time.monotonic() > deadline:
                raise
            complain(error)
        time.sleep(0.02)


class Transaction:
    """One transaction of a producer, from begin to whatever the end is."""

    def __init__(self, made: Producer, number: int) -> None:
        self._producer = made
        self._number = number

    def attempt(self, work: Callable[[], bool]) -> bool:
        """Do the work, which says whether to commit; whether it was committed. Raises Fenced."""
        is_asked = False
        try:
            try:
                insist(self._producer.begin_transaction)
                if not work():
                    raise Abort("as intended")
                is_asked = True
                insist(lambda: self._producer.commit_transaction(CALL_S))
            except Abort:
                insist(lambda: self._producer.abort_transaction(CALL_S))
                say("aborted", self._number)
                return False
            say("committed", self._number)
            return True
        except Fenced:
            say("unknown" if is_asked else "aborted", self._number)
            raise

    def flush(self, timeout_s: float) -> None:
        """Send what was produced, if that goes so fast. Raises Fenced."""
        try:
            self._producer.flush(timeout_s)
        except KafkaException as exception:
            raise Fenced(exception.args[0]) from None

    def produce(self, topic: str, partition: int, value: bytes) -> None:
        """Raises Abort when the transaction has failed already, Fenced when the producer has."""
        while True:
            try:
                self._producer.produce(topic, value, partition=partition)
                return
            except BufferError:
                self._producer.poll(0.05)
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                if error.fatal() or error.code() == KafkaError._FATAL:
                    raise Fenced(error) from None
                # librdkafka says only that this is the wrong moment; what went wrong it told elsewhere.
                raise Abort(error) from None
