"""Runs examples with the options of a user, up to where they would train.

Usage: options_program.py COMMANDS

COMMANDS is JSON: a list of the words of each command, an example's name and its options. The last
line of output has for each a dictionary of all that its trainer was given, or of its error. Without
DeepSpeed: loading and data alone are tried.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = (
    *("output_dir", "learning_rate", "per_device_train_batch_size", "max_steps", "seed"),
    *("max_length", "eval_steps", "resume_from_checkpoint"),
)
TRAINERS = {"trl": ("SFTTrainer", "DPOTrainer"), "transformers": ("Trainer", "Seq2SeqTrainer")}

given: dict[str, Any] = {}


class Recorder:
    """Stands in for a trainer: it notes its arguments, and collates a first batch."""

    def __init__(self, model: Any, args: Any, train_dataset: Any, **others: Any) -> None:
        given["settings"] = {name: getattr(args, name, None) for name in SETTINGS}
        given["model"] = model if isinstance(model, str) else model.config.name_or_path
        given["rows"] = len(train_dataset)
        if "data_collator" in others:
            batch = others["data_collator"]([train_dataset[0], train_dataset[1]])
            given["shape"] = list(batch["input_ids"].shape)
        self._model = model

    def train(self, resume_from_checkpoint: str | None) -> None:
        """Note values set behind the constructor, and where the run would continue."""
        given["resumed"] = resume_from_checkpoint
        given["set"] = {name: one for name, one in vars(self).items() if name != "_model"}
        adapters = getattr(self._model, "peft_config", {})
        given["lora_r"] = [adapter.r for adapter in adapters.values()]

    def save_state(self) -> None:
        """Save nothing."""

    def save_model(self) -> None:
        """Save nothing."""


def outcome(name: str, options: list[str]) -> dict[str, Any]:
    """Return all that the trainer of an example is given, or the message with which it ends."""
    given.clear()
    path = EXAMPLES / name / "train.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their types up
    spec.loader.exec_module(module)
    sys.argv = [str(path), *options]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            module.main()
    except SystemExit:
        return {"error": errors.getvalue().splitlines()[-1]}  # behind the usage
    except (OSError, ValueError) as error:
        return {"error": str(error)}
    return dict(given)


def main() -> None:
    """Run the commands."""
    for library, names in TRAINERS.items():
        module = importlib.import_module(library)  # the one that examples will import
        for name in names:
            getattr(module, name)  # so that TRL's are made of transformers' own
            setattr(module, name, Recorder)
    found = [outcome(*words[:1], words[1:]) for words in json.loads(sys.argv[1])]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
