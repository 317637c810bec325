"""Trains stacks of layers and prints what a step of each moved beside what the plan says, as JSON.

Started by test_traffic.py, with the options of every training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from torch.utils.checkpoint import checkpoint

import memascend  # noqa: F401  what the torch.backends entry point does in an installed copy
from benchmarks.kernel_counts import storage_bytes
from memascend.nvme.store import TensorStore
from tests.support.process_group import leave
from tests.support.rough_muon import leave_updates_as_they_are

MATRICES, WIDTH = 24, 1024
SHARD_BYTES = WIDTH * WIDTH * torch.bfloat16.itemsize
#: The first step makes the states, and DeepSpeed learns the order of the modules.
WARMUPS, STEPS = 2, 1
#: Parameter slots have room for two matrices; without it for eight, held where a pass turns.
LIMIT = "56MiB"


class Stack(torch.nn.Module):
    """Layers of square matrices, recomputed in backward where that is asked for."""

    def __init__(self, recomputes: bool, matrices: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(
                *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(matrices))
            )
            for _ in range(MATRICES // matrices)
        )
        self.recomputes = recomputes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = rows.requires_grad_()
        for layer in self.layers:
            if self.recomputes:
                hidden = hidden + torch.tanh(checkpoint(layer, hidden, use_reentrant=False))
            else:
                hidden = hidden + torch.tanh(layer(hidden))
        return (hidden - rows).float().square().mean()


class Gathers:
    """Counts how often each parameter is gathered, by phase of a step, and how many are at once."""

    def __init__(self) -> None:
        self.phase = ""
        self.counts: Counter[tuple[str, int]] = Counter()
        self.model: Any = None
        self.most = 0

    def watch(self, kind: Any) -> None:
        init = kind.__init__

        def counted(handle: Any, params: Any, *arguments: Any) -> None:
            init(handle, params, *arguments)
            for param in params if isinstance(params, list) else [params]:
                self.counts[self.phase, param.ds_id] += 1
            absent = partition_parameters.ZeroParamStatus.NOT_AVAILABLE
            statuses = [param.ds_status for param in self.model.parameters()]
            self.most = max(self.most, len(statuses) - statuses.count(absent))

        kind.__init__ = counted

    def take(self, steps: int) -> dict[str, list[float]]:
        """Return how often a step has gathered each parameter, by phase, and begin anew."""
        counts, self.counts = self.counts, Counter()
        return {
            phase: [count / steps for (one, _), count in counts.items() if one == phase]
            for phase in ("forward", "backward")
        }


class Reads:
    """Counts the bytes of each parameter that are read from the drive."""

    def __init__(self) -> None:
        self.nbytes: Counter[str] = Counter()

    def watch(self, kind: Any) -> None:
        start_read = kind.start_read

        def counted(store: Any, request: Any) -> Any:
            if request.key.startswith("param."):
                self.nbytes[request.key] += request.nbytes
            return start_read(store, request)

        kind.start_read = counted

    def take(self) -> Counter[str]:
        """Return the bytes by key, and begin anew."""
        nbytes, self.nbytes = self.nbytes, Counter()
        return nbytes


gathers, reads = Gathers(), Reads()


def config(drive: str, options: argparse.Namespace) -> dict[str, Any]:
    on_drive = {"device": "nvme", "nvme_path": drive}
    return {
        "train_micro_batch_size_per_gpu": options.sequences,
        "gradient_accumulation_steps": options.accumulation,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": options.sum_dtype},
        "gradient_clipping": options.clipping,
        **_optimizer(options),
        "zero_optimization": {
            "stage": 3,
            "reduce_scatter": not options.muon,  # which Muon refuses
            "offload_param": on_drive,
            "offload_optimizer": on_drive,
            "sub_group_size": 8_000_000,
            "stage3_prefetch_bucket_size": options.prefetch * WIDTH * WIDTH,
            "stage3_max_reuse_distance": options.reuse_distance,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": 1_000_000,
        "memascend": {
            **({} if options.no_limit else {"host_memory_limit": options.limit}),
            **({"micro_batches": {"count": options.slices}} if options.slices else {}),
            "streaming": {
                "optimizer": {
                    "state_dtype": options.state_dtype,
                    "master_dtype": options.master_dtype,
                    "during_backward": options.during_backward,
                }
            },
        },
    }


def _optimizer(options: argparse.Namespace) -> dict[str, Any]:
    if options.client:
        return {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    return {"optimizer": {"type": "Muon" if options.muon else "AdamW", "params": {"lr": 1e-3}}}


def client_muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Make DeepSpeed's Muon as a script does, which the JSON does not name then."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    params = list(model.parameters())
    for param in params:
        param.use_muon = True
    return MuonWithAuxAdam([{"params": params, "lr": 1e-3, "use_muon": True}])


def train(engine: Any, steps: int, options: argparse.Namespace) -> None:
    for _ in range(steps * options.accumulation):
        rows = torch.randn(options.sequences, 1, WIDTH).to(torch.bfloat16)
        gathers.phase = "forward"
        loss = engine(rows)
        gathers.phase = "backward"
        engine.backward(loss)
        gathers.phase = ""
        engine.step()
        engine.optimizer.finish_walk()  # else it hands values over to a forward pass that waits


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recomputes", action="store_true")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--matrices", type=int, default=1, help="of a layer")
    parser.add_argument("--sequences", type=int, default=2, help="of a micro-step")
    parser.add_argument("--slices", type=int, help="of a micro-step, in which layers compute it")
    parser.add_argument("--sum-dtype", default="bf16")
    parser.add_argument("--reuse-distance", type=int, default=0)
    parser.add_argument("--prefetch", type=int, default=0, help="matrices gathered ahead")
    parser.add_argument("--state-dtype", default="fp32")
    parser.add_argument("--master-dtype", default="fp32")
    parser.add_argument("--during-backward", action="store_true")
    parser.add_argument("--muon", action="store_true")
    parser.add_argument("--client", action="store_true", help="the script makes Muon")
    parser.add_argument("--clipping", type=float, default=0.0)
    parser.add_argument("--no-limit", action="store_true")
    parser.add_argument("--limit", default=LIMIT)
    return parser


def moved(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Train, and return what was planned and measured in each direction."""
    with tempfile.TemporaryDirectory(dir=".") as drive:
        settings = config(drive, options)
        with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
            model = Stack(options.recomputes, options.matrices)
        gathers.model = model
        optimizer = client_muon(model) if options.client else None
        engine = deepspeed.initialize(model=model, config=settings, optimizer=optimizer)[0]
        train(engine, WARMUPS, options)
        store, plan = engine.memascend.runtime.store, engine.memascend.runtime.plan
        before, kernel_before = store.stats(), storage_bytes()
        gathers.take(STEPS), reads.take()
        train(engine, STEPS, options)
        after, kernel_after = store.stats(), storage_bytes()
        found = {
            name: {
                "planned": dict(planned),
                "measured": (after[counter] - before[counter]) // STEPS,
            }
            for name, counter, planned in (
                ("read", "bytes_read", plan.read_bytes),
                ("written", "bytes_written", plan.written_bytes),
            )
        }
        for name, number in (("read", 0), ("written", 1)):
            found[name]["kernel"] = (kernel_after[number] - kernel_before[number]) // STEPS
        found["numel"] = sum(param.ds_numel for param in model.parameters())
        ledger = engine.memascend.ledger().as_dict()
        found["host"] = {"planned": ledger["planned_bytes"], "measured": ledger["live_bytes"]}
        on_drive = ledger["drive"]["used_bytes"]
        found["drive"] = {"planned": sum(plan.drive.values()), "measured": on_drive}
        of_parameters = reads.take()
        found["read"]["parameters"] = sum(of_parameters.values()) // STEPS
        passes_bytes = STEPS * options.accumulation * 2 * SHARD_BYTES
        step_bytes = STEPS * SHARD_BYTES  # as high halves of master weights
        found["reads_in_a_pass"] = [
            (nbytes - step_bytes) / passes_bytes for nbytes in of_parameters.values()
        ]
        found["gathers"] = gathers.take(STEPS)
        found["at_once"], gathers.most = gathers.most, 0
        engine.destroy()
    return found


def main() -> None:
    torch.set_num_threads(1)
    leave_updates_as_they_are()  # bytes do not depend on them
    deepspeed.init_distributed(dist_backend="gloo")
    gathers.watch(partition_parameters.NoGatherHandle)
    gathers.watch(partition_parameters.NoGatherCoalescedHandle)
    reads.watch(TensorStore)
    trainings = json.loads(sys.argv[1])
    found = [moved(parser().parse_args(options)) for options in trainings]
    print(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
