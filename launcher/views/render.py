"""Output for people: tables on stdout, notes on stderr. Programs get JSON with a schema name."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from launcher.agent.checks.finding import Result
from launcher.hosts.fleet import describe_pending
from launcher.plan.plan import LaunchPlan
from launcher.runs.budget.spending import IdleHost, SpendTotal
from launcher.runs.processes.session import ProcessState
from launcher.runs.status import RunView
from launcher.terminal import note, sanitize_text
from launcher.views.tables import COLOURS, Column, make_table
from trainer.system.commandline.wrapping import wrap_card, wrap_line
from trainer.tracking.progress_picture import (
    describe_exchange,
    format_figure,
    format_rate,
    loss_text,
)

_BESIDE_ID = 31
"""Columns that the other columns of `launch runs` need at least."""
_LEADS = ("coordinator", "student")
_CHECKS = (
    Column(""),
    Column("HOST", least=10),
    Column("CHECK"),
    Column("FOUND", words=True, least=16),
    Column("REMEDY", words=True, least=16),
)
_RUNS = (
    Column("RUN"),
    Column("STATE", words=True, least=11),
    Column("STARTED", spare=1),
    Column("WORKERS", spare=2),
    Column("PROGRESS", words=True, least=16),
    Column("OUTPUT", spare=3),
)


_SPEND = (
    Column("HOURS", right=True),
    Column("KWH", right=True),
    Column("POWER", spare=1),
    Column("COST", right=True),
)


class _Terminal(Console):
    """A console on which texts have no effects beyond the given styles."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return what is drawn; every table, picture and line comes through here."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                text = "\n".join(map(sanitize_text, segment.text.split("\n")))
                yield Segment(text, segment.style)


def make_console() -> Console:
    """Return stdout as rich draws on it; piped output is neither coloured nor cut nor broken."""
    return _Terminal(
        file=sys.stdout,
        width=None if sys.stdout.isatty() else 10_000,
        highlight=False,
        soft_wrap=not sys.stdout.isatty(),
    )


@contextlib.contextmanager
def show_while_waiting() -> Generator[Callable[[Iterable[str], RenderableType], None]]:
    """Yield what takes late hosts and shows what the others said, until the block ends.

    On a terminal the block's end takes the picture away: what is printed then is complete. A pipe
    gets that alone.
    """
    from rich.live import Live

    with contextlib.ExitStack() as pictures:

        def draw_hosts(names: Iterable[str], picture: RenderableType) -> None:
            note(describe_pending(names))
            if sys.stdout.isatty():
                live = Live(picture, console=make_console(), auto_refresh=False, transient=True)
                pictures.enter_context(live)

        yield draw_hosts


def print_json(tree: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(tree, indent=2) + "\n")
    sys.stdout.flush()


def print_line(line: str) -> None:
    """Print a line on stdout; on a terminal it is broken between words."""
    _write_lines(wrap_line(sanitize_text(line), terminal_width(), "  "))


def say_whole(line: str) -> None:
    """Print a line of a program on stdout, which must not be broken."""
    _write_lines([sanitize_text(line)])


