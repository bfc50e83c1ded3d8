"""Which engines hold a teacher, and how fast it scores: against sums by hand."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import trainer.distill
from trainer.distill.teacher.engines import ENGINES
from trainer.model.families import FAMILIES
from trainer.model.family import SavedActivations
from trainer.planning.cluster_text import parse_cluster
from trainer.planning.device_models import DEVICES
from trainer.planning.devices import GIB, assume_processor
from trainer.planning.model_config import parse_shape
from trainer.planning.replica import USABLE
from trainer.planning.shapes import NAMED, ModelShape
from trainer.planning.stored_layers import HEAD_ELEMENTS
from trainer.planning.teachers import (
    BATCH,
    DISK_RATE,
    FORMATS,
    Measured,
    TeacherDevice,
    TeacherOption,
    gguf_batch,
    int8_opening_bytes,
    pick_teacher,
    teacher_options,
)
from trainer.planning.time import forward_flops_per_token
from trainer.system.errors import InputError

DENSE, SPARSE = NAMED["qwen3-4b"], NAMED["qwen3-next-80b-a3b"]
BOX = assume_processor(8, 300 * GIB)


def of(options: list[TeacherOption], weights: str, place: str = "cpu") -> TeacherOption:
    (found,) = (one for one in options if (one.format.weights, one.place) == (weights, place))
    return found


def test_engines_and_quantisations_are_those_of_the_table() -> None:
    stored = {"torch": "none", "wgpu": "none", "gguf": None}
    planned = {(one.engine, stored.get(str(one.engine), one.weights)) for one in FORMATS}
    packed = {one.engine for one in FORMATS if one.quantization == "nf4"}
    assert packed == {name for name, kind in ENGINES.items() if kind.facts.takes_dtype}
    assert planned == {(name, kind.facts.quantization) for name, kind in ENGINES.items()}


def test_a_gguf_file_is_picked_for_what_fits_in_no_other_form() -> None:
    def picked(shape: ModelShape, gib: float) -> tuple[str | None, str] | None:
        pick = pick_teacher(
            teacher_options(shape, [TeacherDevice("cpu", assume_processor(8, gib * GIB))], 1024)
        )
        return pick and (pick.format.engine, pick.format.weights)

    assert picked(DENSE, 64) == ("torch", "bfloat16")
    assert picked(DENSE, 8) == ("torch", "bfloat16"), "its layers are read"
    assert picked(DENSE, 1.4) == ("torch", "nf4"), "so are those in NF4, and two take less"
    assert picked(DENSE, 1.2) == ("gguf", "Q4_0")
    experts = teacher_options(SPARSE, [TeacherDevice("cpu", BOX)], 1024)
    assert of(experts, "Q4_0").format.engine is None, "such a file is not converted"


def test_the_teacher_of_80_billion_is_counted_as_published() -> None:
    """Qwen3-Next-80B-A3B: 80 billion in all, 3.9 of them active with both tables."""
    assert SPARSE.parameters == pytest.approx(79.67e9, rel=1e-3)
    assert SPARSE.active_parameters == pytest.approx(3.87e9, rel=5e-3)


def test_a_named_student_is_the_shipped_one() -> None:
    path = Path(trainer.distill.__file__).parent / "students" / "albor-350m.json"
    shape = parse_shape(json.loads(path.read_text()), str(path), "albor-350m")
    assert replace(shape, kept=None) == replace(NAMED["albor-350m"], kept=None)


def test_the_weights_of_each_format() -> None:
    options = teacher_options(SPARSE, [TeacherDevice("cpu", BOX)], 1024)
    for weights, bits in (("float32", 32), ("bfloat16", 16), ("Q8_0", 8.5), ("Q4_0", 4.5)):
        assert of(options, weights).weights == pytest.approx(SPARSE.parameters * bits / 8)
    dense = of(teacher_options(DENSE, [TeacherDevice("cpu", BOX)], 1024), "int8")
    assert dense.weights == int8_opening_bytes(DENSE.parameters, DENSE.table_parameters)


def test_80_billion_fit_300_gib_in_bf16_and_are_read_in_fp32() -> None:
    options = teacher_options(SPARSE, [TeacherDevice("cpu", BOX)], 1024)
    fits = {one.format.weights: one.fits for one in options}
    assert fits == {
        "float32": "streamed",
        "bfloat16": "yes",
        "nf4": "yes",
        "int8": "no",
        "Q8_0": "yes",
        "Q4_0": "yes",
    }
    assert of(options, "int8").refused
    chosen = pick_teacher(options)
    assert chosen is of(options, "bfloat16")
    flops = forward_flops_per_token(SPARSE, 1024).value
    assert chosen is not None
    assert chosen.rate is not None
    assert BOX.flops is not None
    assert chosen.rate == pytest.approx(BOX.flops * 0.4 / flops)
    assert chosen.scoring_seconds(1e6) == pytest.approx(1e6 / chosen.rate)


@pytest.mark.parametrize("stored", ["BF16", "F32", "F16"])
@pytest.mark.parametrize(("weights", "width"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("kept", [None, SavedActivations()])
def test_layers_that_do_not_fit_beside_a_forward_are_read_in_any_format(
    stored: str, weights: str, width: int, kept: SavedActivations | None
) -> None:
    """Two layers as they are stored, one linear as it is computed with, small parts and the table.

    Of the head two chunks, and one as it is computed with.
    """
    shape = replace(DENSE, stored=stored, kept=kept)
    small, tiny = (TeacherDevice("cpu", assume_processor(8, gib * GIB)) for gib in (6, 1))
    found = of(teacher_options(shape, [small], 1024), weights)
    assert (found.fits, found.teachers) == ("streamed", 1)
    assert of(teacher_options(shape, [tiny], 1024), weights).fits == "no"
    element = 4 if stored == "F32" else 2
    layer = shape.linear_parameters() // shape.layers * element
    table = shape.table_parameters * width
    head = HEAD_ELEMENTS * (2 * element + width)
    stay = (shape.parameters - shape.linear_parameters()) * width - table
    assert found.least == stay + head + 2 * layer + width * shape.widest_linear + found.working
    resident, layers, read = (
        int(each)
        for each in re.findall(r"(\d+) of (\d+) layers resident, (\d+) streamed", found.streamed)[0]
    )
    assert (layers, read) == (shape.layers, shape.layers - resident)
    each = shape.linear_parameters() // shape.layers * width
    stays = found.least + table - head
    assert stays + resident * each <= 6 * GIB * USABLE < stays + (resident + 1) * each
    whole = of(teacher_options(shape, [TeacherDevice("cpu", BOX)], 1024), weights)
    assert found.rate is not None
    assert whole.rate is not None
    assert found.rate == pytest.approx(
        min(whole.rate, BATCH["cpu"] * DISK_RATE / (read * layer)), rel=1e-6
    )


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_layers_of_experts_are_read_for_each_forward(place: Literal["cpu", "cuda"]) -> None:
    """Two layers of the 80 billion in bf16, of 3.3 GB each, pass through the memory."""
    device = assume_processor(8, 24 * GIB) if place == "cpu" else DEVICES["RTX4090"]
    found = of(teacher_options(SPARSE, [TeacherDevice(place, device)], 1024), "bfloat16", place)
    assert found.fits == "streamed"
    layer = 2 * SPARSE.linear_parameters() // SPARSE.layers
    read = SPARSE.linear_parameters() + 2 * SPARSE.table_parameters
    stay = 2 * (SPARSE.parameters - read)
    passing = 2 * layer + 2 * SPARSE.widest_linear + 3 * 2 * HEAD_ELEMENTS
    assert found.least == pytest.approx(stay + passing + found.working, rel=1e-6)
    read = int(re.findall(r"layers resident, (\d+) streamed", found.streamed)[0])
    assert found.rate == pytest.approx(BATCH[place] * DISK_RATE / (read * layer), rel=1e-6)


def test_int8_of_weights_that_are_not_mapped_needs_more() -> None:
    as_bf16, as_f16 = (
        of(
            teacher_options(replace(DENSE, stored=stored), [TeacherDevice("cpu", BOX)], 1024),
            "int8",
        ).weights
        for stored in ("BF16", "F16")
    )
    assert as_f16 - as_bf16 == 4 * DENSE.parameters  # it is loaded in fp32


def test_an_engine_that_refuses_a_model_is_not_picked() -> None:
    gemma = replace(DENSE, in_gguf=False)
    options = teacher_options(gemma, [TeacherDevice("cpu", assume_processor(8, 8 * GIB))], 1024)
    assert of(options, "Q4_0").format.engine is None
    picked = pick_teacher(options)
    assert picked is not None
    assert picked.format.engine == "torch"
    hybrid = replace(DENSE, recurrent_layers=3)
    refused = of(teacher_options(hybrid, [TeacherDevice("cpu", BOX)], 1024), "int8")
    assert (refused.fits, refused.refused) == (
        "no",
        "refuses recurrent layers, which it cannot export",
    )


def test_a_longer_window_and_attention_that_is_not_fused_need_more() -> None:
    short, long = (
        of(teacher_options(DENSE, [TeacherDevice("cpu", BOX)], length), "bfloat16").working
        for length in (1024, 131_072)
    )
    assert long > 10 * short
    kept = FAMILIES["gemma2"].kept
    assert kept.scores
    apart = of(
        teacher_options(replace(DENSE, kept=kept), [TeacherDevice("cpu", BOX)], 1024), "bfloat16"
    ).working
    assert apart - short == 4096 * 1024 * DENSE.heads * 2 * 6
    files = [
        of(teacher_options(DENSE, [TeacherDevice("cpu", BOX)], length), "Q8_0").working
        for length in (1024, 2048)
    ]
    assert files[1] - files[0] == 1024 * 8 * DENSE.layers * DENSE.keys  # of a window, in fp32


def test_a_gguf_file_is_read_again_by_each_of_its_smaller_forwards() -> None:
    small = assume_processor(8, 4 * GIB)
    found = of(teacher_options(DENSE, [TeacherDevice("cpu", small)], 1024), "Q8_0")
    whole = of(teacher_options(DENSE, [TeacherDevice("cpu", BOX)], 1024), "Q8_0")
    assert found.fits == "disk"
    in_use = DENSE.layer_parameters + DENSE.table_parameters
    assert found.least == int(in_use * 8.5 / 8) + found.working
    assert found.rate is not None
    assert whole.rate is not None
    again = found.weights / DISK_RATE / gguf_batch(DENSE.vocab)
    assert 1 / found.rate - 1 / whole.rate == pytest.approx(again)
    assert [gguf_batch(size) for size in (1000, 151_936, 1 << 30)] == [512, 220, 1]


def test_cards_hold_every_weight_and_compute_at_their_own_speed() -> None:
    card = DEVICES["RTX4090"]
    options = teacher_options(DENSE, [TeacherDevice("cpu", BOX), TeacherDevice("cuda", card)], 1024)
    on_card = of(options, "bfloat16", "cuda")
    assert (on_card.fits, on_card.room) == ("yes", int(24 * GIB * USABLE))
    assert pick_teacher(options) is on_card
    unknown = parse_cluster("1x24GB").groups[0].device
    silent = of(teacher_options(DENSE, [TeacherDevice("cuda", unknown)], 1024), "bfloat16", "cuda")
    assert (silent.fits, silent.teachers, silent.rate) == ("yes", 1, None)


@pytest.mark.parametrize(
    ("main", "source", "rate"),
    [(128, "memory at 25 GB/s", 25e9), (48, "the disk at 1 GB/s (assumed)", 1e9)],
)
def test_a_card_smaller_than_its_teacher_reads_layers_for_each_forward(
    main: int, source: str, rate: float
) -> None:
    """Qwen3-32B in bf16, 61 GiB: from the disk a forward takes most of a minute to read."""
    (pool,) = parse_cluster(f"RTX4090 {main}GB").groups
    shape, seats = NAMED["qwen3-32b"], [TeacherDevice("cuda", pool.device, pool)]
    options = teacher_options(shape, seats, 1024)
    found = of(options, "bfloat16", "cuda")
    assert (found.fits, found.teachers) == ("streamed", 1)
    assert found.least < found.room < found.weights
    whole = replace(pool.device, memory=80 * GIB)
    computed = of(
        teacher_options(shape, [TeacherDevice("cuda", whole)], 1024), "bfloat16", "cuda"
    ).rate
    assert computed is not None
    counts = re.findall(r"(\d+) of 64 layers resident, (\d+) streamed", found.streamed)[0]
    (resident, read), hidden = map(int, counts), re.findall(r"free from ([\d,]+)", found.streamed)
    assert f" from {source}; free from " in found.streamed
    assert 0 < resident == 64 - read
    seconds = read * 2 * shape.linear_parameters() / 64 / rate
    assert found.rate == pytest.approx(min(computed, BATCH["cuda"] / seconds))
    assert int(hidden[0].replace(",", "")) == math.ceil(computed * seconds)
    assert (found.rate == computed) == (main == 128), "from memory it is free"
    packed = of(options, "nf4", "cuda")
    assert packed.weights == pytest.approx(
        0.5625 * shape.linear_parameters() + 2 * (shape.parameters - shape.linear_parameters())
    )
    assert packed.working - found.working == 2 * shape.widest_linear, "one is out of NF4"
    assert found.rate is not None
    assert packed.rate is not None
    if main == 48:  # of which 36 GB hold NF4
        assert "from memory at 25 GB/s" in packed.streamed
        assert found.rate < packed.rate == computed
    else:
        assert packed.rate == found.rate
    assert pick_teacher(options) is (found if main == 128 else packed), "unless NF4 is faster"


def test_a_vulkan_device_reads_layers_for_each_forward() -> None:
    """Products are in fp32, and a forward's tensors too; it computes nothing while it copies."""
    (pool,) = parse_cluster("W5700X 128GB").groups
    shape, seats = NAMED["qwen3-32b"], [TeacherDevice("wgpu", pool.device, pool)]
    wide, narrow = (
        of(teacher_options(shape, seats, 1024), weights, "wgpu")
        for weights in ("float32", "bfloat16")
    )
    assert [one.fits for one in (wide, narrow)] == ["streamed", "streamed"]
    assert wide.working == narrow.working
    assert pool.device.fp32 is not None
    computed = pool.device.fp32 * 0.4 / forward_flops_per_token(shape, 1024).value
    found = re.search(
        r"([1-9]\d*) of 64 layers resident, (\d+) streamed from memory", narrow.streamed
    )
    assert found is not None
    copy = int(found[2]) * 2 * shape.linear_parameters() / 64 / pool.feed
    forward = BATCH["wgpu"] / computed
    assert narrow.rate == pytest.approx(BATCH["wgpu"] / (forward + copy)), "copies alone cost"
    part = copy / (forward + copy)
    assert f" tokens a pass but for copies, {part:.2g} of its time" in narrow.streamed
    for refused in (SPARSE, replace(shape, kept=SavedActivations())):
        option = of(teacher_options(refused, seats, 1024), "bfloat16", "wgpu")
        assert option.fits == "no"
        assert option.refused


