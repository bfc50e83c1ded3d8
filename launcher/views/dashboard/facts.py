"""Text of a report: a run in words, from its state, history and settings."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from launcher.runs.records.run import Run
from launcher.runs.records.stored_configs import read_start_arguments
from launcher.views.dashboard.run_files import Row
from launcher.views.dashboard.state import Tree

_LONGEST = 400
_SETTINGS = {
    "task": "task",
    "method": "method",
    "LoRA rank": "lora.lora_rank",
    "model": "model.path",
    "teacher": "teacher.model",
    "student": "student.model",
    "training data": "data.train",
    "teacher's data": "teacher.data",
    "validation data": "data.validation",
    "part held out": "data.validation_fraction",
    "longest sample (tokens)": "data.max_seq_len",
    "batch size": "training.batch_size",
    "learning rate": "optimizer.learning_rate",
    "codec": "exchange.codec",
    "seed": "training.seed",
}
"""The settings that a report names, by their words; the others are in its copy of them."""


class Facts:
    """A run in words: rows of a name and a text."""

    def __init__(
        self,
        run: Run,
        state: Tree,
        records: Sequence[Tree],
        has_confusion: bool,
        settings: Mapping[str, Any],
        *,
        by_launcher: bool = True,
    ) -> None:
        """`by_launcher`: whether `launch` has started it, not `trainer finetune` alone."""
        self._run = run
        self._state = state
        self._records = records
        self._has_confusion = has_confusion
        self._settings = settings
        self._by_launcher = by_launcher
        self._training: Mapping[str, Any] = state["status"]["training"] or {}
        self._steps = [record for record in records if record["kind"] == "step"]
        scores = [record for record in records if record["kind"] == "validation"]
        self._score = scores[-1] if scores else None

    def list_facts(self) -> list[Row]:
        """Return what was trained on what, and by which hosts."""
        unused = () if self._settings.get("method") == "lora" else ("lora.",)
        if self._settings.get("task") == "script":  # which has its own model and data
            unused += "model.", "data."
        found = [
            (name, _get_path(self._settings, key))
            for name, key in _SETTINGS.items()
            if not key.startswith(unused)
        ]
        facts = [
            (name, _format_value(value))
            for name, value in found
            if value is not None and (name, value) != ("part held out", 0.0)
        ]
        if self._training.get("total_steps"):
            done = f"{self._training.get('step', 0):,} of {self._training['total_steps']:,}"
            facts.append(("steps", done))
        if started := self._state["status"]["started"]:
            facts.append(("started", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started))))
        hosts: dict[str, list[str]] = {}
        names = self._state["device_names"]
        for process in self._state["status"]["processes"]:
            devices = hosts.setdefault(process["host"], [])
            if process["role"] != "coordinator":
                device = names.get(process["name"]) or process["device"] or process["backend"]
                devices.append(f"{process['name']} on {device}")
        return [*facts, *((f"host {host}", ", ".join(does)) for host, does in hosts.items())]

    def list_results(self) -> list[Row]:
        """Return the last losses and how fast they were reached."""
        found: list[Row] = [("state", self._state["outcome"])]
        if self._steps and self._steps[-1].get("loss") is not None:
            found.append(("loss of the last step", f"{self._steps[-1]['loss']:.4f}"))
        if self._score and self._score.get("loss") is not None:
            loss, at = self._score["loss"], f"step {self._score['step']:,}"
            found.append(("validation loss", f"{loss:.4f} at {at}"))
            other = self._settings.get("task") in ("dpo", "script")
            if not self._is_classifier and not other and loss < 100:
                found.append(("perplexity", f"{math.exp(loss):.4g}"))
            titles = {"accuracy": "accuracy", "mcc": "MCC", "reward_margin": "reward margin"}
            for name, title in {**titles, "reward_accuracy": "reward accuracy"}.items():
                if self._score.get(name) is not None:
                    found.append((title, f"{self._score[name]:.4f}"))
            own: Mapping[str, float] = self._score.get("figures") or {}
            found += [(name, f"{value:.4g}") for name, value in own.items()]
        if self._steps:
            samples, missing, repeated, tokens, _ = self._steps[-1]["totals"]
            exact = f"{missing:,} missing, {repeated:,} repeated"
            exact = "each exactly once" if not missing and not repeated else exact
            found.append(("samples counted", f"{samples:,}, {exact}"))
            if tokens and self._training.get("unit") != "samples":
                found.append(("tokens", f"{tokens:,}"))
        if proofs := [record for record in self._records if record.get("event") == "verified"]:
            last, ranks = proofs[-1], len(proofs[-1].get("ranks", ()))
            count = "1 proof" if last["proofs"] == 1 else f"{last['proofs']:,} proofs"
            noun = "worker" if ranks == 1 else "workers"
            where = f"the last of {ranks} {noun} at step {last['step']:,}"
            found.append(("weights agree", f"{count}, {where}: {last.get('digest', '')}"))
        shares = self._compute_fractions()
        found += [(f"share of worker {rank}", f"{part:.0%}") for rank, part in shares.items()]
        return found

    def list_traffic(self) -> list[Row]:
        """Return how many bytes were exchanged, if any were."""
        sent = self._steps[-1]["totals"][4] if self._steps else 0
        return [("bytes exchanged", f"{sent:,}")] if sent else []

    def list_faults(self) -> list[Tree]:
        """Return each loss and resumption: `step`, `event`, and the seconds until the next step
        (`delay_seconds`) and until the worker was back (`rejoin_seconds`), None if neither came."""
        found: list[Tree] = []
        stopping = False
        for index, record in enumerate(self._records):
            event, began = record.get("event"), record["time"]
            if event in ("stopping", "listening", "resumed"):
                stopping = event == "stopping"
            if event == "resumed" and index:
                who, began = "the run was resumed", self._records[index - 1]["time"]
            elif event == "lost" and not stopping:
                who = f"worker {record.get('rank')} was lost"
            else:
                continue
            after = self._records[index + 1 :]
            step = next((other["time"] for other in after if other["kind"] == "step"), None)
            fates = (r for r in after if r.get("event") in ("rejoined", "lost"))
            fate = next((r for r in fates if event == "lost" and _same_rank(r, record)), None)
            back = fate["time"] if fate and fate["event"] == "rejoined" else None
            reason = f": {record['reason']}" if record.get("reason") else ""
            found.append(
                {
                    "step": record["step"],
                    "event": f"{who}{reason}",
                    "delay_seconds": None if step is None else round(step - began, 3),
                    "rejoin_seconds": None if back is None else round(back - began, 3),
                }
            )
        return found

    def list_answers(self) -> list[tuple[str, str, str]]:
        """Return each prompt that the run answered, with its first and its last answer."""
        found: dict[int, list[Tree]] = {}
        for record in self._records:
            if record["kind"] == "answer":
                found.setdefault(record["number"], []).append(record)
        rows: list[tuple[str, str, str]] = []
        for first, *later in found.values():
            texts = [f"step {each['step']:,}: {each['text']}" for each in (first, *later[-1:])]
            rows.append((first["prompt"], texts[0], texts[1] if later else ""))
        return rows

    def list_class_names(self) -> list[str]:
        """Return the names of a classifier's classes; their numbers if they have none."""
        names = self._settings.get("class_names") or self._settings.get("num_classes")
        if isinstance(names, list):
            return [_format_value(name) for name in cast("list[object]", names)]
        return [str(number) for number in range(names if isinstance(names, int) else 0)]

    def list_commands(self) -> list[str]:
        """Return the commands that repeat the run with the settings of the report."""
        if self._run.plan.leader.role == "student":
            return ["launch distill up --config run.yaml --output NEW_FOLDER"]
        output = shlex.quote(f"{self._run.plan.output}-again")
        if self._settings.get("task") == "script":
            output += " --script FILE"
        if not self._by_launcher:
            return [f"trainer finetune --config run.yaml -o {output}"]
        start = f" {read_start_arguments(self._run.run_id)}".rstrip()
        return [f"launch cluster up --config run.yaml --output {output}{start}"]

    def list_absent(self, *, hashes: bool, spent: bool) -> list[str]:
        """Return what this report lacks, and why."""
        status = self._state["status"]
        found = list(status["unreachable"].values())
        if status["live"]:
            found.append("the result: the run has not ended; these are its figures so far")
        if self._score is None:
            found.append("a validation: there were no held-out data, or none was scheduled")
        elif self._is_classifier and not self._has_confusion:
            found.append("the confusion matrix: the last validation did not record one")
        alone = self._training.get("expect_workers") == 1
        if not (alone or self._run.plan.leader.role == "student") and not any(
            record.get("event") == "verified" for record in self._records
        ):
            found.append("proofs that the weights agree: none was scheduled")
        if not hashes:
            found.append("hashes of model, data and weights: there is no checkpoint")
        if not spent:
            found.append("energy and cost: neither a budget nor prices were set")
        found.append("use, power and temperature of the devices: they are shown live only")
        return found

    @property
    def _is_classifier(self) -> bool:
        return self._settings.get("task") == "classify"

    def _compute_fractions(self) -> dict[int, float]:
        """Return each worker's part of the samples of the steps in the report."""
        sums: dict[int, float] = {}
        for step in self._steps:
            for rank, samples in step["worker_samples"].items():
                sums[int(rank)] = sums.get(int(rank), 0.0) + samples
        whole = sum(sums.values())
        return {rank: sums[rank] / whole for rank in sorted(sums)} if whole else {}


def _same_rank(one: Tree, other: Tree) -> bool:
    return one.get("rank") == other.get("rank")


def _get_path(tree: Mapping[str, Any], key: str) -> Any:
    found: Any = tree
    for part in key.split("."):
        found = cast("dict[str, Any]", found).get(part) if isinstance(found, dict) else None
    return found


def _format_value(value: object) -> str:
    parts = cast("list[object]", value) if isinstance(value, list) else [value]
    return ", ".join(map(str, parts))[:_LONGEST]
