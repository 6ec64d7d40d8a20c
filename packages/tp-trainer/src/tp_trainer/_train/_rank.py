"""A process that calls the function: ``python -m tp_trainer._train._rank script.py:main --lr 0.1``."""

import sys

from tp_trainer._train._call import parse_call

if __name__ == "__main__":
    parse_call(sys.argv[1], sys.argv[2:]).run()
