"""Steps of whole sub-groups, in DeepSpeed's own swapper with our store and memory, or in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.optimizer.beta_powers import BetaPowers, powers_of
from memascend.deepspeed.optimizer.muon import uses_muon
from memascend.deepspeed.optimizer.upstream import Original, ReadBytes, Upstream
from memascend.deepspeed.optimizer.values import WholeValues
from memascend.deepspeed.stock.optimizer_swapper import (
    PipelinedSwapper,
    SequentialSwapper,
    buffers_needed,
)
from memascend.errors import TornStepError
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.streaming.optimizer.step import Step


class WholeSteps:
    """Whole sub-groups; nothing is done ahead, and every step is over when it returns."""

    is_tiled = False
    asked_dtype = "fp32"
    momentum_dtype: torch.dtype | None = None
    early_tile_count = 0

    def __init__(self, upstream: Upstream, attach: Callable[[], Attachment]) -> None:
        """Start without a step.

        Args:
            upstream: The optimizer.
            attach: Returns the model's attachment, once DeepSpeed has formed sub-groups.
        """
        self._upstream, self._attach = upstream, attach
        #: The step that collects gradients, or that was the last one if it is torn.
        self.current = Step()
        self.values = WholeValues(upstream, attach, self)
        self.powers: BetaPowers | None = None  # running ones of Adam's betas, if it is Adam

    # -- construction ----------------------------------------------------------------------------

    def configure(self, offload_config: Any, aio_config: Any) -> None:
        """Make DeepSpeed's own swapper over our store, with the buffers that it needs."""
        upstream, attachment = self._upstream, self._attach()
        self.powers = powers_of(upstream.base)
        pipelined = offload_config.pipeline
        needed = buffers_needed(upstream.base, pipelined=pipelined)
        if offload_config.buffer_count < needed:
            offload_config = offload_config.model_copy(update={"buffer_count": needed})
        swapper_class = PipelinedSwapper if pipelined else SequentialSwapper
        folder = attachment.staging_folder(str(offload_config.nvme_path))
        with attachment.serving_aio("optimizer buffers"):
            upstream.state_swapper = swapper_class(
                swap_config=offload_config,
                aio_config=aio_config,
                base_folder=folder,
                optimizer=upstream.base,
                largest_numel=max(upstream.numels),
                device=upstream.device,
                dtype=upstream.master_dtype,
                timers=upstream.timers,
            )
        if attachment.runtime.store is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def create_masters(self, original: Original) -> None:
        """Make master weights as DeepSpeed.

        Not in the arena: temporaries would keep its memory taken, and stock too leaves master
        weights in pageable memory.
        """
        with self._attach().host_buffers(None):
            original()

    def create_master(self, number: int, original: Original) -> None:
        """Make the master weights of a sub-group as DeepSpeed."""
        original()

    def initialize_states(self, original: Original) -> None:
        """Initialize as DeepSpeed; gradients that stay in host memory are put in the arena."""
        component = None if self._upstream.states_on_drive else "gradients"
        with self._attach().host_buffers(component):
            original()

    def end_setup(self) -> None:
        """Do nothing: DeepSpeed's swapper has waited."""

    # -- a step ----------------------------------------------------------------------------------

    def step(self, original: Original) -> None:
        """Step as DeepSpeed; all values then belong to the same step.

        Raises:
            TornStepError: The last step ended half-way; load a checkpoint first.
        """
        self.current.check()
        try:
            original()
        except BaseException:
            self.current.note_failure()
            raise
        self.current = Step()

    def update_matrices(self, original: Original) -> None:
        """Make the updates of Muon's matrices as DeepSpeed; an error in between tears the step."""
        if any(map(uses_muon, self._upstream.params)):
            self.current.note_updates()
        original()

    def prepare(self, number: int, original: Original) -> None:
        """Begin with a sub-group as DeepSpeed."""
        original()

    def unscale(self, number: int, total_norm: torch.Tensor, original: Original) -> None:
        """Unscale as DeepSpeed, and note the factor for gradients that outlive the step."""
        original()
        upstream = self._upstream
        if upstream.is_swapped(number):
            factor = upstream.gradient_factor(total_norm)
            upstream.state_swapper.note_gradient_factor(upstream.masters[number], factor)

    def step_sub_group(self, number: int, original: Original) -> None:
        """Step a sub-group as DeepSpeed."""
        self.current.note_change()
        original()
        if self.powers is not None and not uses_muon(self._upstream.params[number]):
            step = self._upstream.base.state[self._upstream.masters[number]]["step"]
            self.powers.advance(int(step), self._upstream.hyperparameters(number)["betas"])

    def update_parameters(self, number: int, original: Original) -> None:
        """Write the new values as DeepSpeed."""
        original()

    def release(self, original: Original) -> None:
        """End with a sub-group as DeepSpeed."""
        original()

    def end(self, original: Original) -> None:
        """End the loop as DeepSpeed."""
        original()

    def finish(self) -> None:
        """Do nothing: no step runs in the background."""

    # -- gradients -------------------------------------------------------------------------------

    def bypass_of(self, name: str, offset: int, *, replaces: bool) -> DriveBypass | None:
        """Return None: there are no tiles."""
        return None

    def note_final(self, name: str, offset: int) -> None:
        """Do nothing: nothing is done ahead."""

    def update_early(self, param: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return None: updates are made of whole sub-groups."""
        return None

    def drop_ahead(self, reason: str) -> None:
        """Do nothing, likewise."""

    def restart(self) -> None:
        """Do nothing, likewise."""

    # -- checkpoints -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Check that all values may be saved; between steps they are already in the store.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        self.current.check()

    def stored(self, name: str) -> Iterator[tuple[str | None, torch.dtype, ReadBytes]]:
        """Yield (state, dtype, read) of a sub-group's stored tensors; weights (None) come first."""
        swapper = self._upstream.state_swapper
        swap_info = swapper.swap_params_info.get(name)
        if swap_info is None:
            return  # in memory
        numel = self._upstream.numels[self._upstream.names.index(name)]
        nbytes = numel * swapper.dtype.itemsize
        stream = self._attach().runtime.staging.stream
        for number, context in enumerate(swap_info.tensors):
            # The first one is the master weights; the names of the others begin with the state.
            owner = str(context.compute_tensor.ds_id)
            state = owner.removesuffix(f"-{name}") if number > 0 else None
            yield state, swapper.dtype, partial(stream, key=context.swap_path, nbytes=nbytes)

    def begin_load(self) -> None:
        """Prepare to replace all values.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        if self.current.is_mixed:
            raise TornStepError(
                "cannot load a checkpoint after half an optimizer step: without "
                "streaming.optimizer DeepSpeed's buffers of that step are not freed. fix: restart "
                "the program and load the checkpoint first"
            )
        self.current.note_load()

    def discard_states(self) -> None:
        """Drop every state; master weights stay."""
        store = self._attach().runtime.io
        for swap_info in self._upstream.state_swapper.swap_params_info.values():
            for context in swap_info.tensors[1:]:
                store.discard(key=context.swap_path)
            del swap_info.tensors[1:]
            swap_info.has_state_tensors = False

    def load_tensor(self, tensor: Any) -> None:
        """Load a LoadedTensor: the master weights of a sub-group, or one of its states."""
        upstream = self._upstream
        master = upstream.masters[tensor.sub_group]
        states = upstream.base.state[master]
        if not upstream.is_swapped(tensor.sub_group):
            value = torch.empty(upstream.numels[tensor.sub_group], dtype=tensor.dtype)
            tensor.reader.fill(0, value.view(torch.uint8))
            if tensor.state is None:
                master.data.copy_(value)
            else:
                states[tensor.state] = value.to(master.device)
            return
        swapper = upstream.state_swapper
        swap_info = swapper.swap_params_info[master.ds_id]
        if tensor.state is not None:
            value = states[tensor.state] = torch.empty(0, dtype=tensor.dtype)
            value.ds_id = f"{tensor.state}-{master.ds_id}"  # type: ignore[attr-defined]
            swap_info.add_state_tensors([value])
        key = swap_info.tensors[-1 if tensor.state is not None else 0].swap_path
        nbytes = swapper._io_aligned_numel(swap_info.numel()) * tensor.dtype.itemsize
        runtime = self._attach().runtime
        runtime.io.reserve(key=key, nbytes=nbytes)
        runtime.staging.fill(key=key, nbytes=nbytes, source=tensor.reader.fill)

    def refresh(self, original: Original) -> None:
        """Write the values of the master weights to the parameters as DeepSpeed."""
        original()

    def mend(self) -> None:
        """Note that all values belong to one step again."""
        self.current.mend()

    def discard(self, swapper: Any) -> None:
        """Free the memory and the drive space of all sub-groups."""
        store = self._attach().runtime.store
        if store is None:
            return
        swapper.swap_buffer_manager.all_buffers = []
        for swap_info in swapper.swap_params_info.values():
            for key in (*swap_info.get_swap_paths(), *swap_info.get_swap_gradient_paths()):
                store.discard(key=key)
