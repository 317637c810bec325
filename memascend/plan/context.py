"""Device memory, host memory and traffic for a number of tokens, in six ways to train.

Saved activations stay on the device, go to pinned host memory (transformers' checkpointing with
`offload`), or go to the drive (the section `activations`). With checkpointing they are one hidden
state per layer, without it everything in the table of layers.py.

Peak device memory is the lasting memory plus the largest temporary of three moments: the loss, the
reduction of the largest gradient, and the backward pass of a layer. One pass in slices
(`micro_batches`) has its logits and its recomputed layer for one slice only, but tensors as large
as a hidden state of the whole batch, and sums of gradients. Checkpoints, the reduce bucket
and drive bytes are exact; the rest are estimates, named as such. Defaults and temporaries are those
of DeepSpeed 0.19.8: runtime/zero/config.py, stage3.py and partitioned_param_coordinator.

Pure arithmetic; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from memascend.base.components import WAITING_GRADIENTS
from memascend.base.device_memory import RELEASED_COUNT_MIN, released_bytes_max
from memascend.base.sizes import IN_FLIGHT_COUNT
from memascend.base.units import GIB, power_of_two_up
from memascend.config.block import ActivationConfig, MicroBatchConfig
from memascend.config.deepspeed import DeepSpeedSettings, ZeroOptimization
from memascend.errors import ConfigError
from memascend.plan.derive import Plan
from memascend.plan.footprint import Footprint
from memascend.plan.layers import (
    FP32_BYTES,
    FUSED_LOSS_TENSORS,
    LOGITS_BYTES,
    LayerBytes,
    Widths,
    layer_bytes,
)
from memascend.plan.shapes import ModelShapes, TensorShape
from memascend.plan.stock import StockPlan

#: CUDA's context, workspaces of libraries, and fragmentation of the allocator.
DEVICE_RESERVE_BYTES = 3 * GIB // 2
#: Python, torch and the device's libraries.
HOST_RESERVE_BYTES = 3 * GIB
#: Stock computes a gradient's norm in fp64, on pieces of this many elements
#: (_constant_buffered_norm2).
NORM_NUMEL, FP64_BYTES = 250_000_000, 8

# Components of device memory.
GATHERED = "parameters gathered (estimate)"
RELEASED = "parameters let go, kernels queued"
BUCKET = "reduce bucket"
CHECKPOINTS = "checkpoints, one for each layer"
SAVED = "saved activations (estimate)"
KEPT = "activations kept (device_bytes)"
FLIGHT = "activations in flight"
RESERVE = "driver, libraries, fragments (estimate)"
# Temporaries, each at its own moment.
LOSS = "at the loss (estimate)"
HEAD = "at the largest gradient (estimate)"
LAYER = "in backward of a layer (estimate)"
#: The stream's name, in traffic and on the drive.
ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: which activations are saved, and where."""

    title: str
    _: KW_ONLY
    place: str  # "device", "host" or "drive"
    has_memascend: bool = False  # whether memascend runs; else stock DeepSpeed
    has_checkpoints: bool = False  # whether a layer saves its input alone, and is recomputed


STOCK_ALL = Way("stock, all activations on the device", place="device")
STOCK_CHECKPOINTS = Way("stock, checkpoints on the device", place="device", has_checkpoints=True)
STOCK_ON_HOST = Way("stock, checkpoints on the host", place="host", has_checkpoints=True)
OURS_ON_DEVICE = Way(
    "memascend, checkpoints on the device", place="device", has_memascend=True, has_checkpoints=True
)
#: The section `activations`, with gradient checkpointing and without.
OURS_CHECKPOINTS = Way(
    "memascend, checkpoints on the drive", place="drive", has_memascend=True, has_checkpoints=True
)
OURS_ALL = Way("memascend, all activations on the drive", place="drive", has_memascend=True)
STOCK_WAYS = (STOCK_ALL, STOCK_CHECKPOINTS, STOCK_ON_HOST)
WAYS = (*STOCK_WAYS, OURS_ON_DEVICE, OURS_CHECKPOINTS, OURS_ALL)


#: Tensors of the whole batch that a layer in slices has in backward beside its input, which is the
#: checkpoint: the gradients of input and output.
LAYER_TENSORS = 2
#: Those behind the layers: the inputs of the last norm and of the head, and a gradient.
BEHIND_TENSORS = 3
#: Saved for the whole batch beside a checkpoint for each layer: inputs of the last norm and head.
TAIL_TENSORS = 2

