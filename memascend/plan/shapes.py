"""The shapes of a model's parameters, from a module, a config.json or safetensors headers.

This is all that the plan needs to know about a model. It works without torch: only names and shapes
of a module are used, and only the header of a safetensors file is read.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from memascend.base.json_text import read_json_object
from memascend.base.units import NBYTES_MAX
from memascend.errors import ConfigError
from memascend.plan.architectures import tensors_of
from memascend.plan.safetensors import read_shapes


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One parameter, before it is partitioned."""

    name: str  # its name in the module
    shape: tuple[int, ...]
    trainable: bool = True
    itemsize: int | None = None  # bytes of an element; None: those of the dtype of training
    #: Whether Muon updates it, of a model whose script or DeepSpeed says so; None: by its name.
    uses_muon: bool | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def shard_numel(self, world: int) -> int:
        """Return the elements of one rank's part: ZeRO pads to a multiple of the ranks."""
        return -(-self.numel // world)

    def shard_bytes(self, world: int, itemsize: int) -> int:
        """Return the bytes of one rank's part; `itemsize` is that of the dtype of training."""
        return self.shard_numel(world) * (itemsize if self.itemsize is None else self.itemsize)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The parameters of a model in the module's own order, each once."""

    name: str  # name of the model, for messages
    tensors: tuple[TensorShape, ...]
    tied: Mapping[str, str] = field(default_factory=dict)  # tied weights: name -> name of the first
    #: The content of its config.json; None if only shapes are known.
    config: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def trainable(self) -> tuple[TensorShape, ...]:
        """The parameters that are trained."""
        return tuple(tensor for tensor in self.tensors if tensor.trainable)

    def sub_groups(
        self,
        *,
        world: int,
        sub_group_size: int,
        has_decay_groups: bool,
        matrices: Collection[str] = (),
    ) -> list[list[TensorShape]]:
        """Return DeepSpeed's units of the optimizer step, in its order.

        A sub-group is closed once one rank's elements reach `sub_group_size`; it never spans two
        parameter groups. Norms and biases (one dimension) may form a second one, and the parameters
        that Muon updates, of the names `matrices`, one before the others.
        """
        groups = [self.trainable]
        if has_decay_groups:
            groups = [
                tuple(t for t in self.trainable if len(t.shape) > 1),
                tuple(t for t in self.trainable if len(t.shape) <= 1),
            ]
        if matrices:
            groups = [
                tuple(tensor for tensor in group if (tensor.name in matrices) == is_matrix)
                for group in groups
                for is_matrix in (True, False)
            ]
        closed: list[list[TensorShape]] = []
        for group in groups:
            rest: list[TensorShape] = []
            rest_numel = 0
            for tensor in group:
                rest.append(tensor)
                rest_numel += tensor.shard_numel(world)
                if rest_numel >= sub_group_size:
                    closed.append(rest)
                    rest, rest_numel = [], 0
            closed += [rest] if rest else []
        return closed

    def layers(self) -> list[list[TensorShape]]:
        """Return tensors that are used together: those under the same numbered module.

        "model.layers.7.mlp.up_proj.weight" belongs to "model.layers.7". A tensor without a number
        in its name belongs to the module that holds it.
        """
        groups: dict[str, list[TensorShape]] = {}
        for tensor in self.tensors:
            numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", tensor.name)
            key = numbered.group() if numbered else tensor.name.rpartition(".")[0]
            groups.setdefault(key, []).append(tensor)
        return list(groups.values())


def from_module(module: Any, name: str | None = None) -> ModelShapes:
    """Return the shapes of a torch module, partitioned by `zero.Init` or not.

    Only `named_parameters(remove_duplicate=False)` is used. The class is the default name. If any
    parameter has `use_muon`, those without it are not Muon's, as DeepSpeed reads them.

    Raises:
        ConfigError: The module has no parameters.
    """
    tensors: list[TensorShape] = []
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    named = list(module.named_parameters(remove_duplicate=False))
    is_told = any(hasattr(parameter, "use_muon") for _, parameter in named)
    for parameter_name, parameter in named:
        if id(parameter) in names:
            tied[parameter_name] = names[id(parameter)]
            continue
        names[id(parameter)] = parameter_name
        # A partitioned parameter itself is empty; ZeRO keeps the shape it had.
        shape = tuple(int(n) for n in getattr(parameter, "ds_shape", parameter.shape))
        # Trainable parameters are all stored in the model's dtype; frozen ones in their own, such
        # as packed weights or norms in fp32.
        stored = None if parameter.requires_grad else getattr(parameter, "ds_tensor", parameter)
        itemsize = None if stored is None else stored.dtype.itemsize
        uses_muon = bool(getattr(parameter, "use_muon", False)) if is_told else None
        is_trained = parameter.requires_grad
        tensors.append(TensorShape(parameter_name, shape, is_trained, itemsize, uses_muon))
    return _checked(name or type(module).__name__, tensors, tied)


def from_config(source: Path | str | Mapping[str, Any], name: str | None = None) -> ModelShapes:
    """Derive every tensor from a Hugging Face config.json, as a path or as its content.

    Raises:
        ConfigError: Unreadable, or of an unknown architecture; lists the known ones.
    """
    if isinstance(source, Mapping):
        config: Mapping[str, Any] = source
        named = (config.get(key) for key in ("_name_or_path", "model_type"))
        default_name = next((text for text in named if isinstance(text, str) and text), "model")
    else:
        path = Path(source)
        config = read_json_object(path)
        default_name = path.stem if path.stem != "config" else path.resolve().parent.name
    shapes, tied = tensors_of(config)
    tensors = [TensorShape(tensor_name, shape) for tensor_name, shape in shapes]
    return dataclasses.replace(_checked(name or default_name, tensors, tied), config=config)


def from_safetensors(source: Path | str, name: str | None = None) -> ModelShapes:
    """Read the headers of a .safetensors file, of an index's files, or of a folder's files.

    A checkpoint does not keep the module's order, which decides where DeepSpeed cuts sub-groups.
    Names are sorted in natural order, which comes close; a config.json is exact. Experts are
    counted as stored, one by one in older checkpoints. Tied weights count once, as stored.

    Floats of any width are assumed to be trained, in the dtype that DeepSpeed gives the model.
    Integers, which hold packed weights, are assumed to be frozen in their own dtype.

    Raises:
        ConfigError: Missing, not safetensors, or damaged.
    """
    path = Path(source)
    tensors = [
        TensorShape(one.name, one.shape, one.itemsize is None, one.itemsize)
        for one in read_shapes(path)
    ]
    tensors.sort(key=lambda tensor: _natural(tensor.name))
    return _checked(name or path.stem, tensors, {})


def builtin(name: str) -> ModelShapes:
    """Return the shapes of a public model that comes with this package; case does not matter.

    A name on the Hub counts without its owner, and without the ending of a variant that has the
    same shapes: "meta-llama/Llama-3.1-8B-Instruct" is "Llama-3.1-8B". A model that
    reads images, too, is counted without its vision part.

    Raises:
        ConfigError: No such model; lists all, and the nearest one.
    """
    known = {model.lower(): model for model in builtin_names()}
    wanted = name.lower().rpartition("/")[2]
    by_form = {_family(one): model for one, model in known.items()} | known
    forms = (wanted, _family(wanted), _VARIANT.sub("", wanted), _VERSION.sub("", wanted))
    found = next((by_form[form] for form in forms if form in by_form), None)
    if found is None:
        near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.4)
        hint = f" Did you mean {known[near[0]]!r}?" if near else ""
        owner = "" if "/" in name else "OWNER/"
        raise ConfigError(
            f"no built-in model {name!r}.{hint} `hf download {owner}{name} config.json` makes a "
            "name on the Hub known. Else give the path of a config.json, or of a .safetensors "
            f"file, index or folder, or one of {', '.join(known.values())}"
        )
    return from_config(_content(found), name=found)


