"""The part of a transformers model behind its base model, with the loss, in slices.

So logits exist for one slice at a time. The model's own `forward` computes it: first with the base
model behind a stand-in that stops it, then for each slice with one that returns hidden states.
A script that reads the logits gets them computed once more, for metrics: without a gradient.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from memascend.errors import ConfigError
from memascend.slices.attributes import Attributes
from memascend.slices.cut import CannotCut, Cut, Leaves
from memascend.slices.fused import FusedLoss, check_counts, is_fused, mark_as_gathered, unfused
from memascend.slices.layers import Batch, Slicer, check_hooks, check_keeps_documents, check_module
from memascend.slices.losses import LOSSES, LabelsOf, SlicedLoss, is_known
from memascend.slices.outputs import with_logits_on_demand
from memascend.slices.random_states import RandomState
from memascend.slices.replaced import Replaced
from memascend.slices.shares import LossCut, LossProofs

#: Arguments that are used by the base model alone. `input_ids` are not: a classifier of sequences
#: looks for padding in them, and a head may copy tokens.
_OF_BASE = frozenset({"inputs_embeds", "past_key_values", "use_cache", "mm_token_type_ids"})
#: The first words of others: images, videos and sounds, of which a row has any number.
_OF_MEDIA = ("pixel_", "image_", "video_", "audio_", "input_features", "second_per_grid")
#: Arguments that are used by the loss alone.
_LABELS = ("labels", "shift_labels")
_OF_LOSS = (*_LABELS, "num_items_in_batch")
#: Outputs of a base model that no loss of a slice is made of.
_NOT_OF_LOSS = {
    "last_hidden_state",
    "past_key_values",
    "attentions",
    "rope_deltas",
    "router_logits",
}
_LATE = (
    "logits were read behind the step, but memascend.micro_batches computes them when they are "
    "read, with weights that the step has changed. fix: read them before the step (accelerate "
    'steps in `accelerator.backward`), or "head": false in memascend.micro_batches'
)
#: Errors of a model that is given less than it needs.
_MISSING = (AttributeError, LookupError, TypeError, ValueError)


class SlicedHead:
    """Stands in for the `forward` of a model with a head."""

    def __init__(
        self,
        model: nn.Module,
        original: Callable[..., Any],
        slicer: Slicer,
        replaced: Replaced,
        step_count: Callable[[], int],
    ) -> None:
        self._model, self._original, self._slicer = model, original, slicer
        self._replaced, self._step_count = replaced, step_count

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the model; in slices its output has the loss, and logits for those who read them."""
        batch = self._slicer.batch
        if batch is None or not torch.is_grad_enabled():
            return self._original(*arguments, **keywords)
        try:
            given = self._bind(arguments, keywords)
            loss_of = self._check(given)
        except CannotCut as reason:
            self._note(str(reason))
            return self._original(*arguments, **keywords)
        try:
            base_output, of_base = self._run_base(given)
        except _WholeOutput as whole:
            self._note(f"its forward does not call {self._prefix}")
            return whole.output
        try:
            return self._run_tail(given, of_base, base_output, loss_of, batch)
        except CannotCut as reason:
            self._note(str(reason))
            with self._base_as(_once(base_output, self._base)):
                return self._original(**given)

    @property
    def _name(self) -> str:
        return f"the head of {type(self._model).__name__}"

    def _note(self, reason: str) -> None:
        self._slicer.note(self._name, reason)

    def _bind(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(self._original).bind_partial(*arguments, **keywords)
        given = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL and given.pop(name, ()):
                raise CannotCut("it has arguments without a name")
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given

    def _check(self, given: dict[str, Any]) -> SlicedLoss | FusedLoss:
        """Return the model's loss, if all of the head is known."""
        if given.get("labels") is None:
            raise CannotCut("it is not given labels, so its logits are used outside")
        if self._setting(given, "return_dict") is False:
            raise CannotCut("it returns a tuple (return_dict=False)")
        if self._setting(given, "output_hidden_states"):
            raise CannotCut("its hidden states are asked for (output_hidden_states)")
        for module in self._tail():
            check_hooks(module)
            check_module(module)
        if is_fused(self._original, given):
            if self._model.get_output_embeddings() is None:  # type: ignore[operator]
                raise CannotCut("it names no output embeddings")
            check_counts(self._original, given)
            return FusedLoss(given["labels"], given.get("shift_labels"))
        function: Any = getattr(self._model, "loss_function", None)
        if not is_known(function):
            raise CannotCut(f"its loss is not one of transformers' own {', '.join(LOSSES)}")
        config: Any = self._model.config
        loss_of = SlicedLoss(function, config, given["labels"], given.get("shift_labels"))
        if loss_of.labels_of is LabelsOf.SEQUENCES:
            text: Any = config.get_text_config()
            if getattr(text, "pad_token_id", None) is None:  # slices of one row need none
                raise CannotCut("it has no padding token (pad_token_id)")
        return loss_of

    def _setting(self, given: dict[str, Any], name: str) -> Any:
        """Return a setting of the call; of the configuration if it is not given."""
        value = given.get(name)
        return getattr(getattr(self._model, "config", None), name, None) if value is None else value

    def _run_base(self, given: dict[str, Any]) -> tuple[Any, frozenset[str]]:
        """Return the output of the base model, behind which an exception ends the model's forward.

        Also the names of the arguments that it is given, or would take.

        Raises:
            _WholeOutput: The model has not called its base model; has its output.
        """
        base = self._base
        outputs: list[Any] = []
        names = set(inspect.signature(base.forward).parameters)

        def stop(*arguments: Any, **keywords: Any) -> Any:
            if not outputs:  # else a model that catches all errors tries again
                given_now = (*arguments, *keywords.values())
                passed = {id(one) for one in given_now if torch.is_tensor(one)}
                names.update(keywords, (name for name, one in given.items() if id(one) in passed))
                outputs.append(base(*arguments, **keywords))
            raise _Stop

        with contextlib.suppress(_Stop), self._base_as(stop):
            output = self._original(**given)
        if not outputs:
            raise _WholeOutput(output)
        return outputs[0], frozenset(names)

    def _run_tail(
        self,
        given: dict[str, Any],
        of_base: frozenset[str],
        base_output: Any,
        loss_of: SlicedLoss | FusedLoss,
        batch: Batch,
    ) -> Any:
        hidden = getattr(base_output, "last_hidden_state", None)
        if hidden is None:
            raise CannotCut("its base model returns no last_hidden_state")
        others = _others(base_output)
        if others:
            raise CannotCut(f"its base model also returns {others}")
        # The output itself would keep hidden states until the graph is gone.
        base_type = type(base_output)
        output_type: list[type] = []
        whole_shape = hidden.shape

        def tail(hidden: torch.Tensor, keywords: dict[str, Any]) -> tuple[torch.Tensor, ...]:
            made = base_type(last_hidden_state=hidden)
            loss_of.is_whole = hidden.shape == whole_shape
            if isinstance(loss_of, FusedLoss):  # it does not call the module whose weights it reads
                self._model.get_output_embeddings()(hidden[:, :0])  # type: ignore[operator]
            with self._base_as(_once(made, self._refuse)), self._loss_as(loss_of):
                try:
                    output = self._original(**keywords)
                except _MISSING as error:
                    raise CannotCut(f"it needs more than hidden states: {error}") from error
            output_type[:] = [type(output)]
            values = loss_of.take(output, keywords)
            others = "" if isinstance(loss_of, FusedLoss) else _others(output, "loss", "logits")
            if others:
                raise CannotCut(f"it also returns {others}")
            return values

        keywords = _of_tail(given, of_base)
        if isinstance(loss_of, FusedLoss):
            keywords.setdefault("num_items_in_batch", loss_of.item_count)
        if getattr(base_output, "router_logits", None) is not None:
            keywords["output_router_logits"] = False  # their loss is no sum over slices
        is_shifted = loss_of.shifts and batch.documents is not None
        if is_shifted:  # a last label is in the next slice
            keywords["shift_labels"] = loss_of.shifted()
        leaves = Leaves.of((hidden, keywords), {})
        cut = self._slicer.cut(self._name, leaves, lambda: self._cut(leaves, loss_of, batch))
        losses, *values = self._run_slices(tail, leaves, LossCut(cut), loss_of)
        # Classifiers compute in the model's dtype, in which a sum would lose digits.
        sum_dtype = torch.promote_types(losses.dtype, torch.float32)
        loss = losses.sum(dtype=sum_dtype)
        if isinstance(loss_of, SlicedLoss):
            loss = loss_of.of_batch(loss, values[0])
        rest = self._run_rest(given, base_output)
        if rest:
            loss = loss + rest.pop("loss")
        if isinstance(loss_of, FusedLoss):
            values_of_tokens = loss_of.outputs(values, is_shifted=is_shifted)
            return output_type[0](loss=loss, **rest | values_of_tokens)
        read = functools.partial(
            self._read_logits, self._step_count(), base_type, hidden.detach(), keywords
        )
        return with_logits_on_demand(output_type[0], {"loss": loss, **rest}, read)

    def _run_slices(
        self,
        tail: Callable[..., Any],
        leaves: Leaves,
        cut: LossCut,
        loss_of: SlicedLoss | FusedLoss,
    ) -> Any:
        proofs = LossProofs(*self._slicer.proofs_of(self._model, self._original), loss=loss_of)
        attributes = Attributes(self._model, without=self._base)
        try:
            outputs = self._slicer.run(
                tail, leaves, self._params(), cut, name=self._name, proofs=proofs
            )
            attributes.check_kept()
        except CannotCut:
            attributes.restore()
            raise
        return outputs

    def _cut(self, leaves: Leaves, loss_of: SlicedLoss | FusedLoss, batch: Batch) -> Cut:
        if batch.documents is not None:
            if loss_of.labels_of is LabelsOf.SEQUENCES:
                raise CannotCut("a label belongs to a row of several documents")
            for module in self._tail():
                check_keeps_documents(module)
        return batch.cut(leaves)

    def _run_rest(self, given: dict[str, Any], base_output: Any) -> dict[str, Any]:
        """Return the outputs that are no sums over slices; none without router logits.

        The model computes the loss of the whole batch's router logits, and is given no hidden
        states: its "loss" is that one alone.

        Raises:
            CannotCut: It computes none without hidden states.
        """
        logits = getattr(base_output, "router_logits", None)
        if logits is None:
            return {}
        none = base_output.last_hidden_state.detach()[:, :0]
        given = given | unfused(self._original)
        given |= {name: given[name][:, :0] for name in _LABELS if given.get(name) is not None}
        made = type(base_output)(last_hidden_state=none, router_logits=logits)
        with (
            self._slicer.slicing(None),
            self._base_as(_once(made, self._refuse)),
            self._output_embeddings_as(lambda states: states, none),
            self._loss_as(lambda *_, **__: none.new_zeros((), dtype=torch.float32)),
        ):
            try:
                output = self._original(**given)
            except _MISSING as error:
                raise CannotCut(f"its loss of router logits needs more: {error}") from error
        return {name: one for name, one in output.items() if name != "logits"}

    def _read_logits(
        self,
        step_count: int,
        base_type: Callable[..., Any],
        hidden: torch.Tensor,
        keywords: dict[str, Any],
    ) -> torch.Tensor:
        """Return the logits of the whole batch, which raise an error if they get a gradient.

        Raises:
            ConfigError: A step has changed the head since.
        """
        if self._step_count() != step_count:
            raise ConfigError(_LATE)
        given = {name: one for name, one in keywords.items() if name not in _OF_LOSS}
        made = base_type(last_hidden_state=hidden)
        with (
            torch.no_grad(),
            RandomState([hidden]).restored(),
            self._slicer.slicing(None),
            self._base_as(_once(made, self._refuse)),
        ):
            logits: torch.Tensor = self._original(**given).logits
        self._note(f"the script reads its logits, {logits.dtype} of {tuple(logits.shape)}")
        anchor = torch.zeros((), requires_grad=True)
        return _NoGradient.apply(logits, anchor)  # type: ignore[no-untyped-call, no-any-return]

    # -- the model -------------------------------------------------------------------------------

    @property
    def _prefix(self) -> str:
        prefix: str = self._model.base_model_prefix  # type: ignore[assignment]
        return prefix

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CannotCut(f"its forward calls {self._prefix} several times")

    @property
    def _base(self) -> Any:
        return self._model._modules[self._prefix]

    def _tail(self) -> list[nn.Module]:
        """Return the modules behind the base model, of which a tied head may be a part."""
        modules = [one for name, one in self._model.named_children() if name != self._prefix]
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        return modules if head is None else [*modules, head]

    def _params(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters behind the base model, with a tied head's."""
        of_base = {id(param) for param in self._base.parameters()}
        params = [param for param in self._model.parameters() if id(param) not in of_base]
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        if head is not None:
            params += [param for param in head.parameters() if id(param) in of_base]
        return tuple(params)

    def _base_as(self, call: Callable[..., Any]) -> AbstractContextManager[None]:
        return self._child_as(self._prefix, call)

    def _output_embeddings_as(
        self, call: Callable[..., Any], states: torch.Tensor
    ) -> AbstractContextManager[None]:
        """Have a function in place of the module, with a weight for one token of the vocabulary."""
        head = self._model.get_output_embeddings()  # type: ignore[operator]
        for name, child in self._model.named_children():
            if child is head:
                weight = states.new_zeros(1, states.shape[-1])
                mark_as_gathered(weight)
                return self._child_as(name, call, weight=weight, bias=None)
        raise CannotCut("its output embeddings are in another module")

    def _child_as(
        self, name: str, call: Callable[..., Any], **attributes: Any
    ) -> AbstractContextManager[None]:
        children: dict[str, Any] = self._model._modules
        stand_in = _StandIn(children[name], call, attributes)
        return self._replaced.having(children, name, stand_in)

    def _loss_as(self, loss: Callable[..., torch.Tensor]) -> AbstractContextManager[None]:
        # As the property `loss_function` is set.
        return self._replaced.having(vars(self._model), "_loss_function", loss)


def _once(output: Any, later: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with this output at its first call; later ones are another function's."""
    left = [output]
    return lambda *arguments, **keywords: left.pop() if left else later(*arguments, **keywords)


def _others(output: Any, *known: str) -> str:
    """Return the names of values of an output that slices would lose; empty without any."""
    names = {name for name, one in vars(output).items() if one is not None}
    names -= _NOT_OF_LOSS.union(known)
    return ", ".join(sorted(name for name in names if not name.endswith("hidden_states")))


def _of_tail(given: dict[str, Any], of_base: frozenset[str]) -> dict[str, Any]:
    """Return the arguments of a model that are used behind its base model.

    Args:
        given: All of them.
        of_base: Names of those that the base model takes.

    Raises:
        CannotCut: Images, videos or sounds may be used behind it.
    """
    found: dict[str, Any] = {}
    for name, one in given.items():
        if one is None or name in _OF_BASE:
            continue
        if not name.startswith(_OF_MEDIA):
            found[name] = one
        elif name not in of_base:
            raise CannotCut(f"{name} may be used behind its base model")
    return found


class _Stop(BaseException):
    """Ends a model's forward behind its base model, also where it catches errors (Exception)."""


class _WholeOutput(Exception):
    """Carries the output of the model."""

    def __init__(self, output: Any) -> None:
        self.output = output


class _StandIn:
    """Is called in place of a module, and has its attributes, but for those that are given."""

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], attributes: dict[str, Any]
    ) -> None:
        self._module, self._call = module, call
        vars(self).update(attributes)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ConfigError(
            "logits got a gradient, but memascend.micro_batches computed the loss of this step in "
            "slices, and its logits once more for metrics alone. cause: the script, or its trainer,"
            " computes a loss from the logits of a model that it gives labels. fix: "
            '"head": false in memascend.micro_batches'
        )
