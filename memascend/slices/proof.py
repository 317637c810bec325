"""Proves once for each layer that its outputs for other slices are what they are taken for.

Shapes of slices of one size tell no batch from a bias, a table of positions or a statistic. So a
layer computes a slice of another size as well, without a graph: its outputs must have as many rows
more or less, and the same values for the same sequences. One has another number there than in its
own slice, so that values differ which a layer finds by the number of a row. Values are not compared
where a layer takes random numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memascend.errors import MemAscendError
from memascend.slices.cut import SHARED_TYPES, BatchCut, CannotCut, Cut
from memascend.slices.documents import DocumentCut
from memascend.slices.influence import Two, check_influence
from memascend.slices.random_states import RandomState

log = logging.getLogger(__name__)

#: Largest difference of an output, relative to the norm of the part that a layer computes, in
#: relative steps of its dtype. Kernels for other sizes round otherwise: a layer's roundings add up
#: to a few steps, and fp8 in a layer of bf16 to about four. Rows that depend on each other, or are
#: in another order, differ by a part of that norm.
STEPS = 16
#: The same for sums with the layer's input, relative to the norm of all: each is rounded by less
#: than half a step. What a layer adds may be a few steps itself.
STEPS_OF_SUMS = 2
#: The step of TF32, in which fp32 may be multiplied.
STEP_MIN = 2.0**-10

#: Errors of a layer that is not written for so few sequences, as one that squeezes a dimension.
_OF_SIZES = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)

#: Proofs of one kind of calls of a module. A counter of steps would make another one for ever.
PROOFS_MAX = 128
#: Why calls of one module cannot be cut, by their kinds of arguments and outputs, then by their
#: functions and numbers; empty: they can.
Reasons = dict[Any, dict[Any, str]]
#: Returns the outputs of the only slice of another cut.
Compute = Callable[[Any], Sequence[Any]]


@dataclasses.dataclass(frozen=True)
class Proofs:
    """The module that a call belongs to, and the reasons that are known of its calls.

    The function is that of the call, as `identity_of` has it.
    """

    module: nn.Module
    reasons: Reasons
    function: Any = None

    def reason(self, kind: Any, numbers: Any) -> str | None:
        """Return why a call cannot be cut; empty: it can, None: that is to be proven.

        Behind `PROOFS_MAX` of them other functions and numbers are taken for the worst of these.
        """
        known = self.reasons.get(kind, {})
        found = known.get((self.function, numbers))
        if found is None and len(known) >= PROOFS_MAX:
            return max(known.values())
        return found

    def add(self, kind: Any, numbers: Any, reason: str) -> None:
        """Note the reason of a call."""
        self.reasons.setdefault(kind, {})[self.function, numbers] = reason

    def is_of(self, cut: Cut) -> bool:
        """Return whether slices of such a cut can be proven."""
        return isinstance(cut, BatchCut | DocumentCut)

    def prove(
        self,
        cut: Any,
        whole: Sequence[torch.Tensor | None],
        tensors: Sequence[torch.Tensor],
        compute: Compute,
    ) -> bool:
        """Compare outputs of slices with those of another slice, if memory allows.

        Args:
            cut: How the call was cut, into several slices.
            whole: The outputs of all slices, put together.
            tensors: The tensors that the call is given, as far as its devices are concerned.
            compute: Returns the outputs of the only slice of another cut.

        Returns:
            Whether another call of this kind needs no proof.

        Raises:
            CannotCut: They differ in more than their number of rows.
        """
        if isinstance(cut, DocumentCut):
            with if_it_fits(self.module, is_larger=True):
                _prove_documents(cut, whole, tensors, compute)
        else:
            with if_it_fits(self.module, is_larger=cut.rows[0] == (0, 1)):
                _prove_sequences(cut, whole, tensors, compute)
        return True

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within the context buffers are copies; behind it, they and all numbers are as before.

        A router counts the tokens of its experts in them.
        """
        before = [(one, one._buffers, _numbers(one)) for one in self.module.modules()]
        try:
            for one, buffers, _ in before:
                copies = {
                    name: None if one is None else one.clone() for name, one in buffers.items()
                }
                vars(one)["_buffers"] = copies
            yield
        finally:
            for one, buffers, numbers in before:
                vars(one).update(numbers, _buffers=buffers)


