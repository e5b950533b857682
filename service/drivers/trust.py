"""Which own variants a GPU's worker may use: receives outcomes of self-tests, hands on who is admitted and who isn't.

Self-tests run in a process of their own, beside the service (kernels/probe.py); what is known already joins at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kernels import probe
from kernels.runtime import Runtime


class Trust:
    """Of one GPU's runtime. `changed` is called, on any thread, when an outcome is known."""

    def __init__(self, runtime: Runtime, changed: Callable[[], None]) -> None:
        self._runtime = runtime
        self._changed = changed
        self._outcomes: dict[str, probe.Outcome] = {}

    def begin(self, index: int) -> None:
        """Start the self-tests of GPU `index`; returns when what is known has joined."""
        begun = threading.Event()

        def admit() -> None:
            try:
                probe.admit(self._runtime, index, on_outcome=self.note, on_known=begun.set)
            finally:
                begun.set()

        threading.Thread(target=admit, name="probe", daemon=True).start()
        begun.wait()

    def note(self, outcome: probe.Outcome) -> None:
        """A self-test has ended."""
        self._outcomes[outcome.variant] = outcome
        self._changed()

    @property
    def quarantined(self) -> dict[str, str]:
        """Variants that may not run, each with its kind of reason (service.metrics.QUARANTINES)."""
        return {name: self._kind(name, because) for name, because in self._runtime.barred.items()}

    def _kind(self, name: str, because: str) -> str:
        outcome = self._outcomes.get(name)
        if outcome is not None:
            return str(outcome.ended)
        return "untested" if because == probe.WAITING else "wrong"

    def variants(self) -> list[dict[str, Any]]:
        """All variants with their state, for people."""
        barred = self._runtime.barred
        return [
            {
                "name": each.name,
                "step": each.step,
                "state": "barred" if each.name in barred else "admitted",
                "detail": barred.get(each.name, self._detail(each.name)),
            }
            for each in (*self._runtime.variants, *self._runtime.grouped)
        ]

    def _detail(self, name: str) -> str:
        outcome = self._outcomes.get(name)
        return f"self-test: {outcome.ended}" if outcome is not None else "the reference"
