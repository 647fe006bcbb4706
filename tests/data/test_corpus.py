from __future__ import annotations

import math
import os
import pickle
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from shardkit.config.schema import DataConfig, RunConfig
from shardkit.data.corpus import Corpus, open_corpus
from shardkit.data.rows import find_text_files, split_files
from shardkit.data.windows import IGNORE_INDEX, Windows, open_covered
from shardkit.errors import ConfigError, DataError


def data(tmp_path: Path, path: Path | str | None, **settings: object) -> DataConfig:
    text = None if path is None else str(path)
    return DataConfig.model_validate({"path": text, "cache_dir": str(tmp_path / "cache"), **settings})


def write_tree(root: Path, n: int = 40) -> Path:
    for i in range(n):
        file = root / f"d{i % 3}" / f"f{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(f"document {i}\n".encode() * (i + 1))
    return root


def write_tokens(path: Path, tokens: list[int], dtype: str = "<u2") -> Path:
    np.array(tokens, dtype=dtype).tofile(path)
    return path


def test_standard_library_is_the_default(tmp_path: Path) -> None:
    corpus = open_corpus(data(tmp_path, None))
    assert corpus.n_train_files > 100
    assert 0.005 < len(corpus.val) / len(corpus.train) < 0.2
    assert corpus.max_token < 256
    assert 2.5 < corpus.unigram_cross_entropy() < 4.0
    assert "standard library" in corpus.describe()
    names = [file.name for file in find_text_files(None)]
    assert names == sorted(names)
    assert "json/decoder.py" in names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)


def test_documents_are_bytes_each_followed_by_a_zero(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "text")
    corpus = open_corpus(data(tmp_path, root, val_fraction=0.2))
    files = find_text_files(str(root))
    train, val = split_files(files, 0.2)
    assert 0 < len(val) < len(train)
    for tokens, part in ((corpus.train, train), (corpus.val, val)):
        assert bytes(tokens.astype(np.uint8)) == b"".join(Path(f.path).read_bytes() + b"\0" for f in part)
    assert len(corpus.train) == corpus.train_counts.sum()


def test_split_of_a_file_does_not_depend_on_the_others(tmp_path: Path) -> None:
    files = find_text_files(str(write_tree(tmp_path / "text")))
    val = {f.name for f in split_files(files, 0.3)[1]}
    fewer = {f.name for f in split_files(files[::2], 0.3)[1]}
    assert fewer == val & {f.name for f in files[::2]}


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_part_of_a_split_is_empty(tmp_path: Path, fraction: float) -> None:
    files = find_text_files(str(write_tree(tmp_path / "text", 2)))
    assert [len(part) for part in split_files(files, fraction)] == [1, 1]


