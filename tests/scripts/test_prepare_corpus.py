"""prepare_corpus.py: what is written is what Megatron reads; inputs that cannot be used are named."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_corpus.py"
spec = importlib.util.spec_from_file_location("prepare_corpus", SCRIPT)
prepare_corpus = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare_corpus)


def documents(prefix):
    """The documents that Megatron's reader finds, as lists of tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    assert list(data.document_indices) == list(range(len(data) + 1))
    return [data[i].tolist() for i in range(len(data))]


def test_megatron_reads_back_every_byte_and_the_end_of_each_document(tmp_path):
    every_byte = bytes(range(1, 256))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(every_byte)
    (tmp_path / "text" / "b.txt").write_text("Grüße\n", encoding="utf-8")
    (tmp_path / "text" / "empty.txt").write_bytes(b"")
    (tmp_path / "text" / ".hidden").write_text("left out")
    (tmp_path / "c.txt").write_text("c")
    prefix = tmp_path / "new" / "corpus"
    files = prepare_corpus.text_files([tmp_path / "c.txt", tmp_path / "text"])
    corpus = prepare_corpus.write(prefix, files)
    texts = [b"c", every_byte, "Grüße\n".encode()]
    assert documents(prefix) == [[*text, 256] for text in texts]
    assert (corpus.documents, corpus.text_bytes) == (3, sum(map(len, texts)))
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_the_end_of_a_document_is_the_one_that_null_tokenizer_expects():
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    assert NullTokenizer(prepare_corpus.VOCAB_SIZE).eod == prepare_corpus.END_OF_DOCUMENT


def test_pythons_own_library_is_large_enough_and_leaves_out_installed_packages():
    files = prepare_corpus.standard_library()
    assert sum(p.stat().st_size for p in files) >= 2_000_000
    assert not any("site-packages" in p.parts for p in files)


def test_a_library_that_is_too_small_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(prepare_corpus.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(prepare_corpus.CorpusError, match="expected at least 2000000 bytes of Python source, found 6 in 1 files"):
        prepare_corpus.standard_library()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), "expected files in this folder, found none"),
        (lambda path: path.write_bytes(b""), "found nothing in 1 empty files"),
        (lambda path: path.write_bytes(b"ab\0c"), "found a zero byte at offset 2"),
    ],
)
def test_an_input_that_cannot_be_used_is_named_and_nothing_is_left(tmp_path, make, message, capsys):
    given, prefix = tmp_path / "given", tmp_path / "out" / "corpus"
    make(given)
    assert prepare_corpus.main([str(given), "--output", str(prefix)]) == 1
    error = capsys.readouterr().err
    assert message in error and str(given) in error
    assert not prefix.parent.exists() or list(prefix.parent.iterdir()) == []


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(prepare_corpus.CorpusError, match="a.txt: cannot be read: Permission denied"):
        prepare_corpus.read(tmp_path / "a.txt")


def test_a_failed_run_leaves_the_old_corpus_whole(tmp_path):
    good, bad, prefix = tmp_path / "good.txt", tmp_path / "bad.txt", tmp_path / "corpus"
    good.write_text("good")
    bad.write_bytes(b"\0")
    prepare_corpus.write(prefix, [good])
    with pytest.raises(prepare_corpus.CorpusError):
        prepare_corpus.write(prefix, [good, bad])
    assert documents(prefix) == [[*b"good", 256]]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_command_prints_what_to_train_with(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path / "a.txt"), "--output", str(tmp_path / "c")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "1 documents, 6 tokens" in run.stdout
    assert f"--data-path {tmp_path / 'c'} --tokenizer-type NullTokenizer --vocab-size 257" in run.stdout


def test_a_corpus_of_few_documents_says_that_validation_may_be_empty(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text\n")
    script = Path(__file__).resolve().parents[2] / "scripts" / "prepare_corpus.py"
    command = [sys.executable, str(script), "--output", str(tmp_path / "few"), str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "only 2 documents" in result.stdout and "--split 100,0,0 --eval-iters 0" in result.stdout
