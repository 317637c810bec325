#!/usr/bin/env python3
"""Fine-tunes a causal language model with DeepSpeed and transformers: an ordinary training script.

What the DeepSpeed JSON says is what runs; this file knows nothing of how parameters are offloaded.

    deepspeed --num_gpus 1 scripts/finetune.py --deepspeed_config configs/nvme_cpu.json
    torchrun --nproc-per-node 2 scripts/finetune.py --deepspeed_config configs/nvme_cpu.json
    python scripts/finetune.py --model ~/models/Qwen2.5-7B --text notes/ --deepspeed_config my.json

`--model` is a local Hugging Face folder, or the name of a shape below: random weights, no download.
A folder with a config.json alone has random weights, too.
Rank 0 prints one line per step, `step N loss X time S`; X has every digit, so runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sysconfig
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from transformers.integrations import HfDeepSpeedConfig

TEXT_BYTES_MAX = 16 * 1024 * 1024

# family -> (configuration class, what all its sizes share)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("Qwen2Config", {"tie_word_embeddings": True}),
    "llama-3": ("LlamaConfig", {"tie_word_embeddings": False}),
    "gpt2": ("GPT2Config", {"tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"tie_word_embeddings": False, "num_experts_per_tok": 2}),
}


def decoder(
    *, vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv: int, **more: Any
) -> dict[str, Any]:
    """Gives the configuration keys that Qwen-, Llama- and Mixtral-like decoders share."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": 4096,
        **more,
    }


