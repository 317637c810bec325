"""Device memory, host memory and traffic for a number of tokens, in five ways to train.

What forward saves for backward may stay on the device, go to pinned host memory (transformers'
checkpointing with `offload`), or go to the drive (the section `activations`). With checkpointing it
is one hidden state for each layer, without it everything in the table of layers.py.

Device memory is what lasts, and the largest of what comes on top at three moments: in the loss,
when the largest gradient is reduced, and in the backward pass of a layer. Checkpoints, the reduce
bucket and drive bytes are exact; the rest are estimates, named as such. Defaults and temporaries
are those of DeepSpeed 0.19.8: runtime/zero/config.py, stage3.py and partitioned_param_coordinator.

Pure arithmetic; neither torch nor DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memascend.base.device_memory import RELEASED_COUNT_MIN, released_bytes_max
from memascend.base.sizes import IN_FLIGHT_COUNT
from memascend.base.units import GIB, power_of_two_up
from memascend.config.block import ActivationConfig
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

#: CUDA's context, libraries' workspaces, and what the allocator cannot use.
DEVICE_RESERVE_BYTES = 3 * GIB // 2
#: Python, torch and the device's libraries.
HOST_RESERVE_BYTES = 3 * GIB
#: Stock squares a gradient's norm in fp64, so many elements at once (_constant_buffered_norm2).
NORM_NUMEL, FP64_BYTES = 250_000_000, 8

# Components of device memory.
GATHERED = "parameters gathered (estimate)"
RELEASED = "parameters let go, still computed with"
BUCKET = "reduce bucket"
CHECKPOINTS = "checkpoints, one for each layer"
SAVED = "all that layers save (estimate)"
KEPT = "activations.device_bytes"
FLIGHT = "activations on their way"
RESERVE = "driver, libraries, fragments (estimate)"
# What comes on top, at one moment each.
LOSS = "at the loss (estimate)"
HEAD = "at the largest gradient (estimate)"
LAYER = "in backward of a layer (estimate)"
#: Of the traffic, and on the drive.
ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to train: what is saved, and where it goes.

    Attributes:
        title: For people.
        has_memascend: Else stock DeepSpeed.
        has_checkpoints: Whether each layer saves its input alone, and is computed again.
        place: "device", "host" or "drive".
    """

    title: str
    has_memascend: bool
    has_checkpoints: bool
    place: str


STOCK_ALL = Way(
    title="stock, no checkpointing", has_memascend=False, has_checkpoints=False, place="device"
)
STOCK_CHECKPOINTS = Way(
    title="stock, checkpointing", has_memascend=False, has_checkpoints=True, place="device"
)
STOCK_ON_HOST = Way(
    title="stock, checkpoints on the host", has_memascend=False, has_checkpoints=True, place="host"
)
OURS_CHECKPOINTS = Way(
    title="memascend, checkpointing", has_memascend=True, has_checkpoints=True, place="drive"
)
OURS_ALL = Way(
    title="memascend, no checkpointing", has_memascend=True, has_checkpoints=False, place="drive"
)
WAYS = (STOCK_ALL, STOCK_CHECKPOINTS, STOCK_ON_HOST, OURS_CHECKPOINTS, OURS_ALL)


