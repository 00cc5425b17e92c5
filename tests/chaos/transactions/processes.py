"""The client programs as processes that a test can kill, pause and supplant, one slot for each transactional id.

A slot has one current process, which is started again when it ends as one that was fenced does, and zombies: older
processes that were supplanted while they were paused, or in the midst of their work, and must not take effect any
more. What a process says goes to the ledger of its kind, also what it says as a zombie.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests import java
from tests.chaos.ledger import Ledger
from tests.chaos.transactions.bank import Identity, Outcomes
from tests.chaos.transactions.program import FENCED
from tests.support import TAIL_CHARACTERS

SOURCE = Path(__file__).parent / "java" / "ChaosTransactions.java"
# Of those that speak transactions v2.
CLIENTS = f"org.apache.kafka:kafka-clients:{java.CLIENTS_VERSIONS[0]}"
BESIDES = ("com.fasterxml.jackson.core:jackson-databind:2.18.2", "org.slf4j:slf4j-nop:1.7.36")
JVM = ("-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
END_S = 30.0


def python_program(name: str) -> list[str]:
    return [sys.executable, "-m", f"tests.chaos.transactions.{name}"]


def java_program() -> list[str]:
    """Both programs in one: the arguments tell which. Skips the test where there is no Java."""
    class_path = java.classpath(CLIENTS, *BESIDES)
    classes = java.compiled(SOURCE, class_path)
    return ["java", *JVM, "-cp", f"{classes}{os.pathsep}{class_path}", "ChaosTransactions"]


class Program:
    """One process, and the thread that listens to it."""

    def __init__(self, command: Sequence[str], errors: Path, heard: Callable[[str], None]) -> None:
        self._errors = errors
        self._heard = heard
        with errors.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        self.is_paused = False
        self.lines = 0
        self.last_words = ""
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # A process that was killed may have been in the midst of a line.
            if line.endswith(b"\n"):
                self.last_words = line.decode(errors="replace").strip()
                self._heard(self.last_words)
                self.lines += 1

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self.is_paused = False

    def kill(self) -> None:
        """Also one that is paused. Afterwards all it said has been heard."""
        self._signal(signal.SIGKILL)
        self.reap()

    def ask(self) -> None:
        """Let a program in Python write where it is to its standard error."""
        self._signal(signal.SIGUSR1)

    def reap(self) -> int:
        status = self._process.wait(END_S)
        self._listener.join(END_S)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        return status

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")[-TAIL_CHARACTERS:]

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.kill(self._process.pid, number)


@dataclass
class Slot:
    """One transactional id and its processes."""

    client: int
    command: Sequence[str]
    arguments: dict[str, str]
    outcomes: Outcomes
    ledger: Ledger
    scratch: Path
    choose: random.Random
    instance: int = 0
    current: Program | None = None
    zombies: list[Program] = field(default_factory=list)
    is_resting: bool = False
    fences: int = 0
    hung: int = 0
    began: int = 0

    @property
    def transactional_id(self) -> str:
        return f"client-{self.client}"

    def start(self) -> None:
        self.instance += 1
        instance = self.instance
        given = {
            **self.arguments,
            "id": self.transactional_id,
            "client": str(self.client),
            "instance": str(instance),
            "seed": str(self.choose.randrange(2**31)),
        }
        words = [f"{name}={value}" for name, value in given.items()]
        errors = self.scratch / f"{self.transactional_id}-{instance}.err"
        self.current = Program([*self.command, *words], errors, lambda line: self._heard(instance, line))

    def _heard(self, instance: int, line: str) -> None:
        word, _, what = line.partition(" ")
        if word == "ready":
            self.began += 1
        elif word == "fenced":
            self.fences += 1
        elif word == "hung":
            self.hung += 1
        else:
            self.outcomes.said(Identity(self.client, instance, int(what)), word)

    def supplant(self) -> Program | None:
        """Start another process with the same id while the former is still there; the former."""
        former = self.current
        if former is not None:
            self.zombies.append(former)
        self.start()
        return former

    def kill(self) -> None:
        if self.current is not None:
            killed, self.current = self.current, None
            killed.kill()

    def kill_all(self) -> None:
        self.kill()
        while self.zombies:
            self.zombies.pop().kill()

    def look_after(self) -> None:
        """Start again what was fenced; whatever ended in another way is a broken promise."""
        for zombie in list(self.zombies):
            if zombie.status is not None:
                self.zombies.remove(zombie)
                self._judge(zombie)
        if self.current is not None and self.current.status is not None:
            self._judge(self.current)
            self.current = None
            self.start()

    def _judge(self, ended: Program) -> None:
        status = ended.reap()
        if status != FENCED:
            self.ledger.violated(
                f"{self.transactional_id} ended with status {status} after {ended.last_words!r}: {ended.errors()}"
            )


class Clients:
    """All slots, and a thread that looks after them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = list(slots)
        # Held by whoever changes processes.
        self.lock = threading.RLock()
        self._stopping = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Clients:
        for slot in self.slots:
            slot.start()
        self._keeper.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._show()
        self.stop()

    def _show(self) -> None:
        """What each is about, when the test has failed."""
        for slot in self.slots:
            if slot.current is not None:
                if "java" not in slot.command[0]:
                    slot.current.ask()
                    time.sleep(0.2)
                sys.stderr.write(
                    f"\n--- {slot.transactional_id}, instance {slot.instance}, said last:"
                    f" {slot.current.last_words!r}\n{slot.current.errors()}\n"
                )

    def stop(self) -> None:
        """Kill them all: what they were in the midst of is for the coordinator to end."""
        self._stopping.set()
        if self._keeper.is_alive():
            self._keeper.join(END_S)
        for slot in self.slots:
            slot.kill_all()

    def stop_some(self, slots: Sequence[Slot]) -> None:
        with self.lock:
            for slot in slots:
                slot.is_resting = True
                slot.kill_all()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            with self.lock:
                for slot in self.slots:
                    if not slot.is_resting:
                        slot.look_after()
            time.sleep(0.1)
