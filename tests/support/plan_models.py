"""Models for the tests of the plan."""

from __future__ import annotations

from memascend.plan.shapes import ModelShapes, TensorShape

#: The numbers of a config.json, of a few thousand parameters.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def decoder(
    *, layers: int = 4, hidden: int = 512, vocabulary: int = 8192, frozen: bool = False
) -> ModelShapes:
    """Layers of two square tensors and a norm between two embeddings."""
    tensors = [TensorShape("embed.weight", (vocabulary, hidden), not frozen)]
    for layer in range(layers):
        for name in ("a", "b"):
            tensors.append(TensorShape(f"layers.{layer}.{name}.weight", (hidden, hidden)))
        tensors.append(TensorShape(f"layers.{layer}.norm.weight", (hidden,)))
    tensors.append(TensorShape("head.weight", (vocabulary, hidden), not frozen))
    return ModelShapes("decoder", tuple(tensors))