def test_single_file_is_split_by_its_tail(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("ab" * 50)
    corpus = open_corpus(data(tmp_path, file, val_fraction=0.1))
    assert bytes(corpus.train.astype(np.uint8)) == b"ab" * 45 + b"\0"
    assert bytes(corpus.val.astype(np.uint8)) == b"ab" * 5 + b"\0"


def test_glob_and_validation_path(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "text")
    corpus = open_corpus(data(tmp_path, root / "d[01]" / "*.txt", val_path=str(root / "d2")))
    assert (corpus.n_train_files, corpus.n_val_files) == (27, 13)
    recursive = open_corpus(data(tmp_path, f"{root}/**/*.txt"))
    assert recursive.n_train_files + recursive.n_val_files == 40


def test_binary_hidden_and_empty_files_are_left_out(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "text", 4)
    (root / "image.png").write_bytes(b"\x89PNG\0\0")
    (root / ".hidden").write_text("x")
    (root / "empty.txt").write_text("")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("x")
    corpus = open_corpus(data(tmp_path, root))
    assert corpus.n_train_files + corpus.n_val_files == 4
    assert corpus.n_skipped_files == 1
    assert "1 binary files skipped" in corpus.describe()


def test_second_opening_reads_the_cache_and_a_change_builds_anew(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "text")
    first = open_corpus(data(tmp_path, root))
    stamp = os.stat(first.train_span.path).st_mtime_ns
    again = open_corpus(data(tmp_path, root))
    assert again.train_span == first.train_span
    assert os.stat(again.train_span.path).st_mtime_ns == stamp
    (root / "d0" / "f0.txt").write_text("changed, and of another size")
    assert open_corpus(data(tmp_path, root)).train_span.path != first.train_span.path
    assert open_corpus(data(tmp_path, root, val_fraction=0.5)).train_span.path != first.train_span.path


def test_damaged_cache_is_built_again(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "text")
    first = open_corpus(data(tmp_path, root))
    expected = first.train.copy()
    with open(first.train_span.path, "r+b") as stream:
        stream.truncate(10)
    assert np.array_equal(open_corpus(data(tmp_path, root)).train, expected)
    (Path(first.train_span.path).parent / "meta.json").write_text("{")
    assert np.array_equal(open_corpus(data(tmp_path, root)).train, expected)


def _open(config: DataConfig) -> tuple[int, str]:
    corpus = open_corpus(config)
    return int(corpus.train.sum()), corpus.train_span.path


@pytest.mark.parametrize("locks", [True, False])
def test_processes_may_race_for_the_same_entry(tmp_path: Path, locks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = data(tmp_path, write_tree(tmp_path / "text"))
    if not locks:  # as on a network file system

        def no_locks(*_: object) -> None:
            raise OSError("no locks here")

        monkeypatch.setattr("fcntl.flock", no_locks)
    with get_context("fork").Pool(4) as pool:
        results = pool.map(_open, [config] * 8, chunksize=1)
    assert len(set(results)) == 1
    left = [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]
    assert len(left) == 1
    assert left[0].startswith("text-")


def test_bin_is_split_by_its_tail_or_by_a_second_file(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.bin", list(range(100)))
    corpus = open_corpus(data(tmp_path, path, val_fraction=0.25))
    assert corpus.train.tolist() == list(range(75))
    assert corpus.val.tolist() == list(range(75, 100))
    assert corpus.max_token == 99
    assert corpus.train_span.path == str(path)
    other = write_tokens(tmp_path / "v.bin", [7, 500])
    both = open_corpus(data(tmp_path, path, val_path=str(other)))
    assert len(both.train) == 100
    assert both.val.tolist() == [7, 500]
    assert both.max_token == 500
    wide = open_corpus(data(tmp_path, write_tokens(tmp_path / "w.bin", [1, 100_000, 3, 4], "<u4"), bin_dtype="uint32"))
    assert (wide.max_token, wide.train.tolist()) == (100_000, [1, 100_000, 3])


def test_unigram_cross_entropy_by_hand(tmp_path: Path) -> None:
    train, val = write_tokens(tmp_path / "t.bin", [5, 5, 5, 9]), write_tokens(tmp_path / "v.bin", [5, 7])
    corpus = open_corpus(data(tmp_path, train, val_path=str(val)))
    # Tokens seen: 5, 7, 9; p(5) = 4/7, p(7) = 1/7.
    assert corpus.unigram_cross_entropy() == pytest.approx(-(math.log(4 / 7) + math.log(1 / 7)) / 2)


BAD: dict[str, tuple[dict[str, bytes | None], dict[str, str], str, str]] = {
    "missing": ({}, {"path": "nowhere"}, "nowhere does not exist", "data.path"),
    "missing_bin": ({}, {"path": "nowhere.bin"}, r"nowhere\.bin does not exist", "data.path"),
    "no_match": ({}, {"path": "*.nothing"}, "holds no text files", "data.path"),
    "empty_directory": ({"empty": None}, {"path": "empty"}, "holds no text files", "data.path"),
    "empty_file": ({"empty.txt": b""}, {"path": "empty.txt"}, "empty file", "data.path"),
    "empty_bin": ({"t.bin": b""}, {"path": "t.bin"}, "is empty", "data.path"),
    "binary": ({"b.dat": b"\0\1\2"}, {"path": "b.dat"}, "binary files only", "text"),
    "odd_bin": ({"t.bin": b"abc"}, {"path": "t.bin"}, "3 bytes, not a multiple of the 2", "data.bin_dtype"),
    "wrong_width": ({"t.bin": b"\x2c\1" * 4}, {"path": "t.bin", "bin_dtype": "uint32"}, "token 19661100", "bin_dtype"),
    "mixed": ({"v.bin": b"\1\0\2\0"}, {"path": "text", "val_path": "v.bin"}, r"v\.bin is a token file", "both"),
    "mixed_bin": ({"t.bin": b"\1\0\2\0"}, {"path": "t.bin", "val_path": "text"}, "text is text", "both"),
    "cache": ({"cache": b"a file"}, {"path": "text"}, "cache directory .* cannot be used", "data.cache_dir"),
}
"""Case → files (None = a folder), settings, cause, fix."""


@pytest.mark.parametrize("case", BAD)
def test_bad_data_gets_one_line_of_cause_and_one_of_fix(case: str, tmp_path: Path) -> None:
    files, settings, cause, fix = BAD[case]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some text")
    for name, content in files.items():
        (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    paths = {key: str(tmp_path / name) if key.endswith("path") else name for key, name in settings.items()}
    with pytest.raises(DataError, match=cause) as caught:
        open_corpus(data(tmp_path, **paths))
    assert fix in caught.value.fix
    assert "\n" not in caught.value.cause + caught.value.fix
    assert not [path for path in tmp_path.glob("cache/*") if not path.name.endswith(".lock")], "nothing is left behind"


def corpus_of(tmp_path: Path, n: int) -> Corpus:
    other = write_tokens(tmp_path / "v.bin", [1, 2])
    return open_corpus(data(tmp_path, write_tokens(tmp_path / "t.bin", list(range(n))), val_path=str(other)))


@pytest.mark.parametrize("n", [9, 10, 16, 17, 18, 25])
def test_windows_predict_every_token_but_the_first_once(tmp_path: Path, n: int) -> None:
    windows = Windows(corpus_of(tmp_path, n).train_span, 8, "the data")
    targets = np.concatenate([windows[i]["targets"].numpy() for i in range(len(windows))])
    assert targets[targets != IGNORE_INDEX].tolist() == list(range(1, n))
    assert len(windows) == -(-(n - 1) // 8)
    for i in range(len(windows)):
        sample = windows[i]
        counted = sample["targets"] != IGNORE_INDEX
        assert sample["tokens"].shape == sample["targets"].shape == (8,)
        assert (sample["tokens"][counted] + 1 == sample["targets"][counted]).all()
    with pytest.raises(IndexError):
        windows[len(windows)]
    with pytest.raises(DataError, match=r"8 tokens, fewer than the 9 that train.seq_len=8"):
        Windows(corpus_of(tmp_path, 8).train_span, 8, "the data")


def test_windows_travel_to_workers_without_their_data(tmp_path: Path) -> None:
    windows = Windows(corpus_of(tmp_path, 5000).train_span, 8, "the data")
    sent = pickle.dumps(windows)
    assert len(sent) < 1000
    assert pickle.loads(sent)[3]["tokens"].tolist() == windows[3]["tokens"].tolist()


@pytest.mark.parametrize("name", ["train.jsonl", "train.JSONL", "train.ndjson", "part-0.parquet", "data-0.arrow"])
def test_records_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / name).write_text('{"text": "a line"}\n' * 9)
    for path in (folder / name, folder / "*", folder):
        with pytest.raises(
            DataError, match=rf"holds records, not text \({name}\).*\n  fix: .*data.tokenizer.*\.bin"
        ) as found:
            open_corpus(data(tmp_path, path))
        assert str(path) in found.value.cause
    with pytest.raises(DataError, match="holds records"):
        open_corpus(data(tmp_path, write_tree(tmp_path / "text"), val_path=str(folder / name)))


def test_records_beside_text_are_refused_with_the_files_named(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "text")
    (root / "cases.jsonl").write_text('{"text": "a line"}\n')
    with pytest.raises(DataError, match=r"mixes records \(cases.jsonl\) and text \(d0/f0.txt"):
        open_corpus(data(tmp_path, root))


def judged(tmp_path: Path, vocab_size: int, path: Path, **model: object) -> Corpus:
    config = RunConfig.model_validate(
        {"data": {"path": str(path), "cache_dir": str(tmp_path / "cache")}, "model": model}
    )
    return open_covered(config, vocab_size, "model.hf.vocab_size")


def test_bytes_are_refused_for_weights_that_know_a_tokenizers_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, tokens = write_tree(tmp_path / "text"), write_tokens(tmp_path / "ids.bin", [5, 900] * 99)
    llama, own = tmp_path / "llama", tmp_path / "own"
    for folder in (llama, own):
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ConfigError, match=r"no tokenizer\.json in .*these weights know token ids.*as bytes\n  fix: set data.tokenizer "
    ):
        judged(tmp_path, 32000, text, init_from=str(llama))
    (llama / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"made by the tokenizer beside them \(tokenizer\.json\)"):
        judged(tmp_path, 300, text, init_from=str(llama))
    assert judged(tmp_path, 32000, tokens, init_from=str(llama)).max_token == 900
    assert judged(tmp_path, 256, text, init_from=str(own)).max_token < 256, "weights that were trained on bytes"
    assert caplog.messages == []


def test_a_large_vocabulary_on_bytes_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    judged(tmp_path, 50257, write_tree(tmp_path / "text"))
    (said,) = caplog.messages
    assert "text is read as bytes: of the 50,257 tokens of model.hf.vocab_size only 256 occur" in said
    judged(tmp_path, 257, tmp_path / "text")
    judged(tmp_path, 50257, write_tokens(tmp_path / "ids.bin", [5, 900] * 99))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("umask", "file", "folder", "shown"),
    [(0o022, 0o644, 0o755, 0o755), (0o077, 0o644, 0o755, 0o700), (0o002, 0o664, 0o775, 0o775),
     (0o022, 0o640, 0o755, 0o750), (0o022, 0o600, 0o755, 0o700), (0o022, 0o644, 0o700, 0o700),
     pytest.param(0o022, 0o10640, 0o755, 0o700, id="another group's"),
     pytest.param(0o022, 0o10644, 0o755, 0o755, id="another group's, which all may read")],
)  # fmt: skip
def test_the_cache_shows_nobody_what_the_source_does_not(
    umask: int, file: int, folder: int, shown: int, tmp_path: Path
) -> None:
    if file > 0o7777 and os.geteuid() != 0:
        pytest.skip("needs root, who may give files to other groups")
    with tempfile.TemporaryDirectory() as outside:
        Path(outside).chmod(0o755)
        source = Path(outside) / "text"
        source.mkdir()
        (source / "a.txt").write_text("a secret " * 100)
        if file > 0o7777:
            os.chown(source / "a.txt", -1, os.getegid() + 1)
        (source / "a.txt").chmod(file & 0o7777)
        source.chmod(folder)
        before = os.umask(umask)
        try:
            open_corpus(DataConfig(path=str(source / "a.txt"), cache_dir=str(tmp_path / "cache")))
        finally:
            os.umask(before)
        (entry,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
        assert oct(entry.stat().st_mode & 0o777) == oct(shown)
        assert all(path.stat().st_mode & ~umask & 0o777 == path.stat().st_mode & 0o777 for path in entry.iterdir())
