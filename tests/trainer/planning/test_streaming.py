"""Plans of models that are larger than their devices, beside an arithmetic that knows no plan.

For a device of F operations a second that reads R bytes a second:

    tokens/s of a worker   F / (6 layers x weights of a layer + 4 V h)
    free from              0.5625 weights / R / (2 weights / F) tokens a pass

The reference cluster: an RTX 4090 that reaches 75 TFLOPS (its host reads 25 GB/s), two Radeons of
3.5 (8 GB/s) and a processor of 1. `weights` are `2 h (q + k) + 3 h i`: 487.6 million for
Qwen3-32B, 855.6 for Llama-3.3-70B. Of a mixture of experts `6 active` and `total / active`: 3.3
and 30.5 billion.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from trainer.model.family import SavedActivations
from trainer.planning.cluster_text import parse_cluster
from trainer.planning.decision import pick_strategy
from trainer.planning.device_models import DeviceModel
from trainer.planning.devices import GIB, ClusterShape, HostPool, LayerSource, parse_link
from trainer.planning.replica import CPU_TOKENS
from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.planning.shapes import NAMED
from trainer.planning.strategies import Request, StrategyOption, list_options
from trainer.planning.strategy import AUTOCAST, TrainingSetup
from trainer.planning.streaming import (
    ReadingPlan,
    WorkerPlan,
    explain_unstreamed,
    plan_reading,
)
from trainer.planning.teachers import TeacherDevice, teacher_options
from trainer.planning.time import EFFICIENCY, plan_time

LENGTH = 512
"""Tokens of a row: the arithmetic counts no scores of attention, which grow with it."""


def pool_of(
    name: str, flops: float, memory: float, feed: float, main: float, **more: object
) -> HostPool:
    source = "AMD" if name == "W5700X" else "NVIDIA"
    device = DeviceModel(name=name, flops=flops, memory=memory * GIB, watts=None, source=source)
    pool = HostPool(hosts=1, devices=1, device=device, inside=feed, feed=feed)
    return replace(pool, main_memory=main * GIB, **more)  # pyright: ignore[reportArgumentType]


REFERENCE = ClusterShape(
    groups=(
        pool_of("RTX4090", 75e12, 24, 25e9, 64),
        pool_of("W5700X", 3.5e12, 8, 8e9, 300, devices=2),
        pool_of("CPU, 28 cores", 1e12, 300, 40e9, 300, shares_host=True),
    ),
    between=parse_link("1gbit"),
)


def request_of(shape: str, cluster: ClusterShape, method: str = "qlora") -> Request:
    return Request(
        shape=NAMED[shape],
        cluster=cluster,
        method=method,  # pyright: ignore[reportArgumentType]
        length=LENGTH,
        efficiency=1.0,
        recompute=True,
    )


def streamed_option(request: Request) -> StrategyOption:
    (option,) = [one for one in list_options(request) if one.workers and not one.alternative]
    return option


def streamed_worker(request: Request) -> WorkerPlan | None:
    """Return the one worker that reads layers; None if all layers stay."""
    options = [one for one in list_options(request) if one.workers and not one.alternative]
    return options[0].workers[0] if options else None


def reading_of(
    shape: str, flops: float, rate: float, tokens: int = 2048, *, one_queue: bool = False
) -> ReadingPlan:
    training = TrainingSetup(
        method="qlora",
        length=LENGTH,
        rows=tokens // LENGTH,
        recompute="full",
        precision=AUTOCAST,
        resident=0,
        one_queue=one_queue,
    )
    source = LayerSource(name="memory", rate=rate)
    found = plan_reading(NAMED[shape], training, flops, source, feed=rate)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("shape", "rates", "together"),
    [("qwen3-32b", (394, 2 * 18.4, 5.25), 436), ("llama-3.3-70b", (181, 2 * 8.43, 2.41), 200)],
)
def test_the_reference_cluster_trains_what_fits_no_card_of_it(
    shape: str, rates: tuple[float, ...], together: float
) -> None:
    request = request_of(shape, REFERENCE)
    option = streamed_option(request)
    assert option.fits, option.refused
    for worker, rate in zip(option.workers, rates, strict=True):
        assert worker.rate is not None
        found = worker.rate * worker.pool.count
        if worker.reading:  # the arithmetic counts no copies
            found /= 1 - 2 * worker.reading.copy / worker.reading.seconds
        assert found == pytest.approx(rate, rel=0.1)
        assert worker.memory.total <= worker.room
    assert option.workers[2].training.resident is None, "300 GiB hold the base"
    assert all(worker.training.resident is not None for worker in option.workers[:2])
    tokens = request.rows * LENGTH
    assert option.time is not None
    assert tokens / option.time.compute.value == pytest.approx(together, rel=0.1)
    chosen = pick_strategy(request, list_options(request)).option
    assert chosen is not None
    assert chosen.key == "motley-streamed"


@pytest.mark.parametrize(
    ("flops", "rate", "free"),
    [
        (75e12, 25e9, 844),
        (75e12, 6e9, 3516),
        (75e12, 3e9, 7031),
        (3.5e12, 8e9, 123),
        (3.5e12, 3e9, 328),
        (1e12, 3e9, 94),
        (1e12, 118e6, 2383),
    ],
)
@pytest.mark.parametrize("shape", ["qwen3-32b", "llama-3.3-70b"])
def test_from_how_many_tokens_on_reading_is_free(
    shape: str, flops: float, rate: float, free: int
) -> None:
    found = reading_of(shape, flops, rate)
    assert found.hidden_from == pytest.approx(free, rel=0.1)
    assert (found.speed == 1) == (found.tokens >= found.hidden_from)


@pytest.mark.parametrize("tokens", [512, 4096])
def test_a_device_with_one_queue_computes_nothing_while_it_copies(tokens: int) -> None:
    """123 / T of a forward, and half of that of a backward that computes layers twice."""
    found = reading_of("qwen3-32b", 3.5e12, 8e9, tokens, one_queue=True)
    assert found.copy / found.forward == pytest.approx(123 / tokens, rel=0.1)
    assert 1 / found.speed == pytest.approx(1 + 2 / 3 * 123 / tokens, rel=0.02)
    part = {512: "0.13", 4096: "0.019"}[tokens]
    assert f" tokens a pass but for copies, {part} of its time" in found.describe()
    assert not reading_of("qwen3-32b", 3.5e12, 8e9, tokens).copy


@pytest.mark.parametrize(
    ("flops", "rate", "free"),
    [(75e12, 25e9, 7798), (75e12, 3e9, 64_985), (1e12, 40e9, 65)],
)
def test_experts_in_nf4_are_read_by_their_total_and_computed_by_the_active(
    flops: float, rate: float, free: int
) -> None:
    found = reading_of("qwen3-30b-a3b", flops, rate)
    assert found.hidden_from == pytest.approx(free, rel=0.1)
    seconds = found.forward + found.backward
    assert found.tokens / seconds == pytest.approx(flops / (6 * 3.3e9), rel=0.1)


@pytest.mark.parametrize(
    ("shape", "memory", "free", "active"),
    [("qwen3-30b-a3b", 8, 7798, 3.3e9), ("qwen3-32b", 16, 844, 64 * 487.6e6 + 151_936 * 5120)],
)
def test_a_teacher_in_nf4_reads_a_layer_once_a_forward(
    shape: str, memory: float, free: int, active: float
) -> None:
    """A forward takes a third of a step's operations."""
    pool = pool_of("RTX4090", 75e12 / EFFICIENCY, memory, 25e9, 64)
    seats = [TeacherDevice("cuda", pool.device, pool)]
    options = teacher_options(NAMED[shape], seats, LENGTH)
    (found,) = (one for one in options if one.format.weights == "nf4")
    assert (found.fits, found.rate) == ("streamed", pytest.approx(75e12 / 2 / active, rel=0.1))
    (line,) = re.findall(r" with (\d+) of (\d+) layers .* from ([\d,]+) tokens", found.streamed)
    resident, layers, tokens = (int(number.replace(",", "")) for number in line)
    assert tokens * layers / (layers - resident) == pytest.approx(free, rel=0.1)
    assert found.weights == pytest.approx(0.5625 * NAMED[shape].parameters, rel=0.15), "tables: 2"


