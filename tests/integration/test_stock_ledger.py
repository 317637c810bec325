"""The host memory of stock ZeRO-Infinity, predicted by formula and measured byte by byte.

Every claim about what memascend saves stands on this ledger, so it must be exact. Terms, with P the
elements of this rank, s the bytes of a 16-bit element, g those of an accumulated gradient:

    A  parameter pool              buffer_count x aligned(buffer_size) x s      page-locked
    B  16-bit flat buffer          min(P, max_in_cpu) x s                       pinned
    C  16-bit write-back           aligned(numel) x s, over largest sub-group   page-locked
    D  optimizer swap buffers      buffer_count x aligned(largest sub-group) x 4 page-locked
    E  flat gradients              P x g, and as much again while it is created  pinned
    G  fp32 copy of one sub-group  4 x sub-group, at start                       pageable
    H  gradients for first step    4 x largest sub-group, at start               pageable
    I  Adam state of first step    8 x sub-group, at the first step              pageable

On CUDA, torch rounds the pinned terms B and E up to a power of two; on the CPU accelerator pinning
is nothing, so they are measured as asked for. The file is both the test and the measured program.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.process_group import leave

pytestmark = [pytest.mark.deepspeed, pytest.mark.full]

HIDDEN = 512
VOCABULARY = 4096
LAYER_COUNT = 3
SUB_GROUP_NUMEL = 3_000_000
RESIDENT_NUMEL_MAX = 3_000_000  # as in Hugging Face's example: equal to sub_group_size
PARAM_BUFFER_COUNT = 24
PARAM_BUFFER_NUMEL = 2_100_001
OPTIMIZER_BUFFER_COUNT = 4
ALIGNED_BYTES = 1024
PAGE_BYTES = 4096

# Who asks for memory, as "class.function", and the term it is. `note` looks for these on the
# stack, innermost first.
TERMS = {
    "AsyncPartitionedParameterSwapper._configure_aio": "A",
    "DeepSpeedZeroOptimizer_Stage3._create_param_groups_fp16_flat_cpu_memory": "B",
    "AsyncPartitionedParameterSwapper.reserve_partitioned_swap_space": "C",
    "SwapBufferManager.__init__": "D",
    "DeepSpeedCPUAdam.step": "I",
    "DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions": "G",
    "DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states": "H",
    "DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer": "E",
}


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def ledger(
    request: pytest.FixtureRequest, run_program: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ledger")
    measured = run_program(__file__, str(folder), request.param)
    return measured | {"gradient_bytes": {"bf16": 2, "fp32": 4}[request.param]}


def aligned_numel(numel: int, element_bytes: int) -> int:
    alignment = ALIGNED_BYTES // element_bytes
    return -(-numel // alignment) * alignment


def sub_groups(numels: list[int]) -> list[list[int]]:
    """A sub-group is closed once it has reached sub_group_size: it may exceed it by a tensor."""
    groups: list[list[int]] = [[]]
    for numel in numels:
        if sum(groups[-1]) >= SUB_GROUP_NUMEL:
            groups.append([])
        groups[-1].append(numel)
    return groups


def page_locked_bytes(sizes: list[int]) -> int:
    return sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)


def test_parameter_pool_is_count_times_the_aligned_buffer_size(ledger: dict[str, Any]) -> None:
    predicted = PARAM_BUFFER_COUNT * aligned_numel(PARAM_BUFFER_NUMEL, 2) * 2
    assert ledger["locked"]["A"] == [predicted]


def test_resident_parameters_are_reserved_in_full_and_never_used(ledger: dict[str, Any]) -> None:
    assert sum(ledger["numels"]) > RESIDENT_NUMEL_MAX
    assert ledger["pinned"]["B"] == [RESIDENT_NUMEL_MAX * 2]
    assert ledger["sub_groups_in_resident_buffer"] == 0


def test_write_back_buffer_covers_the_largest_sub_group(ledger: dict[str, Any]) -> None:
    largest = max(sub_groups(ledger["numels"]), key=sum)
    assert ledger["locked"]["C"] == [sum(aligned_numel(numel, 2) for numel in largest) * 2]


def test_optimizer_buffers_each_hold_the_largest_sub_group(ledger: dict[str, Any]) -> None:
    groups = sub_groups(ledger["numels"])
    assert ledger["sub_group_numels"] == [sum(group) for group in groups]
    predicted = aligned_numel(max(map(sum, groups)), 4) * 4
    assert ledger["locked"]["D"] == [predicted] * OPTIMIZER_BUFFER_COUNT


def test_flat_gradients_hold_every_parameter(ledger: dict[str, Any]) -> None:
    predicted = sum(ledger["numels"]) * ledger["gradient_bytes"]
    assert ledger["flat_gradient_bytes"] == predicted
    assert ledger["pinned"]["E"] == [predicted]
    assert ledger["pageable"]["E"].count(predicted) == 1, "the source of the pinned copy"


def test_page_locked_memory_of_the_process_is_the_terms_a_c_and_d(ledger: dict[str, Any]) -> None:
    assert set(ledger["locked"]) == {"A", "C", "D"}
    sizes = [size for term in ledger["locked"].values() for size in term]
    assert ledger["page_locked_bytes"] == page_locked_bytes(sizes)


def test_start_makes_an_fp32_copy_of_every_sub_group(ledger: dict[str, Any]) -> None:
    groups = [sum(group) for group in sub_groups(ledger["numels"])]
    large = [size for size in ledger["pageable"]["G"] if size >= 4 * min(groups)]
    assert large == [4 * numel for numel in groups]


def test_start_makes_gradients_for_the_largest_sub_group(ledger: dict[str, Any]) -> None:
    largest = max(map(sum, sub_groups(ledger["numels"])))
    assert max(ledger["pageable"]["H"]) == 4 * largest


def test_first_step_makes_pageable_adam_state_of_every_sub_group(ledger: dict[str, Any]) -> None:
    groups = [sum(group) for group in sub_groups(ledger["numels"])]
    assert ledger["pageable"]["I"] == [4 * numel for numel in groups for _ in range(2)]


# --- the program that is measured ---


def main(folder: Path, gradient_dtype: str) -> None:
    import deepspeed
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from transformers import LlamaConfig, LlamaForCausalLM

    if not AsyncIOBuilder().is_compatible(verbose=False):
        print("stock's NVMe offload needs its async_io op, which needs libaio's headers to compile")
        sys.exit(77)
    config = stock_config(str(folder), gradient_dtype)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYER_COUNT,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    deepspeed.init_distributed(dist_backend="gloo")
    log = AllocationLog()
    locked_before = vm_locked_bytes()
    with log:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = LlamaForCausalLM(shape)
        engine, *_ = deepspeed.initialize(model=model, config=config)
        locked_after = vm_locked_bytes()
        ids = torch.arange(16).view(1, 16)
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
    optimizer = engine.optimizer
    flats = optimizer.fp16_partitioned_groups_flat
    measured = {
        "numels": [p.ds_tensor.ds_numel for group in optimizer.fp16_groups for p in group],
        "sub_group_numels": optimizer.fp16_partitioned_groups_flat_numel,
        "sub_groups_in_resident_buffer": sum(flat is not None for flat in flats),
        "flat_gradient_bytes": optimizer.grad_partitions_flat_buffer.nbytes,
        "page_locked_bytes": locked_after - locked_before,
        "locked": log.locked,
        "pinned": log.pinned,
        "pageable": log.pageable,
    }
    print(json.dumps(measured))
    leave()


def stock_config(nvme_path: str, gradient_dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": gradient_dtype},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": SUB_GROUP_NUMEL,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": nvme_path,
                "buffer_count": PARAM_BUFFER_COUNT,
                "buffer_size": PARAM_BUFFER_NUMEL,
                "max_in_cpu": RESIDENT_NUMEL_MAX,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": nvme_path,
                "buffer_count": OPTIMIZER_BUFFER_COUNT,
            },
        },
    }


class AllocationLog:
    """While active, notes the bytes of every allocation that one of TERMS asks for."""

    def __init__(self) -> None:
        self.locked: dict[str, list[int]] = {}
        self.pinned: dict[str, list[int]] = {}
        self.pageable: dict[str, list[int]] = {}
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> AllocationLog:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder import AsyncIOBuilder

        handle = AsyncIOBuilder().load(verbose=False).aio_handle
        accelerator = type(get_accelerator())
        replace = self._exits.enter_context
        new_tensor = noting(self.locked, handle.new_cpu_locked_tensor)
        replace(mock.patch.object(handle, "new_cpu_locked_tensor", new_tensor))
        replace(
            mock.patch.object(
                accelerator, "pin_memory", noting(self.pinned, accelerator.pin_memory)
            )
        )
        replace(pageable_log(self.pageable))
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()


def noting(log: dict[str, list[int]], allocate: Callable[..., Any]) -> Callable[..., Any]:
    def allocate_and_note(*arguments: Any, **keywords: Any) -> Any:
        tensor = allocate(*arguments, **keywords)
        note(log, tensor.nbytes)
        return tensor

    return allocate_and_note


def pageable_log(log: dict[str, list[int]]) -> contextlib.AbstractContextManager[Any]:
    """Notes what torch operations newly allocate: outputs that share no memory with inputs."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class PageableLog(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                inputs = [a for a in args if isinstance(a, torch.Tensor)]
                address = result.untyped_storage().data_ptr()
                if all(address != tensor.untyped_storage().data_ptr() for tensor in inputs):
                    note(log, result.nbytes)
            return result

    return PageableLog()


def note(log: dict[str, list[int]], nbytes: int) -> None:
    frame = sys._getframe(1)
    while frame is not None:
        owner = type(frame.f_locals.get("self")).__name__
        term = TERMS.get(f"{owner}.{frame.f_code.co_name}")
        if term is not None:
            log.setdefault(term, []).append(nbytes)
            return
        frame = frame.f_back


def vm_locked_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^VmLck:\s+(\d+) kB$", status, re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
