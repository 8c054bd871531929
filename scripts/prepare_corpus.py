#!/usr/bin/env python
"""Writes text as a Megatron data set (PREFIX.bin, PREFIX.idx): one document a file, one token a byte.

    python scripts/prepare_corpus.py --output corpus/mine FILE_OR_FOLDER...

Without inputs it takes the source files of this Python's own standard library. Tokens 0 to 255 are the bytes; 256 ends a document. Train with
--data-path PREFIX --tokenizer-type NullTokenizer --vocab-size 257.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257  # NullTokenizer takes its last token for the end of a document
STANDARD_LIBRARY_MIN_BYTES = 2_000_000
# Megatron's default split gives a thousandth of the documents to the test split.
FEW_DOCUMENTS = 1000


class CorpusError(Exception):
    """An input or output that cannot be used."""


class Corpus(NamedTuple):
    """What was written."""

    prefix: Path
    documents: int
    text_bytes: int


def text_files(inputs: Iterable[Path]) -> List[Path]:
    """The files that ``inputs`` name, folders with all that is in them (hidden files left out), sorted. Raises CorpusError."""
    files: List[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts))
            if not found:
                raise CorpusError(f"{path}: expected files in this folder, found none. Name a folder with text files.")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise CorpusError(f"{path}: no such file or folder. Name text files or folders of text files.")
    return files


def standard_library() -> List[Path]:
    """The source files of this Python's standard library, without its tests and installed packages. Raises CorpusError when they are too few."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = sorted(p for p in root.rglob("*.py") if p.is_file() and not left_out & set(p.relative_to(root).parts))
    size = sum(p.stat().st_size for p in files)
    if size < STANDARD_LIBRARY_MIN_BYTES:
        raise CorpusError(
            f"{root}: expected at least {STANDARD_LIBRARY_MIN_BYTES} bytes of Python source, found {size} in {len(files)} files. "
            "Name your own text files or folders."
        )
    return files


def read(path: Path) -> bytes:
    """The bytes of a text file. Raises CorpusError for a file that cannot be read or is not text."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}. Correct its permissions, or leave it out.") from error
    if b"\0" in content:
        raise CorpusError(f"{path}: expected text, found a zero byte at offset {content.index(0)}. Leave it out.")
    return content


def write(prefix: Path, files: Sequence[Path]) -> Corpus:
    """Writes ``files`` as PREFIX.bin and PREFIX.idx. Empty files are left out.

    Both files appear whole, the index last. Raises CorpusError when an input cannot be used, all are empty, or the output cannot be written.
    """
    import numpy
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    partial = {suffix: prefix.with_name(f".{prefix.name}.{os.getpid()}{suffix}") for suffix in (".bin", ".idx")}
    documents = text_bytes = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder: Any = IndexedDatasetBuilder(str(partial[".bin"]), dtype=DType.optimal_dtype(VOCAB_SIZE))
        for path in files:
            content = read(path)
            if not content:
                continue
            tokens = numpy.append(numpy.frombuffer(content, dtype=numpy.uint8).astype(numpy.uint16), numpy.uint16(END_OF_DOCUMENT))
            builder.add_document(tokens, [tokens.size])
            documents += 1
            text_bytes += len(content)
        if not documents:
            raise CorpusError(f"expected text, found nothing in {len(files)} empty files ({', '.join(map(str, files[:3]))}). Name files with text in them.")
        builder.finalize(str(partial[".idx"]))
        for suffix in (".bin", ".idx"):
            partial[suffix].replace(prefix.with_name(prefix.name + suffix))
    except OSError as error:
        raise CorpusError(f"{prefix}: cannot be written: {error.strerror}. Name another --output.") from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return Corpus(prefix, documents, text_bytes)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", type=Path, metavar="FILE_OR_FOLDER", help="Text files, or folders of them. Default: Python's standard library.")
    parser.add_argument("--output", type=Path, required=True, metavar="PREFIX", help="Writes PREFIX.bin and PREFIX.idx.")
    args = parser.parse_args(argv)
    try:
        files = text_files(args.inputs) if args.inputs else standard_library()
        corpus = write(args.output, files)
    except CorpusError as error:
        print(f"prepare_corpus.py: {error}", file=sys.stderr)
        return 1
    print(f"{corpus.prefix}.bin, {corpus.prefix}.idx: {corpus.documents} documents, {corpus.text_bytes + corpus.documents} tokens")
    print(f"train with: --data-path {corpus.prefix} --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE}")
    if corpus.documents < FEW_DOCUMENTS:
        print(
            f"only {corpus.documents} documents: Megatron splits by document, and waits forever for a validation or test split that is empty. Its default "
            f"--split 969,30,1 wants {FEW_DOCUMENTS}. Take larger shares (--split 90,5,5 from 40 documents on), or --split 100,0,0 --eval-iters 0."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
