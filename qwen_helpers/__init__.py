"""Plumbing for the course: weights, caches, chapters as modules, drawing, widgets."""
from . import chapters as _chapters

_chapters.install()
