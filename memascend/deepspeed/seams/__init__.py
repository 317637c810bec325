"""What is replaced in DeepSpeed and transformers, and how it is armed."""
