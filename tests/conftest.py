"""What tests share: a quiet environment, skips that nobody adds silently, tiny real models."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import ROOT, passed_elsewhere
from tests.families import FAMILIES, TEACHERS

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from trainer.config.run import RunConfig
    from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter

# Before anything imports torch: tests run beside each other and must not reach for the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "MOTLEY_CACHE" not in os.environ:  # of one session: its processes share it, and nothing is left
    os.environ["MOTLEY_CACHE"] = tempfile.mkdtemp(prefix="motley-cache-")
    atexit.register(shutil.rmtree, os.environ["MOTLEY_CACHE"], ignore_errors=True)
# What tests start imports what they import: this checkout, whether or not one is installed.
_first = (str(ROOT / "tests" / "jitter"),) if os.environ.get("MOTLEY_TEST_JITTER") else ()
os.environ["PYTHONPATH"] = ":".join(
    filter(None, (*_first, str(ROOT), os.environ.get("PYTHONPATH", "")))
)

# Under nohup all that tests start would ignore SIGHUP too; unlike that, a handler ends with exec.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or "TESTS_IGNORE_SIGHUP" in os.environ:
    os.environ["TESTS_IGNORE_SIGHUP"] = "1"
    signal.signal(signal.SIGHUP, lambda *_: None)

# A busy machine may take any time for an example, and to draw one.
settings.register_profile(
    "motley", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("motley")

TinyModel = Callable[..., Path]
MakeConfig = Callable[..., "RunConfig"]

EXPECTED_SKIPS = (
    r"needs root\b",
    r"no CUDA device\b",
    r"this torch has CUDA of its own$",
    r"no Vulkan device\b",
    r"no network namespaces\b",
    r"no user namespaces\b",
    r"no git checkout\b",
    r"needs bwrap\b",
    r"needs chromium$",
    r"needs (bzip2|ip|nft|rsync|ss|ssh|ssh-keygen|sshd|unzip|xz)\b",
    r"needs (cc|g\+\+)$",
    r"needs IPv6 on loopback$",
    r"needs lm-eval\b",
    r"the extra (gguf-engine|mlflow|openvino|trackio|wandb) is not installed$",
    r"needs npm$",
    r"no Debian package lists\b",
    r"no [@/a-z0-9-]+ [0-9.]+ by (pip|npm): ",
    r"needs (shellcheck|sky|slurmctld|slurmd)$",
)
"""Reasons (regular expressions, at the start) for which a machine may leave a test out."""

_END_WITH_US = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
)
"""Children that end with their parent, in their command lines."""

SWIFTSHADER = Path("/usr/lib/chromium/vk_swiftshader_icd.json")
"""The Vulkan driver in Debian's chromium, as its loader finds it; scripts/test.sh names it too."""

_DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds of each long file; `PYTEST_ADDOPTS=--write-durations make test` writes them."""

ARCHITECTURES = ("qwen3", "qwen2", "llama")


class SkipGuard:
    """Collects skips whose reason is not expected, and fails the session for them."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        where = report.longrepr
        reason = str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")
        if not any(re.match(pattern, reason) for pattern in EXPECTED_SKIPS):
            self._found.append(f"FAILED {report.nodeid}: skipped, {reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        if self._found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        yield

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._found:
            terminalreporter.section("skipped for a reason that tests/conftest.py does not expect")
            for line in self._found:
                terminalreporter.write_line(line, red=True)


class ChildGuard:
    """Fails a session at whose end a child process is left: running, or never waited for.

    What runs is killed, since it may hold the pipe whose end a caller waits for. It runs where
    tests run, so with xdist in every worker, which then tells the controller.
    """

    def __init__(self) -> None:
        self._first_seen: dict[int, str] = {}
        self._found: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        yield
        for pid in children():
            self._first_seen.setdefault(pid, item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if session.config.getoption("dist", "no") == "no" or output is not None:
            for pid, command in children().items():
                test = self._first_seen.get(pid, "no test")
                self._found.append(f"{command} (process {pid}), first seen after {test}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if output is not None:
            output["children"] = self._found
        elif self._found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._found += getattr(node, "workeroutput", {}).get("children", [])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._found:
            terminalreporter.section("child processes left at the end of the session")
            for line in self._found:
                terminalreporter.write_line(f"FAILED {line}", red=True)


def children() -> dict[int, str]:
    """Return the command lines of this process's children; one that only waits for us: `ended`."""
    found: dict[int, str] = {}
    for file in Path("/proc/self/task").glob("*/children"):
        words = ""
        with contextlib.suppress(OSError):  # a thread that has ended: its children are another's
            words = file.read_text(encoding="ascii")
        for word in words.split():
            try:
                raw = Path("/proc", word, "cmdline").read_bytes()
            except OSError:
                continue
            command = raw.replace(b"\0", b" ").decode(errors="replace").strip()
            if not any(name in command for name in _END_WITH_US):
                found[int(word)] = command or "ended"
    return found


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's `&` does that, and what the tests start and interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(ChildGuard(), "child-guard")
    strict = os.environ.get("CI") == "true" or os.environ.get("MOTLEY_STRICT_SKIPS") == "1"
    controls = not hasattr(config, "workerinput")  # with xdist: only where reports end up
    if strict and controls:
        config.pluginmanager.register(SkipGuard(), "skip-guard")
    if controls and config.getoption("write_durations", False):
        config.pluginmanager.register(WritesDurations())
    if controls and (path := os.environ.get(passed_elsewhere.NOTE)):
        config.pluginmanager.register(passed_elsewhere.Notes(Path(path)))
    if path := os.environ.get(passed_elsewhere.LEAVE_OUT):
        config.pluginmanager.register(passed_elsewhere.LeavesOut(Path(path)))


class WritesDurations:
    """Writes how many seconds each file took, if ten or more."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = {**json.loads(_DURATIONS.read_text()), **self._seconds}
        long = {file: round(known[file]) for file in sorted(known) if known[file] >= 10}
        _DURATIONS.write_text(json.dumps(long, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write {_DURATIONS.name}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Search what is imported for no garbage, now or later: each search goes through all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(50_000, 20, 20)  # tests import more


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest files be first, so that none is alone at the end."""
    seconds = json.loads(_DURATIONS.read_text())
    items.sort(key=lambda item: -seconds.get(item.location[0], 0))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a test marked `needs(PROGRAM...)` if one of them is not installed.

    `needs("cuda")`: a device that torch computes on.
    """
    for mark in item.iter_markers("needs"):
        for program in mark.args:
            if program == "cuda":
                import torch

                if not torch.cuda.is_available():
                    pytest.skip("no CUDA device on this machine")
            elif shutil.which(program) is None:
                pytest.skip(f"needs {program}")


@pytest.fixture(scope="session")
def vulkan() -> Adapter:
    """Return the first Vulkan device, software ones included; without any the test skips."""
    from trainer.replica.wgpu.gpu.vulkan_adapter import list_adapters

    found = list_adapters()
    if not found:
        pytest.skip("no Vulkan device (Debian: apt install mesa-vulkan-drivers)")
    return found[0]


@pytest.fixture(scope="session")
def two_drivers() -> str:
    """Return `VK_DRIVER_FILES` of two drivers that compute on the CPU: llvmpipe and SwiftShader.

    They stand in for two cards of a host.
    """
    mesa = [str(path) for path in Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json")]
    if not (mesa and SWIFTSHADER.exists()):
        pytest.skip("no Vulkan device by two drivers (Debian: mesa-vulkan-drivers, chromium)")
    return ":".join([*mesa, str(SWIFTSHADER)])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return a maker of model folders: hidden 64, 2 layers, 4/2 heads, 300 tokens.

    `saved_as` is `causal-lm`, `classify` (5 classes) or `bare`; further keywords go into the
    config. The same arguments give the same folder: tests must not write into it.
    """
    made: dict[str, Path] = {}

    def make(
        model_type: str = "qwen3",
        saved_as: str = "causal-lm",
        dtype: str = "float32",
        shard: str | None = None,
        **settings: Any,
    ) -> Path:
        key = repr((model_type, saved_as, dtype, shard, sorted(settings.items())))
        if key in made:
            return made[key]
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(1)
        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 300,
            "tie_word_embeddings": True,
            "num_labels": 5,
        }
        own = {"head_dim": 16, **(FAMILIES | TEACHERS)[model_type], **settings}
        given = {key: value for key, value in {**sizes, **own}.items() if value is not None}
        config = transformers.AutoConfig.for_model(model_type, **given)
        auto = {
            "causal-lm": transformers.AutoModelForCausalLM,
            "classify": transformers.AutoModelForSequenceClassification,
            "bare": transformers.AutoModel,
        }[saved_as]
        torch.manual_seed(1)
        model = auto.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "head" not in name:  # else zeros and ones hide mix-ups
                torch.nn.init.normal_(parameter, mean=0.5, std=0.1)
        folder = tmp_path_factory.mktemp(f"{model_type}-{saved_as}")
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard or "1GB")
        made[key] = folder
        return folder

    return make


@pytest.fixture(scope="session")
def make_config() -> MakeConfig:
    """Return a maker of run configs; dotted settings override, as in `config.load`."""
    from trainer.config.run import load_config

    def make(model_dir: Path | str = "model", **settings: Any) -> RunConfig:
        overrides: dict[str, Any] = {
            "model.path": str(model_dir),
            "data.train": "train.jsonl",
            "task": "classify",
            "training.micro_batch_size": 4,
        }
        overrides |= {key.replace("__", "."): value for key, value in settings.items()}
        if overrides["task"] == "classify":
            overrides.setdefault("num_classes", 5)
        return load_config(None, overrides)

    return make


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Return what runs functions of test modules as ranks of torch.distributed."""
    from tests.distributed_ranks import Ranks

    return Ranks()
