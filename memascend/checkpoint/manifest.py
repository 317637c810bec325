"""The manifest of a rank's part of a checkpoint: a JSON file beside the files it names.

It is read first. It is not trusted: names must stay inside the checkpoint's folder, and sizes are
compared with the files before they are used. Standard library and pydantic only.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from memascend.base.json_text import parse_json, show_json
from memascend.errors import CheckpointError

VERSION = 1
#: Larger manifests are refused; that of a model with a thousand sub-groups has a megabyte.
MANIFEST_BYTES_MAX = 32 << 20
#: Lists with more entries are refused before validation, which could report an error for each.
ENTRY_COUNT_MAX = 1 << 18
#: Limit of file systems for a name, and a limit for paths below theirs.
NAME_BYTES_MAX, PATH_BYTES_MAX = 255, 1024
#: DeepSpeed rounds file sizes up to its I/O alignment, which is below this.
PADDING_BYTES_MAX = 1 << 20

Dtype = Literal["float32", "float16", "bfloat16", "float64"]
ITEMSIZES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
Count = Annotated[int, Field(ge=0, lt=1 << 63, strict=True)]
Beta = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(max_length=PATH_BYTES_MAX)]
Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8}$")]


class _ManifestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_ManifestModel):
    """A file: its path in the checkpoint's folder, its bytes, their CRC-32."""

    name: Text
    nbytes: Count
    crc32: Checksum


class SubGroupEntry(_ManifestModel):
    """A sub-group: DeepSpeed's name of it at the save, and its elements on this rank."""

    name: Text
    numel: Count


class TensorEntry(_ManifestModel):
    """A tensor in a file of its own: master weights (no state), or a state of the optimizer."""

    sub_group: Count
    state: Text | None
    dtype: Dtype
    numel: Count
    file: Text


class SavedPowers(_ManifestModel):
    """The running powers of Adam's betas, which DeepSpeed's operator multiplies up in fp32.

    They begin with pow(beta, since) and are multiplied by beta in each step up to `step`.
    """

    beta1: Beta
    beta2: Beta
    since: Count
    step: Count


class Manifest(_ManifestModel):
    """One rank's part of a checkpoint."""

    format: Literal["memascend checkpoint"] = "memascend checkpoint"
    version: Literal[1] = 1
    memascend: Text
    rank: Count
    world: Count
    global_step: Count
    optimizer: Text
    optimizer_step: Count | None
    powers: SavedPowers | None = None
    sub_groups: tuple[SubGroupEntry, ...]
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]

    def text(self) -> str:
        """Return the manifest as it is stored."""
        unknown = {"powers"} if self.powers is None else None
        return self.model_dump_json(indent=1, exclude=unknown) + "\n"


def manifest_name(rank: int) -> str:
    """Return the file name of a rank's manifest in the checkpoint's folder."""
    return f"memascend-rank{rank:02d}.json"


