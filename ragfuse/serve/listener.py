"""The server's listening socket. Imports little, so that a taken port is reported at once."""

import socket

from ragfuse.errors import SettingsError

BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address; SettingsError if the system refuses it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"The server cannot listen at {host}:{port}: {str(error).partition(' (')[0]}. Choose"
            " another --port or --host."
        ) from error
