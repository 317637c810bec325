"""The answer of `memascend plan`: does it fit, what is on the drive, how long is a step, what wear.

Compares the plan with this machine, or with the sizes that the options state.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import textwrap
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from memascend.base.units import format_nbytes
from memascend.cli.plan_accounts import Accounts
from memascend.cli.plan_context import TABLE_CONTEXT, within_host_memory
from memascend.cli.plan_machine import Machine
from memascend.cli.plan_one_pass import slice_tokens_of
from memascend.cli.plan_time import drive_seconds, least_seconds, ranks_of_node
from memascend.errors import ConfigError
from memascend.plan import muon
from memascend.plan.context import (
    HOST_RESERVE_BYTES,
    OURS_CHECKPOINTS,
    OURS_ON_DEVICE,
    STOCK_CHECKPOINTS,
    ContextPlan,
    DeviceSettings,
    Training,
    widths_of,
    with_activations,
)
from memascend.plan.derive import SECOND_MATRICES, Plan, default_limit, derive
from memascend.plan.fit import Room, fit
from memascend.plan.footprint import Footprint
from memascend.plan.knobs import LimitTooSmallError
from memascend.plan.second_values import (
    checkpoint_bytes,
    lacking_bytes,
    model_bytes,
    second_values_bytes,
)

GB, BILLION, TERABYTE = 10**9, 10**9, 10**12
WEAR_STEPS = 1000
#: The endurance that makers state for common consumer drives of 2 TB, in bytes.
RATED_BYTES = 1200 * TERABYTE
HOST, DRIVE, GPU = "host memory", "drive space", "GPU memory"
_LABEL_WIDTH, _WIDTH_MAX = 7, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The five lines."""

    needed: dict[str, int]  # bytes of one machine, of a GPU those of one rank
    available: dict[str, int]  # the same, where it is known
    place: str  # the folder on the drive
    drive_bytes: int
    #: Bytes more for second values, if the step may begin during backward and the drive has room.
    second_bytes: int
    #: Bytes of one checkpoint, of all ranks of a machine; 0 if the optimizer is not on the drive.
    checkpoint_bytes: int
    model_bytes: int  # of the saved model, on the machine that writes it
    saves_model: bool  # whether the Trainer writes the model into each checkpoint as well
    read_bytes: int  # of one step, by all ranks of a machine
    written_bytes: int
    step_seconds: float
    node_count: int
    tokens: int | None  # of one step of all ranks; None if the GPU or its saved activations are not
    shape: str  # the tokens as sequences of a length, and whether the batch is the largest
    rated_bytes: int  # bytes that the drives of a machine may be written in their life
    drive_count: int
    is_stated: bool  # whether the JSON states these bytes
    why_no_gpu: str  # why device memory is not counted; empty if it is

    @property
    def lacking(self) -> dict[str, int]:
        """Missing bytes by name; empty if all that is known fits."""
        found = {name: self.needed[name] - have for name, have in self.available.items()}
        return {name: nbytes for name, nbytes in found.items() if nbytes > 0}

    @property
    def checkpoint_count(self) -> int | None:
        """Checkpoints that the drive has room for beside the run and the model; None: not known.

        The model takes its room twice: saving gathers it on the drive, then writes its files.
        """
        if DRIVE not in self.available or not self.checkpoint_bytes:
            return None
        left_bytes = self.available[DRIVE] - self.drive_bytes - 2 * self.model_bytes
        one_bytes = self.checkpoint_bytes + self.model_bytes * self.saves_model
        return max(0, left_bytes // one_bytes)

    @property
    def rated_share(self) -> float:
        """The part of the drive's endurance that 1000 steps take."""
        return WEAR_STEPS * self.written_bytes / self.rated_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for `--json`."""
        names = ("lacking", "checkpoint_count", "rated_share")
        found = {"fits": not self.lacking} | {name: getattr(self, name) for name in names}
        return found | dataclasses.asdict(self)


def answer_of(accounts: Accounts, machine: Machine, args: argparse.Namespace) -> Answer:
    """Return the answer for one model on one machine."""
    ranks = ranks_of_node(args)
    plan = _within(_plan_of(accounts, machine, ranks), accounts, machine, ranks)
    steps = plan.request.gradient_accumulation_steps
    have = {HOST: machine.memory_bytes, DRIVE: machine.free_bytes}
    on_device: dict[str, int] = {}
    sequences, length, activation_bytes = 0, args.context or TABLE_CONTEXT, 0
    is_largest = _is_largest(args)
    why_no_gpu = "" if machine.device_bytes else "no GPU counted (--device-memory 24GiB counts one)"
    try:
        # An update of Muon that is made beside activations.
        is_early = plan.request.during_backward
        update_bytes = muon.update_bytes(accounts.shapes, plan.request) if is_early else 0
        room_bytes = machine.device_bytes and max(0, machine.device_bytes - update_bytes)
        sequences, micro_step = _micro_step(accounts, room_bytes, args)
        activation_bytes = micro_step.drive_bytes if sequences else 0
        on_device[GPU] = micro_step.device_bytes + update_bytes
        have[GPU] = machine.device_bytes
    except LimitTooSmallError:
        why_no_gpu = "GPU memory not counted (the limit has no room for slots of activations)"
    except ConfigError as error:  # no plan of its activations
        why_no_gpu = f"GPU memory not counted ({str(error).partition(', so ')[0]})"
    counted: Footprint = with_activations(plan, activation_bytes, steps)
    seconds = least_seconds(plan, args, activation_bytes=activation_bytes)
    host_bytes = plan.peak_bytes + sum(plan.not_ours.values())
    if accounts.is_stock:
        counted, host_bytes = accounts.stock, accounts.stock.peak_bytes
        seconds = drive_seconds(counted, args)
    needed = {
        HOST: ranks * (host_bytes + HOST_RESERVE_BYTES),
        DRIVE: ranks * counted.drive_bytes,
        **on_device,
    }
    endurance = accounts.block.wear.endurance
    return Answer(
        needed=needed,
        available={name: nbytes for name, nbytes in have.items() if nbytes is not None},
        place=machine.place,
        drive_bytes=needed[DRIVE],
        second_bytes=0 if accounts.is_stock else _second_bytes(plan, machine, ranks),
        checkpoint_bytes=ranks
        * checkpoint_bytes(plan, is_portable=accounts.block.checkpoint.portable)
        * bool(plan.trained_numel),
        model_bytes=args.world * model_bytes(plan),
        saves_model=accounts.settings.zero_optimization.stage3_gather_16bit_weights_on_model_save,
        read_bytes=ranks * sum(counted.read_bytes.values()),
        written_bytes=ranks * sum(counted.written_bytes.values()),
        step_seconds=seconds,
        node_count=args.nodes,
        tokens=sequences * length * steps * args.world or None,
        shape="largest batch " * is_largest + f"{sequences * steps * args.world} x {length}",
        rated_bytes=endurance or machine.drive_count * RATED_BYTES,
        drive_count=machine.drive_count,
        is_stated=endurance is not None,
        why_no_gpu=why_no_gpu,
    )


def _plan_of(accounts: Accounts, machine: Machine, ranks: int) -> Plan:
    """Return the plan; without second values of Muon's matrices if the drive has no room for them.

    A run then writes updates, and reads them again.
    """
    plan = accounts.memascend
    if machine.free_bytes is None or not plan.drive.get(SECOND_MATRICES):
        return plan
    taken_bytes = ranks * plan.drive_bytes
    if not lacking_bytes(plan, machine.free_bytes, ranks=ranks, taken_bytes=taken_bytes):
        return plan
    request = dataclasses.replace(plan.request, applies_updates=False)
    return derive(accounts.shapes, request=request, limit_bytes=plan.limit_bytes)


def _within(plan: Plan, accounts: Accounts, machine: Machine, ranks: int) -> Plan:
    """Return the plan, in half of the memory if it is larger: a run without a limit does so."""
    if plan.limit_bytes is not None or machine.memory_bytes is None:
        return plan
    limit_bytes = default_limit(plan.host_bytes, available=machine.memory_bytes // ranks)
    if limit_bytes < plan.host_bytes:
        with contextlib.suppress(LimitTooSmallError):
            return derive(accounts.shapes, request=plan.request, limit_bytes=limit_bytes)
    return plan


def _is_largest(args: argparse.Namespace) -> bool:
    """Return whether the answer is for the largest batch that fits: nothing states one."""
    return args.context is None and not args.has_batch


def _second_bytes(plan: Plan, machine: Machine, ranks: int) -> int:
    if not plan.request.tries_during_backward:
        return 0
    second_bytes = ranks * second_values_bytes(plan)
    taken_bytes = ranks * plan.drive_bytes + second_bytes
    if machine.free_bytes is None:
        return second_bytes
    lacking = lacking_bytes(plan, machine.free_bytes, ranks=ranks, taken_bytes=taken_bytes)
    return 0 if lacking else second_bytes


def _micro_step(
    accounts: Accounts, device_bytes: int | None, args: argparse.Namespace
) -> tuple[int, ContextPlan]:
    """Return the sequences of a micro-step, and its memory.

    It is --batch, or that of the JSON, else the largest that fits, of a common length; 0 if none is
    known to.
    Checkpoints stay on the device unless the block has activations on the drive. With the section
    `micro_batches` layers compute slices; if it states no number, of one sequence each.
    """
    training = training_of(accounts, args)
    way = OURS_CHECKPOINTS if accounts.block.activations.enabled else OURS_ON_DEVICE
    way = STOCK_CHECKPOINTS if accounts.is_stock else way
    count, length = args.batch, args.context or TABLE_CONTEXT
    is_sliced = training.micro_batches is not None and not accounts.is_stock
    tokens_of = slice_tokens_of(training, context=length) if is_sliced else None
    if _is_largest(args):
        room = Room(device_bytes=device_bytes or 0)
        found = fit(training, way, room=room, unit_tokens=length, slice_tokens_of=tokens_of)
        count = 0 if device_bytes is None else found.count
    sequences = max(1, count)
    return count, training.plan(
        way,
        sequences * length,
        slice_tokens=None if tokens_of is None else tokens_of(sequences),
        device_bytes=device_bytes or 0,
    )


def print_answer(
    answer: Answer,
    accounts: Accounts,
    args: argparse.Namespace,
    console: Console,
    *,
    way_that_fits: str = "",
) -> None:
    """Print the model, and the five lines; with the way that fits if the batch at once does not."""
    request = accounts.memascend.request
    on = f" on {args.nodes} machines; bytes of one machine" if args.nodes > 1 else ""
    width = min(console.width, _WIDTH_MAX)
    title = (
        f"{accounts.shapes.name}: {accounts.shapes.numel / BILLION:.2f} billion parameters, "
        f"{request.precision}, {request.optimizer}, {request.world} rank(s){on}"
    )
    print(textwrap.fill(title, width=width, break_on_hyphens=False))
    second = ""
    if answer.second_bytes:
        second = f", and {format_nbytes(answer.second_bytes)} for a second copy of weights and "
        second += "moments if steps begin during backward"
    lines = {
        "fits": _fits(answer, way_that_fits),
        "drive": f"{format_nbytes(answer.drive_bytes)} stay on it{second}; a step reads "
        f"{format_nbytes(answer.read_bytes)} and writes {format_nbytes(answer.written_bytes)}",
        "save": _save(answer),
        "step": _step(answer, args),
        "wear": _wear(answer),
    }
    for label, text in lines.items():
        if not text:
            continue
        print(
            textwrap.fill(
                text,
                width=width,
                initial_indent=f"{label:<{_LABEL_WIDTH}}",
                subsequent_indent=" " * _LABEL_WIDTH,
                break_on_hyphens=False,
            )
        )


def _fits(answer: Answer, way: str) -> str:
    lacking = [f"{format_nbytes(n)} more of {name}" for name, n in answer.lacking.items()]
    sizes = []
    for name, have in answer.available.items():
        where = f" free in {answer.place}" if name == DRIVE and answer.place else ""
        needed = format_nbytes(answer.needed[name])
        sizes.append(f"{name} {needed} of {format_nbytes(have)}{where}")
    if answer.why_no_gpu:
        sizes.append(answer.why_no_gpu)
    verdict = f"no, it needs {' and '.join(lacking)}" if lacking else "yes"
    if way and answer.lacking.keys() == {GPU}:
        verdict += f" ({way} it fits, see below)"
    return f"{verdict}: {', '.join(sizes)}"


def _save(answer: Answer) -> str:
    """Return the line on checkpoints; empty if the optimizer is not on the drive."""
    if not answer.checkpoint_bytes:
        return ""
    count, room = answer.checkpoint_count, ""
    if count is not None:
        room = f"; the drive has room for {count or 'no'} checkpoint{'' if count == 1 else 's'} "
        room += "beside the run and the model"
    model = f"the model {format_nbytes(answer.model_bytes)}"
    if answer.saves_model:
        model += ", which the Trainer puts into each checkpoint, too"
    return f"a checkpoint takes {format_nbytes(answer.checkpoint_bytes)}, {model}{room}"


def _step(answer: Answer, args: argparse.Namespace) -> str:
    rates = args.drive.rates
    at = f"{rates.read_gb_s:.3g} GB/s read, {rates.write_gb_s:.3g} written ({args.drive.kind})"
    text = f"{answer.step_seconds:.0f} s or longer, at {at}"
    if answer.tokens is None:
        return text
    rate = answer.tokens / answer.step_seconds if answer.step_seconds else 0
    return f"{text}; {answer.tokens:,} tokens ({answer.shape}), at most {rate:,.0f} tokens/s"


def _wear(answer: Answer) -> str:
    terabytes = WEAR_STEPS * answer.written_bytes / TERABYTE
    rated = f"the {answer.rated_bytes / TERABYTE:,.0f} TB that "
    drives = (
        "a 2 TB drive is" if answer.drive_count == 1 else f"{answer.drive_count} drives of 2 TB are"
    )
    rated += "wear.endurance states" if answer.is_stated else f"{drives} often rated for"
    text = f"{WEAR_STEPS} steps write {terabytes:,.3g} TB, {answer.rated_share:.0%} of {rated}"
    if answer.tokens is None:
        return text
    tokens = answer.tokens / answer.node_count
    return f"{text}; {1e6 * answer.written_bytes / tokens / GB:,.0f} GB per million tokens"


def training_of(accounts: Accounts, args: argparse.Namespace) -> Training:
    """Return the inputs of a context's plan.

    Raises:
        ConfigError: The saved activations of the model are not known.
    """
    hidden = widths_of(accounts.shapes).hidden
    return Training(
        shapes=accounts.shapes,
        stock=accounts.stock,
        ours=within_host_memory(accounts.shapes, accounts.memascend, args),
        device=DeviceSettings.from_deepspeed(accounts.settings, hidden=hidden),
        activations=accounts.block.activations,
        micro_batches=accounts.block.micro_batches,
        has_fused_loss=args.fused_loss,
        has_tiled_mlp=args.tiled_mlp,
    )
