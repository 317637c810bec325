"""Adapters: DeepSpeed's surfaces over our own paths. Only `seams` assigns to DeepSpeed."""