_ZERO = ZeroOptimization()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """The keys of the DeepSpeed JSON that device memory depends on, with DeepSpeed's defaults.

    Attributes:
        bucket_numel: reduce_bucket_size.
        has_bucket: contiguous_gradients: whether the bucket is memory of its own.
        prefetch_numel: stage3_prefetch_bucket_size.
        live_numel: stage3_max_live_parameters, which bounds prefetching alone.
    """

    bucket_numel: int = _ZERO.reduce_bucket_size
    has_bucket: bool = _ZERO.contiguous_gradients
    prefetch_numel: int = _ZERO.stage3_prefetch_bucket_size
    live_numel: int = _ZERO.stage3_max_live_parameters

    @classmethod
    def from_deepspeed(cls, settings: DeepSpeedSettings, *, hidden: int) -> DeviceSettings:
        """Read a DeepSpeed JSON; "auto" is what Hugging Face's Trainer makes of the hidden size."""
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
    """Bytes of one rank, for one way to train and one number of tokens.

    Attributes:
        way: The way.
        tokens: Of one micro-step: context times batch.
        device: Device memory that lasts through the passes, by component.
        moments: What comes on top, at one moment each.
        host_bytes: The highest host memory, HOST_RESERVE_BYTES included.
        host_activation_bytes: Of it, what was saved by forward.
        drive_bytes: Of what was saved, on the drive: written and read once in each micro-step.
    """

    way: Way
    tokens: int
    device: Mapping[str, int]
    moments: Mapping[str, int]
    host_bytes: int
    host_activation_bytes: int
    drive_bytes: int

    @property
    def device_bytes(self) -> int:
        """The highest device memory."""
        return sum(self.device.values()) + max(self.moments.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everything but the number of tokens.

    Attributes:
        shapes: Of the model, from a config.json.
        stock: Its account with stock DeepSpeed.
        ours: Its plan with memascend, slots of activations included.
        device: What device memory depends on.
        activations: The section of the block.
        has_fused_loss: Whether logits are made in chunks, and never kept.
        has_tiled_mlp: Whether MLPs go over their tokens in tiles.
        rounds_pinned: Whether pinned memory is rounded up to a power of two, as torch does.
    """

    shapes: ModelShapes
    stock: StockPlan
    ours: Plan
    device: DeviceSettings
    activations: ActivationConfig
    has_fused_loss: bool = False
    has_tiled_mlp: bool = False
    rounds_pinned: bool = True

    @property
    def widths(self) -> Widths:
        """The widths of the model.

        Raises:
            ConfigError: Only the shapes of its parameters are known.
        """
        return widths_of(self.shapes)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a parameter, of a hidden state, and of a reduced gradient."""
        return self.ours.request.param_itemsize

    def plan(self, way: Way, tokens: int, *, device_bytes: int = 0) -> ContextPlan:
        """Count every byte.

        Args:
            way: One of WAYS.
            tokens: Of one micro-step on this rank: context times batch.
            device_bytes: All memory of the device, a share of which the host may run ahead by.
        """
        widths = self.widths
        layer = layer_bytes(widths, self.itemsize, has_tiled_mlp=self.has_tiled_mlp)
        saved, drive_bytes = self._saved(way, tokens, widths, layer)
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
            device={
                GATHERED: self._gathered_numel() * self.itemsize,
                **({RELEASED: self._released_bytes(device_bytes)} if way.has_memascend else {}),
                BUCKET: self._bucket_numel() * self.itemsize,
                **saved,
                RESERVE: DEVICE_RESERVE_BYTES,
            },
            moments=self._moments(way, tokens, widths, layer),
            host_bytes=(
                (self.ours.host_bytes if way.has_memascend else stock_bytes) + HOST_RESERVE_BYTES
            ),
            host_activation_bytes=activations_bytes,
            drive_bytes=drive_bytes,
        )

    # -- what forward saves ------------------------------------------------------------------------

    def _saved(
        self, way: Way, tokens: int, widths: Widths, layer: LayerBytes
    ) -> tuple[dict[str, int], int]:
        """Return what is on the device of what layers save, by component, and what goes to a drive.

        To the drive goes also what the last norm and the loss save.
        """
        of_layer = layer.hidden if way.has_checkpoints else layer.saved
        in_layers = tokens * widths.layers * of_layer
        largest = tokens * (layer.hidden if way.has_checkpoints else layer.largest)
        if way.place == "host":
            return {FLIGHT: min(IN_FLIGHT_COUNT * largest, in_layers)}, 0
        if way.place == "device" or largest < self.activations.min_bytes:
            return {CHECKPOINTS if way.has_checkpoints else SAVED: in_layers}, 0
        kept = min(self.activations.device_bytes, in_layers)
        largest = max(largest, tokens * layer.final_norm_largest)
        behind = layer.final_norm
        if not self.has_fused_loss:
            behind += FP32_BYTES * widths.vocabulary
        drive_bytes = max(0, in_layers + tokens * behind - self.activations.device_bytes)
        on_device = {KEPT: kept} if kept else {}
        return {**on_device, FLIGHT: min(IN_FLIGHT_COUNT * largest, in_layers - kept)}, drive_bytes

    # -- parameters and gradients ------------------------------------------------------------------

    def _gathered_numel(self) -> int:
        """Return elements gathered at once.

        Where forward turns to backward that is what will be used again within
        stage3_max_reuse_distance, counted on the way there and on the way back. Elsewhere it is a
        layer or a single large tensor. What is read ahead comes on top.
        """
        largest = max(tensor.numel for tensor in self.shapes.tensors)
        layer = max(sum(tensor.numel for tensor in layer) for layer in self.shapes.layers())
        in_use = max(self.ours.request.reuse_numel // 2, layer, largest)
        ahead = min(self.device.prefetch_numel, max(0, self.device.live_numel - in_use))
        return min(self.shapes.numel, in_use + ahead)

    def _released_bytes(self, device_bytes: int) -> int:
        """Return the most that waits for kernels; stock has no limit, and nothing is counted."""
        always = RELEASED_COUNT_MIN * _largest_in_layers(self.shapes.tensors) * self.itemsize
        return min(max(released_bytes_max(device_bytes), always), self.shapes.numel * self.itemsize)

    def _bucket_numel(self) -> int:
        return self.device.bucket_numel if self.device.has_bucket else 0

    def _gradient_bytes(self, way: Way, numel: int) -> int:
        """Return what is taken beside the bucket while gradients are reduced.

        A gradient that fits goes into the bucket, and the full bucket is copied once to be dealt
        out; a larger one is reduced where it is. Stock then has its part on the device once more
        as it comes back from host memory, once in fp32, and a piece of it in fp64.

        Args:
            way: Stock or memascend.
            numel: Elements of the largest gradient.
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

    # -- what comes on top -------------------------------------------------------------------------

    def _moments(self, way: Way, tokens: int, widths: Widths, layer: LayerBytes) -> dict[str, int]:
        logits = FUSED_LOSS_TENSORS * layer.hidden
        if not self.has_fused_loss:
            logits = LOGITS_BYTES * widths.vocabulary
        # What a layer has saved is counted among all that is saved where it is not computed again.
        backward = layer.backward if way.has_checkpoints else layer.gradients
        tile = min(tokens, widths.hidden) * layer.tile  # as DeepSpeed's examples divide tokens
        learning = self.shapes.trainable
        largest = max((tensor.numel for tensor in learning), default=0)
        return {
            LOSS: tokens * (logits + layer.final_norm),
            HEAD: self._gradient_bytes(way, largest),
            LAYER: tokens * backward
            + tile
            + self._gradient_bytes(way, _largest_in_layers(learning)),
        }


def _largest_in_layers(tensors: Sequence[TensorShape]) -> int:
    in_layers = (tensor.numel for tensor in tensors if re.search(r"\.\d+\.", tensor.name))
    return max(in_layers, default=0)


def widths_of(shapes: ModelShapes) -> Widths:
    """Return the widths of a model.

    Raises:
        ConfigError: Only the shapes of its parameters are known.
    """
    if shapes.config is None:
        raise ConfigError(
            f"{shapes.name}: what a context takes cannot be derived from the shapes of parameters. "
            "Give the model's config.json, or a folder that holds it"
        )
    return Widths.from_config(shapes.config)


def with_activations(footprint: Footprint, nbytes: int, micro_steps: int) -> Footprint:
    """Return an account with what goes to the drive for backward, and comes back.

    Args:
        footprint: Without it.
        nbytes: Of one micro-step.
        micro_steps: Of one optimizer step.
    """
    moved = nbytes * micro_steps
    return dataclasses.replace(
        footprint,
        drive={**footprint.drive, ACTIVATIONS: nbytes},
        read_bytes={**footprint.read_bytes, ACTIVATIONS: moved},
        written_bytes={**footprint.written_bytes, ACTIVATIONS: moved},
        passes_read_bytes=footprint.passes_read_bytes + moved,
        passes_written_bytes=footprint.passes_written_bytes + moved,
    )
