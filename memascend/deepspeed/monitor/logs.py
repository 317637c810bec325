"""Adds a step's numbers to the user's own logs: DeepSpeed's monitor and the Trainer's log line.

No log is added: DeepSpeed's monitor is on only if the JSON names TensorBoard, W&B, Comet or CSV,
and the Trainer gets a few more numbers in a line that it writes anyway.
"""

from __future__ import annotations

import functools
from typing import Any

from memascend.deepspeed.attach.attachment import attachment_of_optimizer
from memascend.monitor.status_file import StatusFile

#: The numbers of a step that are added to the Trainer's line.
TRAINER_NAMES = ("step_seconds", "waited_seconds", "tokens_per_second", "host_memory_bytes")


def write_events(engine: Any, status: StatusFile) -> None:
    """Write the step that has just ended to DeepSpeed's monitor, on rank 0."""
    if not engine.monitor.enabled or engine.global_rank != 0:
        return
    engine.monitor.write_events(
        [
            (f"memascend/{name}", value, engine.global_samples)
            for name, value in status.last_step().items()
        ]
    )


def trainer_callback(base: type[Any]) -> type[Any]:
    """Return a callback class for the Trainer, derived from transformers' TrainerCallback."""

    class StepNumbers(base):  # type: ignore[misc]
        """Adds memascend's numbers to a line before other callbacks log it."""

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any
        ) -> None:
            optimizer = getattr(given.get("optimizer"), "optimizer", None)
            attachment = attachment_of_optimizer(optimizer)
            status = None if attachment is None else attachment.status
            # Only lines of training steps: evaluation and the end have no "loss".
            if status is not None and logs is not None and "loss" in logs:
                status.attempt(functools.partial(_add, status, state, logs))

    return StepNumbers


def _add(status: StatusFile, state: Any, logs: dict[str, Any]) -> None:
    step = status.last_step()
    added = {f"memascend_{name}": step[name] for name in TRAINER_NAMES if name in step}
    logs.update(added)
    if state.log_history:  # it has a copy of the line
        state.log_history[-1].update(added)