def test_what_transformers_computes_is_read_by_all_but_vulkan_devices() -> None:
    ours, published = NAMED["qwen3-32b"], replace(NAMED["qwen3-32b"], kept=SavedActivations())
    vulkan = "wgpu computes only what Motley's own decoder does"
    for text, why in (("CPU16-24GB", ""), ("RTX4090", ""), ("W5700X", vulkan)):
        (pool,) = parse_cluster(text).groups
        assert [explain_unstreamed(shape, pool) for shape in (ours, published)] == ["", why]


def test_a_mixture_of_experts_trains_on_devices_that_do_not_hold_it() -> None:
    """17.2 GB in NF4, and as much for the adapters of all experts; Vulkan has no such code."""
    whole, part = (
        streamed_worker(request_of("qwen3-30b-a3b", parse_cluster(text)))
        for text in ("CPU16-48GB", "CPU16-24GB, 3GB/s disk")
    )
    assert whole is None
    assert part is not None
    assert part.fits
    assert not part.refused
    assert part.reading is not None
    total = part.reading.layers * 0.5625 * 30.5e9 / 48
    read = part.reading.read * 3e9 / (part.reading.layers - part.reading.resident)
    assert read == pytest.approx(total / part.reading.layers, rel=0.1)
    radeons = streamed_worker(request_of("qwen3-30b-a3b", parse_cluster("W5700X 300GB")))
    assert radeons is not None
    assert radeons.refused == "wgpu computes no mixtures of experts"


