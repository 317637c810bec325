"""DeepSpeed's ZeRO-3 optimizer over our streams."""
