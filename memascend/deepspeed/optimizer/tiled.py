"""Steps of the ZeRO-3 optimizer in tiles: no whole sub-group is ever in memory.

All of a sub-group's step happens in the optimizer step, tile by tile. The calls before it only
record values, and those after it do nothing.

A step may run in the background: it continues after `step()` has returned. The gradient norm and
the overflow verdict, which need all ranks, are known before the first sub-group is stepped. The
rest is local to each rank and may overlap the next forward pass. A gather waits for its own
parameters; reading one master weight or state waits for its sub-group; every other access waits for
the end of the walk.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from deepspeed import comm as dist

from memascend.base.units import format_nbytes
from memascend.deepspeed.attach.attachment import Attachment
from memascend.deepspeed.optimizer.ahead import (
    AfterBackward,
    AheadOfStep,
    WorkAhead,
    check_gradients,
)
from memascend.deepspeed.optimizer.ahead_choice import work_ahead
from memascend.deepspeed.optimizer.beta_powers import BetaPowers
from memascend.deepspeed.optimizer.fused_adam import FusedAdam, OwnSteps
from memascend.deepspeed.optimizer.fused_muon import FusedMuon, fused_steps
from memascend.deepspeed.optimizer.locked import locked, with_lock
from memascend.deepspeed.optimizer.master_weights import MasterWeights, low_bits
from memascend.deepspeed.optimizer.muon import MuonUpdates, uses_muon
from memascend.deepspeed.optimizer.swapper import StreamedSwapper
from memascend.deepspeed.optimizer.tile_shape import tile_shape
from memascend.deepspeed.optimizer.upstream import LOADED, Original, ReadBytes, Upstream
from memascend.deepspeed.optimizer.values import TiledValues
from memascend.deepspeed.optimizer.walk_order import forward_order, points_of
from memascend.deepspeed.plan.optimizers import initial_state
from memascend.plan.optimizer_dtypes import fewer_bits, inexactness
from memascend.plan.optimizers import MOMENTUM
from memascend.runtime import Runtime
from memascend.streaming.gradients.accumulation import Factor
from memascend.streaming.gradients.bypass import DriveBypass
from memascend.streaming.optimizer.step import Step, StepPhase
from memascend.streaming.optimizer.stream import OptimizerStream
from memascend.streaming.optimizer.sub_group_step import FusedUpdate, SubGroupStep
from memascend.streaming.optimizer.sub_groups import SubGroups

log = logging.getLogger(__name__)


class TiledSteps:
    """Sub-groups in the store, stepped by an OptimizerStream."""

    is_tiled = True

    def __init__(
        self,
        upstream: Upstream,
        attach: Callable[[], Attachment],
        *,
        streams_gradients: bool,
        communicated: torch.dtype | None = None,
    ) -> None:
        """Start without a step; `configure` makes the rest.

        Args:
            upstream: The optimizer.
            attach: Returns the model's attachment, once DeepSpeed has formed sub-groups.
            streams_gradients: Whether gradients are in the gradient stream before they are final.
            communicated: Dtype in which gradients would be reduced without memascend; None: in
                which they are.
        """
        self._upstream, self._attach = upstream, attach
        self._communicated = communicated
        self._streams_gradients = streams_gradients
        self.early_tile_count = 0
        self.asked_dtype = "fp32"
        self.momentum_dtype: torch.dtype | None = None  # of Muon's matrices
        #: The step that collects gradients, or the last one until the next gradient arrives.
        self.current = Step()
        self.values = TiledValues(upstream, attach, self)
        self._fused: FusedAdam | FusedMuon | OwnSteps = OwnSteps()
        # Work ahead of the coming step: tiles are stepped during backward, or only read.
        self._ahead: AheadOfStep = WorkAhead()
        self._masters: MasterWeights | None = None
        self._muon: MuonUpdates | None = None  # of matrices, if it is DeepSpeed's Muon

    @property
    def runtime(self) -> Runtime:
        """The model's runtime."""
        return self._attach().runtime

    @property
    def masters(self) -> MasterWeights:
        """The master weights, after `configure`."""
        assert self._masters is not None
        return self._masters

    @property
    def _stream(self) -> OptimizerStream:
        return self.runtime.optimizer

    @property
    def _groups(self) -> SubGroups:
        return self._stream.groups

    # -- construction ----------------------------------------------------------------------------

    def configure(self, offload_config: Any, aio_config: Any) -> None:
        """Make the tiles, and the swapper that DeepSpeed asks."""
        upstream, runtime = self._upstream, self.runtime
        section = runtime.config.streaming.optimizer
        self.asked_dtype, fewer = section.state_dtype, fewer_bits(runtime.config)
        shape = tile_shape(upstream, runtime, streams_gradients=self._streams_gradients)
        stream = runtime.open_optimizer(shape)
        tiles = stream.tiles
        if upstream.uses_muon:
            self._muon = MuonUpdates(upstream, runtime, self._communicated)
            self.momentum_dtype = self._muon.momentum_dtype
        if tiles.shape.count == 1 and dist.get_rank() == 0:
            log.warning(
                "memascend: %s is not known to work element by element, so a sub-group is stepped "
                "whole; that takes %s of host memory. A smaller sub_group_size lowers it",
                type(upstream.base).__name__,
                format_nbytes(tiles.nbytes),
            )
        self._fused = fused_steps(
            upstream.base,
            tiles.shape,
            dist.get_rank() if fewer else 0,
            is_wanted=section.fused,
            fewer=fewer,
            largest_numel=max(upstream.numels),
        )
        if fewer and dist.get_rank() == 0:
            log.warning("memascend: %s", inexactness(runtime.config))
        self._ahead = work_ahead(
            upstream,
            runtime,
            self._fused,
            streams_gradients=self._streams_gradients,
            overlaps=self._may_overlap,
            turn_off=self._turn_off,
            after_backward=self._after_backward(),
        )
        self._masters = MasterWeights(
            upstream,
            stream.groups,
            low_bits=functools.partial(low_bits, section, self._fused),
            at_rest=self._at_rest,
        )
        upstream.state_swapper = StreamedSwapper(
            groups=stream.groups, gradient_stream=runtime.gradients, lock=runtime.lock
        )

    def _after_backward(self) -> WorkAhead:
        return self._muon or AfterBackward(self._stream)

    def _turn_off(self) -> None:
        """Step no tile during backward from now on."""
        self._ahead = self._after_backward()

    def create_masters(self, original: Original) -> None:
        """Make master weights as DeepSpeed, sub-group by sub-group, without its buffers."""
        self.masters.create_all(original)

    @locked
    def create_master(self, number: int, original: Original) -> None:
        """Create the master weights of a sub-group from its parameters."""
        self.masters.create(number)

    def initialize_states(self, original: Original) -> None:
        """Allocate nothing: gradients and moments begin as zeros, which need not be stored."""
        base = self._upstream.base
        if isinstance(base, torch.optim.Adagrad):
            # As upstream: Adagrad creates its states when constructed, here without elements.
            self._upstream.remake_base(torch.optim.Adagrad(self._upstream.masters, **base.defaults))

    def end_setup(self) -> None:
        """Wait for the writes of master weights."""
        self._stream.drain()

    @locked
    def discard(self, swapper: Any) -> None:
        """Free the memory and the drive space of all sub-groups."""
        self._ahead.discard()
        self._stream.drop_prefetched()
        self.masters.discard()
        self._ahead = WorkAhead()

    # -- the step --------------------------------------------------------------------------------

    def step(self, original: Original) -> None:
        """Step as DeepSpeed, after the previous step has finished; take or discard early steps.

        DeepSpeed skips a step whose norm is not finite: none of the calls below is made.

        Raises:
            TornStepError: The last step ended half-way; load a checkpoint first.
            GradientGoneError: The inputs differ from those of the early steps, which have consumed
                their gradients. Nothing has changed.
        """
        try:
            self.runtime.background.finish()
            if not self.current.was_cut:  # else it is over, and is not made again
                self._coming().call()
                original()
            if self.current.phase in (StepPhase.COLLECTING, StepPhase.UPDATING):
                self.current.skip()
        finally:
            self.restart()
        self.current = self.current.end_call()

    def _coming(self) -> Step:
        """Return the step that gradients arrive for; the one after the last, once that is over."""
        if self.current.is_over:
            self.current = self.current.end_call()
        return self.current

    def restart(self) -> None:
        """Begin another step, without gradients; a step in the background keeps its phase."""
        self.runtime.on_device.abandon()
        with_lock(self.runtime, self._restart)

    def _restart(self) -> None:
        self._ahead.restart()
        self.current = self.current.following()

    @locked
    def update_matrices(self, original: Original) -> None:
        """Replace the gradients of Muon's matrices by their updates, before the norm."""
        if self._muon is not None:
            step = self._coming()
            step.factor = 1.0 / self._upstream.coming_loss_scale()  # if nothing is clipped
            early, reason = self._ahead.take_results(step)  # before states are as they will be
            for number in range(len(self._upstream.params)):
                self._make_state(number)
            self._muon.begin(step, early, reason)
            self.early_tile_count += sum(map(len, early.values()))
            self._muon.update_all()

    def prepare(self, number: int, original: Original) -> None:
        """Do nothing: a sub-group is read tile by tile, when it is stepped."""

    @locked
    def _decide(self, factor: Factor) -> None:
        """Decide how all sub-groups are stepped, given the factor of their gradients."""
        step, numbers = self._coming(), range(len(self._upstream.params))
        step.factor = factor
        ahead = self._muon or self._ahead  # early steps of both were taken before updates
        early, reason = ahead.take_results(step)  # first: early steps use the tiles
        # If writing a gradient failed, raise before any weight changes.
        self.runtime.staging.wait_writes()
        # The walk reads ahead across sub-groups, so all states must exist before it.
        for number in numbers:
            self._make_state(number)
        step.updates = self._fused_updates()
        step.in_background = self._may_go_behind(step)
        if None in step.updates and self._muon is None:
            early, reason = {}, reason or "the optimizer has to make this step by itself"
        check_gradients(self._upstream, self.runtime, early, reason)
        self.masters.make_whole(step.updates, early)
        self._ahead.note_decided(step, reason)
        if self._muon is None:  # else updates may have been applied, and early tiles are counted
            self.early_tile_count += sum(map(len, early.values()))
        order = forward_order(self._upstream) if step.in_background else numbers
        step.decide([*map(self._upstream.names.__getitem__, order)], early)
        self._stream.start(step)

    def _make_state(self, number: int) -> None:
        """Before a sub-group's first step, add the states that the optimizer would create."""
        base, master = self._upstream.base, self._upstream.masters[number]
        if self._groups.group(master.ds_id).states and base.state.get(master):
            return  # else an error may have come between the states
        if (known := initial_state(base, self._upstream.hyperparameters(number))) is None:
            return
        scalars, fills = known
        shape = self._stream.tiles.shape
        for name, fill in fills.items():
            dtype = shape.moments.get(name, shape.state_dtype)
            if name == MOMENTUM and self.momentum_dtype is not None:
                dtype = self.momentum_dtype
            self._groups.add_state(master.ds_id, name, dtype, fill)
            scalars[name] = torch.empty(0, dtype=dtype)
        base.state[master] = scalars

    def _fused_updates(self) -> list[FusedUpdate | None]:
        """Return the fused update of each sub-group; None: the optimizer must step by itself."""
        upstream, groups, states = self._upstream, self._groups, self._upstream.base.state
        inputs = [
            (upstream.hyperparameters(number), states.get(one, {}), groups.group(one.ds_id).states)
            for number, one in enumerate(upstream.masters)
        ]
        return self._fused.updates(inputs)

    def _may_go_behind(self, step: Step) -> bool:
        """Return whether a step may run in the background on this rank.

        A background step may touch only the store and its tiles: not the optimizer's
        hyperparameters, staging slots or the device.
        """
        if None in step.updates or self.runtime.gradients.needs_slots(
            self._upstream.accumulation_dtype
        ):
            return False
        return self._may_overlap()

    @property
    def _overlaps(self) -> bool:
        """Whether steps may run in the background; the same on every rank."""
        wanted = self.runtime.config.streaming.optimizer.overlap and self._streams_gradients
        return wanted and self._upstream.parameter_swapper is not None

    def _may_overlap(self) -> bool:
        """Return whether a fused step may run in the background: no parameter is on a device."""
        if not self._overlaps or self.runtime.store is None:
            return False
        numbers = range(len(self._upstream.params))
        members = (member for number in numbers for member in self._upstream.members(number))
        return all(one.tensor is None or one.tensor.device.type == "cpu" for one in members)

    def unscale(self, number: int, total_norm: torch.Tensor, original: Original) -> None:
        """Before the first sub-group, decide how all are stepped, with the same factor."""
        if number == 0:
            self._decide(self._upstream.gradient_factor(total_norm))

    @locked
    def step_sub_group(self, number: int, original: Original) -> None:
        """Step a sub-group, or queue its step for the background."""
        master = self._upstream.masters[number]
        current = self.current
        fused = current.updates[number]
        step = SubGroupStep(
            name=master.ds_id,
            parameter=master,
            states=self._upstream.base.state,
            update=original,
            factor=current.factor,
            members=self._upstream.members(number),
            fused=fused,
        )
        if fused is not None and (not self._muon or uses_muon(self._upstream.params[number])):
            # Steps nothing, without gradients; schedulers count it. Muon's Adam would step zeros.
            original()
        if current.in_background:
            current.queue[step.name] = functools.partial(self._stream.step, step)
        else:
            self._stream.step(step)

    def update_parameters(self, number: int, original: Original) -> None:
        """Let the parameters of a sub-group in memory point to their new values."""
        if self._upstream.flats[number] is not None:
            self._upstream.unflatten(number)

    def release(self, original: Original) -> None:
        """Do nothing: no sub-group is in memory."""

    def end(self, original: Original) -> None:
        """Start the background steps, then end as DeepSpeed: it drops norms of a step not made."""
        if not self.current.in_background:
            self.current.end(self._stream.drain)
        self._start_walk()
        if self._overlaps:
            # DeepSpeed would gather these now and wait for the walk; the next forward pass does so
            # anyway. A gather is a collective, and `_overlaps` is the same on all ranks.
            with self._upstream.gathering_nothing():
                original()
        else:
            original()

    def _start_walk(self) -> None:
        """Start the background steps, if there are any."""
        current = self.current
        if current.in_background:
            current.note_change()  # torn until the last one, even if the first one fails
            steps = [current.queue[name] for name in current.order]
            end = functools.partial(current.end, self._stream.drain)
            self.runtime.background.start(steps, points_of(self._upstream, current.order), end)
            current.queue.clear()

    def finish(self) -> None:
        """Wait until the last step has written every value; stop early steps and wait for them.

        Raises:
            StoreError: The step failed; raised once. The step is torn from its start on.
        """
        self.runtime.background.finish()
        with_lock(self.runtime, self._ahead.close)

    def _at_rest(self, action: Callable[[], object]) -> None:
        """Call when neither a step nor a tile is under way."""
        self.finish()
        with_lock(self.runtime, functools.partial(self._call_at_rest, action))

    def _call_at_rest(self, action: Callable[[], object]) -> None:
        self._stream.drain()
        if self.current.is_mixed:
            self._groups.begin_load()  # only that mends it: there is nothing to keep
        action()

    # -- gradients -------------------------------------------------------------------------------

    def bypass_of(self, name: str, offset: int, *, replaces: bool) -> DriveBypass | None:
        """Return tile memory for a gradient of the coming step; None: write it to the drive."""
        step = self._coming()
        if (name, offset) in step.arrived and replaces:
            self._restart()  # this backward pass replaces the previous one
            step = self.current
        return self._ahead.bypass_of(step, name, offset)

    def update_early(self, param: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the update that takes the place of a final gradient of a matrix; None: none."""
        return None if self._muon is None else self._muon.make_early(param, gradient)

    def note_final(self, name: str, offset: int) -> None:
        """Note that a gradient is final; step tiles that are complete, or read tiles ahead."""
        self._ahead.note_final(self._coming(), name, offset)

    @locked
    def drop_ahead(self, reason: str) -> None:
        """Discard early steps and tiles read ahead: one of their inputs is about to change."""
        self._ahead.drop(self.current, reason)

    @locked
    def note_look(self) -> None:
        """Note that the script reads a gradient: an early step would have consumed it."""
        self._ahead.note_look()

    # -- checkpoints -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Write everything to the store: tiles in flight, and states that are still one fill value.

        Raises:
            TornStepError: The last step or load ended half-way.
        """
        self.finish()
        self.current.check()
        with_lock(self.runtime, self._groups.settle)

    def stored(self, name: str) -> Iterator[tuple[str | None, torch.dtype, ReadBytes]]:
        """Yield (state, dtype, read) of a sub-group's stored tensors; weights (None) come first."""
        groups = self._groups
        yield None, groups.master_dtype, functools.partial(groups.stream, name, None)
        for state, dtype in groups.group(name).read_dtypes.items():
            if self._muon is not None and state == MOMENTUM:
                read = functools.partial(self._muon.stream_momentum, name)
                yield state, groups.master_dtype, read
            else:
                yield state, dtype, functools.partial(groups.stream, name, state)

    def begin_load(self) -> None:
        """Prepare to replace all values; earlier errors are ignored."""
        with suppress(Exception):
            self.finish()
        self.runtime.on_device.abandon()
        with suppress(Exception):
            self.drop_ahead(LOADED)
            self._stream.drain()
        self.current.note_load()
        self._groups.begin_load()

    def discard_states(self) -> None:
        """Drop every state; master weights stay."""
        self._groups.discard_states()

    def load_tensor(self, tensor: Any) -> None:
        """Load a LoadedTensor: a state, or master weights and parameters, none of them staged."""
        self.current.note_load()
        number, state, fill = tensor.sub_group, tensor.state, tensor.reader.fill
        master = self._upstream.masters[number]
        if state is None:
            self._stream.load_weights(master.ds_id, self._upstream.members(number), fill)
            return
        self._groups.load(master.ds_id, state=state, dtype=tensor.dtype, source=fill)
        stored = self._groups.group(master.ds_id).states[state]
        self._upstream.base.state[master][state] = torch.empty(0, dtype=stored)

    @property
    def powers(self) -> BetaPowers | None:
        """Running powers of Adam's betas; None if they are unknown."""
        return self._fused.powers

    def refresh(self, original: Original) -> None:
        """Let parameters in memory point to their new values, after a load has written all."""
        self.finish()
        self._stream.drain()
        for number in range(len(self._upstream.masters)):
            self._upstream.update_parameters(number)

    def mend(self) -> None:
        """Note that all values belong to one step again."""
        self.current.mend()
