"""DeepSpeed's own swappers over our store and memory, and its parts for sections that are off."""
