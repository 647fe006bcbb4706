from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shardkit.config.schema import RunConfig
from shardkit.data.pictures import (
    LabelledCrops,
    ScaledCrops,
    find_classes,
    find_pictures,
    read,
    shipped_pictures,
    split_pictures,
)
from shardkit.data.windows import MaskedWindows, flatten_targets
from shardkit.errors import ConfigError, DataError
from shardkit.tasks.hf_text import HFMaskedLM
from shardkit.tasks.images import ImageClassification, SuperResolution, psnr


def paint(folder: Path, names: list[str], size: int = 40) -> Path:
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 255, (size, size + 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def test_shipped_pictures_are_real_and_need_no_download() -> None:
    pictures = shipped_pictures()
    assert len(pictures) >= 10
    for picture in pictures:
        pixels = read(picture)
        assert pixels.dtype == np.uint8
        assert pixels.shape[2] == 3
        assert min(pixels.shape[:2]) >= 192, picture.name
        assert pixels.std() > 10, picture.name


def test_classes_are_directories(tmp_path: Path) -> None:
    paint(tmp_path, ["cat/1.png", "cat/2.png", "ant/1.png", ".hidden/1.png"])
    pictures, names = find_classes(str(tmp_path))
    assert names == ["ant", "cat"]
    assert [(p.name, p.label) for p in pictures] == [("ant/1.png", 0), ("cat/1.png", 1), ("cat/2.png", 1)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="class empty of"):
        find_classes(str(tmp_path))
    with pytest.raises(DataError, match="0 subdirectories"):
        find_classes(str(tmp_path / "cat"))
    with pytest.raises(DataError, match="is not a directory"):
        find_pictures(str(tmp_path / "nowhere"))


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(DataError, match=r"broken\.png cannot be decoded"):
        read(find_pictures(str(tmp_path))[0])


def test_a_picture_of_another_format_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript, whatever the file's name is."""
    from PIL import EpsImagePlugin

    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    (tmp_path / "picture.png").write_bytes(program)
    with pytest.raises(DataError, match=r"picture\.png cannot be decoded"):
        read(find_pictures(str(tmp_path))[0])
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
def test_a_picture_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    Image.new("1", (40_000, 40_000)).save(tmp_path / "bomb.png")
    assert (tmp_path / "bomb.png").stat().st_size < 300_000
    with pytest.raises(DataError, match=r"bomb\.png cannot be decoded: .*pixels"):
        read(find_pictures(str(tmp_path))[0])


def test_a_crop_depends_on_seed_split_and_index_alone() -> None:
    pictures = shipped_pictures()[:2]

    def crops(seed: int = 0, split: str = "train") -> LabelledCrops:
        return LabelledCrops(pictures, 24, 5, seed, split, augment=True)

    first = crops()
    assert len(first) == 10
    assert torch.equal(first[3]["pixels"], crops()[3]["pixels"])
    assert first[3]["label"] == 1
    assert not torch.equal(first[3]["pixels"], first[5]["pixels"]), "another crop of the same picture"
    assert not torch.equal(first[3]["pixels"], crops(seed=1)[3]["pixels"])
    assert not torch.equal(first[3]["pixels"], crops(split="val")[3]["pixels"])
    assert first[0]["pixels"].shape == (3, 24, 24)
    assert -1 <= first[0]["pixels"].min() < first[0]["pixels"].max() <= 1


def test_low_is_the_reduction_of_high() -> None:
    crops = ScaledCrops(shipped_pictures()[:2], 32, 4, 3, 0, "train", augment=True)
    sample = crops[4]
    assert sample["high"].shape == (3, 32, 32)
    assert sample["low"].shape == (3, 8, 8)
    blocks = sample["high"].unfold(1, 4, 4).unfold(2, 4, 4).mean((-1, -2))
    assert (blocks - sample["low"]).abs().mean() < 0.03
    fixed = ScaledCrops(shipped_pictures()[:2], 32, 4, 3, 0, "val", augment=False)
    assert torch.equal(fixed[0]["high"], ScaledCrops(shipped_pictures()[:2], 32, 4, 3, 9, "val", False)[0]["high"])


def test_small_pictures_and_odd_sizes_are_refused(tmp_path: Path) -> None:
    paint(tmp_path, ["a.png", "b.png"])
    crops = ScaledCrops(find_pictures(str(tmp_path)), 64, 4, 1, 0, "train", augment=True)
    with pytest.raises(DataError, match=r"a\.png has 46 × 40 pixels, less than data.crop_size=64"):
        crops[0]
    sections = {"task": {"name": "super_resolution"}, "model": {"preset": "swin2sr-debug"}, "data": {"crop_size": 30}}
    with pytest.raises(ConfigError, match=r"not a multiple of model.hf.upscale=4"):
        SuperResolution(RunConfig.model_validate(sections))


def test_validation_pictures_are_others(tmp_path: Path) -> None:
    paint(tmp_path, [f"{label}/{i}.png" for label in "ab" for i in range(6)])
    train, val = split_pictures(find_pictures(str(tmp_path)), 0.25)
    assert train
    assert val
    assert not {p.name for p in train} & {p.name for p in val}
    sections = {
        "task": {"name": "image_classification"},
        "model": {"preset": "vit-debug"},
        "data": {"path": str(tmp_path), "val_fraction": 0.25},
    }
    task = ImageClassification(RunConfig.model_validate(sections))
    assert task.hf.config.num_labels == 2
    assert len(task.dataset("train")) + len(task.dataset("val")) == 12


def test_psnr_is_in_decibels() -> None:
    real = torch.full((2, 3, 4, 4), 0.5)
    made = real + torch.tensor([0.1, 0.01]).view(2, 1, 1, 1)
    assert psnr(made, real).tolist() == pytest.approx([20.0, 40.0], abs=1e-3)


def task(tmp_path: Path, **data: object) -> HFMaskedLM:
    path = tmp_path / "tokens.bin"
    np.tile(np.arange(1, 201, dtype="<u2"), 40).tofile(path)
    sections = {
        "task": {"name": "hf_masked_lm"},
        "model": {"preset": "bert-debug"},
        "train": {"seq_len": 64, "seed": 3},
        "data": {"path": str(path), "cache_dir": str(tmp_path / "cache"), **data},
    }
    return HFMaskedLM(RunConfig.model_validate(sections))


def masked(tmp_path: Path, **data: object) -> MaskedWindows:
    return task(tmp_path, **data).dataset("train")


def test_shares_are_those_asked_for(tmp_path: Path) -> None:
    samples = masked(tmp_path)
    tokens, targets = (torch.stack([samples[i][key] for i in range(len(samples))]) for key in ("tokens", "targets"))
    plain = torch.stack([samples.windows[i]["tokens"] for i in range(len(samples))])
    chosen = targets != -100
    n = int(chosen.sum())
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.02)
    assert torch.equal(targets[chosen], plain[chosen])
    assert torch.equal(tokens[~chosen], plain[~chosen])
    assert int((tokens[chosen] == 256).sum()) / n == pytest.approx(0.8, abs=0.05)
    assert int((tokens[chosen] == plain[chosen]).sum()) / n == pytest.approx(0.1, abs=0.04)


