"""Plumbing for the course: weights, caches, chapters as modules, drawing, widgets."""
from . import chapters as _chapters
from .weights import find_model, load_config, load_weights

__all__ = ["find_model", "load_config", "load_weights"]
_chapters.install()