def source_of(name: str) -> str:
    """Return a built-in model's own name on the Hub: "Qwen/Qwen3-8B"."""
    owner, model = str(_content(name)["source"]).split("/")[3:5]
    return f"{owner}/{model}"


def _content(name: str) -> dict[str, Any]:
    file = resources.files("memascend.plan") / "models" / f"{name}.json"
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


#: How a model was trained, in its name: "-Instruct" in "Mistral-7B-Instruct-v0.3"; its version.
_VARIANT, _VERSION = re.compile(r"-(instruct|base|it|pt)(?=-v|$)"), re.compile(r"-v[\d.]+$")


def _family(name: str) -> str:
    """Return a model's name without the ending that says how it was trained."""
    return re.sub(r"-(instruct|base|it|pt)(-\d+|-v[\d.]+)?$", "", name)


def builtin_names() -> tuple[str, ...]:
    """Return the names that `builtin` accepts."""
    files = resources.files("memascend.plan").joinpath("models").iterdir()
    return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".json")))


def _checked(name: str, tensors: list[TensorShape], tied: dict[str, str]) -> ModelShapes:
    if not any(tensor.numel for tensor in tensors):
        raise ConfigError(f"{name} has no parameters, so there is nothing to plan")
    model = ModelShapes(name, tuple(tensors), tied)
    if model.numel >= NBYTES_MAX:
        raise ConfigError(f"{name} has {model.numel} parameters, more than there can be")
    return model


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "layers.2" before "layers.10"."""
    key = []
    for index, part in enumerate(re.split(r"(\d+)", name)):
        digits = part.lstrip("0")  # compared as text: a name may have any number of digits
        key.append((len(digits), digits) if index % 2 else (-1, part))
    return key
