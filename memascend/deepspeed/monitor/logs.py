"""A step in the user's own logs: those of DeepSpeed's monitor, and the Trainer's log line.

Nothing is logged that the user has not asked for: DeepSpeed's monitor serves where the JSON names
TensorBoard, W&B, Comet or CSV, and the Trainer gets a few more numbers in a line that it writes.
"""

from __future__ import annotations

import functools
from typing import Any

from memascend.deepspeed.attach.attachment import attachment_of_optimizer
from memascend.monitor.status_file import StatusFile

#: Of what is known of a step, what goes into the Trainer's line.
TRAINER_NAMES = ("step_seconds", "waited_seconds", "tokens_per_second", "host_memory_bytes")


def write_events(engine: Any, status: StatusFile) -> None:
    """Give DeepSpeed's monitor the step that has just ended, beside DeepSpeed's own events."""
    if not engine.monitor.enabled or engine.global_rank != 0:
        return
    engine.monitor.write_events(
        [
            (f"memascend/{name}", value, engine.global_samples)
            for name, value in status.last_step().items()
        ]
    )


def trainer_callback(base: type[Any]) -> type[Any]:
    """Return a class of callbacks of the Trainer, derived from transformers' base of them."""

    class StepNumbers(base):  # type: ignore[misc]
        """Adds numbers of memascend's to a line before anybody logs it."""

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any
        ) -> None:
            optimizer = getattr(given.get("optimizer"), "optimizer", None)
            attachment = attachment_of_optimizer(optimizer)
            status = None if attachment is None else attachment.status
            # A line of a step: not of evaluation, nor of the end.
            if status is not None and logs is not None and "loss" in logs:
                status.attempt(functools.partial(_add, status, state, logs))

    return StepNumbers


def _add(status: StatusFile, state: Any, logs: dict[str, Any]) -> None:
    step = status.last_step()
    added = {f"memascend_{name}": step[name] for name in TRAINER_NAMES if name in step}
    logs.update(added)
    if state.log_history:  # has a copy of the line already
        state.log_history[-1].update(added)
