"""Trains a Llama in slices whose number is chosen, on a device with little memory.

Started by test_auto.py with a file of JSON: a DeepSpeed configuration, the section without a
number, the shape of the model, tokens of a sequence, sequences of a batch, and of slices that just
fit; rank 1 has half of both, or of the latter alone where ranks need equal batches. Weights do not
change, so that passes of equal slices have equal gradients. Prints a line of JSON: what was chosen
and logged, the peaks and digests of the gradients of passes, undisturbed and on one rank disturbed,
and those of slices that are stated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from tests.device.emulator import torch_device

core = torch_device.install()

import deepspeed  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from deepspeed import comm  # noqa: E402
from deepspeed.utils import safe_get_full_grad  # noqa: E402

from memascend.deepspeed.slices.device import MARGIN_BYTES_MIN  # noqa: E402
from tests.device.emulator import accelerator  # noqa: E402

accelerator.install()
RANK = int(os.environ["RANK"])


class Training:
    """One engine."""

    def __init__(self, asked: dict[str, Any], section: dict[str, Any]) -> None:
        config = json.loads(json.dumps(asked["config"]))
        config["memascend"]["micro_batches"] = section
        torch.manual_seed(0)
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**asked["shape"], use_cache=False)
            )
        model.activation_checkpointing_enable()
        self.engine = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        shape = (asked["sequences"] >> RANK * (asked["section"] == {}), asked["tokens"])
        generator = torch.Generator().manual_seed(RANK)
        ids = torch.randint(asked["shape"]["vocab_size"], shape, generator=generator)
        self.ids = ids.to(self.engine.device)

    def loss(self) -> torch.Tensor:
        found: torch.Tensor = self.engine(input_ids=self.ids, labels=self.ids).loss
        return found

    def pass_over(self) -> dict[str, Any]:
        """Run a step; return its peak, above what is held before it, and its gradients."""
        before = begin_peak()
        self.engine.backward(self.loss())
        return {"peak": peak() - before, "gradients": self.step()}

    def step(self) -> str:
        """Run the optimizer; return a digest of the gradients."""
        digest = hashlib.sha256()
        for param in self.engine.module.parameters():
            found = safe_get_full_grad(param)
            assert found is not None
            digest.update(found.float().cpu().numpy().tobytes())
        self.engine.step()
        return digest.hexdigest()


def begin_peak() -> int:
    core.synchronize()
    torch.empty(1, device="sim")  # what has passed is only found now
    core.reset_peak()
    return int(core.memory()["allocated"])


def peak() -> int:
    core.synchronize()
    return int(core.memory()["peak"])


def by_hand(asked: dict[str, Any], sequences: int) -> dict[str, Any]:
    """Return the peaks of a pass with slices of so many sequences, and its gradients."""
    others = {key: one for key, one in asked["section"].items() if key != "count"}
    training = Training(asked, others | {"sequences": sequences})
    training.pass_over()  # DeepSpeed records the order of use
    found = training.pass_over()
    before = begin_peak()
    loss = training.loss()
    found["forward_peak"] = peak() - before
    training.engine.backward(loss)
    training.step()
    training.engine.destroy()
    return found


class Lines(logging.Handler):
    """Keeps what memascend logs of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        for name in ("memascend.slices", "memascend.deepspeed.slices"):
            logging.getLogger(name).addHandler(self)
            logging.getLogger(name).setLevel(logging.INFO)  # on every rank

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def chosen(asked: dict[str, Any], room_bytes: int) -> tuple[Training, dict[str, Any]]:
    """Train with so much room, without a number."""
    training = Training(asked, asked["section"])
    accelerator.MEMORY_BYTES = MARGIN_BYTES_MIN + begin_peak() + room_bytes
    return training, {"passes": [training.pass_over() for _ in range(2)]}


def sequences_in(line: str) -> int:
    """Return the sequences of a slice that a line of the log names."""
    return int(line.split("slices of ")[1].split()[0])


def disturb(training: Training, hand: dict[int, dict[str, Any]], sequences: int) -> dict[str, Any]:
    """Fail in forward, which begins again by itself; then in backward, which the script repeats."""
    half, quarter = hand[sequences // 2], hand[sequences // 4]
    core.set_limit(begin_peak() + (half["forward_peak"] + hand[sequences]["forward_peak"]) // 2)
    loss = training.loss()
    core.set_limit(0)
    training.engine.backward(loss)
    found = {"forward": training.step(), "error": ""}
    core.set_limit(begin_peak() + (quarter["peak"] + half["peak"]) // 2)
    try:
        training.pass_over()
    except torch.OutOfMemoryError as error:
        found["error"] = str(error)
    found["backward"] = training.pass_over()["gradients"]
    core.set_limit(0)
    return found


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    core.set_launches_block(True)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    _ = transformers.LlamaForCausalLM  # imported when first named, and not while zero.Init patches
    lines = Lines()
    ranks = range(comm.get_world_size())
    room_bytes = [by_hand(asked, asked["fits"] >> rank)["peak"] for rank in ranks][RANK]
    training, found = chosen(asked, room_bytes)
    training.engine.destroy()
    sequences = sequences_in(lines.lines[-1])
    stated = sorted({1, max(1, sequences // 4), sequences // 2, sequences})
    hand = {one: by_hand(asked, one) for one in stated}
    training, found["again"] = chosen(asked, room_bytes)
    # A little more or less memory is held by now, which may make one sequence of difference.
    again = found["again"]["sequences"] = sequences_in(lines.lines[-1])
    if again not in hand:
        hand[again] = by_hand(asked, again)
    if comm.get_world_size() == 1:
        found["disturbed"] = disturb(training, hand, sequences)
    core.synchronize()
    training.engine.destroy()
    found |= {"room": room_bytes, "sequences": sequences, "by_hand": hand, "lines": lines.lines}
    found["findings"] = core.take_findings()
    comm.barrier()
    if RANK == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # the threads of streams never end


if __name__ == "__main__":
    main()
