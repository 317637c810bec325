"""One optimizer step: its phase, and the values that belong to it alone.

Knows names of sub-groups; neither tensors nor the drive. A step begins when the one before is over
and collects gradients until `step()` decides how it is made. The walk over sub-groups may then run
in the background; no gradient arrives before it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from memascend.errors import TornStepError
from memascend.streaming.background import QueuedStep
from memascend.streaming.optimizer.sub_group_step import FusedUpdate

#: The inputs of a sub-group's step besides tensors, by name.
Basis = Mapping[str, Any]
#: First elements of tiles, by sub-group.
Begins = Mapping[str, frozenset[int]]


class StepPhase(Enum):
    """The phase of a step; `_FOLLOWING` has the transitions.

    A walk is over when its caller has waited for it. A phase of WALKING after that counts as TORN,
    since Ctrl-C may end a walk at any line; so does UPDATING once the call that decides is over.
    """

    COLLECTING = auto()  #: Gradients arrive; all values belong to the last step.
    #: Gradients of matrices become updates, and their momentum moves on: neither can be done again.
    UPDATING = auto()
    SKIPPED = auto()  #: DeepSpeed does not make it: the norm is not finite. No weight has changed.
    #: Updates, order and early tiles are chosen; no value has changed. Not after UPDATING.
    DECIDED = auto()
    WALKING = auto()  #: Some values may be new and others old.
    DONE = auto()  #: Every value is new.
    TORN = auto()  #: A walk ended half-way, or a load has begun to replace values.


_FOLLOWING: Mapping[StepPhase, frozenset[StepPhase]] = {
    # To WALKING if whole sub-groups are stepped: there is nothing to decide.
    StepPhase.COLLECTING: frozenset(
        {
            StepPhase.UPDATING,
            StepPhase.SKIPPED,
            StepPhase.DECIDED,
            StepPhase.WALKING,
            StepPhase.TORN,
        }
    ),
    # To COLLECTING after a load, as from TORN.
    StepPhase.UPDATING: frozenset(
        {StepPhase.SKIPPED, StepPhase.WALKING, StepPhase.TORN, StepPhase.COLLECTING}
    ),
    StepPhase.SKIPPED: frozenset({StepPhase.TORN}),
    StepPhase.DECIDED: frozenset({StepPhase.WALKING, StepPhase.TORN}),
    StepPhase.WALKING: frozenset({StepPhase.DONE, StepPhase.TORN, StepPhase.COLLECTING}),
    StepPhase.DONE: frozenset({StepPhase.TORN}),
    # Every value was replaced by a load; the gradients that have arrived are kept.
    StepPhase.TORN: frozenset({StepPhase.COLLECTING}),
}


class Step:
    """One optimizer step. Its caller changes it, and during the walk the thread that walks."""

    def __init__(self, order: Sequence[str] = ()) -> None:
        """Begin to collect gradients.

        Args:
            order: Names of sub-groups in the order in which they will probably be stepped.
        """
        self._phase = StepPhase.COLLECTING
        self._due_count = 0  # sub-groups that are still to be stepped
        #: Inputs of each sub-group's step when the first gradient arrived; empty before.
        self.basis: Sequence[Basis] = ()
        #: Why no tile can have been stepped during backward; empty if there is no reason.
        self.doubt = ""
        #: Gradients that are final: sub-group, and offset in it.
        self.arrived: set[tuple[str, int]] = set()
        #: Names of sub-groups in the order in which they are stepped.
        self.order = order
        #: Fused update of each sub-group, by number; None: the optimizer steps it by itself.
        self.updates: Sequence[FusedUpdate | None] = ()
        #: Tiles whose new values lie beside the old ones already.
        self.early: Begins = {}
        #: Multiplied into gradients first: a number, or a tensor of one element.
        self.factor: Any = 1.0
        #: Whether sub-groups are stepped after `step()` has returned.
        self.in_background = False
        #: Steps of sub-groups for the background, by name.
        self.queue: dict[str, QueuedStep] = {}
        self._is_called = False  # the call that makes it has begun and not returned

    @property
    def phase(self) -> StepPhase:
        """The phase of the step."""
        return self._phase

    @property
    def is_mixed(self) -> bool:
        """Whether some values are new and others old: in a walk, and for good in a torn step."""
        return self._phase in (StepPhase.UPDATING, StepPhase.WALKING, StepPhase.TORN)

    @property
    def is_over(self) -> bool:
        """Whether the step is made or skipped: gradients that arrive are the next one's."""
        return self._phase in (StepPhase.DONE, StepPhase.SKIPPED)

    @property
    def was_cut(self) -> bool:
        """Whether it is made or skipped, and Ctrl-C ended the call: its caller does not know.

        The caller may call again. No backward pass came since.
        """
        return self._is_called and self.is_over

    def call(self) -> None:
        """Note that the call begins that makes this step.

        Raises:
            TornStepError: As `check`.
        """
        self.check()
        self._is_called = True

    def end_call(self) -> Step:
        """Note that the call has returned; return the step that comes next."""
        self.note_pass()
        return self.following()

    def note_pass(self) -> None:
        """Note that the next call makes another step than the last one: gradients came between."""
        self._is_called = False

    def check(self) -> None:
        """Refuse to continue with values of two steps.

        Raises:
            TornStepError: An error or an interrupt ended a walk, or a load, half-way.
        """
        if self.is_mixed:
            raise TornStepError(
                "the last optimizer step or load ended half-way, so some weights have new values "
                "and others old ones. cause: the error that was raised then. fix: load a "
                "checkpoint with its optimizer states"
            )

    def decide(self, order: Sequence[str], early: Begins | None = None) -> None:
        """Fix the order of all sub-groups, and the tiles that are not stepped again.

        Raises:
            TornStepError: As `check`.
        """
        if self._phase is StepPhase.UPDATING:  # momentum has moved on
            self._enter(StepPhase.WALKING)
        else:
            self.check()
            self._enter(StepPhase.DECIDED)
        self.order, self.early = order, early or {}
        self._due_count = len(order)

    def skip(self) -> None:
        """Note that there is no such step: the norm is not finite. Its gradients are dropped."""
        self._enter(StepPhase.SKIPPED)

    def note_updates(self) -> None:
        """Note that a gradient is about to become an update, and its momentum to move on.

        Raises:
            TornStepError: As `check`.
        """
        self.check()
        self._enter(StepPhase.UPDATING)

    def note_change(self) -> None:
        """Note that a value is about to be new while others are old."""
        if self._phase is not StepPhase.WALKING:
            self._enter(StepPhase.WALKING)

    def note_stepped(self) -> None:
        """Note that a sub-group has all its new values."""
        self._due_count -= 1
        if self._due_count == 0:
            self._enter(StepPhase.DONE)

    def note_failure(self) -> None:
        """Note that an error ends the walk; without effect if no value has changed."""
        if self._phase in (StepPhase.UPDATING, StepPhase.WALKING, StepPhase.DONE):
            self._enter(StepPhase.TORN)

    def end(self, drain: Callable[[], object]) -> None:
        """Wait for the writes of the last tiles; one that fails tears the step.

        Raises:
            StoreError: A write failed.
        """
        try:
            drain()
        except BaseException:
            self.note_failure()
            raise

    def note_load(self) -> None:
        """Note that a load is about to replace values."""
        if self._phase is not StepPhase.TORN:
            self._enter(StepPhase.TORN)

    def mend(self) -> None:
        """Note that all values belong to one step again; no effect if they did."""
        if self.is_mixed:
            self._enter(StepPhase.COLLECTING)

    def drop_collected(self) -> None:
        """Drop the record of gradients that have arrived."""
        self.basis, self.doubt = (), ""
        self.arrived.clear()

    def following(self) -> Step:
        """Return the step that comes next: this one if it is torn, still walks, or was cut."""
        if self.is_mixed or self.was_cut:
            self.drop_collected()
            return self
        return Step(self.order)

    def _enter(self, phase: StepPhase) -> None:
        if phase not in _FOLLOWING[self._phase]:
            raise AssertionError(f"a step that is {self._phase.name} cannot be {phase.name}")
        self._phase = phase
