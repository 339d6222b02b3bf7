import qwen_helpers  # noqa: F401  (makes `chapters.*` importable)