def test_a_group_is_planned_where_a_layer_can_run_one() -> None:
    request = request_of("qwen3-30b-a3b", parse_cluster("CPU16-24GB, 0.2GB/s disk"))
    rates: dict[bool, float] = {}
    for separable in (True, False):
        own = replace(request.shape, separable=separable)
        worker = streamed_worker(replace(request, shape=own))
        assert worker is not None
        assert worker.reading is not None
        assert worker.reading.tokens == worker.training.tokens + worker.training.waiting
        assert bool(worker.training.waiting) == separable
        assert worker.rate is not None
        rates[separable] = worker.rate
    assert rates[True] > 2 * rates[False]


def test_a_pass_of_few_tokens_waits_for_the_reads() -> None:
    """512 tokens on the 4090: a layer's read takes 11.0 ms, its forward 6.7, backward 13.3."""
    found = reading_of("qwen3-32b", 75e12, 25e9, tokens=512)
    assert found.speed == pytest.approx((6.7 + 13.3) / (11.0 + 13.3), rel=0.1)
    slow = replace(found, source=LayerSource(name="the disk", rate=0.2e9), read=found.read * 125)
    assert slow.hidden_from == pytest.approx(844 * 125, rel=0.1)
    said = slow.describe("training.micro_batch_size 16")
    assert said.startswith("0 of 64 layers resident, 64 streamed from the disk at 0.2 GB/s; free")
    ways = "move the model to NVMe, or training.micro_batch_size 16"
    assert said.endswith(f"with 512 0.0076 of computing speed; {ways}")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("RTX4090 64GB", "memory at 25 GB/s"),
        ("RTX4090 8GB RAM, 3GB/s disk", "the disk at 3 GB/s"),
        ("RTX4090", "the disk at 1 GB/s (assumed)"),
    ],
)
def test_layers_come_from_the_host_s_memory_or_its_disk(text: str, source: str) -> None:
    option = streamed_option(request_of("qwen3-32b", parse_cluster(text)))
    (worker,) = option.workers
    assert f"streamed from {source}; free from " in worker.describe()


def test_a_processor_with_little_memory_reads_layers_now() -> None:
    request = request_of("llama-3.3-70b", parse_cluster("CPU16-24GB, 3GB/s disk"))
    chosen = pick_strategy(request, list_options(request)).option
    assert chosen is not None
    assert chosen.key == "one-device-streamed"
    assert chosen.memory.total <= chosen.room < 36 * GIB
    (worker,) = chosen.workers
    assert worker.training.tokens <= CPU_TOKENS, "as micro-batches are by default"


@pytest.mark.parametrize(
    ("shape", "text", "tokens"),
    [
        ("llama-3.3-70b", "CPU28-24GB, 0.2GB/s disk", 8 * LENGTH),
        ("qwen3-32b", "RTX4090 64GB", 8 * LENGTH),  # they wait in the host's memory
        ("qwen3-32b", "W5700X 300GB", 8 * LENGTH),  # on the device
        ("qwen3-32b", "RTX4090", LENGTH),  # of which nothing is known
        ("qwen3-32b", "RTX4090 2GB RAM, 3GB/s disk", 2 * LENGTH),
    ],
)
def test_a_pass_has_the_micro_batches_of_a_step_where_they_can_wait(
    shape: str, text: str, tokens: int
) -> None:
    request = replace(request_of(shape, parse_cluster(text)), recompute=True)
    (worker,) = streamed_option(request).workers
    assert worker.reading is not None
    assert worker.reading.tokens == tokens
    assert worker.memory.total <= worker.room
    waits = [part.name for part in worker.memory.activations if "that wait" in part.name]
    on_device = worker.pool.device.is_processor or worker.training.one_queue
    assert bool(waits) == (on_device and tokens > LENGTH)


@pytest.mark.parametrize("text", ["RTX4090 64GB", "W5700X 300GB"])
def test_layers_are_computed_twice_before_one_is_read(text: str) -> None:
    """As workers do unless `training.gradient_checkpointing` is off."""
    for recompute, expected in ((None, "full"), (False, "none")):
        request = replace(request_of("qwen3-32b", parse_cluster(text)), recompute=recompute)
        worker = streamed_worker(request)
        assert worker is not None
        assert worker.training.resident is not None
        assert worker.training.recompute == expected


