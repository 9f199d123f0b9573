"""How far generation may run ahead of training: arithmetic, and the permits that enforce it.

With versions counted in published steps:

    age of a token      = learner version when it is trained on − version that sampled it
    bound               : age <= max_staleness, checked where tokens are consumed
    permits             = (max_staleness + 1) * batch

A rollout holds a permit from the moment its prompt is handed to a worker until the step that
trained it has published. Taken in the order in which they were started, a rollout that starts at
version v has at most (max_staleness + 1) * batch − 1 others before it, so it is trained at version
v + max_staleness at the latest: the learner that waits for the oldest never breaks the bound
(`wait`), and with max_staleness = 0 the run is strictly synchronous.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from engine.config import StalenessConfig


@dataclass(frozen=True)
class Bound:
    """The age bound of a run."""

    max: int
    older: str

    @classmethod
    def of(cls, config: StalenessConfig) -> "Bound":
        return cls(config.max, config.older)

    def permits(self, batch: int) -> int:
        """Rollouts that may be outstanding."""
        return (self.max + 1) * batch

    def usable(self, oldest: int, newest: int, version: int) -> bool:
        """Whether a response with tokens of these versions may be trained on at `version`.

        Under `mask` one fresh token is enough; otherwise all tokens must be fresh."""
        return version - (newest if self.older == "mask" else oldest) <= self.max


# A learner that waited less than this share of a step was not kept waiting: shares move by a few
# per cent from step to step.
WAITED = 0.05
# Of fresh rollouts the effective sample is 1. Below this, what a step trained on is no longer what
# the learner would say, and idle workers cost less than older rollouts would.
DRIFTED = 0.8


class Depth:
    """How many rollouts are really kept outstanding: as few as keep everybody busy.

    Filling up to the bound always would make every token as old as it may be, for nothing where the
    learner is the slowest. So the depth starts at two batches, one in training and one on its way,
    and moves after each step, between one batch and all permits:

        learner waited and rollout workers had free slots     → deeper by a quarter of a batch
        learner did not wait and half a batch was left over   → shallower by an eighth
        half a batch was waiting for a teacher worker         → shallower by an eighth
        the step's effective sample was below DRIFTED         → shallower by a quarter, never deeper

    A busy worker with free slots can still do more: a decoding step takes nearly as long for a few
    responses as for many, and the longest one keeps a whole batch waiting if nothing else runs.
    Where teacher workers are the slowest, more responses would only age in front of them. A learner
    that moves fast, as at a run's beginning, makes rollouts of the same age staler.

    A depth that is given stays.
    """

    def __init__(self, batch: int, permits: int, given: int = 0) -> None:
        self._batch = batch
        self._permits = permits
        self._given = given
        self.value = given or min(2 * batch, permits)

    def observe(
        self, waited: float, free_slots: int, unscored: int, left_over: int, effective: float
    ) -> str:
        """Moves by the share of a step that the learner waited, the rollout workers' free slots and
        the responses that no teacher worker had taken at its end, the scored rows that were left
        when its batch had been taken, and its tokens' effective sample. Returns the decision in
        words, or nothing if all stays."""
        before, enough = self.value, max(1, self._batch // 2)
        if self._given:
            return ""
        kept_waiting = waited > WAITED
        if effective < DRIFTED:
            self.value = max(self._batch, before - max(1, self._batch // 4))
        elif unscored >= enough or (left_over >= enough and not kept_waiting):
            self.value = max(self._batch, before - max(1, self._batch // 8))
        elif kept_waiting and free_slots > 0:
            self.value = min(self._permits, before + max(1, self._batch // 4))
        if self.value == before:
            return ""
        return (
            f"depth {before} → {self.value}: the learner waited {waited:.0%} of the step, "
            f"{free_slots} slots free, {unscored} unscored, {left_over} rows left over, "
            f"effective sample {effective:.2f}"
        )


class Stage(StrEnum):
    """Where an outstanding rollout is."""

    GENERATING = "generating"
    SCORING = "scoring"
    BUFFERED = "buffered"
    TRAINING = "training"


@dataclass(frozen=True)
class Lease:
    """A permit in use."""

    stage: Stage
    owner: str


class Permits:
    """Permits as leases with an owner: free + generating + scoring + buffered + training = total.

    Leases are kept in the order in which rollouts were started. `changed` is called after every
    event; it is how waiting coroutines are woken."""

    def __init__(self, total: int, changed: Callable[[], None] = lambda: None) -> None:
        self.total = total
        self.leases: dict[int, Lease] = {}
        self._changed = changed

    @property
    def free(self) -> int:
        return self.total - len(self.leases)

    def count(self, stage: Stage) -> int:
        return sum(lease.stage is stage for lease in self.leases.values())

    def lease(self, tickets: Iterable[int], owner: str) -> None:
        """Takes one permit for each ticket, for generation by `owner`."""
        tickets = list(tickets)
        if len(tickets) > self.free:
            raise ValueError(f"{len(tickets)} permits asked for, {self.free} free")
        for ticket in tickets:
            if ticket in self.leases:
                raise ValueError(f"ticket {ticket} already holds a permit")
            self.leases[ticket] = Lease(Stage.GENERATING, owner)
        self._changed()

    def move(self, tickets: Iterable[int], stage: Stage, owner: str) -> None:
        """Hands leases on to the next stage."""
        for ticket in tickets:
            if ticket not in self.leases:
                raise ValueError(f"ticket {ticket} holds no permit")
            self.leases[ticket] = Lease(stage, owner)
        self._changed()

    def release(self, tickets: Iterable[int]) -> None:
        """Gives permits back."""
        for ticket in tickets:
            del self.leases[ticket]
        self._changed()

    def held_by(self, owner: str) -> list[int]:
        """Tickets whose permits this owner holds, in the order they were started."""
        return [ticket for ticket, lease in self.leases.items() if lease.owner == owner]
