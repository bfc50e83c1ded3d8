"""The `trainer` program as a module, which torchrun can start."""

from trainer.cli import main

if __name__ == "__main__":
    main()