_ZERO = ZeroOptimization()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """The keys of the DeepSpeed JSON that device memory depends on, with DeepSpeed's defaults."""

    bucket_numel: int = _ZERO.reduce_bucket_size
    has_bucket: bool = _ZERO.contiguous_gradients  # whether the bucket has memory of its own
    prefetch_numel: int = _ZERO.stage3_prefetch_bucket_size
    live_numel: int = _ZERO.stage3_max_live_parameters  # bounds only prefetching

    @classmethod
    def from_deepspeed(cls, settings: DeepSpeedSettings, *, hidden: int) -> DeviceSettings:
        """Read a DeepSpeed JSON; "auto" becomes Hugging Face Trainer's value for `hidden`."""
        zero, squared = settings.zero_optimization, hidden * hidden
        auto = zero.left_to_trainer
        prefetches_auto = "stage3_prefetch_bucket_size" in auto
        return cls(
            bucket_numel=squared if "reduce_bucket_size" in auto else zero.reduce_bucket_size,
            has_bucket=zero.contiguous_gradients,
            prefetch_numel=(
                int(0.9 * squared) if prefetches_auto else zero.stage3_prefetch_bucket_size
            ),
            live_numel=zero.stage3_max_live_parameters,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """Bytes of one rank, for one way to train and one number of tokens."""

    way: Way
    tokens: int  # tokens of one micro-step: context times batch
    slice_tokens: int  # tokens that a layer computes at once: `tokens` without slices
    device: Mapping[str, int]  # lasting device memory, by component
    moments: Mapping[str, int]  # temporary device memory, by moment
    host_bytes: int  # peak host memory, HOST_RESERVE_BYTES included
    host_activation_bytes: int  # host memory of saved activations
    drive_bytes: int  # saved activations on the drive: written and read once in each micro-step

    @property
    def device_bytes(self) -> int:
        """Peak device memory."""
        return sum(self.device.values()) + max(self.moments.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All settings except the number of tokens."""

    shapes: ModelShapes  # shapes of the model, from a config.json
    stock: StockPlan  # its account with stock DeepSpeed
    ours: Plan  # its plan with memascend, slots of activations included
    device: DeviceSettings  # settings that device memory depends on
    activations: ActivationConfig  # the section `activations` of the block
    micro_batches: MicroBatchConfig | None = None  # its section `micro_batches`
    has_fused_loss: bool = False  # whether logits are computed in chunks, and not saved
    has_tiled_mlp: bool = False  # whether MLPs process their tokens in tiles
    rounds_pinned: bool = True  # whether pinned memory is rounded up to a power of two, as by torch

    @property
    def stated_slices(self) -> MicroBatchConfig | None:
        """The section `micro_batches`, if it states the number of slices."""
        section = self.micro_batches
        return None if section is None or section.is_auto else section

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a parameter, of a hidden state, and of a reduced gradient."""
        return self.ours.request.param_itemsize

    def plan(
        self, way: Way, tokens: int, *, slice_tokens: int | None = None, device_bytes: int = 0
    ) -> ContextPlan:
        """Compute the bytes for the tokens of one micro-step on this rank: context times batch.

        With fewer `slice_tokens` than `tokens` a layer computes the micro-step in slices of so many
        tokens at most: `memascend.micro_batches`, which needs checkpointing. A share of
        `device_bytes`, the device's total memory, bounds released parameters.
        """
        if slice_tokens is None or slice_tokens >= tokens:
            slice_tokens = tokens
        elif not (way.has_memascend and way.has_checkpoints):
            raise ValueError(f"{way.title}: slices need memascend and checkpointing")
        widths = widths_of(self.shapes)
        layer = layer_bytes(widths, self.itemsize, has_tiled_mlp=self.has_tiled_mlp)
        saved, drive_bytes = self._saved(way, tokens, slice_tokens, widths, layer)
        activations_bytes = 0
        if way.place == "host":
            pinned = layer.hidden * tokens
            pinned = power_of_two_up(pinned) if self.rounds_pinned else pinned
            activations_bytes = widths.layers * pinned
        at_step_bytes = self.stock.step_bytes + activations_bytes
        stock_bytes = max(self.stock.initialization_bytes, at_step_bytes)
        return ContextPlan(
            way=way,
            tokens=tokens,
            slice_tokens=slice_tokens,
            device={
                GATHERED: self._gathered_numel() * self.itemsize,
                **(self._ours(device_bytes) if way.has_memascend else {}),
                BUCKET: self.device.bucket_numel * self.itemsize if self.device.has_bucket else 0,
                **saved,
                RESERVE: DEVICE_RESERVE_BYTES,
            },
            moments=self._moments(way, tokens, slice_tokens, widths, layer),
            host_bytes=(
                (self.ours.host_bytes if way.has_memascend else stock_bytes) + HOST_RESERVE_BYTES
            ),
            host_activation_bytes=activations_bytes,
            drive_bytes=drive_bytes,
        )

    # -- saved activations -------------------------------------------------------------------------

    def _saved(
        self, way: Way, tokens: int, slice_tokens: int, widths: Widths, layer: LayerBytes
    ) -> tuple[dict[str, int], int]:
        """Return (saved activations on the device by component, bytes on the drive).

        The drive also gets the activations that the last norm and the loss save; in slices they
        save their inputs alone.
        """
        of_layer = layer.hidden if way.has_checkpoints else layer.saved
        in_layers = tokens * widths.layers * of_layer
        largest = tokens * (layer.hidden if way.has_checkpoints else layer.largest)
        if way.place == "host":
            return {FLIGHT: min(IN_FLIGHT_COUNT * largest, in_layers)}, 0
        if not self._is_stored(way, largest):
            return {CHECKPOINTS if way.has_checkpoints else SAVED: in_layers}, 0
        kept = min(self.activations.device_bytes, in_layers)
        behind = TAIL_TENSORS * layer.hidden
        if slice_tokens == tokens:
            largest = max(largest, tokens * layer.final_norm_largest)
            behind = layer.final_norm
        if not self.has_fused_loss and self._head_tokens(tokens, slice_tokens) == tokens:
            behind += FP32_BYTES * widths.vocabulary
        drive_bytes = max(0, in_layers + tokens * behind - self.activations.device_bytes)
        on_device = {KEPT: kept} if kept else {}
        return {**on_device, FLIGHT: min(IN_FLIGHT_COUNT * largest, in_layers - kept)}, drive_bytes

    def _is_stored(self, way: Way, nbytes: int) -> bool:
        """Return whether saved activations of so many bytes go to the drive."""
        return way.place == "drive" and nbytes >= self.activations.min_bytes

    # -- parameters and gradients ------------------------------------------------------------------

    def _gathered_numel(self) -> int:
        """Return the most elements that are gathered at once.

        Between forward and backward these are the parameters that are used again within
        stage3_max_reuse_distance, which counts both passes: half of it. Elsewhere it is a layer or
        a single large tensor. Prefetched parameters are added.
        """
        largest = max(tensor.numel for tensor in self.shapes.tensors)
        layer = max(sum(tensor.numel for tensor in layer) for layer in self.shapes.layers())
        in_use = max(self.ours.request.reuse_numel // 2, layer, largest)
        ahead = min(self.device.prefetch_numel, max(0, self.device.live_numel - in_use))
        return min(self.shapes.numel, in_use + ahead)

    def _ours(self, device_bytes: int) -> dict[str, int]:
        """Return the device memory that memascend takes beside stock's, by component."""
        # Not a moment: torch keeps the memory for the stream on which gradients are reduced.
        return {
            RELEASED: self._released_bytes(device_bytes),
            WAITING_GRADIENTS: self.ours.gradient_room_bytes,
        }

    def _released_bytes(self, device_bytes: int) -> int:
        """Return the most bytes of released parameters that wait for kernels (memascend only)."""
        always = RELEASED_COUNT_MIN * _largest_in_layers(self.shapes.tensors) * self.itemsize
        return min(max(released_bytes_max(device_bytes), always), self.shapes.numel * self.itemsize)

    def _gradient_bytes(self, way: Way, numel: int) -> int:
        """Return device bytes beside the bucket while the largest gradient, of `numel`, is reduced.

        A gradient that fits goes into the bucket, and the full bucket is copied once to be
        scattered; a larger one is reduced in place. Stock then also has its partition on the device
        as read back from host memory, once more in fp32, and a piece of it in fp64.
        """
        fits = numel <= self.device.bucket_numel
        learning = sum(tensor.numel for tensor in self.shapes.trainable)
        reduced = min(self.device.bucket_numel, learning) if fits else numel
        nbytes = (numel + reduced * fits) * self.itemsize
        if way.has_memascend:
            return nbytes
        world = self.ours.request.world
        piece = min(-(-numel // world), NORM_NUMEL)
        return nbytes + -(-reduced // world) * (self.itemsize + FP32_BYTES) + piece * FP64_BYTES

    # -- temporaries -------------------------------------------------------------------------------

    def _moments(
        self, way: Way, tokens: int, slice_tokens: int, widths: Widths, layer: LayerBytes
    ) -> dict[str, int]:
        logits = FUSED_LOSS_TENSORS * layer.hidden
        if not self.has_fused_loss:
            logits = LOGITS_BYTES * widths.vocabulary
        # Without recomputation the layer's saved activations are counted in _saved() already.
        backward = layer.backward if way.has_checkpoints else layer.gradients
        tile = min(slice_tokens, widths.hidden) * layer.tile  # as DeepSpeed's examples divide them
        learning = self.shapes.trainable
        largest = max((tensor.numel for tensor in learning), default=0)
        found = {
            LOSS: self._head_tokens(tokens, slice_tokens) * logits
            + slice_tokens * layer.final_norm,
            HEAD: self._gradient_bytes(way, largest),
            LAYER: slice_tokens * backward
            + tile
            + self._gradient_bytes(way, _largest_in_layers(learning)),
        }
        if slice_tokens == tokens:
            return found
        # Until the last slice is done the layer has its sums; a slice's gradients are added to them
        # one by one.
        # The input of the layer that is computed again is back from the drive.
        counts = {LOSS: BEHIND_TENSORS, HEAD: BEHIND_TENSORS, LAYER: LAYER_TENSORS}
        counts[LAYER] += self._is_stored(way, tokens * layer.hidden)
        sum_itemsize = self.ours.request.gradient_itemsize
        outside = [tensor.numel for tensor in learning if not _is_in_layer(tensor)]
        in_layer = max(
            sum(one.numel for one in tensors if one.trainable) for tensors in self._layers()
        )
        sums = {LOSS: max(outside, default=0), HEAD: largest, LAYER: in_layer}
        return {
            moment: nbytes + tokens * counts[moment] * layer.hidden + sums[moment] * sum_itemsize
            for moment, nbytes in found.items()
        }

    def _head_tokens(self, tokens: int, slice_tokens: int) -> int:
        """Return the tokens whose loss is computed at once, fused or with logits."""
        section = self.micro_batches
        return slice_tokens if section is None or section.head else tokens

    def _layers(self) -> list[list[TensorShape]]:
        """Return the parameters of each layer; the whole model if it has no numbered layers."""
        layers = [layer for layer in self.shapes.layers() if _is_in_layer(layer[0])]
        return layers or [list(self.shapes.tensors)]


def _is_in_layer(tensor: TensorShape) -> bool:
    return bool(re.search(r"\.\d+\.", tensor.name))


def _largest_in_layers(tensors: Sequence[TensorShape]) -> int:
    return max((tensor.numel for tensor in tensors if _is_in_layer(tensor)), default=0)


def widths_of(shapes: ModelShapes) -> Widths:
    """Return the widths of a model; raise ConfigError if only shapes of parameters are known."""
    if shapes.config is None:
        raise ConfigError(
            f"{shapes.name}: the memory of a context cannot be derived from shapes of parameters. "
            "Give the model's config.json, or a folder that holds it"
        )
    return Widths.from_config(shapes.config)


def with_activations(footprint: Footprint, nbytes: int, micro_steps: int) -> Footprint:
    """Return an account with the traffic of activations added: `nbytes` in each micro-step."""
    moved = nbytes * micro_steps
    return dataclasses.replace(
        footprint,
        drive={**footprint.drive, ACTIVATIONS: nbytes},
        read_bytes={**footprint.read_bytes, ACTIVATIONS: moved},
        written_bytes={**footprint.written_bytes, ACTIVATIONS: moved},
        passes_read_bytes=footprint.passes_read_bytes + moved,
        passes_written_bytes=footprint.passes_written_bytes + moved,
    )
