"""Groups of commands that know what people type for a command that has another name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from typer.core import TyperGroup

SYNONYMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("rm", "delete", "del", "remove", "purge"), ("rm", "clear")),
        "clear": ("rm",),
        **dict.fromkeys(("list", "dir"), ("ls",)),
        **dict.fromkeys(("stat", "info", "du"), ("stats",)),
        **dict.fromkeys(("mv",), ("move",)),
    }
)
"""For each word, the names that the command for it has in some group, the likeliest first."""


class HintingGroup(TyperGroup):
    """A group that says of an unknown word which command does the same."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is named; the error for a wrong name says which one is meant."""
        word = args[0] if args else ""
        meant = next((name for name in SYNONYMS.get(word, ()) if name in self.commands), word)
        if word not in self.commands and meant in self.commands:
            ctx.fail(f"There is no command '{word}' here: `{ctx.command_path} {meant}` does that.")
        return super().resolve_command(ctx, args)
