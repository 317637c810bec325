"""The rows that tests of slices train on, and their small models."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers

ROWS, COLUMNS, VOCABULARY = 24, 16, 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
}


class Rows(torch.utils.data.Dataset):
    """Random token rows, the same in every run, padded to one length."""

    def __init__(self, count: int = ROWS, *, seed: int = 7, padded: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(1, VOCABULARY, (count, COLUMNS), generator=generator)
        self._lengths = torch.randint(3, COLUMNS + 1, (count,), generator=generator)
        if not padded:
            self._lengths[:] = COLUMNS

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(COLUMNS) < self._lengths[index]).long()
        ids = self._ids[index] * mask
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }


def to_longest(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch without the columns that are padding in all of its rows."""
    batch = torch.utils.data.default_collate(rows)
    length = int(batch["attention_mask"].sum(dim=1).max())
    return {name: value[:, :length] for name, value in batch.items()}


class Classes(Rows):
    """Likewise, in one of two classes."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return row | {"labels": row["input_ids"][0] % 2}


def language_model(**changes: Any) -> Any:
    """Return a small decoder with random weights, always the same."""
    transformers.set_seed(11)
    shape = transformers.LlamaConfig(**SHAPE | changes)
    return transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)


def classifier(*, accepts_loss_kwargs: bool = True) -> Any:
    """Return a decoder with a head of two classes, which is made outside zero.Init.

    Its loss is given no number of items. If it `accepts_loss_kwargs`, as its signature says, the
    Trainer believes that it is, and does not divide the loss by the micro-steps of a step.
    """
    transformers.set_seed(11)
    shape = transformers.LlamaConfig(**SHAPE | {"pad_token_id": None}, num_labels=2)
    model = transformers.LlamaForSequenceClassification(shape)
    # Not before: a partitioned embedding has no row to be made zero.
    model.config.pad_token_id = 0
    model.accepts_loss_kwargs = accepts_loss_kwargs
    return model


def mixture() -> Any:
    """Return a small mixture of experts, whose router loss has the weight of Mixtral 8x7B."""
    transformers.set_seed(11)
    shape = transformers.MixtralConfig(
        **SHAPE, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.02
    )
    return transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)


def adapted() -> Any:
    """Return a decoder with adapters."""
    return peft.get_peft_model(language_model(), adapters())


def adapters() -> peft.LoraConfig:
    """Return the description of some whose second matrices are not zero."""
    return peft.LoraConfig(
        r=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
