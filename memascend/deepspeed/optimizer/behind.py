"""Steps of the ZeRO-3 optimizer that go on behind the caller of `step()`.

What a step needs of all ranks, norm and verdict, is known when its first sub-group begins. The rest
is each rank's own, and may go on while the next forward pass computes: a gather waits for its own
parameters, who looks at a single master weight or state for its sub-group, and whoever looks at
anything else waits for all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from memascend.deepspeed.optimizer.steps import Steps
from memascend.streaming.optimizer import OptimizerStream
from memascend.streaming.walk import Place, Step

#: Of all elements, so many at most are in sub-groups that count as small.
SMALL_PART = 0.01
#: What may come between backward and step.
LOADED = "a checkpoint was loaded between backward and step()"


class StepsBehind(Steps):
    """Has the steps of sub-groups go on behind their caller, and waits for them."""

    streams_gradients: bool
    stream: OptimizerStream
    persistent_parameters: list[Any]
    _param_swapper: Any
    # Steps of sub-groups that are to go on behind the caller; None: each is made at once.
    _behind: list[Step] | None = None
    # Numbers of sub-groups, as they are walked.
    _order: Sequence[int] = ()

    @property
    def _overlaps(self) -> bool:
        """Whether steps may go on behind their caller; the same on every rank."""
        wanted = self.attachment.runtime.config.streaming.optimizer.overlap
        return wanted and self.streams_gradients and self._param_swapper is not None

    def finish_walk(self) -> None:
        """Have every value new that the last step makes. Any thread may call.

        Raises:
            StoreError: The step failed; raised once. `integrity` says so from its start on.
        """
        self.attachment.runtime.walk.finish()

    def finish_sub_group(self, name: str) -> None:
        """Have the values of one sub-group new that the last step makes.

        Raises:
            StoreError: The step failed before.
        """
        walk = self.attachment.runtime.walk
        if walk.is_under_way:
            walk.wait_for([name])
        else:
            self.finish_walk()

    def step(self, closure: Any = None) -> None:
        """Step as upstream, once the step before is over."""
        self.attachment.runtime.walk.finish()
        super().step(closure)

    def _post_step(self, timer_names: Any) -> None:
        if not self._behind:
            self.stream.drain()
        # Upstream gathers these now, and would wait for them; a forward pass gathers them, too.
        # Ranks must do alike, and one may not go behind where another does.
        persistent = self.persistent_parameters
        self.persistent_parameters = [] if self._overlaps else persistent
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent
        self._start_walk()

    def _start_walk(self) -> None:
        """Have the steps that are to go on behind the caller begin."""
        steps, self._behind = self._behind, None
        if steps:
            self.integrity.note_change()  # until the last of them, whatever becomes of the first
            in_order = [steps[number] for number in self._order]
            self.attachment.runtime.walk.start(in_order, self._places(), self.stream.drain)

    def _forward_order(self) -> list[int]:
        """Return the numbers of sub-groups in the order in which a forward pass needs them.

        Those of one parameter group are in the order of its parameters. Where norms and biases are
        a group of their own, behind all others, every layer needs a part of it: what is small comes
        first.
        """
        numels = [sum(param.ds_tensor.ds_numel for param in group) for group in self.fp16_groups]
        ascending = sorted(range(len(numels)), key=numels.__getitem__)
        sums = itertools.accumulate(numels[number] for number in ascending)
        small_numel = SMALL_PART * sum(numels)
        small = {number for number, end in zip(ascending, sums, strict=True) if end <= small_numel}
        return sorted(
            ascending,
            key=lambda number: (number not in small, self.fp16_groups[number][0].ds_id),
        )

    def _walk_names(self) -> list[str]:
        """Return the sub-groups in the order of the walk; before the first step none."""
        return [self.fp32_partitioned_groups_flat[number].ds_id for number in self._order]

    def _places(self) -> dict[str, Place]:
        """Return where in a walk each parameter has its new value, and each sub-group all."""
        assert self._param_swapper is not None
        places = {}
        for index, number in enumerate(self._order):
            places[self.fp32_partitioned_groups_flat[number].ds_id] = (index + 1, 0)
            end = 0
            for param in self.fp16_groups[number]:
                end += param.ds_tensor.ds_numel
                places[self._param_swapper.key(param)] = (index, end)
        return places

    def _rigid_state_dict(self) -> Any:
        self.finish_walk()
        return super()._rigid_state_dict()

    def _restore_from_bit16_weights(self) -> None:
        self.finish_walk()
        self.forget_early(LOADED)
        super()._restore_from_bit16_weights()
