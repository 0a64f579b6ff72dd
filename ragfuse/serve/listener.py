"""Open the server's socket. The module imports little, so a port in use is reported at once."""

import socket

from ragfuse.errors import SettingsError

BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; SettingsError if the address is unavailable."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"The server cannot listen at {host}:{port}: {str(error).partition(' (')[0]}. Choose"
            " another --port or --host."
        ) from error
