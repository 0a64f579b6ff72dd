"""The text of a PDF, read by pypdf in a process of its own: a file from a stranger may take all time and memory.

`python -m ragfuse.serve.pdf_text` is that process: the PDF on its standard input, JSON on its standard output.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys

from ragfuse.errors import InputError

TIMEOUT_S = 60
"""Seconds that reading a PDF may take."""
MEMORY_NBYTES = 1 << 30
"""Bytes of address space of the process that reads it."""
MAX_PAGES = 1000
"""Most pages of a PDF."""
_HINT = "Repair it, or send its text."


def text_of_pdf(data: bytes) -> str:
    """Return the text of a PDF.

    Raises:
        InputError: It cannot be read, has too many pages or no text, or takes too long.
    """
    command = [sys.executable, "-P", "-m", "ragfuse.serve.pdf_text"]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=TIMEOUT_S, check=False)
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        raise InputError(f"The PDF could not be read within {TIMEOUT_S} seconds. {_HINT}") from None
    except ValueError:
        answer = {}
    if "text" not in answer:
        raise InputError(f"The PDF cannot be read: {answer.get('error', 'reading it failed')}. {_HINT}")
    text = str(answer["text"])
    if not text.strip():
        raise InputError("The PDF has no text; if its pages are scanned, run OCR on it first.")
    return text


def read(data: bytes) -> dict[str, str]:
    """Return {"text": ...} or {"error": ...} for a PDF."""
    try:
        from pypdf import PdfReader

        pages = PdfReader(io.BytesIO(data)).pages
        if len(pages) > MAX_PAGES:
            return {"error": f"it has {len(pages):,} pages, wanted {MAX_PAGES:,} at most"}
        return {"text": "\n\n".join(page.extract_text() for page in pages)}
    except ImportError:
        return {"error": "the server lacks the package pypdf, which whoever runs it can install"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    except (ImportError, ValueError, OSError):
        return  # this system has no such limit; the time is limited anyway


if __name__ == "__main__":
    _limit_memory()
    sys.stdout.write(json.dumps(read(sys.stdin.buffer.read())))
