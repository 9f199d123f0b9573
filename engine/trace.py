"""What every worker did, when: spans and counters of a run.

    busy      generate, score, train     work that the run exists for
    syncing   swap, publish              weights on their way
    waiting   wait for <what>            nothing to do, and what would end it

What is left of a worker's time is transport: calls and objects between processes. The driver
writes spans down as it sees them; each is placed at the end of the call that it was a part of. The
file is in Chrome's trace format, to be opened at ui.perfetto.dev or chrome://tracing. It grows with
every step, so a run that died has one too; the format allows for the missing end.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY = ("generate", "score", "train")
SYNCING = ("swap", "publish")
WAITING = "wait for "
# Spans that are kept in memory, for the picture of the last minutes.
KEPT = 20_000


def now() -> float:
    """Seconds of the event loop's clock, which may be a virtual one, or of the process's."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


@dataclass(frozen=True)
class Span:
    """A worker's time from `start` to `end`, in seconds of `now`."""

    worker: str
    kind: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace:
    """The spans of a run, in memory and in a file if a path is given."""

    def __init__(self, path: Path | None = None, kept: int | None = KEPT) -> None:
        """Of the spans in memory, so many of the last are kept, or all."""
        self.spans: deque[Span] = deque(maxlen=kept)
        self._path = path
        self._start = now()
        self._new: list[Span] = []
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}
        if path:
            path.write_text("[\n")

    def span(self, worker: str, kind: str, start: float, end: float, **details: Any) -> None:
        """Writes down what a worker did; `details` go into the file."""
        span = Span(worker, kind, start, end)
        self.spans.append(span)
        self._new.append(span)
        self._event(
            "X", kind, start, tid=self._row(worker), dur=_micros(span.seconds), args=details
        )

    def call(self, worker: str, kind: str, busy: float, **details: Any) -> None:
        """A span of so many seconds that ends now."""
        end = now()
        self.span(worker, kind, end - busy, end, **details)

    def mark(self, what: str) -> None:
        """A decision, at this moment."""
        self._event("i", what, now(), s="g")

    def counters(self, values: Mapping[str, float]) -> None:
        """Sizes of queues, at this moment."""
        for name, value in values.items():
            self._event("C", name, now(), args={"value": value})

    def take(self) -> list[Span]:
        """Spans since the last call; the file then has all of them."""
        if self._path and self._events:
            with self._path.open("a") as file:
                file.writelines(json.dumps(event) + ",\n" for event in self._events)
        self._events.clear()
        spans, self._new = self._new, []
        return spans

    def _row(self, worker: str) -> int:
        if worker not in self._rows:
            self._rows[worker] = len(self._rows)
            named = {"tid": self._rows[worker], "args": {"name": worker}}
            self._event("M", "thread_name", self._start, **named)
        return self._rows[worker]

    def _event(self, phase: str, name: str, at: float, **rest: Any) -> None:
        if self._path:
            head = {"ph": phase, "name": name, "ts": _micros(at - self._start), "pid": 0}
            self._events.append(head | rest)


def shares(spans: Iterable[Span], roles: dict[str, int], wall: float) -> dict[str, float]:
    """Of each role, that has so many workers, the shares of `wall` seconds that its workers were
    busy, syncing and waiting: metrics `busy/…`, `sync/…` and `wait/…`. A worker is called by its
    role, or by its role, a hyphen and a number."""
    kinds = [(what, role) for what in ("busy", "sync", "wait") for role in roles]
    totals = {f"{what}/{role}": 0.0 for what, role in kinds if (what, role) != ("sync", "teacher")}
    for span in spans:
        role = span.worker.partition("-")[0]
        totals[f"{_what(span.kind)}/{role}"] += span.seconds / wall / roles[role]
    return totals


def _what(kind: str) -> str:
    if kind.startswith(WAITING):
        return "wait"
    return "busy" if kind in BUSY else "sync"


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 1)
