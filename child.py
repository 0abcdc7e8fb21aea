"""Processes that the server holds: each starts with a line of JSON, is replaced when it has died, and ends with it.

    Child       the server's hold on one of them
    Life        the process's own end of that

The process reads its options from standard input, and that pipe is also its leash: when the other end closes, because
the server ended or was killed, whoever did it, the process leaves. A `multiprocessing.Process` would not do: gunicorn
forks the API processes, and each would try to join it when it exits.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

STOP_TIMEOUT = 10  # seconds that a process has to leave before it is killed
MAX_FAILURES = 3  # of a new process to start, in a row, before the server gives up


class Child:
    """A process that the server holds. It is launched at once; `wait` until it is ready.

    A session of its own keeps the terminal's Ctrl-C from it: the server drains first, then lets go of the leash.

    Args:
        name: for messages.
        script: path of the file that it runs.
        options: what `Life` finds there; its `folder` is removed when the server has gone.
        environment: variables that it has beside the server's.
    """

    def __init__(self, name: str, script: str, options: dict[str, Any], environment: dict[str, str] | None = None):
        self.name, self.script, self.options = name, os.path.abspath(script), options
        self.environment = os.environ | (environment or {})
        self.facts: dict[str, Any] = {}
        self.failures = 0
        self._launch()

    def fix(self) -> None:
        """Called with new `facts`: a successor's options may have to change for them."""

    def _launch(self) -> None:
        self.begun, self.starting = time.monotonic(), True
        command = [sys.executable, self.script]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=self.environment
        )
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # dead already: what it should print will be missed
            self.process.stdin.write(json.dumps(self.options).encode() + b"\n")
            self.process.stdin.flush()

    def _ready(self) -> bool:
        """Wait for the process's facts; False if it ends without them."""
        assert self.process.stdout
        with self.process.stdout as stdout:
            line = stdout.readline()
        self.starting = False
        if line:
            self.facts = json.loads(line)
            self.fix()
        return bool(line)

    def wait(self) -> None:
        """Wait until it is ready.

        Raises:
            SystemExit: it could not start, and has said why in one line.
        """
        if not self._ready():
            raise SystemExit(self.process.wait() or 1)

    def tend(self) -> None:
        """Replace the process if it has died; never waits, so call it every second or so.

        Raises:
            ChildProcessError: it does not start any more.
        """
        if not self.starting:
            if self.process.poll() is not None:
                self._say(f"has ended (pid {self.process.pid}); another is started")
                self._let_go()
                self._launch()
        elif self.process.stdout and select.select([self.process.stdout], [], [], 0)[0]:
            if self._ready():
                self.failures = 0
                self._say(f"is ready again after {time.monotonic() - self.begun:.1f} s (pid {self.process.pid})")
            else:
                self.failures += 1
                if self.failures == MAX_FAILURES:
                    raise ChildProcessError(f"{self.name} has failed to start {self.failures} times in a row")

    def _say(self, what: str) -> None:
        print(f"{self.name} {what}", file=sys.stderr, flush=True)

    def _let_go(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def forget(self) -> None:
        """In a forked child: let go of the leash, so that it hangs on the parent alone."""
        self._let_go()
        self.process.returncode = 0  # not our child: there is nothing to wait for

    def stop(self) -> None:
        """End the process."""
        self._let_go()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Life:
    """Such a process's own end of it: on the leash from now on.

    Attributes:
        options: that it was started with.
        leave: called when the leash goes, before the process ends.
    """

    def __init__(self) -> None:
        self.options = json.loads(sys.stdin.buffer.readline())
        self.folder = self.options.pop("folder")
        self.leave: Callable[[], None] = lambda: None
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # nothing that a library prints may reach the handshake
        threading.Thread(target=self._hold, daemon=True).start()

    def _hold(self) -> None:
        while os.read(0, 1):  # ends when the last process that holds the other end is gone; unbuffered, because
            pass  # a lock held here would abort the interpreter when it exits
        self.leave()
        self.end(0)

    def ready(self, facts: dict[str, Any]) -> None:
        """Tell the server so."""
        with self.out:
            self.out.write(json.dumps(facts) + "\n")

    def end(self, code: int) -> None:
        """End the process, and its workers, also one that is stopped and cannot see it leave."""
        for worker in multiprocessing.active_children():
            worker.kill()
        if code == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(code)
