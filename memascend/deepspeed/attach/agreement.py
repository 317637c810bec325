"""What has to be the same on every rank is compared, before anything is made of it.

Machines of one run may have files of their own, and an old one on one of them. Ranks that cut
tensors in other places, or ask for a collective that others do not, would wait for ever; and so
would those that wait for a rank that has ended alone.
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

#: Of the block, the sections that decide how tensors are cut, and when ranks talk to each other.
_COMPARED = ("buffer_pool", "streaming", "checkpoint", "verify")


def check_agreement(config: MemAscendConfig) -> None:
    """Compare this rank's block and releases with those of rank 0; all ranks call this.

    Raises:
        ConfigError: They differ somewhere; raised by every rank, by those that differ with the
            first difference.
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
    """Raise on every rank where the block raises on one; all ranks call this.

    The others would wait for that rank in their next collective. So the block holds none.

    Args:
        refusal: Makes the error of the ranks on which nothing failed, from the others' numbers.

    Raises:
        MemAscendError: The block raised on other ranks; where it did, its own error.
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
    """Return the ranks that called this with true."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [0] if is_so else []
    told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=_device())
    told[dist.get_rank()] = is_so
    dist.all_reduce(told)
    return [int(rank) for rank in told.nonzero().flatten()]


def _facts(config: MemAscendConfig) -> dict[str, Any]:
    """Return what is compared, by the name that a user knows it by."""
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
    """Return the text that rank 0 called this with."""
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
        return f"{_named(ranks)} differ from rank 0, and say in what. {fix}"
    name = names[0]
    return (
        f"{name} is {json.dumps(own.get(name))} on rank {dist.get_rank()} and "
        f"{json.dumps(first.get(name))} on rank 0. {fix}"
    )


def _named(ranks: list[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"


def _device() -> str:
    return str(get_accelerator().current_device_name())
