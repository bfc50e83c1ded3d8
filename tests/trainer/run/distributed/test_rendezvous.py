"""A rank that is started again while the others of its former attempt still live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks

pytestmark = pytest.mark.cluster

HERE = "tests.trainer.run.distributed.test_rendezvous"


def meet_again() -> list[str]:
    """Return what rank 1 is told while it is taken, and what it reads once it is free."""
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import replace

    import pytest

    from tests.ports import free_port
    from tests.waiting import wait_for
    from trainer.run.distributed.environment import Environment
    from trainer.run.distributed.process_group import open_store
    from trainer.system.errors import UnreachableError

    zero = Environment(0, 2, None, "127.0.0.1", free_port(), "a test")
    one = replace(zero, rank=1)
    stores = [open_store(zero, 60), open_store(one, 60)]
    with pytest.raises(UnreachableError) as refused:
        open_store(one, 0.5)

    tried = stores[0].add("claim-1", 0)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(open_store, one, 120)
        wait_for(lambda: stores[0].add("claim-1", 0) > tried, "the next try of rank 1")
        stores.clear()  # the former attempt has ended
        again = open_store(zero, 60)
        again.set("attempt", "2")
        found = waiting.result(120).get("attempt").decode()
    return [str(refused.value).replace(f":{zero.port}", ":PORT"), found]


def meet_silence() -> list[str]:
    """Return what a rank is told, and after a SIGTERM, at a port that accepts and says nothing."""
    import os
    import signal
    import socket
    import threading

    import pytest

    from trainer.run.distributed.environment import Environment
    from trainer.run.distributed.process_group import open_store
    from trainer.system.errors import UnreachableError

    with socket.create_server(("127.0.0.1", 0)) as silent:
        one = Environment(1, 2, None, "127.0.0.1", silent.getsockname()[1], "a test")
        with pytest.raises(UnreachableError) as refused:
            open_store(one, 0.5)

        def stop(*_: object) -> None:
            raise InterruptedError("stopped")

        signal.signal(signal.SIGTERM, stop)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(InterruptedError) as stopped:
            open_store(one, 120)
        return [str(refused.value).replace(f":{one.port}", ":PORT"), str(stopped.value)]


def test_a_port_that_never_answers_is_given_up_and_a_signal_is_heard(ranks: Ranks) -> None:
    ((refused, stopped),) = ranks.run(f"{HERE}:meet_silence", world=1)
    assert refused == (
        "rank 1: a process accepts connections at 127.0.0.1:PORT and does not answer for 0.5 s; "
        "is that port"
        " rank 0's?"
    )
    assert stopped == "stopped"


def test_it_does_not_mix_with_them_and_meets_the_next_attempt(ranks: Ranks) -> None:
    ((refused, found),) = ranks.run(f"{HERE}:meet_again", world=1)
    assert refused == (
        "rank 1: another process has used this rank at 127.0.0.1:PORT for 0.5 s: stop the job "
        "there, or give this one another --master"
    )
    assert found == "2"


def meet_at_one_address() -> list[str]:
    """Return at which addresses of this host the store of a job at 127.0.0.1 answers."""
    import socket

    from tests.ports import free_port
    from trainer.run.distributed.environment import Environment
    from trainer.run.distributed.process_group import open_store

    answers: list[str] = []
    for master in ("127.0.0.1", "localhost"):
        port = free_port()
        store = open_store(Environment(0, 1, None, master, port, "a test"), 60)
        store.set("it", "works")
        for address in ("127.0.0.1", "127.0.0.2"):
            with socket.socket() as caller:
                if caller.connect_ex((address, port)) == 0:
                    answers.append(f"{master}: {address}")
        del store
    return answers


def test_the_store_listens_at_the_one_address_that_was_given(ranks: Ranks) -> None:
    (answers,) = ranks.run(f"{HERE}:meet_at_one_address", world=1)
    assert "127.0.0.1: 127.0.0.1" in answers
    assert "127.0.0.1: 127.0.0.2" not in answers
    assert "localhost: 127.0.0.1" in answers