def gpt2(*, vocab: int, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Gives the same for GPT-2, which has its own names."""
    return {"vocab_size": vocab, "n_embd": hidden, "n_layer": layers, "n_head": heads}


# Rows beyond 256 never occur in bytes, but vocabularies are this large in practice, and embeddings
# with them. The tiny shapes keep every feed-forward weight just large enough to be offloaded.
# fmt: off
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-tiny": decoder(vocab=4096, hidden=256, ffn=2048, layers=2, heads=4, kv=2),
    "qwen2.5-20m": decoder(vocab=16384, hidden=512, ffn=1536, layers=4, heads=8, kv=2),
    "qwen2.5-125m": decoder(vocab=65536, hidden=768, ffn=3072, layers=9, heads=12, kv=2),
    "qwen2.5-500m": decoder(vocab=151936, hidden=896, ffn=4864, layers=24, heads=14, kv=2),
    "qwen2.5-0.5b": decoder(vocab=151936, hidden=896, ffn=4864, layers=24, heads=14, kv=2),
    "qwen2.5-1.5b": decoder(vocab=151936, hidden=1536, ffn=8960, layers=28, heads=12, kv=2),
    "qwen2.5-7b": decoder(
        vocab=152064, hidden=3584, ffn=18944, layers=28, heads=28, kv=4, tie_word_embeddings=False),
    "qwen2.5-14b": decoder(
        vocab=152064, hidden=5120, ffn=13824, layers=48, heads=40, kv=8, tie_word_embeddings=False),
    "qwen2.5-32b": decoder(
        vocab=152064, hidden=5120, ffn=27648, layers=64, heads=40, kv=8, tie_word_embeddings=False),
    "llama-3-tiny": decoder(vocab=4096, hidden=256, ffn=2048, layers=2, heads=4, kv=2),
    "llama-3-20m": decoder(vocab=8192, hidden=512, ffn=1792, layers=4, heads=8, kv=2),
    "llama-3-125m": decoder(vocab=32768, hidden=768, ffn=3072, layers=9, heads=12, kv=4),
    "llama-3-500m": decoder(vocab=128256, hidden=1024, ffn=4096, layers=16, heads=16, kv=4),
    "llama-3.2-1b": decoder(
        vocab=128256, hidden=2048, ffn=8192, layers=16, heads=32, kv=8, tie_word_embeddings=True),
    "llama-3.1-8b": decoder(vocab=128256, hidden=4096, ffn=14336, layers=32, heads=32, kv=8),
    "llama-3.1-70b": decoder(vocab=128256, hidden=8192, ffn=28672, layers=80, heads=64, kv=8),
    "gpt2-tiny": gpt2(vocab=4096, hidden=384, layers=2, heads=6),
    "gpt2-20m": gpt2(vocab=16384, hidden=384, layers=6, heads=6),
    "gpt2-125m": gpt2(vocab=50257, hidden=768, layers=12, heads=12),
    "gpt2-355m": gpt2(vocab=50257, hidden=1024, layers=24, heads=16),
    "gpt2-1.5b": gpt2(vocab=50257, hidden=1600, layers=48, heads=25),
    "mixtral-tiny": decoder(
        vocab=4096, hidden=256, ffn=512, layers=2, heads=4, kv=2, num_local_experts=4),
    "mixtral-20m": decoder(
        vocab=8192, hidden=384, ffn=768, layers=4, heads=6, kv=2, num_local_experts=4),
    "mixtral-125m": decoder(
        vocab=32000, hidden=512, ffn=1024, layers=8, heads=8, kv=2, num_local_experts=8),
    "mixtral-8x7b": decoder(
        vocab=32000, hidden=4096, ffn=14336, layers=32, heads=32, kv=8, num_local_experts=8),
}
# fmt: on


def parse_arguments() -> argparse.Namespace:
    """Reads the command line; DeepSpeed adds its own `--deepspeed_config`."""
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model.")
    parser.add_argument(
        "--model",
        default="llama-3-125m",
        help=f"a local Hugging Face folder, or one of: {', '.join(SHAPES)}",
    )
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[Path(sysconfig.get_paths()["stdlib"])],
        help="files or folders (default: the Python standard library's own sources)",
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, help="sequences per rank and micro-batch")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, help="overrides the optimizer's lr in the JSON")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="overrides the JSON")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--nvme-path", help="overrides every nvme_path in the JSON")
    parser.add_argument(
        "--digest",
        choices=["parameters", "master"],
        help="print a SHA-256 of every final parameter: as trained with, or its fp32 master",
    )
    parser.add_argument("--save", type=Path, help="write the final 16-bit weights to this folder")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by some launchers")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is required")
    return args


def load_config(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the DeepSpeed JSON and lets the command line override what it names."""
    config: dict[str, Any] = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    micro_batch = "train_micro_batch_size_per_gpu"
    if args.batch_size is not None or config.get(micro_batch, "auto") == "auto":
        config[micro_batch] = args.batch_size or 1
    if args.lr is not None:
        config["optimizer"]["params"]["lr"] = args.lr
    if args.dtype is not None:
        config["bf16"] = {**config.get("bf16", {}), "enabled": args.dtype == "bf16"}
        config["fp16"] = {**config.get("fp16", {}), "enabled": args.dtype == "fp16"}
    if args.nvme_path is not None:
        for section in ("offload_param", "offload_optimizer"):
            offload = config.get("zero_optimization", {}).get(section, {})
            if offload.get("device") == "nvme":
                offload["nvme_path"] = args.nvme_path
    return config


def join_process_group() -> None:
    """Joins the launcher's process group; without a launcher, a group of one."""
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.init_distributed(auto_mpi_discovery=False)
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))


def training_dtype(config: dict[str, Any]) -> torch.dtype:
    """Gives the dtype that the JSON trains in."""
    if config.get("bf16", {}).get("enabled"):
        return torch.bfloat16
    return torch.float16 if config.get("fp16", {}).get("enabled") else torch.float32


