"""Training runs as child processes that take one step when told, and the models they train.

Several may be alive side by side and take turns, so that a drive that slows down slows all alike.
Knows `train_program.py`, whose parent this is; nothing of what is compared.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PROGRAM = Path(__file__).parent / "train_program.py"
MARK = "@@"  # as in the program, which imports torch
SHARED_MEMORY = Path("/dev/shm")
#: Whoever asks the kernel for any port gets one above these.
PORTS = range(10_000, 32_768)
_given: set[int] = set()  # of them, since this program began
LOG_LINES_MAX = 15
#: For stock at its best, as memascend sets it by itself: freed memory of this size goes back to the
#: system at once. By default glibc keeps up to 32 MiB of what a CPU run frees where a GPU run frees
#: device memory, and it stays torn in pieces.
MALLOC_MMAP_THRESHOLD_BYTES = 1 << 18
#: A child that is not through by then is stuck.
QUIT_TIMEOUT_S = 60.0

# A layer of these widths: 9.4 M parameters, matrices of 1 to 4 MiB in bf16, so that DeepSpeed keeps
# each of them on the drive.
HIDDEN, FFN, HEADS, KEY_VALUE_HEADS = 1024, 2048, 16, 8
VOCABULARY = 4096
TOKENS = 8


class Shaped(Protocol):
    """A model, as far as a run needs to know it."""

    @property
    def shape(self) -> dict[str, Any]:
        """Arguments of its configuration class; of a Llama, unless model_type says otherwise."""


@dataclass(frozen=True, slots=True)
class Model:
    """A Llama of one width: its depth and its vocabulary give its size."""

    layers: int
    vocabulary: int = VOCABULARY
    is_tied: bool = True  # whether the embedding is the head's matrix, too

    @property
    def shape(self) -> dict[str, Any]:
        """Arguments of LlamaConfig."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_VALUE_HEADS,
            "tie_word_embeddings": self.is_tied,
        }

    @property
    def layer_numel(self) -> int:
        """Parameters of one layer."""
        kv_width = HIDDEN * KEY_VALUE_HEADS // HEADS
        return 2 * HIDDEN * (HIDDEN + kv_width) + 3 * HIDDEN * FFN + 2 * HIDDEN

    @property
    def numel(self) -> int:
        """Parameters of all."""
        words = self.vocabulary * HIDDEN * (1 if self.is_tied else 2)
        return words + self.layers * self.layer_numel + HIDDEN

    @property
    def largest_numel(self) -> int:
        """Elements of the largest tensor."""
        return max(self.vocabulary * HIDDEN, HIDDEN * FFN)


@dataclass(frozen=True, slots=True)
class Sleeping:
    """A SleepingModel.

    Attributes:
        layers: Matrices.
        width: Columns of each.
        forward_s: Compute of one layer in forward.
        backward_s: The same in backward, recomputing not counted.
        rows: Of each matrix; None: as many as columns.
        hidden: Width of the hidden state.
    """

    layers: int
    width: int
    forward_s: float = 0.0
    backward_s: float = 0.0
    rows: int | None = None
    hidden: int = 1

    @property
    def shape(self) -> dict[str, Any]:
        """What the program builds it of."""
        return {
            "model_type": "sleeping",
            "vocab_size": 2,
            "layers": self.layers,
            "width": self.width,
            "rows": self.rows,
            "hidden": self.hidden,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
        }

    @property
    def numel(self) -> int:
        """Parameters of all."""
        return self.layers * self.largest_numel

    @property
    def largest_numel(self) -> int:
        """Elements of the largest tensor."""
        return (self.rows or self.width) * self.width

    def compute_s(self, phase: str) -> float:
        """What all layers compute in a phase."""
        return self.layers * {"forward": self.forward_s, "backward": self.backward_s}.get(phase, 0)


def model_of(numel: int, vocabulary: int = VOCABULARY) -> Model:
    """The model whose number of parameters is nearest to `numel`; it has one layer at least."""
    one = Model(1, vocabulary)
    rest = numel - (one.numel - one.layer_numel)
    return Model(max(1, round(rest / one.layer_numel)), vocabulary)


def deepspeed_config(
    *,
    directory: Path,
    zero: Mapping[str, Any],
    parameters: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> dict[str, Any]:
    """DeepSpeed's JSON of a bf16 training run with ZeRO-3, all of it on the drive.

    Args:
        directory: On the drive.
        zero: Keys of zero_optimization.
        parameters: Keys of offload_param.
        optimizer: Keys of offload_optimizer.
    """
    on_drive = {"device": "nvme", "nvme_path": str(directory), "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "offload_param": on_drive | {"max_in_cpu": 0} | dict(parameters),
            "offload_optimizer": on_drive | dict(optimizer),
            **zero,
        },
        "aio": {"block_size": 1 << 18, "queue_depth": 32},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
    }


