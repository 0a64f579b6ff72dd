"""Extract the text of an upload in a separate process, with limits on time and memory.

The process is `python -m ragfuse.serve.upload_text SUFFIX CHARS`. The process reads the file from
standard input and writes the text to standard output. After a failure, the reason is written to
standard error.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

from ragfuse.errors import InputError
from ragfuse.text.file_texts import READERS, texts_in

TIMEOUT_S = 60
MEMORY_NBYTES = 1 << 30
"""Maximum address space of the separate process, in bytes."""
PDF = ".pdf"


def text_of(data: bytes, suffix: str, most_chars: int) -> str:
    """Return the text of an uploaded file, as `ragfuse ingest` would read the file.

    Args:
        data: The file's bytes. A text file must be UTF-8.
        suffix: The file's suffix, such as ".html". An unknown suffix means plain text.
        most_chars: Maximum characters of the result. Plain text is not limited.

    Raises:
        InputError: The file cannot be read, has too much text, or takes too long to read.
    """
    if suffix != PDF and suffix not in READERS:
        return data.decode()
    what = f"The {suffix[1:]} document"
    command = [sys.executable, "-P", "-m", "ragfuse.serve.upload_text", suffix, str(most_chars)]
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{what} took over {TIMEOUT_S} seconds to read. Repair the file, or send its text."
        ) from None
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
            "the reader ended early"
        ]
        raise InputError(
            f"{what} cannot be read: {why[0]:.200}. Repair the file, or send its text."
        )
    return done.stdout.decode("utf-8", "surrogatepass")


def read(data: bytes, suffix: str, most_chars: int) -> str:
    """Return the text of a file; any exception means that the file cannot be read."""
    if suffix == PDF:
        from pypdf import PdfReader

        texts: Iterable[str] = (page.extract_text() for page in PdfReader(io.BytesIO(data)).pages)
    else:
        texts = texts_in(data.decode(), suffix)
    text = "\n\n".join(texts)
    if len(text) > most_chars:
        raise InputError(f"the text has more than {most_chars:,} characters")
    return text


if __name__ == "__main__":
    with suppress(ImportError, ValueError, OSError):  # a system without this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    try:
        found = read(sys.stdin.buffer.read(), sys.argv[1], int(sys.argv[2]))
    except Exception as error:
        sys.exit(str(error) or type(error).__name__)
    sys.stdout.buffer.write(found.encode("utf-8", "surrogatepass"))
