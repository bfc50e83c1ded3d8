"""The compiled passes give the bits of NumPy, and are left out where they cannot be used."""

from __future__ import annotations

import math
import pkgutil
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from trainer.config.optimizer import OptimizerConfig
from trainer.exchange.protocol.codecs import Bf16
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.optimizer.adamw import AdamW, TrainState, square_sum
from trainer.system.passes import compiled_library, compiler
from trainer.system.passes.compiled_library import Passes, load_passes

needs_compiler = pytest.mark.needs("cc")


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Passes:
    folder = tmp_path_factory.mktemp("passes")
    assert "compiled" in compiler.compile_library(folder)
    found = load_passes(compiler.library_path(folder))
    assert found is not None
    return found


@pytest.fixture
def numpy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_library, "PASSES", None)


def floats(seed: int, size: int) -> np.ndarray:
    """Return floats of all exponents, subnormal ones and zeros too, and no NaN."""
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 2**32, size, np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(0), values)


@needs_compiler
def test_every_bf16_is_decoded_and_encoded_as_by_ml_dtypes(passes, numpy_only):
    every = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    decoded = np.empty(2**16, np.float32)
    Bf16().decode(every, decoded)
    assert passes.bf16_encode(decoded).tobytes() == Bf16().encode(decoded).tobytes()


@needs_compiler
def test_rounding_is_to_nearest_even(passes, numpy_only):
    upper = np.arange(0, 2**16, 7, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        assert passes.bf16_encode(values).tobytes() == Bf16().encode(values).tobytes()


@needs_compiler
@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.integers(1, 5), st.integers(1, 2**20))
def test_an_average_has_numpys_bits(passes, seed, size, number, divisor):
    parts = [floats(seed + part, size).astype(bfloat16) for part in range(number)]
    with np.errstate(over="ignore", invalid="ignore"):
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total = total + part.astype(np.float32)
        wanted = (total / np.float32(divisor)).astype(bfloat16)
        exact = float(np.sum(np.square(wanted.astype(np.float64))))
    out, squares = passes.bf16_average([part.view(np.uint8) for part in parts], divisor)
    assert out.tobytes() == wanted.tobytes()
    assert math.isfinite(squares) == bool(np.isfinite(wanted.astype(np.float32)).all())
    if math.isfinite(squares):
        assert squares == pytest.approx(exact, rel=1e-6)
        assert passes.bf16_square_sum(wanted.view(np.uint8)) == squares


@needs_compiler
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 1023, 1024, 1040, 2049])
def test_what_is_not_finite_shows_in_every_place(passes, wrong, place):
    values = np.ones(2050, np.float32)
    values[place] = wrong
    assert not math.isfinite(passes.square_sum(values))
    encoded = passes.bf16_encode(values)
    assert not math.isfinite(passes.bf16_square_sum(encoded))
    assert not math.isfinite(passes.bf16_average([encoded, encoded], 2)[1])


@needs_compiler
def test_squares_that_overflow_single_precision_are_finite(passes):
    largest = np.full(5000, np.finfo(np.float32).max)
    exact = 5000 * float(largest[0]) ** 2
    assert passes.square_sum(largest) == pytest.approx(exact, rel=1e-6)


@needs_compiler
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_have_numpys_bits(passes, monkeypatch, weight_decay):
    shapes = [(3, 40_000), (40_000,), (7, 9), (1,), (50, 50), (2,)]
    slots, start = [], 0
    for index, shape in enumerate(shapes):
        slots.append(TensorSlot(f"t{index}", shape, start))
        start += math.prod(shape)
    layout = GradientLayout((Block(0, "layers.0", 0, start, tuple(slots)),), num_layers=1)
    results = []
    for used in (passes, None):
        monkeypatch.setattr(compiled_library, "PASSES", used)
        draw = np.random.default_rng(3)
        state = TrainState.create(draw.standard_normal(start).astype(np.float32))
        optimizer = AdamW(OptimizerConfig(weight_decay=weight_decay), layout)
        for step in range(5):
            scale = np.float32(10.0 ** draw.integers(-44, 10))  # subnormal gradients too
            gradient = draw.standard_normal(start).astype(np.float32) * scale
            optimizer.apply(state, gradient, 1e-3 / (step + 1), 0.7)
        results.append(state.compute_digest())
    assert results[0] == results[1]


@needs_compiler
def test_the_norm_is_numpys_up_to_rounding(passes, numpy_only):
    values = np.random.default_rng(0).standard_normal(100_003).astype(np.float32)
    assert passes.square_sum(values) == pytest.approx(square_sum(values), rel=1e-6)


@needs_compiler
def test_a_library_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    compiler.compile_library(tmp_path)
    old = compiler.library_path(tmp_path)
    source = tmp_path / "passes.c"
    source.write_text(compiler.SOURCE.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    monkeypatch.setattr(compiler, "SOURCE", source)
    assert compiler.library_path(tmp_path) != old
    assert load_passes(compiler.library_path(tmp_path)) is None
    compiler.compile_library(tmp_path)
    assert load_passes(compiler.library_path(tmp_path)) is not None
    assert not old.exists()


def test_what_is_no_library_is_passed_over(tmp_path, caplog):
    path = tmp_path / "passes-0.library"
    path.write_bytes(b"\x7fELF garbage")
    assert load_passes(path) is None
    assert "NumPy" in caplog.text


@needs_compiler
def test_a_library_without_a_function_is_passed_over(tmp_path, caplog):
    path = tmp_path / "passes-0.library"
    empty = tmp_path / "empty.c"
    empty.write_text("int nothing;\n", encoding="utf-8")
    other = Path(shutil.which("cc") or "cc")
    assert compiler.subprocess.run([other, "-shared", "-o", path, empty]).returncode == 0
    assert load_passes(path) is None
    assert "NumPy" in caplog.text
    assert "square_sum" in caplog.text


def test_without_a_compiler_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler.compile_library(tmp_path).startswith("no C compiler")
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_leaves_nothing(tmp_path, monkeypatch):
    broken = tmp_path / "bin" / "cc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'stdio.h: fatal error: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    made = tmp_path / "made"
    made.mkdir()
    assert "fatal error: no such file" in compiler.compile_library(made)
    assert list(made.iterdir()) == []


@needs_compiler
def test_the_library_is_no_module_of_python(tmp_path):
    compiler.compile_library(tmp_path)
    assert not list(pkgutil.iter_modules([str(tmp_path)]))