def build_model(name: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Loads a local folder, or builds a named shape or a folder's config.json: random weights.

    With ZeRO-3 configured transformers enters `deepspeed.zero.Init` here by itself, so that no rank
    ever holds the whole model.
    """
    if Path(name).is_dir():
        folder = Path(name)
        if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        return transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, local_files_only=True
        )
    if name not in SHAPES:
        raise SystemExit(f"--model {name}: neither a folder nor one of: {', '.join(SHAPES)}")
    family = max((known for known in FAMILIES if name.startswith(known)), key=len)
    config_class, common = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**common, **SHAPES[name]})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def load_tokens(paths: list[Path], model: str) -> torch.Tensor:
    """Turns text into token ids: with the folder's tokenizer if it has one, else as bytes."""
    text = bytearray()
    for path in paths:
        files = sorted(path.glob("*.py")) or sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and len(text) < TEXT_BYTES_MAX:
                content = file.read_bytes()
                text += b"" if b"\0" in content else content
    if Path(model, "tokenizer_config.json").is_file():
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
        ids = tokenizer(text.decode("utf-8", errors="replace"))["input_ids"]
        return torch.tensor(ids, dtype=torch.long)
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(tokens: torch.Tensor, rows: int, columns: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields random windows of the text for ever; the seed fixes their order."""
    if tokens.numel() <= columns:
        raise SystemExit(f"--text holds {tokens.numel()} tokens, --seq-len {columns} needs more")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(tokens.numel() - columns, (rows,), generator=generator)
        yield torch.stack([tokens[start : start + columns] for start in starts.tolist()])


def mean_over_ranks(value: float) -> float:
    """Averages one number over all ranks, in double precision."""
    total = torch.tensor(
        [value], dtype=torch.float64, device=get_accelerator().current_device_name()
    )
    deepspeed.comm.all_reduce(total)
    return total.item() / deepspeed.comm.get_world_size()


def train(engine: Any, tokens: torch.Tensor, args: argparse.Namespace) -> None:
    """Runs the steps; one line each on rank 0."""
    rank = deepspeed.comm.get_rank()
    rows = engine.train_micro_batch_size_per_gpu()
    stream = batches(tokens, rows, args.seq_len, args.seed + rank)
    accumulation = engine.gradient_accumulation_steps()
    for step in range(args.steps):
        started = time.perf_counter()
        loss_sum = 0.0
        for _ in range(accumulation):
            ids = next(stream).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            loss_sum += loss.item()
        mean = mean_over_ranks(loss_sum / accumulation)
        if rank == 0:
            seconds = time.perf_counter() - started
            # In one piece: the launcher has Python write what it prints at once, an end apart.
            print(f"step {step} loss {mean!r} time {seconds:.3f}\n", end="", flush=True)


def print_digests(model: torch.nn.Module, kind: str) -> None:
    """Prints a SHA-256 of every parameter, gathered one at a time: the model need not fit."""
    for name, parameter in model.named_parameters():
        if kind == "master":
            values = deepspeed.utils.safe_get_full_fp32_param(parameter)
        else:
            with deepspeed.zero.GatheredParameters(parameter):
                values = parameter.detach().cpu().clone()
        if deepspeed.comm.get_rank() == 0:
            content = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            print(f"digest {name} {hashlib.sha256(content).hexdigest()}", flush=True)


def main() -> None:
    """Builds the model, trains it, and reports."""
    # DeepSpeed calls collectives under names that recent torch announces to rename, once per call.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    args = parse_arguments()
    config = load_config(args)
    join_process_group()
    transformers.set_seed(args.seed)
    is_zero3 = config.get("zero_optimization", {}).get("stage") == 3
    # transformers looks this object up while it builds the model, so it has to stay alive.
    hf_config = HfDeepSpeedConfig(config) if is_zero3 else None
    model = build_model(args.model, training_dtype(config))
    model.config.use_cache = False
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    tokens = load_tokens(args.text, args.model)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    del hf_config
    if deepspeed.comm.get_rank() == 0:
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        print(f"{args.model}: {numel:,} parameters, {tokens.numel():,} tokens", flush=True)
    train(engine, tokens, args)
    if args.digest is not None:
        print_digests(model, args.digest)
    if args.save is not None:
        engine.save_16bit_model(str(args.save))
        if deepspeed.comm.get_rank() == 0:
            model.config.save_pretrained(args.save)
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    # gloo's threads take the GIL to free the tensors of the last collective; a Python that is
    # finalizing by then kills them, and torch aborts.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
