"""Plumbing for the course: weights, caches, chapters as modules, drawing, widgets."""
from . import chapters as _chapters
from .linear import pack
from .weights import find_model, load_config, load_weights

__all__ = ["find_model", "load_config", "load_weights", "pack"]
_chapters.install()
