"""The text of an upload, read in a process of its own: a file from a stranger may take all time and memory.

PDFs are read by pypdf, other types as `ragfuse.text.file_texts` reads them. `python -m ragfuse.serve.upload_text SUFFIX
CHARS` is that process: the file on its standard input, JSON on its standard output.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys

from ragfuse.errors import InputError
from ragfuse.text.file_texts import READERS, texts_in

TIMEOUT_S = 60
"""Seconds that reading an upload may take."""
MEMORY_NBYTES = 1 << 30
"""Bytes of address space of the process that reads it."""
MAX_PAGES = 1000
"""Most pages of a PDF."""
PDF = ".pdf"


def text_of_pdf(data: bytes, most_chars: int) -> str:
    """Return the text of a PDF, or as much of it as is more than `most_chars`.

    Raises:
        InputError: It cannot be read, has too many pages or no text, or takes too long.
    """
    text = _read_apart(data, PDF, most_chars, "Repair it, or send its text.")
    if not text.strip():
        raise InputError("The PDF has no text; if its pages are scanned, run OCR on it first.")
    return text


def text_of_type(text: str, suffix: str, most_chars: int) -> str:
    """Return the text in an upload, as `ragfuse ingest` reads a file of this type.

    Args:
        text: The content of the file.
        suffix: Its type, such as ".html"; one that is not in `READERS` is plain text.
        most_chars: Most characters of the result.

    Raises:
        InputError: It cannot be read, has more characters, or takes too long.
    """
    text = text.removeprefix("\ufeff")
    if suffix not in READERS:
        return "".join(texts_in(text, suffix, most_chars))
    hint = 'Repair it, or send it with media_type "text/plain" to have it taken as it is.'
    return _read_apart(text.encode("utf-8", "surrogatepass"), suffix, most_chars, hint)


def _read_apart(data: bytes, suffix: str, most_chars: int, hint: str) -> str:
    """Return what another process reads; InputError with `hint` where it does not."""
    what = "The PDF" if suffix == PDF else f"The {suffix[1:]} document"
    command = [sys.executable, "-P", "-m", "ragfuse.serve.upload_text", suffix, str(most_chars)]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=TIMEOUT_S, check=False)
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        raise InputError(f"{what} could not be read within {TIMEOUT_S} seconds. {hint}") from None
    except ValueError:
        answer = {}
    if "text" not in answer:
        raise InputError(f"{what} cannot be read: {answer.get('error', 'reading it failed')}. {hint}")
    return str(answer["text"])


def read(data: bytes, suffix: str, most_chars: int) -> dict[str, str]:
    """Return {"text": ...} or {"error": ...} for a file of this type."""
    try:
        if suffix == PDF:
            return _read_pdf(data, most_chars)
        return {"text": "\n\n".join(texts_in(data.decode("utf-8", "surrogatepass"), suffix, most_chars))}
    except ImportError as error:
        return {"error": f"the server lacks the package {error.name}, which whoever runs it can install"}
    except InputError as error:
        return {"error": str(error)[:200]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _read_pdf(data: bytes, most_chars: int) -> dict[str, str]:
    from pypdf import PdfReader

    pages = PdfReader(io.BytesIO(data)).pages
    if len(pages) > MAX_PAGES:
        return {"error": f"it has {len(pages):,} pages, wanted {MAX_PAGES:,} at most"}
    return {"text": "\n\n".join(page.extract_text() for page in pages)[: most_chars + 1]}


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    except (ImportError, ValueError, OSError):
        return  # this system has no such limit; the time is limited anyway


if __name__ == "__main__":
    _limit_memory()
    sys.stdout.write(json.dumps(read(sys.stdin.buffer.read(), sys.argv[1], int(sys.argv[2]))))
