"""Tuned variants: timed, kept on disk, taken again."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer.commands.autotune import autotune
from trainer.model.architecture import parse_architecture
from trainer.replica.wgpu.autotune import (
    list_products,
    load_table,
    save_table,
    table_path,
    tune_device,
)
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels.gemm.choice import (
    choose_variant,
    default_variant,
    list_candidates,
    tuned_variants,
)
from trainer.replica.wgpu.kernels.gemm.variants import ALL, SPLIT, Product

TINY = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
}


@pytest.fixture
def untuned(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Yield the device without a table, and with a cache folder of its own."""
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "motley"))
    tuned = tuned_variants(device)
    before = dict(tuned)
    tuned.clear()
    yield device
    tuned.clear()
    tuned.update(before)


def test_the_fastest_candidate_is_taken_and_found_again(untuned: Device) -> None:
    product = Product(False, True, "f32", 3, 8, 8)
    (timings,) = tune_device(untuned, [product])
    assert {timing.variant for timing in timings} == set(list_candidates(product))
    assert [timing.seconds for timing in timings] == sorted(timing.seconds for timing in timings)
    assert choose_variant(untuned, product) == timings[0].variant

    path = save_table(untuned)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    tuned_variants(untuned).clear()
    load_table(untuned)
    assert tuned_variants(untuned) == {product.key: timings[0].variant}


def test_without_a_table_there_are_defaults(untuned: Device) -> None:
    load_table(untuned)
    product = Product(False, False, "f32", 64, 64, 64)
    assert tuned_variants(untuned) == {}
    assert choose_variant(untuned, product) == default_variant(product)
    assert default_variant(product) in list_candidates(product)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "{",
        '{"adapter": "another", "variants": {}}',
        '{"adapter": "KEY", "variants": []}',
        '{"adapter": "KEY", "variants": {"NT f32 1x1x1": "direct 3x3 1x8"}}',
        '{"adapter": "KEY", "variants": {"NT f32 1x1x1": {"rows": 4}}}',
    ],
)
def test_a_damaged_table_is_ignored_with_a_warning(
    untuned: Device, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = table_path(untuned.adapter)
    path.parent.mkdir(parents=True)
    path.write_text(damage.replace("KEY", untuned.adapter.key))
    with caplog.at_level(logging.WARNING):
        load_table(untuned)
    assert tuned_variants(untuned) == {}
    assert f"{path}: ignored" in caplog.text


def test_a_table_of_other_products_leaves_defaults(untuned: Device) -> None:
    tuned = SPLIT
    tuned_variants(untuned)[Product(False, True, "nf4", 512, 1024, 1024).key] = tuned
    save_table(untuned)
    load_table(untuned)
    assert choose_variant(untuned, Product(False, True, "nf4", 300, 600, 700)) == tuned
    other = Product(False, True, "nf4", 300, 300, 300)
    assert choose_variant(untuned, other) == default_variant(other)


def test_products_of_a_model_cover_its_linears_adapters_and_attention() -> None:
    found = list_products(parse_architecture(TINY, "tiny"), "nf4", tokens=16, rank=4)
    assert len({product.key for product in found}) == len(found)
    assert {product.form for product in found if product.kind_b == "nf4"} == {"NT", "NN"}
    assert any(product.form == "TN" and product.m == 4 for product in found)  # LoRA's A
    assert any(product.form == "NT" and product.k == 4 for product in found)  # scores


def test_defaults_are_among_what_is_timed() -> None:
    model = parse_architecture(TINY | {"hidden_size": 2048}, "wide")
    for tokens in (1, 16, 512):
        for product in list_products(model, "nf4", tokens):
            assert default_variant(product) in list_candidates(product)
            assert set(list_candidates(product)) <= set(ALL)


def test_no_default_depends_on_the_kind_of_device(
    untuned: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = list_products(parse_architecture(TINY | {"hidden_size": 2048}, "wide"), "nf4", 512)
    here = [choose_variant(untuned, product) for product in wanted]
    monkeypatch.setattr(untuned, "adapter", replace(untuned.adapter, kind="discrete"))
    assert here == [choose_variant(untuned, product) for product in wanted]
    assert here == [choose_variant(None, product) for product in wanted]


@pytest.mark.long
def test_the_command_prints_a_table_and_keeps_it(untuned: Device, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    result = CliRunner().invoke(
        autotune, ["--gpu", str(untuned.adapter.index), "--model", str(model), "--tokens", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "GF/s" in result.output
    assert str(table_path(untuned.adapter)) in result.output
    load_table(untuned)
    assert tuned_variants(untuned)