def read_manifest(folder: Path, rank: int) -> Manifest | None:
    """Return the manifest of a rank; None if no rank has one: stock DeepSpeed saved.

    Raises:
        CheckpointError: Only this rank's is missing, or it is damaged or of a later memascend.
    """
    path = folder / manifest_name(rank)
    if not path.is_file():
        others = sorted(other.name for other in folder.glob("memascend-rank*.json"))
        if not others:
            return None
        raise CheckpointError(
            f"checkpoint {folder} has no {path.name}, but {', '.join(others[:4])}. Likely cause: "
            "it was not copied completely, or has its ranks' files on several machines. Copy all "
            "of them into one folder"
        )
    nbytes = path.stat().st_size
    if nbytes > MANIFEST_BYTES_MAX:
        raise _damaged(path, f"it has {nbytes} bytes, expected at most {MANIFEST_BYTES_MAX}")
    try:
        content = parse_json(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    version = content.get("version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"checkpoint {folder} has format version {show_json(version)}, this memascend knows "
            f"{VERSION}. It was saved by a later memascend; install that one"
        )
    for name in ("sub_groups", "tensors", "files"):
        entries = content.get(name) if isinstance(content, dict) else None
        if isinstance(entries, list) and len(entries) > ENTRY_COUNT_MAX:
            raise _damaged(path, f"{name} has {len(entries)} entries, at most {ENTRY_COUNT_MAX}")
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = show_json(".".join(map(str, first["loc"])))
        found = show_json(first["input"])
        raise _damaged(path, f"{where}: {first['msg']}, found {found}") from None
    _check(path, manifest, rank)
    return manifest


def _check(path: Path, manifest: Manifest, rank: int) -> None:
    """Check consistency beyond the types."""
    if manifest.rank != rank:
        raise _damaged(path, f"it is for rank {manifest.rank}, expected {rank}")
    if manifest.powers is not None and manifest.powers.since > manifest.powers.step:
        raise _damaged(path, "powers of the betas begin behind their last step")
    sizes = {}
    for file in manifest.files:
        check_name(path, file.name)
        if file.name in sizes:
            raise _damaged(path, f"{show_json(file.name)} is named twice")
        sizes[file.name] = file.nbytes
    seen = set()
    for tensor in manifest.tensors:
        shown = show_json(tensor.file)
        if tensor.file not in sizes:
            raise _damaged(path, f"{shown} belongs to a tensor, but is not listed in files")
        if tensor.sub_group >= len(manifest.sub_groups):
            raise _damaged(path, f"{shown} is of sub-group {tensor.sub_group}: no such")
        if (tensor.sub_group, tensor.state) in seen:
            raise _damaged(path, f"{shown} is the second file of one tensor")
        seen.add((tensor.sub_group, tensor.state))
        if tensor.numel != manifest.sub_groups[tensor.sub_group].numel:
            raise _damaged(path, f"{shown} has not as many elements as its sub-group")
        check_nbytes(path.parent / tensor.file, sizes[tensor.file], tensor.numel, tensor.dtype)


def check_name(path: Path, name: str) -> None:
    """Raise CheckpointError for a name that no file can have, or one outside the checkpoint."""
    if not _is_inside(path.parent, name):
        raise _damaged(
            path, f"the file name {show_json(name)} leads out of the checkpoint's folder"
        )


def _is_inside(folder: Path, name: str) -> bool:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or "\0" in name or ".." in parts:
        return False
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:  # half of a character
        return False
    if max(sizes) > NAME_BYTES_MAX or sum(sizes) + len(parts) > PATH_BYTES_MAX:
        return False
    real = os.path.realpath(folder / name)
    return real.startswith(os.path.join(os.path.realpath(folder), ""))


def check_nbytes(path: Path, nbytes: int, numel: int, dtype: str) -> None:
    """Raise CheckpointError for a file shorter than a tensor, or longer than rounding explains."""
    expected = numel * ITEMSIZES[dtype]
    if not expected <= nbytes < expected + PADDING_BYTES_MAX:
        raise CheckpointError(
            f"checkpoint file {path} has {nbytes} bytes, the optimizer needs {expected} ({numel} "
            f"elements of {dtype}). Likely cause: it was saved with another model, or is damaged. "
            "Load it with the configuration that saved it"
        )


def check_file(folder: Path, entry: FileEntry, nbytes: int, crc32: int) -> None:
    """Raise CheckpointError if a file differs from its entry, with expected and found values."""
    if nbytes == entry.nbytes and f"{crc32:08x}" == entry.crc32:
        return
    raise CheckpointError(
        f"checkpoint file {folder / entry.name} is damaged: expected {entry.nbytes} bytes with "
        f"crc32 {entry.crc32}, found {nbytes} bytes with crc32 {crc32:08x}. Likely cause: it was "
        "not copied completely, or the drive changed it. Copy it again, or load another tag"
    )


def missing_file(path: Path) -> CheckpointError:
    """Return the error for a missing file."""
    return CheckpointError(
        f"checkpoint file {path} is missing. Likely cause: the checkpoint was not copied "
        "completely. Copy it again, or load another tag"
    )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint manifest {path} cannot be used: {what}. Likely cause: the file is damaged. "
        "Copy the checkpoint again, or load another tag"
    )
