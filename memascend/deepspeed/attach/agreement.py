"""Compares settings that must be the same on every rank, before they are used.

Each machine of a run may have its own copy of a file, and one of them may be old. Ranks that cut
tensors in different places, or begin different collectives, would wait forever; so would ranks that
wait for a rank that has failed alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from memascend.config.block import MemAscendConfig
from memascend.errors import ConfigError, MemAscendError
from memascend.version import __version__

#: Sections of the block that decide how tensors are cut, and when ranks communicate.
_COMPARED = ("buffer_pool", "streaming", "checkpoint", "verify", "micro_batches")


def check_agreement(config: MemAscendConfig) -> None:
    """Compare this rank's block and releases with those of rank 0; all ranks call this.

    Raises:
        ConfigError: A rank differs. Every rank raises; those that differ name the first difference.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = _facts(config)
    first = json.loads(_text_of_rank_0(json.dumps(own)))
    ranks = _ranks_where(own != first)
    if ranks:
        raise ConfigError(_message(own, first, ranks))


@contextmanager
def all_or_none(refusal: Callable[[str], MemAscendError]) -> Iterator[None]:
    """Raise on every rank if the context's body raises on one; all ranks call this.

    Otherwise the other ranks would wait for that rank in their next collective. The body must not
    contain a collective. `refusal` makes the error of the ranks on which nothing failed, from the
    names of the others.

    Raises:
        MemAscendError: The body raised on other ranks. A rank on which it raised keeps its error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as found:
        error = found
    ranks = _ranks_where(error is not None)
    if error is not None:
        raise error
    if ranks:
        raise refusal(_named(ranks))


def _ranks_where(is_so: bool) -> list[int]:
    """Return the ranks that called this with True; all ranks call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [0] if is_so else []
    told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=_device())
    told[dist.get_rank()] = is_so
    dist.all_reduce(told)
    return [int(rank) for rank in told.nonzero().flatten()]


def _facts(config: MemAscendConfig) -> dict[str, Any]:
    """Return the compared values by the names that messages use."""
    block = config.model_dump(mode="json")
    facts: dict[str, Any] = {
        "the release of memascend": __version__,
        "the release of DeepSpeed": deepspeed.__version__,
        "the release of torch": torch.__version__,
        "memascend.direct_nvme.enabled": config.direct_nvme.enabled,
        "memascend.host_memory_limit": "absent" if config.host_memory_limit is None else "stated",
        "memascend.status": "off" if config.status is False else "on",
    }
    for name in _COMPARED:
        facts |= _flat(f"memascend.{name}", block[name])
    return facts


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: v for inner in value for key, v in _flat(f"{name}.{inner}", value[inner]).items()}


def _text_of_rank_0(text: str) -> str:
    """Return the text that rank 0 passed; all ranks call this."""
    raw = text.encode()
    length = torch.tensor([len(raw)], dtype=torch.int64, device=_device())
    dist.broadcast(length, src=0)
    data = torch.zeros(int(length.item()), dtype=torch.uint8, device=_device())
    if dist.get_rank() == 0:
        data.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).decode()


def _message(own: Mapping[str, Any], first: Mapping[str, Any], ranks: list[int]) -> str:
    fix = "Give every machine the same releases and the same DeepSpeed JSON"
    names = [name for name in {**first, **own} if own.get(name) != first.get(name)]
    if not names:
        return f"{_named(ranks)} differ from rank 0; see the errors of these ranks. {fix}"
    name = names[0]
    return (
        f"{name} is {json.dumps(own.get(name))} on rank {dist.get_rank()} and "
        f"{json.dumps(first.get(name))} on rank 0. {fix}"
    )


def _named(ranks: list[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"


def _device() -> str:
    return str(get_accelerator().current_device_name())
