"""DeepSpeed's own parts over our memory and store, and its parts for sections that are off."""
