"""Background steps of the ZeRO-3 optimizer: they continue after `step()` has returned.

The gradient norm and the overflow verdict, which need all ranks, are known before the first
sub-group is stepped. The rest is local to each rank and may overlap the next forward pass. A gather
waits for its own parameters; reading one master weight or state waits for its sub-group; every
other access waits for the end of the walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from memascend.deepspeed.optimizer.steps import Steps
from memascend.streaming.background import Place, Step
from memascend.streaming.optimizer.stream import OptimizerStream

#: Sub-groups that count as small hold at most this fraction of all elements.
SMALL_PART = 0.01
#: Reason for `forget_early`.
LOADED = "a checkpoint was loaded between backward and step()"


class StepsBehind(Steps):
    """Runs the steps of sub-groups in the background, and waits for them where needed."""

    streams_gradients: bool
    stream: OptimizerStream
    persistent_parameters: list[Any]
    _param_swapper: Any
    # Sub-group steps to run in the background; None: step each at once.
    _behind: list[Step] | None = None
    # Sub-group numbers in the order of the walk.
    _order: Sequence[int] = ()

    @property
    def _overlaps(self) -> bool:
        """Whether steps may run in the background; the same on every rank."""
        wanted = self.attachment.runtime.config.streaming.optimizer.overlap
        return wanted and self.streams_gradients and self._param_swapper is not None

    def finish_walk(self) -> None:
        """Wait until the last step has written every value. Any thread may call.

        Raises:
            StoreError: The step failed; raised once. `integrity` is torn from its start on.
        """
        self.attachment.runtime.background.finish()

    def finish_sub_group(self, name: str) -> None:
        """Wait until the last step has written the values of one sub-group.

        Raises:
            StoreError: The step failed before that.
        """
        walk = self.attachment.runtime.background
        if walk.is_under_way:
            walk.wait_for([name])
        else:
            self.finish_walk()

    def step(self, closure: Any = None) -> None:
        """Step as upstream, after the previous step has finished."""
        self.attachment.runtime.background.finish()
        super().step(closure)

    def _post_step(self, timer_names: Any) -> None:
        if not self._behind:
            self.stream.drain()
        # Upstream would gather these now and wait for the walk; the next forward pass gathers them
        # anyway. The condition is `_overlaps`, equal on all ranks, since a gather is a collective,
        # while `_behind` may differ between ranks.
        persistent = self.persistent_parameters
        self.persistent_parameters = [] if self._overlaps else persistent
        try:
            super()._post_step(timer_names)
        finally:
            self.persistent_parameters = persistent
        self._start_walk()

    def _start_walk(self) -> None:
        """Start the background steps, if there are any."""
        steps, self._behind = self._behind, None
        if steps:
            self.integrity.note_change()  # torn until the last one, even if the first one fails
            in_order = [steps[number] for number in self._order]
            self.attachment.runtime.background.start(in_order, self._places(), self.stream.drain)

    def _forward_order(self) -> list[int]:
        """Return the sub-group numbers in the order in which a forward pass needs them.

        Small sub-groups come first, then all others by their first parameter. Norms and biases are
        often a parameter group of their own, after the others, and every layer needs a part of it.
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
        """Return sub-group names in the order of the walk; empty before the first step."""
        return [self.fp32_partitioned_groups_flat[number].ds_id for number in self._order]

    def _places(self) -> dict[str, Place]:
        """Return the place in the walk at which each parameter and each sub-group is written."""
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
