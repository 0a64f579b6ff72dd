"""The fixtures that both siblings' tests share."""

from integrations.tests.kit import engine, minilm, real_engine, smollm, tiny_path, tiny_settings

__all__ = ["engine", "minilm", "real_engine", "smollm", "tiny_path", "tiny_settings"]
