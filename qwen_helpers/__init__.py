"""What a lesson imports and does not want to look at: weights, caches, drawing, sliders."""
from .linear import pack
from .weights import find_model, load_config, load_weights

__all__ = ["find_model", "load_config", "load_weights", "pack"]