def test_a_sample_depends_on_seed_and_index_alone(tmp_path: Path) -> None:
    first, again = masked(tmp_path), masked(tmp_path)
    again[3]  # the order of reading does not matter
    assert torch.equal(first[9]["tokens"], again[9]["tokens"])
    assert not torch.equal(first[9]["targets"] == -100, first[8]["targets"] == -100)
    again.seed = 4
    assert not torch.equal(first[9]["targets"], again[9]["targets"])


def test_filling_is_never_a_target(tmp_path: Path) -> None:
    samples = masked(tmp_path, mask_fraction=0.9)
    last = len(samples) - 1
    real = int((samples.windows[last]["targets"] != -100).sum())
    assert 0 < real < 64
    assert bool((samples[last]["targets"][real:] == -100).all())


def test_a_micro_batch_lists_what_is_to_be_predicted(tmp_path: Path) -> None:
    samples = masked(tmp_path)
    batch = flatten_targets([samples[0], samples[1]])
    assert batch["tokens"].shape == (2, 64)
    whole = torch.cat([samples[0]["targets"], samples[1]["targets"]])
    assert torch.equal(whole[batch["positions"]], batch["targets"])
    assert len(batch["targets"]) == int((whole != -100).sum())


def test_a_mask_token_that_the_data_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.mask_token=7 occurs in"):
        task(tmp_path, mask_token=7).dataset("train")
    with pytest.raises(ConfigError, match=r"data.mask_token=300, but the model's vocabulary has 257"):
        task(tmp_path, mask_token=300)
