"""Files: what is written is read again, minimalloc's files are read, and every bad line is named with what was expected and found."""

import pytest

from megatron_memo.plan.csv_format import read_plan, read_trace, write_plan, write_trace
from megatron_memo.plan.errors import TraceError
from megatron_memo.plan.records import Buffer

BUFFERS = [Buffer("0", 0, 3, 512, "1/forward"), Buffer("x y", 2, 9, 7), Buffer("2", 2, 4, 2**40)]


def written(tmp_path, content):
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "t.csv"
    write_trace(path, BUFFERS)
    assert read_trace(path) == BUFFERS
    write_plan(path, BUFFERS, [0, 512, 1024])
    assert read_plan(path) == (BUFFERS, [0, 512, 1024])
    assert read_trace(path) == BUFFERS
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_without_layers_the_file_is_minimallocs(tmp_path):
    path = tmp_path / "t.csv"
    write_plan(path, [Buffer("a", 1, 2, 3)], [4])
    assert path.read_text() == "id,lower,upper,size,offset\na,1,2,3,4\n"


@pytest.mark.parametrize("content", ["id,lower,upper,size\na,1,2,3\n", "id,lower,upper,size\r\na,1,2,3\r\n", "size, upper ,lower,id\n3,2,1,a", "lower,id,size,upper,offset\n1,a,3,2,77\n"])
def test_column_order_line_ends_and_blanks_do_not_matter(tmp_path, content):
    assert read_trace(written(tmp_path, content)) == [Buffer("a", 1, 2, 3)]


HEADER = "id,lower,upper,size\n"


@pytest.mark.parametrize(
    "content, line, expected, found",
    [
        ("", 1, "header with id,lower,upper,size", "''"),
        ("a,1,2,3\n", 1, "header", "'a,1,2,3'"),
        ("id,lower,upper\na,1,2\n", 1, "header", "'id,lower,upper'"),
        ("id,lower,upper,size,size\n", 1, "header", "size,size"),
        ("id,lower,upper,size,alignment\na,1,2,3,4\n", 1, "header", "Remove 'alignment'"),
        (HEADER, 2, "at least one buffer", "the end of the file"),
        (HEADER + "a,1,2,3\n\nb,1,2,3\n", 3, "4 values", "1 in ''"),
        (HEADER + "a,1,2,3,4\n", 2, "4 values", "5 in 'a,1,2,3,4'"),
        (HEADER + "a,1,2\n", 2, "4 values", "3 in 'a,1,2'"),
        (HEADER + "a,1,2,-3\n", 2, "size: a whole number", "'-3'"),
        (HEADER + "a,1,2,3.5\n", 2, "size: a whole number", "'3.5'"),
        (HEADER + "a,1,2,1_0\n", 2, "size: a whole number", "'1_0'"),
        (HEADER + "a,\u0663,9,1\n", 2, "lower: a whole number", "'\u0663'"),
        (HEADER + "a,1,2,4611686018427387904\n", 2, "below 2^62", "'4611686018427387904'"),
        (HEADER + f"a,1,2,{'9' * 5000}\n", 2, "size: a whole number", "'99"),
        (HEADER + "a,1,2,4611686018427387903\nb,1,2,4611686018427387903\n", 3, "add up to less than 2^62", "9223372036854775806"),
        (HEADER + "a,2,2,3\n", 2, "lower below upper", "lower 2, upper 2"),
        (HEADER + "a,1,2,0\n", 2, "at least 1 byte", "0"),
        (HEADER + ",1,2,3\n", 2, "an id", "none"),
        (HEADER + "a,1,2,3\na,5,6,3\n", 3, "an id that no other line has", "'a', which line 2 has too"),
        (HEADER.encode() + b"a,1,2,3\n\xff,1,2,3\n", 3, "UTF-8", "0xff in column 1"),
        (HEADER.encode() + b"a\0,1,2,3\n", 2, "printable", "\\x00"),
        (HEADER + "a,1,2,=cmd()\n", 2, "size: a whole number", "'=cmd()'"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected_and_found(tmp_path, content, line, expected, found):
    path = written(tmp_path, content)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    message = str(raised.value)
    assert message.startswith(f"{path}, line {line}: expected ") and expected in message and found in message
    assert len(message) < len(str(path)) + 400


def test_a_plan_needs_offsets(tmp_path):
    with pytest.raises(TraceError, match="line 1: expected a header with id,lower,upper,size,offset"):
        read_plan(written(tmp_path, HEADER + "a,1,2,3\n"))


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    with pytest.raises(TraceError, match="missing.csv: cannot be read"):
        read_trace(tmp_path / "missing.csv")
    with pytest.raises(TraceError, match="no/t.csv: cannot be written"):
        write_trace(tmp_path / "no" / "t.csv", BUFFERS)


@pytest.mark.parametrize("bad", [Buffer("a,b", 0, 1, 1), Buffer("a", 0, 1, 1, "x\ny"), Buffer(" a", 0, 1, 1)])
def test_text_that_would_not_be_read_again_is_not_written(tmp_path, bad):
    with pytest.raises(TraceError, match="Rename it"):
        write_trace(tmp_path / "t.csv", [bad])
    assert list(tmp_path.iterdir()) == []
