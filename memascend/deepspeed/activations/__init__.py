"""DeepSpeed's parameter swapper over our parameter stream."""