def test_teachers_on_several_hosts_read_their_own_layers() -> None:
    seats: list[TeacherDevice] = [
        TeacherDevice("cpu", assume_processor(8, 6 * GIB)) for _ in range(2)
    ]
    one, two = (of(teacher_options(DENSE, seats[:count], 1024), "bfloat16") for count in (1, 2))
    assert one.rate is not None
    assert (two.rate, two.teachers, two.fits) == (2 * one.rate, 2, "streamed")


@pytest.mark.parametrize(("cores", "teachers"), [((8, 8), 2), ((8, 4), 2), ((8, 3), 1)])
def test_parts_are_equal_so_a_slow_teacher_may_be_left_out(
    cores: tuple[int, int], teachers: int
) -> None:
    seats: list[TeacherDevice] = [
        TeacherDevice("cpu", assume_processor(count, 300 * GIB)) for count in cores
    ]
    found = of(teacher_options(DENSE, seats, 1024), "bfloat16")
    alone = of(teacher_options(DENSE, seats[:1], 1024), "bfloat16")
    assert found.teachers == teachers
    assert found.rate is not None
    assert alone.rate is not None
    assert found.rate == pytest.approx(max(alone.rate, 2 * alone.rate * cores[1] / 8))


def test_what_was_measured_replaces_what_is_computed() -> None:
    measured = Measured(
        engine="torch",
        weights="float32",
        place="cpu",
        vocab_size=DENSE.vocab,
        rates={"a": 30.0, "b": 20.0},
    )
    options = teacher_options(DENSE, [TeacherDevice("cpu", BOX)], 1024, measured=[measured])
    found = of(options, "float32")
    assert (found.rate, found.teachers, found.source) == (40.0, 2, "measured")
    assert pick_teacher(options) is found
    file = replace(measured, engine="gguf", weights="Q4_K+Q6_K", bits=6.5625, rates={"a": 9.0})
    options = teacher_options(DENSE, [TeacherDevice("cpu", BOX)], 1024, measured=[file])
    found = of(options, "Q4_K+Q6_K")
    assert (found.format.engine, found.rate, found.source) == ("gguf", 9.0, "measured")
    assert found.weights == int(DENSE.parameters * 6.5625 / 8)
    assert pick_teacher(options) is found
    with pytest.raises(InputError, match="it was measured on cuda, and no teacher here"):
        teacher_options(
            DENSE, [TeacherDevice("cpu", BOX)], 1024, measured=[replace(measured, place="cuda")]
        )
    given = teacher_options(DENSE, [TeacherDevice("cpu", BOX)], 1024, given=45.7)
    assert {(one.rate, one.source) for one in given} == {(45.7, "given")}
