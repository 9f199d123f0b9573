"""Energy that a run took, where the machine counts it.

Linux shows the counters of processors (RAPL) as files, which on most systems root alone can read.
Everything that the machine does is in them. Where none can be read, processor seconds have to do.
"""

import contextlib
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class Energy:
    """Counts from when it was made on. Counters start again at 0, after some minutes at full load
    at the earliest: `read` is to be called more often."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        self._counters = _packages(powercap)
        self._last = {counter: _read(counter) for counter in self._counters}
        self.joules: float | None = 0.0 if self._counters else None
        """Up to the last reading; None where no counter can be read."""

    def read(self) -> None:
        """Adds what was used since the last reading."""
        for counter, limit in self._counters.items():
            used = _read(counter) - self._last[counter]
            self._last[counter] += used
            self.joules = (self.joules or 0.0) + (used if used >= 0 else used + limit)


def _packages(root: Path) -> dict[Path, float]:
    """The counters of whole processors, and the joules at which each starts again. Their parts,
    `intel-rapl:0:1`, are in them."""
    found: dict[Path, float] = {}
    for zone in sorted(root.glob("*-rapl:?")):
        with contextlib.suppress(OSError):
            _read(zone / "energy_uj")
            found[zone / "energy_uj"] = _read(zone / "max_energy_range_uj")
    return found


def _read(counter: Path) -> float:
    return int(counter.read_text()) / 1e6
