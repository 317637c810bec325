"""The seams in DeepSpeed, transformers and TRL, and how they are armed."""