def after_backward(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the block, with steps after backward unless it says otherwise."""
    streaming = block.get("streaming", {})
    optimizer = {"during_backward": False} | streaming.get("optimizer", {})
    return {**block, "streaming": {**streaming, "optimizer": optimizer}}


@dataclass(slots=True)
class Trainee:
    """One run of one or more ranks. `start` it, let it `step`, `end` it; also after an error.

    Every rank gets every command; rank 0 answers.

    Attributes:
        name: What the report calls it.
        config: DeepSpeed's JSON.
        model: What it trains.
        directory: On the drive; it gets a folder there, which goes with the run.
        block: The memascend block, or None for stock. Steps begin after backward unless it says
            otherwise: a run that takes turns with others cannot time its own steps.
        counts_device_bytes: Whether steps come with `device_bytes`.
        tokens: Of a sequence; there is one, unless `options` say otherwise.
        options: More of the program's.
        accelerator: What DeepSpeed trains on: "cpu", "cuda", or "sim", the emulated device.
        world: Ranks.
        environment: Variables besides.
        events: What the program has answered but for steps, by name.
    """

    name: str
    config: dict[str, Any]
    model: Shaped
    directory: Path
    block: Mapping[str, Any] | None = None
    counts_device_bytes: bool = False
    tokens: int = TOKENS
    options: Sequence[str] = ()
    accelerator: str = "cpu"
    world: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _folder: Path | None = None
    _log: list[str] = field(default_factory=list)
    _port: int = 0

    def __post_init__(self) -> None:
        if self.block is not None:
            self.block = after_backward(self.block)

    def start(self) -> None:
        """Starts the process and waits until it is ready for its first step.

        Raises:
            RuntimeError: It ended instead; the message holds the end of what it printed.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="memascend-bench-", dir=self.directory))
        zero = self.config["zero_optimization"]
        for section in ("offload_param", "offload_optimizer"):
            zero[section]["nvme_path"] = str(self._folder)
        if self.block is not None:
            self.config["memascend"] = dict(self.block)
        self._port = free_port()
        command = [sys.executable, str(PROGRAM), "--config", json.dumps(self.config)]
        command += ["--shape", json.dumps(self.model.shape), "--tokens", str(self.tokens)]
        command += ["--device-bytes"] * self.counts_device_bytes + list(self.options)
        command += ["--emulated"] * self._is_emulated
        for rank in range(self.world):
            with ExitStack() as stack:
                output = stack.enter_context(self._log_of(rank).open("w")) if rank else None
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env=self._environment(rank),
                        stdin=subprocess.PIPE,
                        stdout=output or subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        errors="replace",
                    )
                )
        for event in ("baseline", "built", "initialized"):
            self.events[event] = self._answer(event)

    def step(self, count: int = 1) -> dict[str, Any]:
        """Training steps in a row, and the figures of one.

        Raises:
            RuntimeError: The process ended instead.
        """
        return self.ask(f"step {count}", "step")

    def ask(self, command: str, event: str) -> dict[str, Any]:
        """Gives every rank a command; rank 0's answer.

        Raises:
            RuntimeError: The process ended instead.
        """
        self._running()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(command + "\n")
            process.stdin.flush()
        return self._answer(event)

    def end(self) -> None:
        """Ends the process and removes what it left on the drive and in shared memory."""
        processes, self._processes = self._processes, []
        for process in processes:  # all at once: they leave the group together
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write("quit\n")
                process.stdin.flush()
        for process in processes:
            try:
                process.communicate(timeout=QUIT_TIMEOUT_S)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                process.terminate()
                process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        # DeepSpeed leaves these after every run on the CPU, named by the port.
        for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> Trainee:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def printed(self) -> list[str]:
        """The lines that rank 0 has printed besides answers."""
        return list(self._log)

    @property
    def _is_emulated(self) -> bool:
        return self.accelerator == "sim"

    def _running(self) -> subprocess.Popen[str]:
        if not self._processes:
            raise AssertionError(f"{self.name} was not started")
        return self._processes[0]

    def _environment(self, rank: int) -> dict[str, str]:
        root = str(PROGRAM.parent.parent)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
            "MASTER_PORT": str(self._port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_WORLD_SIZE": str(self.world),
            "DS_ACCELERATOR": "cpu" if self._is_emulated else self.accelerator,
        }
        for variable in ("MEMASCEND_CONFIG", "MEMASCEND_DISABLE"):
            environment.pop(variable, None)
        return environment | dict(self.environment)

    def _log_of(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank-{rank}.log"

    def _answer(self, event: str) -> dict[str, Any]:
        process = self._running()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                if answer["event"] != event:
                    raise AssertionError(f"expected {event!r}, got {answer}")
                return answer
            self._log.append(line.rstrip())
        status = process.wait()
        logs = [self._log_of(rank) for rank in range(1, self.world)]
        others = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        last = "\n".join([*others[-LOG_LINES_MAX:], *self._log[-LOG_LINES_MAX:]])
        raise RuntimeError(
            f"the training run {self.name!r} of {self.model} ended with status {status} while it "
            f"was waited for {event!r}. It printed last:\n{last}"
        )


@contextmanager
def side_by_side(runs: Sequence[Trainee]) -> Iterator[None]:
    """Several alive at once, started and ended together: what takes long of that are imports.

    Raises:
        RuntimeError: One ended instead; none is left.
    """
    with ThreadPoolExecutor(len(runs)) as pool:
        started = [pool.submit(run.start) for run in runs]
        try:
            for one in started:
                one.result()
            yield
        finally:
            wait(started)  # what is still about to start would outlive its end
            list(pool.map(lambda run: run.end(), runs))


def free_port() -> int:
    """A port that nobody listens on, that nobody else was given here, nor is by the kernel."""
    chance = random.SystemRandom()  # several programs must not choose alike
    while True:
        port = chance.choice(PORTS)
        if port in _given:  # and not bound yet, maybe
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
