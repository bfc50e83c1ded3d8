"""`python -P -m trainer.system.passes`: compile the passes for this machine."""

import sys

from trainer.system.passes.compiler import compile_library

sys.stdout.write(compile_library() + "\n")
