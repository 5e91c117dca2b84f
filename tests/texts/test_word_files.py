"""Tests of Word documents: formatted words, links, fields and images stay, and so does all else of the file."""

import io
import zipfile

import pytest
from identity_engine import identity_generator
from PIL import Image

from metaphrase.texts.whole_texts import TextDecoder, read_file

docx = pytest.importorskip("docx", reason="needs python-docx")
from docx.oxml import parse_xml  # noqa: E402
from docx.oxml.ns import nsdecls  # noqa: E402

NOTES = """<w:footnotes {}><w:footnote w:id="1"><w:p><w:r><w:footnoteRef/></w:r><w:r><w:t>a note</w:t></w:r></w:p></w:footnote>
</w:footnotes>"""
FIELD = '<w:fldChar w:fldCharType="begin"/>|<w:instrText>PAGE</w:instrText>|<w:fldChar w:fldCharType="separate"/>|<w:t>7</w:t>'
FIELD += '|<w:fldChar w:fldCharType="end"/>'


def append(paragraph, xml):
    name = xml.split(">", 1)[0].rstrip("/")
    paragraph._p.append(parse_xml(xml.replace(name, f"{name} {nsdecls('w')}", 1)))


@pytest.fixture
def path(tmp_path):
    """A document with headings, formatted words, a field, a link, an image, a table and a header."""
    document = docx.Document()
    document.add_heading("A title", 1)
    paragraph = document.add_paragraph("The ")
    paragraph.add_run("small cat").bold = True
    # Word parts runs by their spelling.
    append(paragraph, "<w:r><w:rPr><w:lang w:val='en'/></w:rPr><w:t xml:space='preserve'> sle</w:t></w:r>")
    append(paragraph, "<w:proofErr w:type='spellStart'/>")
    paragraph.add_run("eps & eats.")
    paragraph = document.add_paragraph("On page ")
    for xml in FIELD.split("|"):
        append(paragraph, f"<w:r>{xml}</w:r>")
    append(paragraph, "<w:bookmarkStart w:id='5' w:name='x'/>")
    paragraph.add_run(" see ")
    link = "<w:r><w:rPr><w:u w:val='single'/></w:rPr><w:t>this link</w:t></w:r>"
    append(paragraph, f"<w:hyperlink w:anchor='x'>{link}</w:hyperlink>")
    append(paragraph, "<w:bookmarkEnd w:id='5'/>")
    paragraph = document.add_paragraph("Name:\tBob\nSecond line")
    image = io.BytesIO()
    Image.new("RGB", (2, 2)).save(image, "PNG")
    image.seek(0)
    paragraph.add_run().add_picture(image)
    document.add_table(1, 1).cell(0, 0).text = "in a cell"
    document.sections[0].header.paragraphs[0].text = "at the top"
    document.save(str(tmp_path / "in.docx"))
    return tmp_path / "in.docx"


def decoded(path):
    file = read_file(str(path), path.read_bytes())
    decoder = TextDecoder(identity_generator(str.upper), text_format="xml", has_lines=True)
    (path.with_name("out.docx")).write_bytes(file.fill(decoder.decode(file.texts)))
    return docx.Document(str(path.with_name("out.docx")))


def looks(paragraph):
    return [(run.text, run.bold) for run in paragraph.runs if run.text]


def test_words_keep_their_look(path, align):
    document = decoded(path)
    title, first, second, third = document.paragraphs
    assert (title.text, title.style.name) == ("A TITLE", "Heading 1")
    assert looks(first) == [("THE ", None), ("SMALL CAT", True), (" SLEEPS & EATS.", None)]
    assert second.text == "ON PAGE 7 SEE THIS LINK"
    assert [link.text for link in second.hyperlinks] == ["THIS LINK"] and second.hyperlinks[0].runs[0].underline
    assert [mark.tag.split("}")[1] for mark in (second._p[0], second._p[-1])] == ["bookmarkStart", "bookmarkEnd"]
    assert third.text == "NAME:\tBOB\nSECOND LINE" and len(document.inline_shapes) == 1
    assert document.tables[0].cell(0, 0).text == "IN A CELL"
    assert document.sections[0].header.paragraphs[0].text == "AT THE TOP"


