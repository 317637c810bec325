"""The shapes of a model's parameters, from a module, a config.json or safetensors headers.

Everything the plan needs to know about a model, and all of it without torch: a module is only asked
for names and shapes, and of a safetensors file only the header is read.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from memascend.base.json_text import parse_json, show_json
from memascend.base.units import NBYTES_MAX
from memascend.errors import ConfigError
from memascend.plan.architectures import tensors_of

#: What the safetensors library itself accepts.
HEADER_BYTES_MAX = 100_000_000
DIMENSION_COUNT_MAX = 64
#: Bytes of one element of what can be a parameter; masks and counters are not.
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, slots=True)
class TensorShape:
    """One parameter: its name, its whole shape (before partitioning), and whether it learns."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def shard_numel(self, world: int) -> int:
        """Elements of one rank's part: ZeRO pads to a multiple of the number of ranks."""
        return -(-self.numel // world)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The parameters of a model in the module's own order, each once.

    Attributes:
        name: For people.
        tensors: Every parameter.
        tied: Names that stand for another tensor, and its name.
    """

    name: str
    tensors: tuple[TensorShape, ...]
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def trainable(self) -> tuple[TensorShape, ...]:
        """The parameters that learn."""
        return tuple(tensor for tensor in self.tensors if tensor.trainable)

    @property
    def largest(self) -> TensorShape:
        """The largest parameter."""
        return max(self.tensors, key=lambda tensor: tensor.numel)

    def sub_groups(
        self, *, world: int, sub_group_size: int, has_decay_groups: bool
    ) -> list[list[TensorShape]]:
        """DeepSpeed's units of the optimizer step, in its order.

        A sub-group is closed once one rank's elements reach `sub_group_size`; it never spans two
        parameter groups.

        Args:
            world: Ranks.
            sub_group_size: In elements of one rank.
            has_decay_groups: Norms and biases (one dimension) form a second parameter group.
        """
        groups = [self.trainable]
        if has_decay_groups:
            groups = [
                tuple(t for t in self.trainable if len(t.shape) > 1),
                tuple(t for t in self.trainable if len(t.shape) <= 1),
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
        """Tensors that are used together: those below the same numbered module.

        "model.layers.7.mlp.up_proj.weight" belongs to "model.layers.7". A tensor below no number
        belongs to the module that holds it.
        """
        groups: dict[str, list[TensorShape]] = {}
        for tensor in self.tensors:
            numbered = re.match(r"(?:.*?\.)?\d+(?=\.)", tensor.name)
            key = numbered.group() if numbered else tensor.name.rpartition(".")[0]
            groups.setdefault(key, []).append(tensor)
        return list(groups.values())


def from_module(module: Any, name: str | None = None) -> ModelShapes:
    """Asks a torch module, partitioned by `zero.Init` or not.

    Args:
        module: Anything with `named_parameters(remove_duplicate=False)` like torch's.
        name: For people; left out: the class of the module.

    Raises:
        ConfigError: The module has no parameters.
    """
    tensors: list[TensorShape] = []
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for parameter_name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied[parameter_name] = names[id(parameter)]
            continue
        names[id(parameter)] = parameter_name
        # A partitioned parameter itself is empty; ZeRO keeps the shape it had.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        tensors.append(
            TensorShape(parameter_name, tuple(int(n) for n in shape), parameter.requires_grad)
        )
    return _checked(name or type(module).__name__, tensors, tied)


def from_config(source: Path | str | Mapping[str, Any], name: str | None = None) -> ModelShapes:
    """Derives every tensor from a Hugging Face config.json, as a path or as its content.

    Raises:
        ConfigError: Unreadable, or of an architecture not known here; says which are.
    """
    if isinstance(source, Mapping):
        config: Mapping[str, Any] = source
        named = (config.get(key) for key in ("_name_or_path", "model_type"))
        default_name = next((text for text in named if isinstance(text, str) and text), "model")
    else:
        path = Path(source)
        config = _read_json(path)
        default_name = path.stem if path.stem != "config" else path.resolve().parent.name
    tensors, tied = tensors_of(config)
    return _checked(
        name or default_name, [TensorShape(name, shape) for name, shape in tensors], tied
    )


def from_safetensors(source: Path | str, name: str | None = None) -> ModelShapes:
    """Reads the headers of a .safetensors file, of an index's files, or of a folder's.

    A checkpoint does not keep the module's order, which decides where DeepSpeed cuts sub-groups:
    names are put in natural order, which comes close. A config.json is exact. Experts are counted
    as they are stored, one by one in older checkpoints. Tied weights count once, as stored.

    Raises:
        ConfigError: Missing, not safetensors, or damaged.
    """
    path = Path(source)
    tensors: list[TensorShape] = []
    for file, wanted in _safetensors_files(path):
        found = _read_header(file)
        missing = sorted(wanted - set(found))
        if missing:
            raise ConfigError(
                f"{path} says that {file.name} holds {show_json(missing[0])}, but it does not. "
                "Likely cause: files of different checkpoints in one folder. Download them again"
            )
        kept = wanted or set(found)
        tensors += [TensorShape(key, shape) for key, shape in found.items() if key in kept]
    tensors.sort(key=lambda tensor: _natural(tensor.name))
    return _checked(name or path.stem, tensors, {})


def builtin(name: str) -> ModelShapes:
    """The shapes of a public model whose numbers come with this package; case does not matter.

    Raises:
        ConfigError: No such model; names the nearest one and all of them.
    """
    known = {model.lower(): model for model in builtin_names()}
    found = known.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
        hint = f" Did you mean {known[near[0]]!r}?" if near else ""
        raise ConfigError(
            f"no built-in model {name!r}. Known: {', '.join(known.values())}.{hint} Or give the "
            "path of a config.json, or of a .safetensors file, index or folder"
        )
    file = resources.files("memascend.plan") / "models" / f"{found}.json"
    text = file.read_text("utf-8")
    return from_config(json.loads(text), name=found)


def builtin_names() -> tuple[str, ...]:
    """Names that `builtin` takes."""
    files = resources.files("memascend.plan").joinpath("models").iterdir()
    return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".json")))


def _checked(name: str, tensors: list[TensorShape], tied: dict[str, str]) -> ModelShapes:
    if not any(tensor.numel for tensor in tensors):
        raise ConfigError(f"{name} has no parameters, so there is nothing to plan")
    model = ModelShapes(name, tuple(tensors), tied)
    if model.numel >= NBYTES_MAX:
        raise ConfigError(f"{name} has {model.numel} parameters, more than there can be")
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _safetensors_files(path: Path) -> list[tuple[Path, set[str]]]:
    """Files to read, each with the names wanted of it (empty: all)."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        if index.exists():
            return _safetensors_files(index)
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{path} holds no .safetensors file and no index of such files")
        return [(file, set()) for file in files]
    if path.suffix != ".json":
        return [(path, set())]
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f'{path} has no "weight_map": it is not an index of safetensors files')
    names_of: dict[str, set[str]] = {}
    for key, file_name in weight_map.items():
        is_beside = isinstance(file_name, str) and file_name == Path(file_name).name
        if not is_beside or file_name in ("", ".."):
            raise ConfigError(
                f"{path}: {show_json(key)} must name a file beside it, got {show_json(file_name)}"
            )
        names_of.setdefault(file_name, set()).add(key)
    return [(path.parent / file_name, names) for file_name, names in sorted(names_of.items())]


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a file's floating-point tensors; every length is checked before it is used."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(HEADER_BYTES_MAX, file_bytes - 8):
                raise ConfigError(
                    f"{path} is not a safetensors file: its first 8 bytes announce a header of "
                    f"{header_bytes} bytes in a file of {file_bytes}. Likely cause: a Git LFS "
                    "pointer or a download that broke off"
                )
            header = parse_json(file.read(header_bytes))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: the safetensors header must be a JSON object")
    room_bytes = file_bytes - 8 - header_bytes
    found = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        shape = _entry_shape(path, key, entry, room_bytes)
        if entry["dtype"] in FLOAT_BYTES:
            found[key] = shape
    return found


