"""The ways people call Hugging Face's Trainer and accelerate, each once, in one process per rank.

Usage: ways_program.py DEEPSPEED_JSON OUTPUT_FOLDER [WAY ...]

The JSON has "auto" where the Trainer fills values in. For each way the last line of output, JSON,
has what was logged and a digest of every weight.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import optuna
import psutil
import torch
import transformers
from deepspeed import comm as dist
from deepspeed import zero

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PREFERENCES = EXAMPLES / "data" / "preferences.jsonl"
ROWS, COLUMNS, VOCABULARY = 12, 16, 2048
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
LOOP_STEPS, MEASURED_FROM = 200, 60
#: Of figures that differ from run to run.
TIMED = ("runtime", "per_second", "flos", "memascend_")

Found = dict[str, Any]


class Rows(torch.utils.data.Dataset):
    """Random token rows, the same in every run; labels are the tokens, or one of two classes."""

    def __init__(self, *, seed: int = 7, classes: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(1, VOCABULARY, (ROWS, COLUMNS), generator=generator)
        self._classes = classes

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._ids[index]
        return {"input_ids": ids, "labels": ids[0] % 2 if self._classes else ids}


class Ways:
    """One method for each way; each trains a new model."""

    def __init__(self, config: Path, folder: Path) -> None:
        self._config = config
        self._folder = folder
        # A model with a tokenizer, of each rank; written while no Trainer has a ZeRO-3 in mind.
        self.toy = folder / f"toy-{os.environ.get('RANK', '0')}"
        transformers.set_seed(1)
        runpy.run_path(str(EXAMPLES / "toy.py"))["llama"](self.toy)

    def evaluation_at_start(self) -> Found:
        """Evaluate before the first step and after each, and stop early for lack of progress."""
        trainer = self._trainer(
            "evaluation",
            callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=1)],
            eval_dataset=Rows(seed=8),
            eval_on_start=True,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=6,
            learning_rate=1.0,  # so that the loss grows
            save_strategy="steps",
            save_steps=1,
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        )
        trainer.train()
        assert trainer.state.global_step < 6, "it did not stop early"
        return found_of(trainer)

    def sequence_classification(self) -> Found:
        """Train a head of two classes over a decoder."""
        trainer = self._trainer(
            "classes",
            model=classifier,
            train_dataset=Rows(classes=True),
        )
        trainer.train()
        return found_of(trainer)

    def trials(self) -> Found:
        """Search for a learning rate: a new model and engine for each trial."""
        trainer = self._trainer(
            "trials",
            model=None,
            model_init=language_model,
            eval_dataset=Rows(seed=8),
            max_steps=2,
        )
        found: list[list[Found]] = []

        def objective(metrics: dict[str, float]) -> float:
            found.append(logged_of(trainer))  # no weights: some are on their way now
            return float(metrics["eval_loss"])

        trainer.hyperparameter_search(
            hp_space=lambda trial: {
                "learning_rate": trial.suggest_categorical("learning_rate", [1e-3, 3e-3, 5e-3])
            },
            compute_objective=objective,
            backend="optuna",
            n_trials=3,
            sampler=optuna.samplers.RandomSampler(seed=1),
        )
        return {"trials": found}

    def batch_size_found(self) -> Found:
        """Halve the batch after an attempt that runs out of memory in its forward pass.

        With accelerate's own decorator: the Trainer's auto_find_batch_size refuses ZeRO-3 itself.
        """
        sizes: list[int] = []

        def attempt(batch_size: int) -> Found:
            sizes.append(batch_size)
            return self._loop(rows=batch_size, steps=4)

        find = accelerate.utils.find_executable_batch_size(
            starting_batch_size=4, reduce_batch_size_fn=lambda: sizes[-1] // 2
        )
        return {**find(attempt)(), "sizes": sizes}

    def no_batch_size_of_the_trainer(self) -> Found:
        """Ask the Trainer for it all the same."""
        try:
            self._trainer("batch", auto_find_batch_size=True)
        except ValueError as error:
            return {"refused": str(error)}
        return {}

    def only_the_model_saved(self) -> Found:
        """Save weights alone at each step."""
        trainer = self._trainer(
            "only", save_only_model=True, save_strategy="steps", save_steps=1, save_total_limit=2
        )
        trainer.train()
        folder = self._folder / "only" / f"checkpoint-{trainer.state.global_step}"
        dist.barrier()
        files = sorted(path.name for path in folder.iterdir())
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        return {"files": files, "digest": digest, **found_of(trainer)}

    def data_loader_workers(self) -> Found:
        """Read the data in child processes, which are forked while the engine lives."""
        trainer = self._trainer(
            "workers",
            dataloader_num_workers=2,
            dataloader_persistent_workers=True,
            num_train_epochs=2,
            max_steps=-1,
        )
        trainer.train()
        return found_of(trainer)

    def reference_that_follows(self) -> Found:
        """Train on preferences with TRL; the reference takes up the policy after each step.

        It gathers lists in which parameters of two models take turns.
        """
        import datasets
        import trl

        accelerate.state.AcceleratorState._reset_state()
        arguments = trl.DPOConfig(
            output_dir=str(self._folder / "preferences"),
            deepspeed=str(self._config),
            bf16=True,
            use_cpu=True,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_checkpointing=True,
            learning_rate=1e-4,
            max_length=64,
            model_init_kwargs={"dtype": "bfloat16"},
            sync_ref_model=True,
            ref_model_sync_steps=1,
            ref_model_mixup_alpha=0.6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = datasets.load_dataset("json", data_files=str(PREFERENCES), split="train")
        trainer = trl.DPOTrainer(model=str(self.toy), args=arguments, train_dataset=rows)
        trainer.train()
        return found_of(trainer)

    def loop_of_accelerate(self) -> Found:
        """Train in a loop of one's own for many steps; memory is not to grow."""
        resident: list[int] = []
        found = self._loop(rows=2, steps=LOOP_STEPS, resident=resident)
        before = max(resident[MEASURED_FROM : MEASURED_FROM + 20])
        return {**found, "growth_bytes": max(resident[-20:]) - before}

    def _loop(
        self, *, rows: int, steps: int, rows_max: int = 2, resident: list[int] | None = None
    ) -> Found:
        accelerate.state.AcceleratorState._reset_state()
        config = json.loads(self._config.read_text())
        del config["optimizer"]
        config |= {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": 1}
        config |= {"gradient_clipping": 1.0, "bf16": {"enabled": True}}
        zero_keys = config["zero_optimization"]
        for key in [key for key, value in zero_keys.items() if value == "auto"]:
            del zero_keys[key]
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=config)
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
        bare = language_model()
        optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(Rows(), batch_size=rows)
        model, optimizer, loader = accelerator.prepare(bare, optimizer, loader)
        losses: list[float] = []
        while len(losses) < steps:
            for batch in loader:
                loss = model(**batch).loss
                if rows > rows_max:
                    accelerator.free_memory()
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if resident is not None:
                    resident.append(psutil.Process().memory_info().rss)
        return {"losses": losses, "weights": digests(bare)}

    def _trainer(self, name: str, *, model: Any = "", **changes: Any) -> transformers.Trainer:
        # The one of the way before, which a Trainer would go on with.
        accelerate.state.AcceleratorState._reset_state()
        given = {
            key: changes.pop(key)
            for key in ("callbacks", "eval_dataset", "train_dataset", "model_init")
            if key in changes
        }
        settings: dict[str, Any] = {
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "save_strategy": "no",
        }
        # Before the model, so that transformers builds it under zero.Init.
        arguments = transformers.TrainingArguments(
            output_dir=str(self._folder / name),
            deepspeed=str(self._config),
            bf16=True,
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=11,
            **settings | changes,
        )
        transformers.set_seed(11)
        if model is not None:
            model = model() if callable(model) else language_model()
        given.setdefault("train_dataset", Rows())
        return transformers.Trainer(model=model, args=arguments, **given)


