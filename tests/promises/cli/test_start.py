"""The command starts at once: torch takes a second to import, and is loaded where something is
computed.
"""

from __future__ import annotations

from tests.kits.tiny import python


def test_the_command_starts_without_torch():
    code = """
        import json, sys
        import ragfuse.cli.main
        print(json.dumps("torch" in sys.modules))
        """
    assert python(code) is False
