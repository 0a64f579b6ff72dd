"""What programs ask: an `Engine` in their process, or a `RemoteEngine` that passes everything on to
a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ragfuse.engine.engine import Engine
    from ragfuse.remote.remote_engine import RemoteEngine

Answerer: TypeAlias = "Engine | RemoteEngine"
"""What answers prompts and reuses the KV of their chunks; both have the same methods, which
`Engine` documents.
"""