def test_words_may_change_places(path, tmp_path):
    file = read_file(str(path), path.read_bytes())
    target = "<t1>Die kleine Katze</t1> schläft."
    assert file.texts[1] == "The <t1>small cat</t1> sleeps &amp; eats."
    (tmp_path / "out.docx").write_bytes(
        file.fill([target if index == 1 else text for index, text in enumerate(file.texts)])
    )
    document = docx.Document(str(tmp_path / "out.docx"))
    assert looks(document.paragraphs[1]) == [("Die kleine Katze", True), (" schläft.", None)]


def test_ruby_text_and_text_behind_a_field_without_an_end_are_read(path, align):
    document = docx.Document()
    ruby = "<w:ruby><w:rt><w:r><w:t>neko</w:t></w:r></w:rt><w:rubyBase><w:r><w:t>cat</w:t></w:r></w:rubyBase></w:ruby>"
    append(document.add_paragraph("a "), f"<w:r>{ruby}</w:r>")
    for xml in FIELD.split("|"):
        append(document.paragraphs[-1], f"<w:r>{xml}</w:r>")
    append(document.add_paragraph("one "), f"<w:r>{FIELD.split('|')[0]}</w:r>")
    append(document.paragraphs[-1], f"<w:r>{FIELD.split('|')[1]}</w:r>")
    document.add_paragraph("two")
    document.save(str(path))
    texts = [paragraph.text for paragraph in decoded(path).paragraphs]
    assert texts == ["A CAT7", "ONE ", "TWO"]


def test_other_parts_stay(path, align, tmp_path):
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.footnotes+xml"
    part = f'<Override PartName="/word/footnotes.xml" ContentType="{kind}"/></Types>'
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/footnotes"
    relation = f'<Relationship Id="rId99" Type="{kind}" Target="footnotes.xml"/></Relationships>'
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "notes.docx", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "[Content_Types].xml":
                data = data.replace(b"</Types>", part.encode())
            if name == "word/_rels/document.xml.rels":
                data = data.replace(b"</Relationships>", relation.encode())
            target.writestr(name, data)
        target.writestr("word/footnotes.xml", NOTES.format(nsdecls("w")))
    decoded(tmp_path / "notes.docx")
    with zipfile.ZipFile(tmp_path / "notes.docx") as source, zipfile.ZipFile(tmp_path / "out.docx") as target:
        assert sorted(source.namelist()) == sorted(target.namelist())
        assert b"A NOTE" in target.read("word/footnotes.xml") and b"footnoteRef" in target.read("word/footnotes.xml")
        for name in source.namelist():
            if "media" in name or name == "word/theme/theme1.xml":
                assert source.read(name) == target.read(name)


def many_paragraphs(path):
    docx.Document().save(str(path))
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data.replace(b"<w:body>", b"<w:body>" + b"<w:p/>" * (1 << 24)))


def bomb(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("word/document.xml", "w") as stream:
        for _ in range(257):
            stream.write(bytes(2**20))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"no zip"), "must be a Word document"),
        (lambda path: zipfile.ZipFile(path, "w").close(), "must be a Word document"),
        (bomb, "must unpack to at most 256 MB and 16777216 tags, got 257 MB"),
        (many_paragraphs, "must unpack to at most 256 MB and 16777216 tags, got 96 MB and 16801"),
        (lambda path: docx.Document().save(str(path)), "must hold text"),
    ],
)
def test_errors_leave_the_output(run_generate, tmp_path, make, message):
    make(tmp_path / "in.docx")
    (tmp_path / "out.docx").write_text("old")
    with pytest.raises(ValueError, match=message):
        run_generate("--file", tmp_path / "in.docx", "--output", tmp_path / "out.docx", "--overwrite")
    assert (tmp_path / "out.docx").read_text() == "old"