def identity_of(function: Any) -> Any:
    """Return what tells a function from others of its module, also if each pass makes it anew."""
    while isinstance(function, functools.partial):
        function = function.func  # its arguments are those of the call
    if isinstance(function, nn.Module):
        return type(function)
    if inspect.ismethod(function):
        return function.__func__
    if not inspect.isfunction(function):
        return type(function)
    values = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing was put into it yet
            one = cell.cell_contents
            if isinstance(one, SHARED_TYPES) or inspect.isfunction(one):
                values.append(getattr(one, "__code__", one))
    return function.__code__, tuple(values)


def _numbers(module: nn.Module) -> dict[str, int | float]:
    return {name: one for name, one in vars(module).items() if type(one) in (int, float)}


@contextlib.contextmanager
def if_it_fits(module: nn.Module, *, is_larger: bool) -> Iterator[None]:
    """Warn where memory for more than in a slice is not there; an error if it `is_larger` not."""
    try:
        yield
    except torch.OutOfMemoryError:
        if not is_larger:
            raise
        log.warning(
            "memascend: %s is not proven to compute each sequence by itself: device memory ran out "
            "for the two sequences that prove it. Slices of one are used all the same",
            type(module).__name__,
        )


def _prove_sequences(
    cut: BatchCut,
    whole: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor],
    compute: Compute,
) -> None:
    """Compare slices of a batch with one of another size, and two sequences with each other."""
    begin, end = cut.rows[0]
    rows = 2 if end - begin == 1 else 1
    other = dataclasses.replace(cut, rows=((end - 1, end - 1 + rows),))
    calls = _Calls(tensors, compute)
    outputs = calls.outputs(other, f"{rows} sequence(s)")
    is_random = calls.is_random
    for one, output in zip(whole, outputs, strict=True):
        if one is None or output is None:
            if one is not output:
                raise CannotCut(f"of {rows} sequence(s) it returns other outputs than of others")
            continue
        part = other.part(0, one)
        if not torch.is_tensor(output) or part.shape != output.shape:
            raise CannotCut(
                f"an output for {rows} sequence(s) has the shape {tuple(output.shape)}, where "
                f"slices of {end - begin} give {tuple(part.shape)}: it is not of sequences"
            )
        if is_random:
            _check_order_is_known(output, rows)
        else:
            _check_output(part, output, other, one, tensors)
    two = Two(dataclasses.replace(cut, rows=((0, 2),)), _half_of_rows, "sequence")
    _check_two(two, outputs if rows == 2 else None, calls)


def _prove_documents(
    cut: DocumentCut,
    whole: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor],
    compute: Compute,
) -> None:
    """Compare slices of a packed row with a slice of two documents, and these with each other."""
    other, first = cut.across_edge()
    calls = _Calls(tensors, compute)
    outputs = calls.outputs(other, "two documents")
    for one, output in zip(whole, outputs, strict=True):
        part = one if one is None else other.part(0, one)
        if getattr(part, "shape", None) != getattr(output, "shape", None):
            raise CannotCut("of two documents it returns other outputs than of others")
        if one is not None and part is not None and not calls.is_random:
            _check_output(part, output, other, one, tensors)
    halves = functools.partial(other.halves, first)
    _check_two(Two(other, halves, "document"), outputs, calls)


class _Calls:
    """Calls of a layer without a graph, all with the same random numbers."""

    def __init__(self, tensors: Sequence[torch.Tensor], compute: Compute) -> None:
        self.tensors, self._compute = tensors, compute
        self._before = RandomState(tensors)
        #: Whether the last call took random numbers.
        self.is_random = False

    def outputs(self, cut: Any, name: str) -> Sequence[Any]:
        with self._before.restored(), torch.no_grad():
            outputs = outputs_of(self._compute, cut, name)
            self.is_random = not RandomState(self.tensors).is_same(self._before)
        return outputs


