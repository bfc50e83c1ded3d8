"""A process that ends beside a thread that hangs in torch's store."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the launcher-only install has none")

BESIDE_A_STORE = """
import atexit, ctypes, os, signal, sys, time, types
from torch._C._distributed_c10d import TCPStore
from trainer.run.distributed.rank_watchdog import _ask_in_time
from trainer.system.process.native_thread import exit_process

ports, port = os.pipe()
holder = os.fork()
if holder == 0:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with this process
    os.closerange(1, 3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(port, str(store.port).encode())
    signal.pause()
store = TCPStore("127.0.0.1", int(os.read(ports, 9)), wait_for_workers=False)
store.set("key", "value")

class WhileTheInterpreterEnds:
    '''Lets the store answer, and the thread that asked return.'''

    def __del__(self, kill=os.kill, holder=holder, again=signal.SIGCONT, sleep=time.sleep):
        kill(holder, again)
        sleep(0.5)

sys.modules["late"] = types.ModuleType("late")
sys.modules["late"].late = WhileTheInterpreterEnds()
os.kill(holder, signal.SIGSTOP)
os.waitpid(holder, os.WUNTRACED)  # its threads run on until this tells that all have stopped
answered = _ask_in_time(lambda: store.get("key"), HOW_LONG)
print("answered" if answered else "silent")
atexit.register(print, "tidied")
EXIT(4)
"""


@pytest.mark.cluster
@pytest.mark.parametrize(("how", "code"), [("exit_process", 4), ("sys.exit", -6)])
def test_the_exit_code_stays_and_what_is_to_be_tidied_is(how: str, code: int) -> None:
    """Python 3.14 lets such a thread hang; before, an abort replaced the exit code."""
    if how == "sys.exit" and sys.version_info >= (3, 14):
        pytest.skip("this Python does not abort")
    program = BESIDE_A_STORE.replace("HOW_LONG", "0.2").replace("EXIT", how)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.stdout.split() == [b"silent", b"tidied"], done.stderr
    assert done.returncode == code


def test_without_such_a_thread_the_interpreter_ends_as_ever() -> None:
    program = (
        "import threading\n"
        "from trainer.system.process.native_thread import exit_process\n"
        "def last(): threading.main_thread().join(); print('last', flush=True)\n"
        "threading.Thread(target=last).start()\n"
        "exit_process(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.stdout.split(), done.returncode) == ([b"last"], 3)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_timer_ends_a_process_whose_main_thread_keeps_the_lock(cancel: bool) -> None:
    program = (
        "import ctypes\n"
        "from trainer.system.process.native_thread import ExitTimer\n"
        "timer = ExitTimer(3, 0.5)\n"
        "timer.start('cancelled')\n"
        "timer.cancel()\n"
        "timer.start('hangs')\n"
        f"if {cancel}: timer.cancel()\n"
        f"ctypes.PyDLL(None).sleep({3 if cancel else 60})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.stderr, done.returncode) == ((b"", 0) if cancel else (b"hangs\n", 3))
