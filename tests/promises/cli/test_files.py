"""Files that are found and read: kinds, encodings, and what is passed over or refused, with the
reason.
"""

import io
import json
import os
import zipfile

import pytest
from pypdf import PdfWriter

from ragfuse.cli.files import find_files, texts_of
from ragfuse.errors import InputError
from ragfuse.serve.upload_text import read
from tests.kits.pdf import pdf


def test_a_folder_is_searched_through_in_order_and_hidden_files_are_not_seen(tmp_path):
    for name in ("b.md", "a.txt", "sub/c.html", "sub/d.PDF", ".git/e.txt", "sub/.f.txt", "g.rst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    names = [path.relative_to(tmp_path).as_posix() for path in find_files([tmp_path])]
    assert names == ["a.txt", "b.md", "g.rst", "sub/c.html", "sub/d.PDF"]


def test_what_cannot_be_read_is_passed_over_with_the_reason(tmp_path):
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("  \n ")
    (tmp_path / "binary.txt").write_bytes(b"ab\0cd")
    (tmp_path / "picture.png").write_bytes(b"PNG")
    os.mkfifo(tmp_path / "pipe.txt")
    why = {}
    for path in find_files([tmp_path, tmp_path / "pipe.txt", tmp_path / "good.txt"]):
        try:
            assert texts_of(path) == ["text"]
        except InputError as error:
            why[path.name] = str(error)
    assert why == {
        "empty.txt": "contains no text",
        "binary.txt": "cannot be read as txt (the file is binary)",
        "picture.png": "not a supported type of document ('.png')",
        "pipe.txt": "not a plain file",
    }


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
@pytest.mark.parametrize("name", ["a.txt", "a.html"])
def test_text_in_other_encodings_is_read_right(tmp_path, encoding, name):
    said = "Le café déjà vu à Nanterre, né près de la rivière"
    file = tmp_path / name
    file.write_bytes((said if name == "a.txt" else f"<p>{said}</p>").encode(encoding))
    assert find_files([file]) == [file]
    assert [text.strip() for text in texts_of(file)] == [said]


def docx(path, body, **parts):
    """A docx of these paragraphs' XML; parts: further files in it."""
    head = (
        '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
        ' xmlns:mc="urn:mc"><w:body>'
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("word/document.xml", f"{head}{body}</w:body></w:document>")
        for name, text in parts.items():
            packed.writestr(f"word/{name}.xml", text)
    return path


CELLS = [
    {"cell_type": "markdown", "source": ["# The mill\n", "Built in 1790."]},
    {"cell_type": "code", "source": "ships = 40", "input": "ships = 40", "outputs": ["printed"]},
]


@pytest.mark.parametrize(
    ("name", "written", "wanted"),
    [
        ("a.py", "def keeper():\n    return 40\n", "def keeper():\n    return 40"),
        ("a.html", "<head><script>x</script></head><h1>A mill</h1><p>Old.</p>", "A mill\nOld."),
        ("a.pdf", pdf("The fair is held."), "The fair is held."),
        ("a.json", '{"keeper": "Br\\u00e4ndt"}', '{\n "keeper": "Brändt"\n}'),
        ("a.ipynb", json.dumps({"cells": CELLS}), "# The mill\nBuilt in 1790.ships = 40"),
        ("a.csv", 'keeper,ships\nWorth,"9,000"\n', "keeper: Worth\nships: 9,000"),
        ("b.csv", '\nkeeper;ships\n"Brandt, H.";40\n', "keeper: Brandt, H.\nships: 40"),
    ],
)
def test_documents_code_and_data_are_read_as_text(tmp_path, name, written, wanted):
    file = tmp_path / name
    file.write_bytes(written if isinstance(written, bytes) else written.encode())
    assert find_files([tmp_path]) == [file]
    assert "".join(texts_of(file)).strip() == wanted


def test_lines_of_json_are_a_text_each_and_a_bad_one_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": "one"}\n\n{"a": "two"}\n')
    assert [json.loads(text) for text in texts_of(file)] == [{"a": "one"}, {"a": "two"}]
    file.write_text('{"a": "one\u2028more\x85"}\r\n{"a": "two"}', encoding="utf-8")
    assert [json.loads(text)["a"] for text in texts_of(file)] == ["one\u2028more\x85", "two"]
    file.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(InputError, match="line 2"):
        texts_of(file)


def test_a_docx_is_read_by_its_paragraphs_tables_and_notes(tmp_path):
    def said(text):
        return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"

    twice = f"<mc:Choice>{said('box')}</mc:Choice><mc:Fallback>{said('box')}</mc:Fallback>"
    twice = f"<mc:AlternateContent>{twice}</mc:AlternateContent>"
    body = (
        said("The mill")
        + "<w:p><w:r><w:t>Built</w:t><w:tab/><w:t>1790</w:t><w:br/><w:delText>not</w:delText></w:r></w:p>"
    )
    body += (
        f"<w:tbl><w:tr><w:tc>{said('oak')}</w:tc><w:tc>{said('walnut')}</w:tc></w:tr></w:tbl>"
        + twice
    )
    note = (
        '<w:footnotes xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">'
        + said("a note")
        + "</w:footnotes>"
    )
    text, notes = texts_of(docx(tmp_path / "a.docx", body, footnotes=note))
    assert [line for line in text.split("\n") if line] == [
        "The mill",
        "Built\t1790",
        "oak",
        "walnut",
        "box",
    ]
    assert notes.strip() == "a note"


def test_a_misspelled_path_is_refused_beside_a_deleted_document(tmp_path):
    deleted = tmp_path / "deleted.md"
    assert find_files([deleted], [str(deleted)]) == []
    with pytest.raises(InputError, match=r"typo\.md"):
        find_files([deleted, tmp_path / "typo.md"], [str(deleted)])


def test_a_pdf_is_read_as_the_server_reads_it(tmp_path):
    writer, file = PdfWriter(), tmp_path / "pages.pdf"
    for text in ("The fair is held", "in the harbour."):
        writer.append(io.BytesIO(pdf(text)))
    writer.write(file)
    assert texts_of(file) == [read(file.read_bytes(), ".pdf", 1000)]
