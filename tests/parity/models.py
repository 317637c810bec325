"""The tiny models of the parity cases, and weights that depend on nothing but a parameter's name.

Sizes are chosen against DeepSpeed's swap threshold of 1 MiB of 16-bit elements per rank: each
family has tensors well above it with one rank and with two, and some below, which stay in host
memory.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel import ulysses_sp
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

from . import families

VOCABULARY = 2048
SEQUENCE = 4
HIDDEN = 512
#: A family whose name begins so has Liger's loss.
LIGER = "liger"


class OddShapes(nn.Module):
    """Element counts that are a multiple of nothing: the next tensor's offset is unaligned.

    Of the smallest all ranks but the first have nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.gate = nn.Parameter(torch.empty(1))
        self.gains = nn.Parameter(torch.empty(3))
        self.table = nn.Parameter(torch.empty(1_000_003))
        self.widen = nn.Linear(HIDDEN, 2053)
        self.long_table = nn.Parameter(torch.empty(2_097_157))
        self.narrow = nn.Linear(2053, 519)
        self.head = nn.Linear(519, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        hidden = hidden * self.gate * self.gains[0] + self.table[: hidden.numel()].view_as(hidden)
        hidden = torch.tanh(self.widen(hidden)) * self.gains[1]
        hidden = hidden + self.long_table[-hidden.numel() :].view_as(hidden)
        return self.head(torch.tanh(self.narrow(hidden)) * self.gains[2])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.narrow = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.narrow(torch.tanh(self.widen(hidden)))


class PartlyUsed(nn.Module):
    """A layer that never takes part, and one that takes part in every other forward only."""

    def __init__(self, *, alternate: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.first = Block()
        self.unused = nn.Linear(2 * HIDDEN, 2 * HIDDEN)
        self.sometimes = Block() if alternate else None
        self.last = Block()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.forward_count = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.first(self.embedding(input_ids))
        if self.sometimes is not None and self.forward_count % 2 == 0:
            hidden = self.sometimes(hidden)
        self.forward_count += 1
        return self.head(self.last(hidden))


class Experts(nn.Module):
    """A list of experts, each token's chosen by its values: some get none. For DeepSpeed a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN + 3) for _ in range(4))
        self.join = nn.Linear(HIDDEN + 3, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shares = self.router(hidden).float().softmax(dim=-1)
        chosen, joined = shares.argmax(dim=-1), torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                share = shares[rows][:, number, None].to(hidden.dtype)
                joined[rows] = self.join(torch.tanh(expert(hidden[rows]))) * share
        return hidden + joined


class Mixture(nn.Module):
    """Two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class TiledBlock(Block):
    """Computes its tokens in two parts, as DeepSpeed does for long contexts."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        def dense(block: Block, part: torch.Tensor) -> torch.Tensor:
            return block.narrow(torch.tanh(block.widen(part)))

        tiled = ulysses_sp.TiledMLP.apply(dense, self, hidden, 2, list(self.parameters()))
        return hidden + tiled


class Tiled(nn.Module):
    """DeepSpeed's tiled layers, and its loss that never has all logits; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(TiledBlock() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)

        def loss(model: Tiled, part: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            logits = model.head(part).float().flatten(0, -2)
            return nn.functional.cross_entropy(logits, ids.flatten())

        next_ids, parts, weights = input_ids.roll(-1, dims=1), 2, [self.head.weight]
        return ulysses_sp.TiledFusedLogitsLoss.apply(
            loss, self, hidden, next_ids, None, parts, weights, "mean"
        )


class FusedLoss(nn.Module):
    """A model whose loss is Liger's, which never has all logits; gives the loss.

    Liger reads the weight of the head outside of the head's module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        from liger_kernel.transformers import monkey_patch

        apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
        # Its other kernels do not run in Triton's interpreter.
        kernels = dict.fromkeys(inspect.signature(apply).parameters, False)
        apply(**kernels | {"model": model, "fused_linear_cross_entropy": True})
        self.model = model
        self.activation_checkpointing_enable = model.activation_checkpointing_enable

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=input_ids).loss
        return loss


class NormalisedDescent(torch.optim.Optimizer):
    """Not elementwise: a step is as long as the learning rate, whatever the gradient."""

    def __init__(self, parameters: Any, *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "average" not in state:
                    state["average"] = torch.zeros_like(weight)
                average = state["average"].mul_(0.5).add_(weight.grad)
                weight.sub_(average * (group["lr"] / (average.norm() + 1e-6)))


class ScheduleFree(torch.optim.Optimizer):
    """Has the states and modes of schedulefree's AdamW, and like it counts steps in its groups."""

    def __init__(self, parameters: Any, *, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": False})

    def train(self) -> None:
        self._move(is_training=True)

    def eval(self) -> None:
        self._move(is_training=False)

    @torch.no_grad()
    def _move(self, *, is_training: bool) -> None:
        for group in self.param_groups:
            for weight in group["params"] if group["train_mode"] != is_training else ():
                if "z" in self.state[weight]:
                    share = 0.1 if is_training else 1 - 1 / 0.9
                    weight.lerp_(self.state[weight]["z"], share)
            group["train_mode"] = is_training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.param_groups[0]["train_mode"]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["weight_sum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "z" not in state:
                    state["z"] = weight.clone()
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                moment = state["exp_avg_sq"].mul_(0.99)
                moment.addcmul_(weight.grad, weight.grad, value=0.01)
                scale = (moment / (1 - 0.99 ** group["k"])).sqrt_().add_(1e-8)
                update = (weight.grad / scale).add_(weight, alpha=0.1)
                weight.lerp_(state["z"], share)
                weight.add_(update, alpha=group["lr"] * (0.9 * (1 - share) - 1))
                state["z"].sub_(update, alpha=group["lr"])


#: By type: optimizers that a script makes.
CLIENTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "client": functools.partial(NormalisedDescent, lr=1e-2),
    "schedule-free": functools.partial(ScheduleFree, lr=1e-3),
}


def maker(family: str) -> Callable[[], nn.Module]:
    """What builds a new model of `family`; its weights are undefined until `set_weights`.

    All imports have happened when this returns: zero.Init replaces tensor constructors while it is
    active, which torch's own lazy imports do not survive.
    """
    if family == "odd":
        return OddShapes
    if family in ("unused", "alternating"):
        return functools.partial(PartlyUsed, alternate=family == "alternating")
    if family == "tiled":
        return Tiled
    if family == "leaves":
        return Mixture
    if family == "lora":
        return maker("qwen")
    if family.startswith(LIGER):
        return maker(family.removeprefix(LIGER).removeprefix("-") or "llama")
    if family in families.NAMES:
        return families.maker(family)
    import transformers

    config = _configuration(family)
    model_classes = {
        "llama": transformers.LlamaForCausalLM,
        "qwen": transformers.Qwen2ForCausalLM,
        "gpt2": transformers.GPT2LMHeadModel,
        "mixtral": transformers.MixtralForCausalLM,
    }
    return functools.partial(model_classes[family], config)


def adapted(family: str, model: nn.Module) -> nn.Module:
    """With LoRA by peft, Liger's loss or leaf modules where the family asks for it, as scripts do
    it: outside of zero.Init.

    With LoRA every weight of the model is frozen, and a few small ones beside them learn.
    """
    if family.startswith(LIGER):
        return FusedLoss(model)
    if family == "leaves":
        set_z3_leaf_modules(model, [Experts])
    if family != "lora":
        return model
    import peft

    adapters = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    # DeepSpeed leaves parameters of another dtype than its own out.
    return peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)


def _configuration(family: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    if family == "llama":
        return transformers.LlamaConfig(**common, tie_word_embeddings=False)
    if family == "qwen":
        return transformers.Qwen2Config(**common, tie_word_embeddings=True)
    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=HIDDEN,
            n_layer=2,
            n_head=8,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    if family == "mixtral":
        small = {"hidden_size": 256, "intermediate_size": 512}
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        return transformers.MixtralConfig(**common | small | experts)
    raise ValueError(f"no model family called {family!r}")


def set_weights(name: str, weight: torch.Tensor, *, seed: int) -> None:
    """Fill `weight` from `seed` and `name` alone: the order of construction does not matter."""
    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    noise = torch.randn(weight.numel(), generator=generator).view(weight.shape)
    # Vectors are gains as often as biases. Values around one show a lost or stale vector at once.
    weight.copy_(1.0 + 0.1 * noise if weight.dim() == 1 else 0.02 * noise)


def batch(*, seed: int, step: int, rank: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 1_000 * step + rank)
    return torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)


def loss_of(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    output = logits_of(model, input_ids)
    if output.dim() == 0:
        return output
    output = output[:, -input_ids.shape[1] :]  # what comes before is an image
    return nn.functional.cross_entropy(
        output[:, :-1].float().flatten(0, 1), input_ids[:, 1:].flatten()
    )


def labelled_loss(model: nn.Module, input_ids: torch.Tensor, item_count: int) -> torch.Tensor:
    """The loss as the Trainer asks for it: a sum divided by the tokens of the whole step."""
    inputs = families.inputs(getattr(model, "module", model).config, input_ids)
    before = inputs["input_ids"].shape[1] - input_ids.shape[1]  # an image
    labels = nn.functional.pad(input_ids, (before, 0), value=-100)
    loss: torch.Tensor = model(**inputs, labels=labels, num_items_in_batch=item_count).loss
    return loss


def logits_of(model: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    config = getattr(getattr(model, "module", model), "config", None)
    output = model(input_ids) if config is None else model(**families.inputs(config, input_ids))
    return output if isinstance(output, torch.Tensor) else output.logits
