"""Files that are found and read: kinds, encodings, and what is passed over or refused, with the reason."""

import os

import pytest

from ragfuse.cli.files import encoding_of, find_files, texts_of
from ragfuse.errors import InputError


def pdf(text: bytes) -> bytes:
    """The smallest PDF that says something."""
    drawn = b"BT /F1 12 Tf 72 720 Td (" + text + b") Tj ET"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    tail = b"xref\n0 %d\n0000000000 65535 f \n%strailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
    return out + tail % (size, table, size, len(out))


def test_a_folder_is_searched_through_in_order_and_hidden_files_are_not_seen(tmp_path):
    for name in ("b.md", "a.txt", "sub/c.html", "sub/d.PDF", ".git/e.txt", "sub/.f.txt", "g.rst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    names = [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path]).files]
    assert names == ["a.txt", "b.md", "g.rst", "sub/c.html", "sub/d.PDF"]


def test_what_cannot_be_read_is_passed_over_with_the_reason(tmp_path):
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("  \n ")
    (tmp_path / "binary.txt").write_bytes(b"ab\0cd")
    (tmp_path / "code.py").write_text("x = 1")
    os.mkfifo(tmp_path / "pipe.txt")
    found = find_files([tmp_path, tmp_path / "pipe.txt", tmp_path / "good.txt"])
    assert found.files == (tmp_path / "good.txt",)
    assert {(path.name, why) for path, why in found.skipped} == {
        ("empty.txt", "empty"),
        ("binary.txt", "binary, not text"),
        ("code.py", "not a kind of document that is read here ('.py')"),
        ("pipe.txt", "not a plain file"),
    }


def test_a_wrong_path_is_named(tmp_path):
    with pytest.raises(InputError, match=r"found nothing at '.*/nope'"):
        find_files([tmp_path / "nope"])


def test_a_folder_without_documents_says_what_is_in_it(tmp_path):
    with pytest.raises(InputError, match="found none: no file"):
        find_files([tmp_path])
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(InputError, match=r"1 passed over \(x\.bin: not a kind"):
        find_files([tmp_path])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
@pytest.mark.parametrize("name", ["a.txt", "a.html"])
def test_text_in_other_encodings_is_read_right(tmp_path, encoding, name):
    said = "Le café déjà vu à Nanterre, né près de la rivière"
    file = tmp_path / name
    file.write_bytes((said if name == "a.txt" else f"<p>{said}</p>").encode(encoding))
    assert find_files([file]).files == (file,)
    assert [text.strip() for text in texts_of(file)] == [said]


def test_bytes_that_are_no_text_in_any_of_them_still_have_an_encoding():
    data = bytes(range(256))
    assert len(data.decode(encoding_of(data))) == 256


def test_html_is_read_without_its_scripts_and_pdf_by_its_pages(tmp_path):
    html, page = tmp_path / "a.html", tmp_path / "a.pdf"
    html.write_text("<head><script>var x = 1</script></head><body><h1>The mill</h1><p>Built in 1790.</p></body>")
    page.write_bytes(pdf(b"The fair is held every October."))
    assert "".join(texts_of(html)).split("\n") == ["The mill", "Built in 1790."]
    assert "The fair is held every October." in "".join(texts_of(page))


def test_a_broken_document_is_named_with_the_reason_and_nothing_else_is_said(tmp_path, caplog):
    file = tmp_path / "broken.pdf"
    file.write_bytes(b"%PDF-1.4 but no more")
    with pytest.raises(InputError, match=r"broken\.pdf' cannot be read as pdf .*Mend it or leave it out"):
        texts_of(file)
    assert caplog.text == ""
