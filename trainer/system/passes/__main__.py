"""`python -P -m trainer.system.passes`: compile the passes for this machine."""

import sys

from trainer.system.passes.compiler import compile_library

if __name__ == "__main__":
    sys.stdout.write(compile_library() + "\n")