def _half_of_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = tensor.chunk(2)
    return first, second


def _check_two(two: Two, outputs: Sequence[Any] | None, calls: _Calls) -> None:
    """Raise CannotCut if two sequences or documents of a slice change each other's output."""
    name = f"two {two.name}s"
    if outputs is None:
        outputs = calls.outputs(two.cut, name)
    found = next((one for one in outputs if torch.is_tensor(one)), None)
    if found is None or found.device.type == "meta":
        return
    step = relative_step(calls.tensors, found)
    check_influence(two, outputs, calls.tensors, lambda cut: calls.outputs(cut, name), step)


def _check_output(
    part: torch.Tensor,
    output: torch.Tensor,
    cut: Cut,
    whole: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> None:
    """Raise CannotCut if an output of a cut's only slice is no part of the whole one."""
    if output.is_floating_point() and output.device.type != "meta":
        states = [cut.part(0, given) for given in tensors if _can_be_added(given, whole)]
        check_values(part, output, states, relative_step(tensors, output))


def outputs_of(compute: Compute, cut: Cut, name: str) -> Sequence[Any]:
    """Return the outputs of a slice; raise CannotCut if its size is an error in the layer."""
    try:
        return _uncompiled(compute)(cut)
    except _OF_SIZES as error:
        if isinstance(error, torch.OutOfMemoryError | MemAscendError):
            raise
        reason = f"{type(error).__name__} {error}".splitlines()[0].rstrip()
        raise CannotCut(f"{name} are an error in it, {reason}") from error


def _check_order_is_known(output: torch.Tensor, rows: int) -> None:
    """Raise CannotCut if sequences may alternate in the rows of an output."""
    if output.shape[0] != rows:
        raise CannotCut(
            f"an output of shape {tuple(output.shape)} may have tokens in any order, and the "
            "random numbers that the layer takes hide it"
        )


def _can_be_added(given: torch.Tensor, whole: torch.Tensor) -> bool:
    is_like = (given.shape, given.device) == (whole.shape, whole.device)
    return is_like and given.is_floating_point()


def check_values(
    part: torch.Tensor, output: torch.Tensor, states: Sequence[torch.Tensor], step: float
) -> None:
    """Raise CannotCut if values for the same sequences differ; NaN and infinity say nothing.

    Args:
        part: An output for some sequences, from slices of one size.
        output: The same from a slice of another size.
        states: Inputs of their shape, to one of which the layer may add the part that it computes.
        step: The relative step of a dtype.
    """
    difference, norm = _norm(output - part), _norm(part)
    computed = min([norm, *(_norm(part - one) for one in states)])
    largest = max([norm, *map(_norm, states)])
    if difference > step * (STEPS * computed + STEPS_OF_SUMS * largest):
        raise CannotCut(
            f"its output for a sequence depends on other sequences: it differs by "
            f"{difference:.1e}, with a norm of {norm:.1e}, where slices have another size"
        )


def relative_step(tensors: Sequence[torch.Tensor], output: torch.Tensor) -> float:
    """Return the relative step of the coarsest dtype that a call computes with."""
    dtypes = {one.dtype for one in (*tensors, output) if one.is_floating_point()}
    kind = output.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    return max(STEP_MIN, *(torch.finfo(dtype).eps for dtype in dtypes))


def _norm(tensor: torch.Tensor) -> float:
    finite = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(finite, dtype=dtype))


def _uncompiled(compute: Compute) -> Compute:
    """Return a function whose compiled layers run as they are written: one size more costs nothing.

    With a release of torch without stances layers that are compiled in place are compiled for it.
    """
    if "torch._dynamo" not in sys.modules:
        return compute

    def run(cut: Cut) -> Sequence[Any]:
        if not hasattr(torch.compiler, "set_stance"):
            return compute(cut)
        with torch.compiler.set_stance("force_eager"):
            return compute(cut)

    # In the midst of a compiled function stances are errors.
    eager: Compute = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    return eager
