"""Scored rollouts that wait for the learner: references and metadata, never the tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.schema import RolloutMeta
from engine.staleness import Bound


@dataclass(frozen=True)
class Row:
    """One scored rollout: where its batch is, and what the driver knows of it."""

    batch: Any
    """Handle of the SCORED batch that holds the row; opaque here."""
    meta: RolloutMeta
    since: float = 0.0
    """When it was scored, in seconds of `engine.trace.now`."""


class Buffer:
    """Scored rollouts, taken oldest first."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        self._rows |= {row.meta.ticket: row for row in rows}

    def rows(self) -> list[Row]:
        """All rows, oldest first: by the version of the first token, then in stream order."""
        return sorted(
            self._rows.values(), key=lambda row: (row.meta.oldest_version, row.meta.ticket)
        )

    def evict(self, version: int) -> list[Row]:
        """Removes and returns the rows that may not be trained on at `version` any more."""
        usable = self._bound.usable
        stale = [
            row
            for row in self._rows.values()
            if not usable(row.meta.oldest_version, row.meta.newest_version, version)
        ]
        for row in stale:
            del self._rows[row.meta.ticket]
        return stale

    def take(self, size: int, started: Iterable[int]) -> list[Row] | None:
        """The next batch of `size` rows, or None while it is not complete.

        `started` are the outstanding tickets in the order they were started. Under `wait` the batch
        is exactly the first of them, whoever else is ready; otherwise the oldest that are here."""
        if self._bound.older == "wait":
            first = [ticket for ticket, _ in zip(started, range(size), strict=False)]
            if len(first) < size or any(ticket not in self._rows for ticket in first):
                return None
        elif len(self._rows) < size:
            return None
        else:
            first = [row.meta.ticket for row in self.rows()[:size]]
        return [self._rows.pop(ticket) for ticket in first]