def test_a_group_hides_the_exchange_behind_its_whole_backward() -> None:
    shape, cluster = "llama-3.3-70b", parse_cluster("a: CPU28-24GB; b: CPU28-24GB; 0.1gbit")
    option = streamed_option(request_of(shape, cluster))
    exposed: list[float] = []
    for training in (option.training, replace(option.training, waiting=0)):
        spread = replace(option.strategy, codec="fp32")
        found = plan_time(NAMED[shape], training, spread, cluster, total_tokens=1e9, rate=20.0)
        assert found is not None
        exposed.append(found.exposed.value)
    assert exposed[0] < exposed[1] / 2


def test_what_fits_is_not_read_at_each_use_and_what_trains_whole_neither() -> None:
    for shape, method in (("qwen3-4b", "lora"), ("qwen3-32b", "full")):
        options = list_options(request_of(shape, parse_cluster("RTX4090 64GB"), method))
        assert not [one for one in options if one.workers and not one.alternative]


def test_a_head_is_read_where_it_does_not_fit_beside_two_layers() -> None:
    """Llama-3.3-70B: 1.05 billion weights, 2.1 GB, once a direction for as many times 261 tokens
    as memory is left for.

    Beside it two layers of 0.48 GB, one linear of 0.24 billion weights in fp32, and 1.6 GB of
    adapters with their gradients and moments.
    """
    kept, read, least = (
        streamed_worker(request_of("llama-3.3-70b", parse_cluster(f"CPU16-{size}GB, 3GB/s disk")))
        for size in (15, 10, 4)
    )
    assert kept is not None
    assert read is not None
    assert least is not None
    assert kept.fits
    assert read.fits
    assert kept.training.resident is not None
    assert kept.training.resident >= 0
    assert read.training.resident == HEAD_STREAMED
    assert "0 of 80 layers resident, 80 streamed with the head from the disk" in read.describe()
    assert read.reading is not None
    tokens, table = read.reading.tokens, 128_256 * 8192
    chunks = math.ceil(read.training.tokens * 128_256 / 2**25)
    assert read.training.logit_chunks == chunks == 2
    assert read.memory.total <= read.room
    for together in (1, 2):
        training = replace(read.training, logit_chunks=together)
        flops, slow = assumed_flops(read), LayerSource(name="the disk", rate=2e8)
        found = plan_reading(NAMED["llama-3.3-70b"], training, flops, slow)
        assert found is not None
        reads = tokens / read.training.tokens * chunks / together
        spent = 2 * reads * 2 * table / 2e8 - 4 * table * tokens / flops
        assert found.head == pytest.approx(spent, rel=0.01)
    assert not least.fits
    assert "for two layers, a chunk of the head and one row" in least.describe()
    sparse = request_of("qwen3-next-80b-a3b", parse_cluster("CPU16-6GB, 3GB/s disk"))
    found = streamed_worker(sparse)
    assert found is not None
    assert found.fits
    assert found.training.resident == HEAD_STREAMED, "transformers' code makes no difference"


@pytest.mark.parametrize(("source", "extra"), [(8.0, 2 / 8), (0.5, 2 / 0.5 - 4 * 0.5 * 256 / 3500)])
def test_a_device_with_one_queue_reads_a_head_once_a_direction_and_256_tokens(
    source: float, extra: float
) -> None:
    """It copies chunks between its products, while the next are read.

    Of 256 tokens a GB of the head, which are 0.5 billion weights, takes `extra` seconds.
    """
    pool = pool_of("W5700X", 3.5e12, 5, 8e9, 300)
    request = request_of("llama-3.3-70b", ClusterShape(groups=(pool,), between=parse_link("1gbit")))
    worker = streamed_worker(request)
    assert worker is not None
    assert worker.fits
    assert worker.training.resident == HEAD_STREAMED
    found = plan_reading(
        request.shape,
        worker.training,
        3.5e12,
        LayerSource(name="memory", rate=source * 1e9),
        8e9,
    )
    assert found is not None
    gigabytes, reads = 2 * 128_256 * 8192 / 1e9, found.tokens / 256
    assert found.head == pytest.approx(gigabytes * reads * extra, rel=1e-3)


def assumed_flops(worker: WorkerPlan) -> float:
    peak = worker.pool.device.flops
    assert peak is not None
    return peak


def test_two_layers_and_a_row_are_the_least_and_the_remedy_is_true() -> None:
    request = request_of("llama-3.3-70b", parse_cluster("CPU4-4GB"))
    chosen = pick_strategy(request, list_options(request))
    assert chosen.option is None
    assert "one device streamed needs least" in chosen.runner_up
    assert "qlora" not in chosen.runner_up, "it is that already"
    assert "use a device with more memory, or a smaller --length." in chosen.runner_up
