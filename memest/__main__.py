"""``python -m memest``."""

import sys

from memest.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
