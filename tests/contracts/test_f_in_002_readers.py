"""F-IN-002: modules that read JSON without `untrusted_data.py` are listed here, with the reason.

A new reader, or a new answer of an agent that is not checked, therefore fails a test.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import launcher
import trainer

OF_A_PERSON = "what a person brings: F-IN-001"
OWN = "made by this process, or by a child of it"
THERE = "on the host that wrote it; the launcher checks the answer"
BY_OTHER_MEANS = {
    "launcher.agent.checks.digests": THERE,
    "launcher.agent.checks.job": THERE,
    "launcher.agent.checks.link": "a connection that knows the token of this check",
    "launcher.agent.checks.logits_folder": THERE,
    "launcher.agent.checks.shared_folder": OWN,
    "launcher.agent.frames": "a frame, whose content each caller receives: see below",
    "launcher.commands.job_start": OWN,
    "launcher.discovery.yaml_text": OWN,
    "launcher.export.export_source": OF_A_PERSON,
    "launcher.hosts.local": OWN,
    "launcher.installation.environments": THERE,
    "launcher.inventory.facts.machine": THERE,
    "launcher.inventory.facts.network": THERE,
    "launcher.inventory.hosts": OWN,
    "launcher.inventory.rendering": OWN,
    "launcher.runs.plan_inputs": "a model's config on the hub: its reader checks each key",
    "launcher.runs.records.stored_configs": "the YAML of a run's config, whose paths are refused",
    "launcher.runs.records.registry": OWN,
    "launcher.session.process_supervisor": THERE,
    "launcher.session.spec": THERE,
    "launcher.views.dashboard.history": "models with limits of their own",
    "launcher.views.dashboard.report": OWN,
    "launcher.views.dashboard.run_files": OWN,
    "trainer.checkpoint.merge_lora": OF_A_PERSON,
    "trainer.checkpoint.module_patterns": OWN,
    "trainer.checkpoint.publication": OF_A_PERSON,
    "trainer.commands.distill.inspect": OWN,
    "trainer.config.dataset_info": OF_A_PERSON,
    "trainer.config.section": OF_A_PERSON,
    "trainer.distill.student.from_scratch": OF_A_PERSON,
    "trainer.exchange.protocol.messages": "models with limits of their own: see above",
    "trainer.planning.budget.ledger": "a model with limits of its own: see above",
    "trainer.replica.wgpu.autotune": OWN,
    "trainer.run.distributed.group.link": OWN,
    "trainer.run.distributed.group.setup": OWN,
    "trainer.system.untrusted_data": "the function itself",
    "trainer.system.yaml_tree": "the function itself, for YAML",
    "trainer.system.storage.lease_folder": "the lease's own holder",
}
OF_A_PERSON_BELOW = (
    "trainer.data.",
    "trainer.model.",
    "trainer.distill.tokenizer.",
    "trainer.lab.",
)
VALIDATORS = {"model_validate_json", "validate_json"}
MODULES_WITH_LOAD = {"json", "yaml"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in (trainer, launcher):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            spec = importlib.util.find_spec(module.name)
            assert spec is not None
            if spec.origin and spec.origin.endswith(".py"):
                yield module.name, ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def parses(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "parse_yaml"
    if isinstance(node, ast.Attribute):  # called here, or under another name
        return node.attr in VALIDATORS
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner, name = node.func.value, node.func.attr
    known = isinstance(owner, ast.Name) and owner.id in MODULES_WITH_LOAD
    return name in ("loads", "load", "safe_load") and known


def test_json_of_others_is_read_by_one_function() -> None:
    found = {name for name, tree in modules() if any(map(parses, ast.walk(tree)))}
    others = {name for name in found if not name.startswith(OF_A_PERSON_BELOW)}
    assert others == set(BY_OTHER_MEANS)


SHIPPED = "a file of this package"
STATE = "a file of this user's own state folder, cache or environment"
KERNEL = "a file of the kernel"
READ_AS_THEY_ARE = {
    "launcher.agent.archive": SHIPPED,
    "launcher.agent.checks.digests": STATE,
    "launcher.agent.checks.host": KERNEL,
    "launcher.agent.checks.shared_folder": KERNEL,
    "launcher.installation.environments": STATE,
    "launcher.installation.versions": KERNEL,
    "launcher.inventory.facts.machine": KERNEL,
    "launcher.inventory.hosts": SHIPPED,
    "launcher.plan.hub": STATE,
    "launcher.runs.certificates.authority": STATE,
    "launcher.runs.preflight.versions": SHIPPED,
    "launcher.runs.records.stored_configs": STATE,
    "launcher.session.process_supervisor": STATE,
    "launcher.session.processes": KERNEL,
    "launcher.transfer.push": SHIPPED,
    "launcher.transfer.wheel": SHIPPED,
    "launcher.views.dashboard.single_file": SHIPPED,
    "trainer.data.encoded_rows": STATE,
    "trainer.data.shell_safety.family": SHIPPED,
    "trainer.evaluate.sandbox": SHIPPED,
    "trainer.lab.training": KERNEL,
    "trainer.replica.torch.processors": KERNEL,
    "trainer.replica.wgpu.autotune": STATE,
    "trainer.replica.wgpu.kernels.source": SHIPPED,
    "trainer.system.kernel_files": KERNEL,
    "trainer.system.passes.compiler": SHIPPED,
    "trainer.system.process.child": KERNEL,
    "trainer.system.storage.host_identity": KERNEL,
    "trainer.tracking.run_file": "a file that this run has made",
}
"""Modules that read a whole file without `regular_file`, each with its reason."""


def test_files_that_others_name_are_read_by_one_function() -> None:
    """A named pipe would be waited for, and a device or a sparse file fill the memory."""
    found = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("read_bytes", "read_text")
    }
    assert found == set(READ_AS_THEY_ARE)


UNCHECKED_CALLS = {
    "launcher.hosts.remote": "the connection itself",
}
"""Modules whose functions use an agent's answer without `validate_data`."""


def test_every_answer_of_an_agent_is_received() -> None:
    """Of each function that uses the value of a `.call(...)`, the module validates it."""
    lax = set[str]()
    for name, tree in modules():
        if not name.startswith("launcher."):
            continue
        unused = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
        }  # statements
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "call"
            and id(node) not in unused
        ]
        receives = sum(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("validate_data", "read")
            for node in ast.walk(tree)
        )
        if len(calls) > receives:
            lax.add(name)
    assert lax == set(UNCHECKED_CALLS)


def test_no_model_brings_code() -> None:
    """transformers asks on a terminal otherwise, and runs what is answered with a return."""
    asks = [
        f"{name}:{node.lineno}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "from_pretrained"
        and ast.unparse(node.func.value) != "nn.Embedding"
        and not any(
            word.arg == "trust_remote_code" and ast.unparse(word.value) == "False"
            for word in node.keywords
        )
    ]
    assert asks == []