def _write_lines(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


@contextlib.contextmanager
def detach_on_interrupt(again: str, run_id: str) -> Generator[None]:
    """Turn Ctrl-C on a view into a note: the run continues, and how to return or stop it."""
    try:
        yield
    except KeyboardInterrupt:
        note("")  # behind the ^C
        say_detached(again, run_id)
        raise


def say_detached(again: str, run_id: str) -> None:
    """Print how to reattach to a run, and how to end it."""
    note(f"detached; run {run_id} continues. Return: {again}; stop it: launch cluster down")


def terminal_width() -> int | None:
    """Return the columns of the terminal on stdout; None for a file or pipe: nothing is cut."""
    return make_console().width if sys.stdout.isatty() else None


def say_card(view: RunView) -> None:
    """Print a run's summary card; its commands are for the host that has the output."""
    leader = view.run.plan.leader.host
    if view.result_lines and not view.run.plan.get_host(leader).is_local:
        print_line(f"on {leader}:")
    say_result(view.result_lines)


def say_result(lines: Iterable[str]) -> None:
    """Print sentences, and commands below `next:`, which are indented."""
    _write_lines(wrap_card(lines, terminal_width()))


def checks_table(checks: Iterable[Result], width: int | None) -> Table:
    """Return the table of `launch doctor`."""
    rows = [(_style_state(c.status), c.host, c.name, c.detail, c.remedy) for c in checks]
    return make_table(_CHECKS, rows, width)


def runs_table(views: Iterable[RunView], width: int | None) -> RenderableType:
    """Return the table of `launch runs`; where the ids leave no room, each has its own line."""
    rows: list[tuple[str, Text, str, str, str, str]] = [
        (
            view.run.run_id,
            _style_state(view.outcome),
            format_time(view.run.started),
            str(len(view.run.plan.workers or view.run.plan.followers)),
            format_progress(view.training or {}, steps=view.state != "stopped"),
            view.run.plan.output,
        )
        for view in views
    ]
    longest = max((len(row[0]) for row in rows), default=0)
    if width is None or longest + _BESIDE_ID <= width:
        return make_table(_RUNS, rows, width)
    # `overflow="ignore"`: an id is never cut or broken, since `--resume` and `--run` take it.
    lines: list[RenderableType] = []
    for run_id, state, started, workers, steps, _ in rows:
        facts = (state.plain, steps, f"{workers} workers, started {started}")
        about = Text(", ".join(filter(None, facts)))
        lines += [
            Text(sanitize_text(run_id), no_wrap=True, overflow="ignore"),
            Padding(about, (0, 0, 0, 2)),
        ]
    return Group(*lines)


def spend_table(totals: Sequence[SpendTotal], by: str, width: int | None) -> Table:
    """Return the table of `launch spend`, with the sum of each currency as its last lines."""
    rows = [_spending_row(total.name, [total]) for total in totals]
    for unit in dict.fromkeys(total.currency for total in totals):
        rows.append(_spending_row("all", [total for total in totals if total.currency == unit]))
    columns = (Column(by.upper()), *_SPEND)
    return make_table(columns, rows if len(totals) > 1 else rows[:1], width)


def _spending_row(name: str, totals: Sequence[SpendTotal]) -> tuple[str, ...]:
    seconds = sum(total.seconds for total in totals)
    share = (
        sum(total.measured_fraction * total.seconds for total in totals) / seconds
        if seconds
        else 0.0
    )
    kwh, money = sum(total.kwh for total in totals), sum(total.cost for total in totals)
    power = "planned" if not share else "measured" if share > 0.999 else f"{share:.0%} measured"
    power = power if kwh else "unknown"
    unit = totals[0].currency or ""
    return name, f"{seconds / 3600:.2f}", f"{kwh:.3f}", power, f"{money:.2f} {unit}".strip()


def idle_lines(hosts: Sequence[IdleHost]) -> list[str]:
    """Return what hosts cost that do nothing, a line for each currency."""
    lines: list[str] = []
    for unit in dict.fromkeys(host.currency for host in hosts):
        own = [host for host in hosts if host.currency == unit]
        names, an_hour = ", ".join(host.name for host in own), sum(host.hourly_cost for host in own)
        line = f"idle: {names} cost{'s' if len(own) == 1 else ''} {an_hour:.2f} {unit} an hour"
        if all(host.idle_cost is not None for host in own):
            since = sum(host.idle_cost or 0.0 for host in own)
            line += f", {since:.2f} {unit} since the run ended"
        lines.append(line)
    return lines


def command_lines(plan: LaunchPlan) -> list[str]:
    """Return what `--dry-run` prints: for each host the exact commands, ready for a shell."""
    lines: list[str] = []
    for host in plan.hosts:
        where = "this machine" if host.is_local else f"SSH to {host.address or host.name}"
        lines.append(f"# {host.name} ({where})")
        for process in plan.processes:
            if process.host == host.name:
                env = [f"{name}={value}" for name, value in process.env.items()]
                lines += [f"# {process.name}", shlex.join(["env", *env, *process.argv])]
        lines.append("")
    return lines[:-1]


def status_tree(view: RunView) -> dict[str, Any]:
    """Return a run's status for programs, as `motley.cluster.status/2`."""
    plan: LaunchPlan = view.run.plan
    processes: list[dict[str, Any]] = []
    for process in plan.processes:
        state: ProcessState = view.processes[process.name]
        processes.append(
            {
                "name": process.name,
                "role": process.role,
                "rank": process.rank,
                "host": process.host,
                "device": process.device,
                "members": list(process.members),
                "strategy": process.strategy,
                "backend": process.backend,
                "threads": process.threads,
                "address": process.address,
                "state": state.state,
                "joined": view.takes_part(process) if process.role not in _LEADS else None,
                "report": dict(view.reports[process.name])
                if process.name in view.reports
                else None,
                "attempt": state.attempt,
                "pid": state.child.pid if state.child and not state.is_over else None,
                "supervisor_pid": state.supervisor.pid
                if state.supervisor and not state.is_over
                else None,
                "exit_code": state.exit_code,
                "signal": state.signal,
                "folder": view.folders.get(process.name),
            }
        )
    return {
        "schema": "motley.cluster.status/2",
        "run_id": plan.run_id,
        "state": view.state,
        "reason": view.reason,
        "live": view.is_live,
        "started": view.run.started,
        "output": plan.output,
        "expect_workers": len(plan.workers),
        "joined": view.joined_ranks,
        "processes": processes,
        "unreachable": dict(view.unreachable),
        "training": view.training,
    }


def run_headline(view: RunView) -> str:
    """Return one line for a run: its state and how far training is."""
    parts = [f"{view.run.run_id}: {view.outcome}"]
    if view.training:
        parts.append(format_progress(view.training, steps=view.state != "stopped"))
    over = (view.training or {}).get("state") == "completed"  # whose reason is that it is done
    if view.reason and view.state != "failed" and not over:
        parts.append(str(view.reason))
    return ", ".join(part for part in parts if part)


def format_progress(training: Mapping[str, Any], *, steps: bool = True) -> str:
    """Return `step 12/90, loss 1.234, 4,200 tokens/s` from the leader's status."""
    done = f"step {training.get('step', 0)}/{training.get('total_steps')}"
    validation: Mapping[str, Any] = training.get("validation") or {}
    own: Mapping[str, float] = validation.get("figures") or {}
    invalid = ", ".join(training.get("invalid") or ())
    parts = (
        done if steps and training.get("total_steps") else "",
        loss_text(training),
        format_rate(training),
        *describe_exchange(training),
        format_figure("validation accuracy", validation.get("accuracy"), ".3f"),
        format_figure("reward margin", validation.get("reward_margin"), ".3f"),
        format_figure("reward accuracy", validation.get("reward_accuracy"), ".1%"),
        *(f"{name} {value:.4g}" for name, value in own.items()),
        f"invalid in its report: {invalid}" if invalid else "",
    )
    return ", ".join(filter(None, parts))


def format_time(seconds: float) -> str:
    """Return Unix seconds as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _style_state(state: str) -> Text:
    return Text(sanitize_text(state), COLOURS.get(state.partition(": ")[0], ""))