def language_model(trial: Any = None) -> Any:
    """Return a small decoder with random weights, always the same."""
    transformers.set_seed(11)
    shape = transformers.LlamaConfig(**SHAPE)
    return transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)


def classifier() -> Any:
    """Return a decoder with a head of two classes, which is made outside zero.Init."""
    shape = transformers.LlamaConfig(**SHAPE | {"pad_token_id": None}, num_labels=2)
    model = transformers.LlamaForSequenceClassification(shape)
    # Not before: a partitioned embedding has no row to be made zero.
    model.config.pad_token_id = 0
    return model


def found_of(trainer: transformers.Trainer) -> Found:
    return {"log": logged_of(trainer), "weights": digests(trainer.model)}


def logged_of(trainer: transformers.Trainer) -> list[Found]:
    return [
        {key: value for key, value in row.items() if not any(word in key for word in TIMED)}
        for row in trainer.state.log_history
    ]


def digests(model: Any) -> dict[str, str]:
    found = {}
    for name, parameter in model.named_parameters():
        with zero.GatheredParameters([parameter]):
            data = parameter.data.detach().cpu().contiguous().view(torch.uint8)
            found[name] = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
    return found


def main() -> None:
    config, folder, *names = sys.argv[1:]
    ways = Ways(Path(config), Path(folder))
    gc.freeze()  # what was imported stays: no later collection has to look through it
    all_ways: dict[str, Callable[[], Found]] = {
        name: getattr(ways, name)
        for name, member in vars(Ways).items()
        if callable(member) and not name.startswith("_")
    }
    results = {}
    for name in names or all_ways:
        results[name] = all_ways[name]()
        gc.collect()
    if int(os.environ.get("RANK", "0")) == 0:
        print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