def _entry_shape(path: Path, key: str, entry: Any, room_bytes: int) -> tuple[int, ...]:
    is_sound = (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and _is_counts(entry.get("shape"))
        and _is_counts(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    )
    if is_sound:
        begin, end = entry["data_offsets"]
        itemsize = FLOAT_BYTES.get(entry["dtype"])
        is_sound = begin <= end and (
            itemsize is None or end - begin == itemsize * math.prod(entry["shape"])
        )
    if not is_sound:
        raise ConfigError(
            f"{path}: the header entry of {show_json(key)} is damaged: {show_json(entry)}"
        )
    if entry["data_offsets"][1] > room_bytes:
        raise ConfigError(
            f"{path}: {show_json(key)} ends at byte {entry['data_offsets'][1]} of {room_bytes}. "
            "Likely cause: a download that broke off"
        )
    return tuple(entry["shape"])


def _is_counts(value: Any) -> bool:
    """Few and of a size that can be multiplied: the header may be anybody's."""
    if not isinstance(value, list) or len(value) > DIMENSION_COUNT_MAX:
        return False
    return all(type(n) is int and 0 <= n < NBYTES_MAX for n in value)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts "layers.2" before "layers.10"."""
    key = []
    for index, part in enumerate(re.split(r"(\d+)", name)):
        digits = part.lstrip("0")  # compared as text: there may be any number of them
        key.append((len(digits), digits) if index % 2 else (-1, part))
    return key
