"""``python -m tp_core`` is ``tp``."""

from tp_core.cli import main

if __name__ == "__main__":
    main()
